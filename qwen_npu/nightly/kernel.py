"""The process of a notebook's kernel: ipykernel that leaves file descriptors 1 and 2 alone, dies with its worker, and
tells where it is when it crashes or is asked (SIGUSR1), even while C code holds the interpreter."""

from __future__ import annotations

import faulthandler
import signal
import sys

NAME = "qwen-npu-nightly"


def spec() -> dict[str, object]:
    """The kernelspec. Capturing fd 1 would hang for good once C code writes more than a pipe holds (ipykernel#847)."""
    return {
        "argv": [
            sys.executable,
            "-m",
            "qwen_npu.nightly.kernel",
            "-f",
            "{connection_file}",
            "--IPKernelApp.capture_fd_output=False",
            "--HistoryManager.hist_file=:memory:",
        ],
        "display_name": "qwen-npu nightly",
        "language": "python",
    }


def main() -> None:
    """Becomes the kernel; arguments are ipykernel's."""
    from qwen_npu.nightly.processes import die_with_parent, skip_slow_import

    die_with_parent()
    skip_slow_import()
    faulthandler.enable(file=2, all_threads=False)
    if hasattr(signal, "SIGUSR1"):
        faulthandler.register(signal.SIGUSR1, file=2, all_threads=False)
    from ipykernel.kernelapp import IPKernelApp

    IPKernelApp.launch_instance()


if __name__ == "__main__":
    main()
