"""`qwen-npu lab`: what the server is told, and which notebooks it opens."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from qwen_npu import data, lab
from qwen_npu.errors import UsageError


def parsed(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    lab.add_commands(parser.add_subparsers())
    return parser.parse_args(["lab", *arguments])


def test_loopback_unless_told_otherwise() -> None:
    assert parsed().ip == "127.0.0.1"
    assert lab.is_loopback(parsed().ip)
    assert lab.is_loopback("localhost")
    assert lab.is_loopback("::1")
    assert not lab.is_loopback("0.0.0.0")
    assert not lab.is_loopback("box.example")
    assert parsed("--ip", "10.0.0.5").ip == "10.0.0.5"


def test_no_server_without_a_token(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="token is empty"):
        lab.server_arguments(ip="127.0.0.1", port=1, folder=tmp_path, browser=False, token="")


def test_the_server_asks_nobody(tmp_path: Path) -> None:
    arguments = lab.server_arguments(ip="127.0.0.1", port=1, folder=tmp_path, browser=False, token="secret")
    assert "--LabApp.news_url=None" in arguments
    assert "--LabApp.check_for_updates_class=jupyterlab.NeverCheckForUpdate" in arguments
    assert "--LabApp.extension_manager=readonly" in arguments
    assert "--IdentityProvider.token=secret" in arguments
    assert f"--ServerApp.root_dir={tmp_path}" in arguments
    lab.write_settings(tmp_path)
    told = json.loads((tmp_path / "labconfig/default_setting_overrides.json").read_text(encoding="utf-8"))
    assert told["@jupyterlab/apputils-extension:notification"] == {"fetchNews": "false", "checkForUpdates": False}


def test_our_kernel_has_the_name_that_notebooks_ask_for(tmp_path: Path) -> None:
    lab.write_kernel(tmp_path)
    spec = json.loads((tmp_path / "kernels/python3/kernel.json").read_text(encoding="utf-8"))
    assert "--IPKernelApp.capture_fd_output=False" in spec["argv"]
    for path in data.notebooks_dir().glob("*.ipynb"):
        notebook = json.loads(path.read_text(encoding="utf-8"))
        assert notebook["metadata"]["kernelspec"]["name"] == "python3", path.name


def test_a_checkout_is_opened_in_place_and_a_package_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert lab.notebooks_to_open() == data.notebooks_dir().resolve()
    package = tmp_path / "site" / "qwen_npu"
    shipped = package / "_notebooks"
    shipped.mkdir(parents=True)
    (shipped / "00_a.ipynb").write_text("new", encoding="utf-8")
    (shipped / "01_b.ipynb").write_text("new", encoding="utf-8")
    monkeypatch.setattr(lab, "__file__", str(package / "lab.py"))
    monkeypatch.setattr(data, "notebooks_dir", lambda: shipped)
    monkeypatch.chdir(tmp_path)
    (tmp_path / lab.COPY_NAME).mkdir()
    (tmp_path / lab.COPY_NAME / "00_a.ipynb").write_text("mine", encoding="utf-8")
    copy = lab.notebooks_to_open()
    assert copy == tmp_path / lab.COPY_NAME
    assert (copy / "00_a.ipynb").read_text(encoding="utf-8") == "mine"
    assert (copy / "01_b.ipynb").read_text(encoding="utf-8") == "new"


def test_a_directory_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no directory"):
        lab.notebooks_to_open(tmp_path / "nothing")
    assert lab.notebooks_to_open(tmp_path) == tmp_path.resolve()
