"""The course headless: every notebook with other parameters, and faults that turn exactly one lesson red."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from qwen_npu.bundle import build_bundle
from qwen_npu.data import image_path, notebooks_dir, tiny_checkpoint
from qwen_npu.errors import DriverError
from qwen_npu.nightly.files import read_lines
from qwen_npu.nightly.preflight import check, parameters
from qwen_npu.nightly.runner import run_suite
from qwen_npu.nightly.suite import Suite, load_suite
from qwen_npu.nightly.verdict import Outcome, Verdict
from qwen_npu.records import RECORDS_VARIABLE
from tests.integration.nightly_notebooks import write_suite

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(not any(tiny_checkpoint().glob("*.safetensors")), reason="the small model is not here"),
]

# Two sets for each notebook. `TURNED` stands for a picture of another size and shape than the grids, by its path.
TURNED = "@turned"
OTHERS: dict[str, list[dict[str, Any]]] = {
    "00_cockpit": [
        {"prompt": "数到五。 🙂", "image": "", "kv": "growing", "numerics": "f32", "steps": 5, "max_new_tokens": 12},
        {"prompt": "What colour is the star?", "image": TURNED, "state": "host", "ignore_eos": True, "steps": 9},
    ],
    "01_vision": [
        {"prompt": "图里有几个物体？ 🙂", "picture": "wide_three_shapes", "second_picture": TURNED, "numerics": "f32"},
        {"prompt": "How many objects are there?", "picture": TURNED, "device": "ascend:2", "max_new_tokens": 3},
    ],
    "02_prefill": [
        {"prompt": "你好，世界 🙂 " * 5, "image": "", "numerics": "f32", "pad_behind_to": 256},
        {"prompt": "Is there a red circle?", "image": TURNED, "device": "ascend:1", "pad_behind_to": 64},
    ],
    "03_decode_residency": [
        {"prompt": "数到五。 🙂", "image": "", "kv": "growing", "numerics": "f32", "steps": 3},
        {"prompt": "How many objects are there?", "image": "wide_three_shapes", "device": "cpu", "steps": 5},
    ],
    "04_kv_growth": [
        {"prompt": "数到五。 🙂", "image": TURNED, "numerics": "f32", "steps": 5, "small_capacity_tokens": 2},
        {"prompt": "Describe this image.", "image": "three_shapes", "steps": 40, "small_capacity_tokens": 20},
    ],
    "05_kernel": [
        {"prompt": "数到五。 🙂", "linear_layer": 5, "head": 3, "long_steps": 2},
        {"prompt": "Describe this image.", "image": "wide_two_shapes", "linear_layer": 2, "head": 1, "long_steps": 90},
    ],
    "06_slot_pool": [
        {"prompt": "数到五。 🙂", "second_prompt": "重复：月亮 🌙", "depth": 1, "max_new_tokens": 9},
        {"prompt": "Describe this image.", "image": TURNED, "numerics": "device", "depth": 7, "max_new_tokens": 12},
    ],
    "07_roundtrip_ab": [
        {"prompt": "数到五。 🙂", "image": "", "kv": "growing", "numerics": "f32", "steps": 2},
        {"prompt": "What do you see?", "image": TURNED, "device": "cpu", "steps": 7},
    ],
    "08_memory_plan": [
        {"models": ["tiny"], "card": "300i-pro", "capacity_tokens": 512, "drafts": 0, "sequences": 1},
        {"models": ["4b", "0.8b"], "capacity_tokens": 131072, "drafts": 7, "sequences": 16, "device": "cpu"},
    ],
    "09_your_change": [
        {"prompt": "数到五。 🙂", "image": "", "before_numerics": "device", "after_numerics": "device", "steps": 4},
        {"prompt": "Count from 1 to 9.", "image": TURNED, "before_numerics": "device", "after_numerics": "f32"},
    ],
}

# What every Python process of a run does before anything else, and the one lesson that teaches against it.
FAULTS = {
    "01_vision": """
# the picture is shown as the camera stored it
from PIL import ImageOps
ImageOps.exif_transpose = lambda image, **options: image
""",
    "02_prefill": """
# the mask of pads is lost in long buckets
import numpy as np
from qwen_npu.runtime import stages
padded = stages.left_padded
def left_padded(array, bucket, value=0):
    lost = bucket > 100 and array.ndim == 2 and np.all(array == 1)
    return padded(array, bucket, 1 if lost else value)
stages.left_padded = left_padded
""",
    "03_decode_residency": """
# a buffer that is read and written goes unseen
from qwen_npu.emulator import policy
report = policy.report
policy.report = lambda hazard, **where: hazard.kind != "write_after_read" and report(hazard, **where)
""",
    "04_kv_growth": """
# the fixed cache is read one position too far
from qwen_npu.runtime import stages
def one_too_many(self, mask=stages.DecodeStage._next_mask):
    if self.capacity is not None and self.tokens + 1 < self.capacity:
        self._mask[0, self.tokens + 1] = 1
    return mask(self)
stages.DecodeStage._next_mask = one_too_many
""",
    "05_kernel": """
# the chunk rule forgets the decay
from qwen_npu import rgdr
rule = rgdr.chunk_gated_delta_rule
rgdr.chunk_gated_delta_rule = lambda *inputs, g=None, **options: rule(*inputs, **options)
""",
    "06_slot_pool": """
# accepted counts are ignored by the op
from qwen_npu import rgdr
rule = rgdr.recurrent_gated_delta_rule
rgdr.recurrent_gated_delta_rule = lambda *inputs, num_accepted_tokens=None, **options: rule(*inputs, **options)
""",
    "07_roundtrip_ab": """
# the round trip keeps seven bits of the recurrent state's mantissas
import numpy as np
from qwen_npu.runtime import states
def rounded(self, results, advance=states.RoundTripStates.advance):
    advance(self, results)
    self._live[1] = (self._live[1].view(np.uint32) & 0xFFFF0000).view(np.float32)
states.RoundTripStates.advance = rounded
""",
    "08_memory_plan": """
# a pair of halves is planned as one buffer
from qwen_npu import planner
def halved(*arguments, make_plan=planner.make_plan, **options):
    plan = make_plan(*arguments, **options)
    plan.decode["state_halves"] //= 2
    return plan
planner.make_plan = halved
""",
    "09_your_change": """
# the diff names the step behind the one that differs
from qwen_npu.ledger import diff
def late(before, after, compare=diff._peeks):
    found, first, peeked = compare(before, after)
    return found, first and {**first, "step": first["step"] + 1}, peeked
diff._peeks = late
""",
}


@pytest.fixture(scope="module")
def turned(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A picture of no grid's shape, in a folder with a name of many scripts."""
    from PIL import Image

    folder = tmp_path_factory.mktemp("图片 😀")
    source = image_path("one_shape")
    assert source is not None
    with Image.open(source) as file:
        file.resize((90, 150)).save(folder / "猫.png")
    return str(folder / "猫.png")


def reasons(outcome: Outcome) -> list[tuple[str, str]]:
    return [(result.item, result.reason) for result in outcome.results if result.verdict is not Verdict.PASS]


def test_every_notebook_with_two_other_sets_of_parameters(turned: str, tmp_path: Path) -> None:
    items = [
        {
            "notebook": f"{name}.ipynb",
            "id": f"{name}_{number}",
            "parameters": {key: turned if value == TURNED else value for key, value in chosen.items()},
        }
        for name, sets in OTHERS.items()
        for number, chosen in enumerate(sets)
    ]
    outcome = run_suite(write_suite(tmp_path / "others.toml", items, budget_s=180), tmp_path / "out")
    assert outcome.fine, reasons(outcome)


def test_the_sets_cover_the_course() -> None:
    assert sorted(OTHERS) == sorted(path.stem for path in notebooks_dir().glob("*.ipynb"))
    assert all(len(sets) == 2 for sets in OTHERS.values())


# One other value for each parameter, and what must stand beside it for a difference to show.
OTHER_BUNDLE = "@bundle"
CHANGES: dict[str, Any] = {
    **dict.fromkeys(("bundle_name", "before_bundle", "after_bundle"), OTHER_BUNDLE),
    "prompt": "How many objects are there? 🙂",
    "second_prompt": "Count from 1 to 3.",
    **dict.fromkeys(("image", "picture"), "one_shape"),
    "second_picture": "one_shape",
    "device": "ascend:1",
    "state": "host",
    "kv": "growing",
    "numerics": "f32",  # where the default is f32: device
    "before_numerics": "device",
    "after_numerics": "f32",
    "drafts": 2,
    "depth": 2,
    "steps": 6,
    "long_steps": 30,
    "max_new_tokens": 3,
    "ignore_eos": True,
    "small_capacity_tokens": 3,
    "pad_behind_to": 128,
    "linear_layer": 3,
    "head": 2,
    "models": ["tiny"],
    "card": "300i-pro",
    "capacity_tokens": 1024,
    "sequences": 2,
}
SHORT = {"05_kernel": {"long_steps": 40}}
BESIDE: dict[tuple[str, str], dict[str, Any]] = {
    ("00_cockpit", "ignore_eos"): {"steps": 40, "max_new_tokens": 30},
    ("00_cockpit", "max_new_tokens"): {"steps": 40},
    ("05_kernel", "long_steps"): {},
    ("05_kernel", "bundle_name"): {"long_steps": 500},
    ("06_slot_pool", "image"): {"prompt": "Describe this image."},
}


@pytest.fixture(scope="module")
def other_bundle(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The small model once more, with less room and one grid."""
    out = tmp_path_factory.mktemp("bundle") / "other"
    return str(build_bundle(tiny_checkpoint(), out, capacity=300, buckets=(64, 256), grids=[(8, 8)]).directory)


def claims(path: Path, records: Path, **given: Any) -> dict[str, Any]:
    """The records of a notebook whose cells are run here, one after the other; without times."""
    cells = [cell for cell in json.loads(path.read_text(encoding="utf-8"))["cells"] if cell["cell_type"] == "code"]
    names: dict[str, Any] = {"__name__": "notebook"}
    os.environ[RECORDS_VARIABLE] = str(records)
    for cell in cells:
        exec(compile("".join(cell["source"]), f"{path.name}/{cell['id']}", "exec"), names)
        if "parameters" in cell["metadata"].get("tags", []):
            names.update(check(path, given))
    return {line["name"]: line["value"] for line in read_lines(records) if line["unit"] not in {"ms", "us"}}


@pytest.mark.parametrize("name", OTHERS)
def test_every_parameter_changes_something(
    name: str, other_bundle: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QWEN_NPU_HEADLESS", "1")
    monkeypatch.setenv(RECORDS_VARIABLE, "")
    path = notebooks_dir() / f"{name}.ipynb"
    known: dict[str, dict[str, Any]] = {}
    defaults = parameters(path)
    for number, parameter in enumerate(defaults):
        if parameter == "driver":
            with pytest.raises(DriverError, match="mindspore_lite cannot be imported"):
                claims(path, tmp_path / "refused", driver="mindspore_lite")
            continue
        beside = BESIDE.get((name, parameter), SHORT.get(name, {}))
        key = repr(beside)
        if key not in known:
            known[key] = claims(path, tmp_path / f"plain_{number}", **beside)
        value = other_bundle if CHANGES[parameter] == OTHER_BUNDLE else CHANGES[parameter]
        if parameter == "numerics" and defaults[parameter].default == value:
            value = "device"
        changed = claims(path, tmp_path / str(number), **{**beside, parameter: value})
        assert changed != known[key], parameter


@pytest.fixture(scope="module")
def lessons() -> Suite:
    """The lessons of the default suite, one item each, against the baselines of the repository."""
    suite = load_suite("default")
    first = {item.notebook.stem: item.id for item in reversed(suite.items)}
    return suite.select(ids=[first[name] for name in FAULTS])


@pytest.mark.parametrize("lesson", FAULTS)
def test_a_fault_turns_its_lesson_red_and_no_other(
    lessons: Suite, lesson: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sitecustomize.py").write_text(FAULTS[lesson], encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    outcome = run_suite(lessons, tmp_path / "out")
    red = {result.notebook: result.verdict for result in outcome.results if result.verdict is not Verdict.PASS}
    assert red == {f"{lesson}.ipynb": Verdict.FAIL}, reasons(outcome)  # what it claims fails; it does not crash
