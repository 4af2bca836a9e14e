"""The command line. Parses, calls a room, prints; exits 0 (fine), 1 (a verdict not fine) or 2 (the user's mistake)."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from qwen_npu.errors import WorkbenchError

if TYPE_CHECKING:
    from qwen_npu.runtime.results import GenerateResult

EXIT_FINE, EXIT_VERDICT, EXIT_MISTAKE = 0, 1, 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command and gives its exit code."""
    options = argparse.Namespace(command="")
    _prepare_output()
    try:
        options = _parser().parse_args(arguments)
        code: int = options.run(options)
        sys.stdout.flush()
    except WorkbenchError as error:
        return _mistake(options, f"{error} ({type(error).__name__}: see data/troubleshooting.md)")
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # the reader of our output has left (head, less): say nothing, and keep the interpreter from flushing again
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FINE
    except OSError as error:
        # a full disk or a directory that may not be written, wherever it is met
        return _mistake(options, f"the system refused: {error}. What to do: free the disk, or name another place.")
    return code


def _prepare_output() -> None:
    """An answer may hold any character and a caller may have closed the output: neither is an error of ours."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: PTH123, SIM115 (as long as we run)
        elif hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")


def _mistake(options: argparse.Namespace, text: str) -> int:
    print(f"{f'qwen-npu {options.command}'.rstrip()}: {text}", file=sys.stderr)
    return EXIT_MISTAKE


def _parser() -> argparse.ArgumentParser:
    from qwen_npu import __version__
    from qwen_npu.bench import add_commands as add_bench
    from qwen_npu.build import add_commands as add_build
    from qwen_npu.convert import add_commands as add_convert
    from qwen_npu.doctor import add_commands as add_doctor
    from qwen_npu.lab import add_commands as add_lab
    from qwen_npu.nightly.commands import add_commands as add_nightly
    from qwen_npu.planner import add_commands as add_plan
    from qwen_npu.views.commands import add_commands as add_readers

    parser = argparse.ArgumentParser(
        prog="qwen-npu", description="Where does the state of a staged Qwen3.5 runtime live?"
    )
    parser.add_argument("--version", action="version", version=f"qwen-npu {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_run(commands)
    add_lab(commands)
    add_nightly(commands)
    add_readers(commands)
    add_build(commands)
    add_convert(commands)
    add_plan(commands)
    add_doctor(commands)
    add_bench(commands)
    return parser


def _add_run(commands: Any) -> None:
    run = commands.add_parser("run", help="answer a prompt, and say what each stage and step cost")
    run.add_argument("--prompt", required=True, help="the user's text")
    run.add_argument("--image", help="a picture file")
    run.add_argument("--bundle", default="tiny", help="tiny, a bundle directory or a checkpoint directory")
    run.add_argument("--device", default="ascend:0", help="ascend:N or cpu")
    run.add_argument("--driver", default="auto", help="auto, emulator or mindspore_lite")
    run.add_argument("--state", default="resident", help="resident or host (round trip each step)")
    run.add_argument("--kv", default="fixed", help="fixed or growing")
    run.add_argument("--numerics", default="device", help="device (f16 as deployed) or f32")
    run.add_argument("--speculate", type=int, default=0, metavar="K", help="verify up to K drafts at once (0: none)")
    run.add_argument("--max-new-tokens", type=int, default=64, metavar="N")
    run.add_argument("--ignore-eos", action="store_true", help="go on after end of text")
    run.add_argument("--record", metavar="FILE", help="write a ledger")
    run.add_argument("--json", action="store_true", help="print one JSON object instead of text and tables")
    run.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    from contextlib import ExitStack

    from qwen_npu.bundle import open_bundle
    from qwen_npu.driver import choose_driver
    from qwen_npu.driver.npu_smi import sampled
    from qwen_npu.runtime.session import Session

    bundle = open_bundle(options.bundle)
    with Session(
        bundle,
        device=options.device,
        driver=options.driver,
        state=options.state,
        kv=options.kv,
        numerics=options.numerics,
        speculate=options.speculate,
    ) as session:
        generation = session.stream(
            options.prompt, options.image, max_new_tokens=options.max_new_tokens, ignore_eos=options.ignore_eos
        )
        with ExitStack() as recording:
            if options.record:
                ledger = recording.enter_context(session.record(options.record))
                if session.driver.name == "mindspore_lite" and options.device.startswith("ascend:"):
                    recording.enter_context(sampled(ledger, int(options.device.partition(":")[2])))
            for step in generation:
                if not options.json:
                    print(step.text, end="", flush=True)
        result = generation.result()
    if options.json:
        print(json.dumps(result.to_json(), ensure_ascii=False))
    else:
        print("\n\n" + _tables(result))
        if options.driver == "auto":
            print("Driver auto took {}: {}.".format(*choose_driver("auto")))
    return EXIT_FINE


def _tables(result: GenerateResult) -> str:
    facts = result.to_json()
    decode, traffic = facts["decode"], facts["traffic"]
    origin = f"{result.driver} on {result.device}"
    lines = [f"{result.prompt_tokens} prompt tokens, {len(result.tokens)} new ({result.stop}), {origin}"]
    lines += [f"note: {note}" for note in result.notes]
    lines += ["", f"{'stage':<10}{'build ms':>10}{'predict ms':>12}{'wall ms':>10}"]
    rows = [(name, *stage.values()) for name, stage in facts["stages"].items()]
    upload = result.stage("upload")
    if upload is not None:
        predict_ms = sum(step.predict_ms for step in result.decode_steps)
        rows.append(("decode", upload.build_ms, predict_ms, decode["wall_total_ms"]))
    lines += [f"{name:<10}{build:>10.1f}{predict:>12.1f}{wall:>10.1f}" for name, build, predict, wall in rows]
    if upload is not None:
        moved = {name: _span(values) for name, values in traffic.items()}
        lines += [
            f"decode: {decode['steps']} steps; its wall holds the one-time upload of {decode['upload_ms']:.1f} ms",
            f"a decode step (median): predict {decode['predict_ms']:.2f} ms, wall {decode['wall_ms']:.2f} ms",
            f"bytes moved a step: host to device {moved['host_to_device_bytes']}, "
            f"device to host {moved['device_to_host_bytes']}; allocated {moved['allocated_bytes']}",
        ]
    if (speculation := facts["speculation"]) is not None:
        lines.append(
            f"speculation: {speculation['tokens_per_verify']:.2f} tokens a verify, {speculation['accepted']} of "
            f"{speculation['drafted']} drafts accepted ({speculation['acceptance']:.0%})"
        )
    lines.append(f"peak device bytes: {result.peak_device_bytes:,} ({result.peak_source})")
    if result.driver == "emulator":
        lines.append("Emulated device: bytes are exact; times are this machine's CPU, not an NPU's.")
    return "\n".join(lines)


def _span(values: Sequence[int]) -> str:
    if not values:
        return "-"
    low, high = min(values), max(values)
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"


if __name__ == "__main__":
    sys.exit(main())
