"""`qwen-npu lab`: JupyterLab on this machine's loopback, with a token, our kernel and the notebooks.

Nothing is asked from the network: news, update checks and the extension manager are off, and everything that the pages
load comes from this server.
"""

from __future__ import annotations

import argparse
import ipaddress
import json
import os
import secrets
import shutil
import socket
import sys
import tempfile
from pathlib import Path
from typing import Any

from qwen_npu.errors import UsageError

COPY_NAME = "qwen_npu_notebooks"
"""Directory that an installed package copies its notebooks to, in the directory where the command was started."""


def add_commands(subparsers: Any) -> None:
    """Adds the commands of this room to the command line's parser."""
    lab = subparsers.add_parser("lab", help="open the notebooks in JupyterLab, on this machine only")
    lab.add_argument("--port", type=int, default=8888, help="first port to try (default: 8888)")
    lab.add_argument("--no-browser", action="store_true", help="only print the address")
    lab.add_argument(
        "--ip",
        default="127.0.0.1",
        metavar="ADDRESS",
        help="listen on another address than loopback: whoever reaches it and has the token can run code here",
    )
    lab.add_argument(
        "--notebooks",
        type=Path,
        metavar="DIR",
        help=f"directory to open (default: the checkout's notebooks; installed: a copy in ./{COPY_NAME})",
    )
    lab.add_argument("--json", action="store_true", help="print address and directory as one JSON line")
    lab.set_defaults(run=_lab)


def notebooks_to_open(chosen: Path | None = None) -> Path:
    """The directory to open: `chosen`, a checkout's own notebooks, or a writable copy of an installed package's.

    A copy is completed, never overwritten: what the user changed stays.
    """
    from qwen_npu.data import notebooks_dir

    if chosen is not None:
        if not chosen.is_dir():
            raise UsageError(f"there is no directory {chosen}", expected="a directory with notebooks")
        return chosen.resolve()
    shipped = notebooks_dir()
    if not shipped.is_dir():
        raise UsageError(f"the notebooks are missing: {shipped}", expected="a complete checkout or package")
    if Path(__file__).resolve().parent not in shipped.resolve().parents:
        return shipped.resolve()
    copy = Path.cwd() / COPY_NAME
    copy.mkdir(exist_ok=True)
    for path in sorted(shipped.glob("*.ipynb")):
        if not (copy / path.name).exists():
            shutil.copyfile(path, copy / path.name)
    return copy


def server_arguments(*, ip: str, port: int, folder: Path, browser: bool, token: str) -> list[str]:
    """Arguments of the server. They never become a process's command line, since they hold the token."""
    if not token:
        raise UsageError("the token is empty", expected="a secret that keeps others out")
    arguments = [
        f"--ServerApp.ip={ip}",
        f"--ServerApp.port={port}",
        f"--ServerApp.root_dir={folder}",
        f"--ServerApp.open_browser={browser}",
        f"--IdentityProvider.token={token}",
        "--LabApp.news_url=None",
        "--LabApp.check_for_updates_class=jupyterlab.NeverCheckForUpdate",
        "--LabApp.extension_manager=readonly",
    ]
    if hasattr(os, "geteuid") and os.geteuid() == 0:
        arguments.append("--ServerApp.allow_root=True")  # in the vendor's containers everybody is root
    return arguments


def write_kernel(folder: Path) -> None:
    """A kernelspec of this interpreter under the name that the notebooks ask for.

    File descriptors stay uncaught: C code that writes much while it holds the interpreter would hang the kernel.
    """
    spec = {
        "argv": [
            sys.executable,
            "-m",
            "ipykernel_launcher",
            "-f",
            "{connection_file}",
            "--IPKernelApp.capture_fd_output=False",
        ],
        "display_name": "Python 3 (qwen-npu)",
        "language": "python",
        "metadata": {"debugger": False},
    }
    path = folder / "kernels" / "python3" / "kernel.json"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps(spec), encoding="utf-8")


def write_settings(folder: Path) -> None:
    """Defaults of the page: it asks nobody for news or updates, and does not ask whether it should."""
    path = folder / "labconfig" / "default_setting_overrides.json"
    path.parent.mkdir(parents=True)
    quiet = {"fetchNews": "false", "checkForUpdates": False}
    path.write_text(json.dumps({"@jupyterlab/apputils-extension:notification": quiet}), encoding="utf-8")


def check_address(ip: str, port: int) -> None:
    """Refuses what no server can listen on, before one is made.

    Raises:
        UsageError: no address of this machine, or no port.
    """
    if not 1 <= port <= 65535:
        raise UsageError(f"the port is {port}", expected="1..65535")
    try:
        with socket.socket(socket.AF_INET6 if ":" in ip else socket.AF_INET) as trial:
            trial.bind((ip or "no address", 0))
    except (OSError, UnicodeError) as error:
        raise UsageError(
            f"the address {ip!r} cannot be listened on: {error}",
            expected="127.0.0.1, or the address of one network interface",
        ) from None


def is_loopback(ip: str) -> bool:
    if ip == "localhost":
        return True
    try:
        return ipaddress.ip_address(ip).is_loopback
    except ValueError:
        return False


def _lab(options: argparse.Namespace) -> int:
    folder = notebooks_to_open(options.notebooks)
    check_address(options.ip, options.port)
    token = os.environ.get("JUPYTER_TOKEN") or secrets.token_hex(24)
    with tempfile.TemporaryDirectory(prefix="qwen-npu-lab-") as private:
        write_kernel(Path(private))
        write_settings(Path(private))
        for name in ("JUPYTER_PATH", "JUPYTER_CONFIG_PATH"):
            os.environ[name] = os.pathsep.join(filter(None, (private, os.environ.get(name, ""))))
        from jupyterlab.labapp import LabApp

        server = LabApp.initialize_server(
            argv=server_arguments(
                ip=options.ip, port=options.port, folder=folder, browser=not options.no_browser, token=token
            )
        )
        if server.identity_provider.token != token:
            raise UsageError("a configuration file of yours takes the token away", expected="a server with a token")
        from tornado.ioloop import IOLoop

        IOLoop.current().add_callback(_tell, server, folder, options)  # when the server listens
        server.start()
    return 0


def _tell(server: Any, folder: Path, options: argparse.Namespace) -> None:
    """Prints the address, with the token: whoever reads it may come in."""
    host = options.ip if is_loopback(options.ip) else server.ip
    host = f"[{host}]" if ":" in host else host
    address = f"http://{host}:{server.port}/lab?token={server.identity_provider.token}"
    if options.json:
        print(json.dumps({"address": address, "notebooks": str(folder)}), flush=True)
    else:
        print(f"{address}\nnotebooks: {folder}", flush=True)
    if not is_loopback(options.ip):
        print(f"{options.ip} is not loopback: whoever has the token can run code here.", file=sys.stderr)
