"""What a user can give that makes no sense: each a message that names it, never a traceback, never a wait."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from qwen_npu.bundle import Bundle, build_bundle, open_bundle
from qwen_npu.cli import EXIT_MISTAKE, main
from qwen_npu.data import tiny_checkpoint
from qwen_npu.errors import (
    CheckpointError,
    DeviceError,
    DriverError,
    ImageError,
    LedgerError,
    PromptError,
    StateError,
    UsageError,
    WorkbenchError,
)
from qwen_npu.runtime.inputs import InputProcessor
from qwen_npu.runtime.session import Session


@pytest.fixture(scope="module")
def bundle() -> Bundle:
    return open_bundle("tiny")


@pytest.fixture(scope="module")
def session(bundle: Bundle) -> Session:
    return Session(bundle, driver="emulator")


@pytest.mark.parametrize(
    ("options", "kind"),
    [
        ({"device": None}, DeviceError),
        ({"device": "ascend:٣"}, DeviceError),
        ({"device": "ascend:1000"}, DeviceError),
        ({"driver": None}, DriverError),
        ({"driver": 5}, DriverError),
        ({"state": None}, UsageError),
        ({"speculate": 1.5}, UsageError),
        ({"speculate": None}, UsageError),
    ],
)
def test_settings_of_a_wrong_type(bundle: Bundle, options: dict[str, Any], kind: type[WorkbenchError]) -> None:
    with pytest.raises(kind):
        Session(bundle, **options)


@pytest.mark.parametrize(
    ("prompt", "options", "kind"),
    [
        ("\ud800", {}, PromptError),
        ([[1, 2], [3]], {}, PromptError),
        ([1.5], {}, PromptError),
        (None, {}, PromptError),
        ("hi", {"max_new_tokens": 2.5}, UsageError),
        ("hi", {"max_new_tokens": "5"}, UsageError),
        ("hi", {"force_tokens": [10**9]}, PromptError),
        ("hi", {"force_tokens": ["a"]}, PromptError),
        ("hi", {"force_tokens": []}, UsageError),
    ],
)
def test_questions_of_a_wrong_type(
    session: Session, prompt: Any, options: dict[str, Any], kind: type[WorkbenchError]
) -> None:
    with pytest.raises(kind):
        session.generate(prompt, **options)


def test_a_ledger_of_a_wrong_type(session: Session) -> None:
    with pytest.raises(LedgerError, match="a ledger in 5"), session.record(5):  # type: ignore[arg-type]
        pass


def test_pictures_that_never_end_or_break_late(session: Session, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.png")
    with pytest.raises(ImageError, match="no file"):
        session.inputs.feed("What is this?", tmp_path / "pipe.png")
    rng = np.random.default_rng(0)
    Image.fromarray(rng.integers(0, 256, (64, 64, 3), np.uint8)).save(tmp_path / "whole.png")
    (tmp_path / "cut.png").write_bytes((tmp_path / "whole.png").read_bytes()[:2000])
    with Image.open(tmp_path / "cut.png") as lazy, pytest.raises(ImageError, match="cannot be read"):
        session.inputs.feed("What is this?", lazy)


def test_of_two_generations_the_later_one_goes_on(bundle: Bundle) -> None:
    with Session(bundle, driver="emulator") as session:
        first = session.stream("Count from 1 to 9.")
        begun = [next(first) for _ in range(4)]
        second = session.stream("Count from 1 to 9.")
        next(second)
        with pytest.raises(StateError, match="has begun another one"):
            next(first)
        assert first.result().tokens == tuple(token for step in begun for token in step.tokens)
        list(second)
        assert second.result().text == "1 2 3 4 5 6 7 8 9"
        assert list(second) == []  # one that has ended stays ended
        third = session.stream("Count from 1 to 9.")
        next(third)
    with pytest.raises(StateError, match="session is closed"):
        next(third)


def _config(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    def damage(directory: Path) -> None:
        path = directory / "config.json"
        facts = json.loads(path.read_text())
        path.write_text(json.dumps(change(facts) or facts))

    return damage


def _text(key: str, value: Any) -> Callable[[Path], None]:
    return _config(lambda facts: facts["text_config"].update({key: value}))


DAMAGED_CONFIGURATIONS = {
    "list": _config(lambda _: [1]),
    "text_config": _config(lambda facts: facts.update(text_config=5)),
    "rope": _text("rope_parameters", None),
    "rope_section": _text("rope_parameters", {"mrope_section": [1], "rope_theta": 1.0}),
    "text_for_a_number": _text("hidden_size", "128"),
    "zero_heads": _text("num_key_value_heads", 0),
    "zero_key_heads": _text("linear_num_key_heads", 0),
    "negative": _text("linear_key_head_dim", -1),
    "true": _text("vocab_size", True),
    "nan": _text("rms_norm_eps", float("nan")),
    "layers": _text("layer_types", 5),
    "layer": _text("layer_types", [["linear_attention"]]),
    "end": _text("eos_token_id", "stop"),
    "patch": _config(lambda facts: facts["vision_config"].update(patch_size=0)),
}


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_checkpoint(), tmp_path / "model"))


@pytest.mark.parametrize("name", DAMAGED_CONFIGURATIONS)
def test_a_configuration_that_makes_no_sense(checkpoint: Path, name: str) -> None:
    DAMAGED_CONFIGURATIONS[name](checkpoint)
    with pytest.raises(CheckpointError):
        build_bundle(checkpoint, checkpoint.parent / "out")


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("chat_template.jinja", "{% if %}"),
        ("chat_template.jinja", "{{ messages[7].content.x }}"),
        ("chat_template.jinja", "{{ 1 / 0 }}"),
        ("chat_template.jinja", "{{ raise_exception('no') }}"),
        ("preprocessor_config.json", "[]"),
        ("preprocessor_config.json", '{"image_mean": 5, "image_std": 5}'),
        ("preprocessor_config.json", '{"image_mean": [1, 2], "image_std": [1, 2]}'),
        ("preprocessor_config.json", '{"image_mean": [0, 0, 0], "image_std": [1, 1, 1], "resample": 99}'),
        ("preprocessor_config.json", '{"image_mean": [0, 0, 0], "image_std": ["a", 1, 1]}'),
        ("tokenizer.json", "{}"),
    ],
)
def test_files_of_a_checkpoint_that_make_no_sense(checkpoint: Path, bundle: Bundle, file: str, content: str) -> None:
    (checkpoint / file).write_text(content)
    inputs = InputProcessor(checkpoint, bundle.spec, bundle.grids)
    with pytest.raises(CheckpointError):
        inputs.feed("What is this?", np.zeros((128, 128, 3), np.uint8))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["build", "tiny", "--target", "emulator", "--out", "{out}", "--grid", "100000x100000"], "65,536 patches"),
        (["build", "tiny", "--target", "emulator", "--out", "{out}", "--capacity", f"{10**30}"], "at most 262,144"),
        (["lab", "--port", "70000", "--no-browser"], "the port is 70000"),
        (["lab", "--ip", "300.1.1.1", "--no-browser"], "'300.1.1.1' cannot be listened on"),
        (["lab", "--ip", "", "--no-browser"], "'' cannot be listened on"),
        (["doctor", "--device", "ascend:0"], "--device without --probe-device"),
        (["run", "--prompt", "\udcff"], "the prompt is no text"),
    ],
)
def test_options_of_the_command_line(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], arguments: list[str], words: str
) -> None:
    assert main([part.format(out=tmp_path / "out") for part in arguments]) == EXIT_MISTAKE
    assert words in capfd.readouterr().err
    assert not list(tmp_path.iterdir())


def test_an_interpreter_that_is_none(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    build_bundle("tiny", tmp_path / "cpu", target="mslite-cpu", buckets=(32,))
    assert main(["convert", str(tmp_path / "cpu"), "--python", str(tmp_path / "nope")]) == EXIT_MISTAKE
    assert "cannot be started" in capfd.readouterr().err


def test_what_the_system_refuses_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device", "somewhere")

    monkeypatch.setattr("qwen_npu.bundle.write", full)
    arguments = ["build", "tiny", "--target", "emulator", "--out", str(tmp_path / "out")]
    assert main(arguments) == EXIT_MISTAKE
    assert "No space left on device: 'somewhere'" in capfd.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("shell", ["{command} >&-", "{command} 2>&-", "PYTHONIOENCODING=ascii {command}"])
def test_an_output_that_is_closed_or_knows_few_characters(shell: str) -> None:
    command = f"{sys.executable} -m qwen_npu.cli run --prompt 'Repeat: 你好 😀' --max-new-tokens 4"
    done = subprocess.run(["sh", "-c", shell.format(command=command)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr


def test_a_comparison_without_peeks_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = [str(tmp_path / name) for name in ("one", "two")]
    for path in paths:
        assert main(["run", "--prompt", "Count from 1 to 3.", "--record", path, "--json"]) == 0
    capsys.readouterr()
    assert main(["diff", *paths]) == 0
    assert "no peeks were recorded: states were not compared" in capsys.readouterr().out
