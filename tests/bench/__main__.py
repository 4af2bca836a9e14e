"""`make bench`: every measured ratio, one bench after the other, each in a process of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def main() -> int:
    benches = sorted(path.stem for path in Path(__file__).parent.glob("bench_*.py"))
    failed = []
    for bench in benches:
        print(f"\n== {bench}", flush=True)
        if subprocess.run([sys.executable, "-m", f"tests.bench.{bench}"], check=False).returncode:
            failed.append(bench)
    print(f"\n{len(benches) - len(failed)} of {len(benches)} within their bounds", *failed)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
