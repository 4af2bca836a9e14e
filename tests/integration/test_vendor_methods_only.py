"""Session, CLI and a notebook, unchanged, over a package that has the vendor's name and the vendor's methods only."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from qwen_npu.bundle import Bundle, open_bundle
from qwen_npu.data import image_path, notebooks_dir, tiny_checkpoint
from qwen_npu.nightly.runner import run_one
from qwen_npu.nightly.verdict import Verdict
from qwen_npu.runtime.session import Session

FACADE = Path(__file__).parent / "facade"
CHECKPOINT = Path(os.environ.get("QWEN_NPU_TEST_CHECKPOINT") or tiny_checkpoint())
PROMPT = "Describe the image."


@pytest.fixture(scope="module")
def bundle() -> Bundle:
    return open_bundle(CHECKPOINT)


@pytest.fixture(scope="module")
def facade() -> ModuleType:
    spec = importlib.util.spec_from_file_location("mindspore_lite", FACADE / "mindspore_lite" / "__init__.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(FACADE), os.environ.get("PYTHONPATH", "")])}


def test_facade_shows_nothing_of_the_emulator(facade: ModuleType) -> None:
    assert not hasattr(facade, "instrument")
    assert not hasattr(facade, "configure")
    tensor = facade.Tensor(shape=[2], dtype=facade.DataType.FLOAT32, device="ascend:0")
    assert tensor.device == "ascend:0"
    for name in ("_tensor", "block", "address"):
        assert not hasattr(tensor, name)


@pytest.mark.parametrize("device", ["ascend:1", "cpu"])
@pytest.mark.parametrize("kv", ["fixed", "growing"])
def test_session(bundle: Bundle, facade: ModuleType, device: str, kv: str) -> None:
    def run(driver: str | ModuleType) -> tuple[tuple[int, ...], list[tuple[int, int, int]]]:
        with Session(bundle, device=device, driver=driver, kv=kv) as session:  # type: ignore[arg-type]
            result = session.generate(PROMPT, image_path("two_shapes"), max_new_tokens=6, ignore_eos=True)
        moved = [(s.host_to_device_bytes, s.device_to_host_bytes, s.allocated_bytes) for s in result.steps]
        return result.tokens, moved

    assert run(facade) == run("emulator")


def test_cli(bundle: Bundle) -> None:
    def run(driver: str) -> dict[str, object]:
        command = [
            sys.executable,
            "-m",
            "qwen_npu.cli",
            "run",
            "--bundle",
            str(CHECKPOINT),
            "--driver",
            driver,
            "--json",
        ]
        command += ["--prompt", PROMPT, "--max-new-tokens", "4"]
        done = subprocess.run(command, env=environment(), capture_output=True, text=True, check=True)
        answer: dict[str, object] = json.loads(done.stdout)
        return answer

    ours, plain = run("emulator"), run("mindspore_lite")
    assert (ours["driver"], plain["driver"]) == ("emulator", "mindspore_lite")
    assert plain["tokens"] == ours["tokens"]
    assert plain["traffic"] == ours["traffic"]


@pytest.mark.full
def test_notebook(bundle: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in environment().items():
        monkeypatch.setenv(name, value)
    notebook = notebooks_dir() / "03_decode_residency.ipynb"
    chosen = {"driver": "mindspore_lite", "bundle_name": str(CHECKPOINT), "steps": 3}
    result = run_one(notebook, tmp_path / "out", **chosen)
    assert result.verdict is Verdict.PASS, result.reason
    cells = json.loads((tmp_path / "out/items/03_decode_residency/notebook.ipynb").read_text(encoding="utf-8"))["cells"]
    printed = "".join(
        "".join(output.get("text", "")) for cell in cells for output in cell.get("outputs", ()) if "text" in output
    )
    assert "mindspore_lite on ascend:0" in printed
