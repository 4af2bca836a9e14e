"""Bad values of the course's parameters: each is refused by name, before a kernel would start."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from qwen_npu.data import image_path, notebooks_dir
from qwen_npu.errors import NotebookError
from qwen_npu.nightly.preflight import check, parameters

NOTEBOOKS = sorted(notebooks_dir().glob("*.ipynb"))
WRONG: dict[str, list[Any]] = {
    **{name: ["", "no_such_directory", 3] for name in ("bundle_name", "before_bundle", "after_bundle")},
    **{name: ["", " \n", None] for name in ("prompt", "second_prompt")},
    "image": ["no_such_picture", 3],
    **{name: ["", "no_such_picture.png"] for name in ("picture", "second_picture")},
    "device": ["ascend", "ascend:x", "npu:0", ""],
    "driver": ["vendor", ""],
    "state": ["device", 0],
    "kv": ["grown", ""],
    **{name: ["f16", ""] for name in ("numerics", "before_numerics", "after_numerics")},
    **{name: [0, -1, 2.5, "8", True] for name in ("steps", "long_steps", "max_new_tokens", "sequences")},
    **{name: [0, "many"] for name in ("capacity_tokens", "small_capacity_tokens")},
    "drafts": [-1, 8],
    "depth": [0, 8],
    "linear_layer": [-1, 6],
    "head": [-1, 4],
    "pad_behind_to": [-64, 65],
    "ignore_eos": [1, "yes"],
    "card": ["300i", ""],
    "models": [[], ["5b"], "4b"],
}
CASES = [
    pytest.param(path, name, value, id=f"{path.stem[:2]}-{name}-{value!r}")
    for path in NOTEBOOKS
    for name in parameters(path)
    for value in WRONG[name]  # a parameter without an entry is an error here: nobody has said what is wrong for it
]


@pytest.mark.parametrize(("path", "name", "value"), CASES)
def test_a_bad_value_is_refused_by_name(path: Path, name: str, value: Any) -> None:
    with pytest.raises(NotebookError) as caught:
        check(path, {name: value})
    assert f"'{name}' is {value!r}" in str(caught.value)
    assert caught.value.expected


@pytest.mark.parametrize("path", NOTEBOOKS, ids=[path.stem for path in NOTEBOOKS])
def test_the_defaults_are_fine(path: Path) -> None:
    given = {name: parameter.default for name, parameter in parameters(path).items()}
    assert check(path, given) == given


@pytest.mark.parametrize("other", [{"kv": "growing"}, {"state": "host"}])
def test_drafts_need_resident_states_and_a_fixed_cache(other: dict[str, str]) -> None:
    with pytest.raises(NotebookError, match="'drafts' is 3"):
        check(notebooks_dir() / "00_cockpit.ipynb", {"drafts": 3, **other})


def test_a_relative_path_becomes_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel runs in a directory of its own."""
    shipped = image_path("two_shapes")
    assert shipped is not None
    (tmp_path / "猫 😀.png").write_bytes(shipped.read_bytes())
    monkeypatch.chdir(tmp_path)
    assert check(notebooks_dir() / "02_prefill.ipynb", {"image": "猫 😀.png"}) == {"image": str(tmp_path / "猫 😀.png")}
