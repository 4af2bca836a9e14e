"""A script written for the vendor's package alone, on the emulated device by the package's name."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from qwen_npu.bundle import open_bundle
from qwen_npu.data import image_path, tiny_checkpoint
from qwen_npu.runtime.session import Session

CLIENT = Path(__file__).parents[1] / "data" / "client_mindspore_lite.py"
FACADE = Path(__file__).parent / "facade"
CHECKPOINT = Path(os.environ.get("QWEN_NPU_TEST_CHECKPOINT") or tiny_checkpoint())
STEPS = 12


def test_client_knows_only_the_vendors_package() -> None:
    text = CLIENT.read_text(encoding="utf-8")
    imported = set(re.findall(r"^(?:import|from) (\w+)", text, re.M))
    assert imported == {"argparse", "gc", "json", "pathlib", "mindspore_lite", "numpy"}
    assert "qwen_npu" not in text


@pytest.mark.parametrize("device_id", [0, 1])
def test_client_answers_as_the_session(tmp_path: Path, device_id: int) -> None:
    bundle = open_bundle(CHECKPOINT)
    picture = image_path("two_shapes")
    with Session(bundle, driver="emulator") as session:
        feed = session.inputs.feed("Describe the image.", picture)
        result = session.generate("Describe the image.", picture, max_new_tokens=STEPS + 1, ignore_eos=True)
    assert feed.image is not None
    np.savez(
        tmp_path / "feed.npz", ids=feed.tokens, positions=feed.positions[:, 0], pixel_values=feed.image.pixel_values
    )
    command = [sys.executable, str(CLIENT), str(bundle.directory), "--feed", str(tmp_path / "feed.npz")]
    command += ["--device-id", str(device_id), "--steps", str(STEPS)]
    paths = [str(FACADE), str(CLIENT.parents[2]), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == list(result.tokens)
