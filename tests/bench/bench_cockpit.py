"""What watching costs: the cockpit's updates, ten a second, beside the recorded steps that they show.

    python -m tests.bench.bench_cockpit [BUNDLE]

In CPU time, so that other programs change it little: after every tenth of a second of decoding (CPU time, recording
included) one update of all widgets is made, with every message packed to JSON as a kernel would send it. Exit code 1 if
a limit is passed.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from typing import Any

import comm
import comm.base_comm

from qwen_npu.bundle import open_bundle
from qwen_npu.runtime.session import Session
from qwen_npu.views.live import Cockpit
from qwen_npu.views.live.frames import Frames

STEPS = 900
BETWEEN_S = 0.1
LARGEST_SHARE = 0.10
LARGEST_UPDATE_BYTES = 300_000
RUNS = 3


class Comm(comm.base_comm.BaseComm):  # type: ignore[misc]
    """Packs what it is given and counts it."""

    sent_bytes = 0

    def publish_msg(
        self, msg_type: str, data: Any = None, metadata: Any = None, buffers: Any = None, **keys: Any
    ) -> None:
        Comm.sent_bytes += len(json.dumps([data, metadata, keys])) + sum(memoryview(b).nbytes for b in buffers or ())


def main(source: str) -> int:
    comm.create_comm = Comm
    bundle = open_bundle(source)
    shares, updates, sizes, reading = [], [], [], []
    for _ in range(RUNS):
        with Session(bundle) as session, Cockpit(session) as cockpit:
            assert cockpit.widget is not None
            runner = cockpit._runner
            runner.start("Describe this image.", None, max_new_tokens=STEPS, ignore_eos=True)
            runner.status, runner._busy = "running", True  # as its thread would be, which this bench is
            decoding = watching = since = 0.0
            while True:
                start = time.thread_time()
                if next(runner._generation, None) is None:
                    break
                since += time.thread_time() - start
                if since < BETWEEN_S:
                    continue
                decoding, since = decoding + since, 0.0
                start, Comm.sent_bytes = time.thread_time(), 0
                cockpit.update()
                told = time.thread_time() - start
                cockpit._panel.refresh()
                took = time.thread_time() - start
                watching += took
                updates.append(took * 1e3)
                reading.append(told * 1e3)
                sizes.append(Comm.sent_bytes)
            runner._busy = False
            shares.append(watching / decoding)
            frames = Frames(runner.ledger)
            start = time.thread_time()
            frames.update()
            whole = time.thread_time() - start
            events = runner.ledger.last_seq + 1
    share = statistics.median(shares)
    print(f"an update: {statistics.median(updates):.2f} ms CPU, of it reading {statistics.median(reading):.2f} ms")
    print(f"it sends {statistics.median(sizes):,.0f} bytes, at most {max(sizes):,} (limit {LARGEST_UPDATE_BYTES:,})")
    print(f"watching at 10 Hz: {share:.1%} of recorded decoding, limit {LARGEST_SHARE:.0%}")
    print(
        f"reading a whole recording: {whole / events * 1e6:.1f} µs an event, {1e5 * whole / events:.2f} s for 100,000"
    )
    return int(share > LARGEST_SHARE or max(sizes) > LARGEST_UPDATE_BYTES)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1] if len(sys.argv) > 1 else "tiny"))
