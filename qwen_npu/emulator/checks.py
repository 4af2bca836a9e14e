"""The vendor's argument checks, word for word: programs and the probe compare these messages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def check_isinstance(name: str, value: object, kind: type) -> None:
    if not isinstance(value, kind):
        raise TypeError(f"{name} must be {kind.__name__}, but got {type(value)}.")


def check_list_of(name: str, value: object, kind: type) -> None:
    if not isinstance(value, list):
        raise TypeError(f"{name} must be list, but got {type(value)}.")
    check_elements(name, value, kind)


def check_elements(name: str, value: Sequence[Any], kind: type) -> None:
    if set(map(type, value)) == {kind}:
        return
    for index, element in enumerate(value):
        if not isinstance(element, kind):
            raise TypeError(f"{name} element must be {kind.__name__}, but got {type(element)} at index {index}.")


def check_not_negative(name: str, value: object) -> None:
    check_isinstance(name, value, int)
    assert isinstance(value, int)
    if value < 0:
        raise ValueError(f"{name} must be a non-negative int.")


def check_choice(name: str, value: object, choices: Sequence[str]) -> None:
    check_isinstance(name, value, str)
    if value not in choices:
        raise ValueError(f"{name} must be in [{', '.join(choices)}], but got {value}.")
