"""What the parameters of our notebooks mean: a parameter of one of these names is checked by its value, too.

A bad value is refused by name before a kernel starts, and a relative path is made absolute, since the kernel runs in a
directory of its own. A notebook that means something else gives its parameter another name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from qwen_npu.bundle import buckets_of
from qwen_npu.data import image_path, tiny_checkpoint
from qwen_npu.driver import DRIVERS
from qwen_npu.driver.mslite import parse_device
from qwen_npu.errors import UsageError
from qwen_npu.planner import DEVICES
from qwen_npu.runtime.context import KV_POLICIES, STATE_PLACES
from qwen_npu.runtime.speculative import MOST_DRAFTS
from qwen_npu.spec import NUMERICS, PRESETS, ModelSpec

Rule = Callable[[Any], Any]
"""Takes a value of the right type; gives the value to inject, or raises WorkbenchError."""


def meant(name: str, value: Any) -> Any:
    """The value to inject for a parameter of this name.

    Raises:
        WorkbenchError: a value that the name does not allow; `expected` says which it does.
    """
    for kind, rules in RULES.items():
        if name in rules and type(value) is kind:
            return rules[name](value)
    return value


def _one_of(*choices: str) -> Rule:
    def rule(value: str) -> str:
        if value not in choices:
            raise UsageError(repr(value), expected=f"one of {', '.join(map(repr, choices))}")
        return value

    return rule


def _between(least: int, most: int | None = None) -> Rule:
    def rule(value: int) -> int:
        if value < least or (most is not None and value > most):
            raise UsageError(str(value), expected=f"{least} or more" if most is None else f"{least}..{most}")
        return value

    return rule


def _text(value: str) -> str:
    if not value.strip():
        raise UsageError(repr(value), expected="a text that asks something")
    return value


def _picture(value: str) -> str:
    path = image_path(value)
    if path is None:
        raise UsageError(repr(value), expected="a picture that ships, or the path of one")
    return str(path.resolve()) if Path(value).is_file() else value


def _picture_or_none(value: str) -> str:
    return _picture(value) if value else ""


def _bundle(value: str) -> str:
    return "tiny" if value == "tiny" else str(_checkpoint(value))


def _checkpoint(value: str) -> Path:
    directory = Path(value).resolve()
    if not (directory / "config.json").is_file():
        raise UsageError(repr(value), expected="'tiny', or the directory of a bundle or checkpoint (with config.json)")
    return directory


def _models(value: list[Any]) -> list[str]:
    if not value:
        raise UsageError("[]", expected=f"one model or more of {', '.join(PRESETS)}, or checkpoint directories")
    return [model if model in PRESETS else str(_checkpoint(str(model))) for model in value]


def _device(value: str) -> str:
    parse_device(value)
    return value


# By the type of the value: a notebook may well have a list of prompts, and then it says so.
RULES: dict[type, dict[str, Rule]] = {
    str: {
        **dict.fromkeys(("bundle_name", "before_bundle", "after_bundle"), _bundle),
        **dict.fromkeys(("prompt", "second_prompt"), _text),
        "image": _picture_or_none,
        **dict.fromkeys(("picture", "second_picture"), _picture),
        "device": _device,
        "driver": _one_of(*DRIVERS),
        "state": _one_of(*STATE_PLACES),
        "kv": _one_of(*KV_POLICIES),
        **dict.fromkeys(("numerics", "before_numerics", "after_numerics"), _one_of(*NUMERICS)),
        "card": _one_of(*DEVICES),
    },
    int: {
        **dict.fromkeys(("steps", "long_steps", "max_new_tokens", "sequences"), _between(1)),
        **dict.fromkeys(("capacity_tokens", "small_capacity_tokens"), _between(1)),
        "drafts": _between(0, MOST_DRAFTS),
        "depth": _between(1, MOST_DRAFTS),
        **dict.fromkeys(("linear_layer", "head", "pad_behind_to"), _between(0)),
    },
    list: {"models": _models},
}


def check_together(values: Mapping[str, Any]) -> None:
    """Checks all parameters of a notebook, given ones and defaults, against one another.

    Raises:
        UsageError: two that exclude each other.
    """
    kv, state = values.get("kv", "fixed"), values.get("state", "resident")
    if values.get("drafts") and (kv, state) != ("fixed", "resident"):
        raise UsageError(
            f"the parameter 'drafts' is {values['drafts']} with state {state!r} and kv {kv!r}",
            expected="state 'resident' and kv 'fixed': drafts live in slot pools on the device",
        )
    if "bundle_name" not in values:
        return
    name = values["bundle_name"]
    directory = tiny_checkpoint() if name == "tiny" else Path(name)
    if "linear_layer" in values or "head" in values:
        spec = ModelSpec.from_checkpoint(directory)
        for parameter, count in (("linear_layer", len(spec.linear_layers)), ("head", spec.nv)):
            if values.get(parameter, 0) >= count:
                raise UsageError(
                    f"the parameter {parameter!r} is {values[parameter]}", expected=f"0..{count - 1} in {name!r}"
                )
    if values.get("pad_behind_to"):
        buckets = buckets_of(directory)
        if values["pad_behind_to"] not in buckets:
            raise UsageError(
                f"the parameter 'pad_behind_to' is {values['pad_behind_to']}",
                expected=f"0, or a bucket of {name!r}: one of {', '.join(map(str, buckets))}",
            )
