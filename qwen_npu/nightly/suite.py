"""What a suite file says: notebooks, parameter grids, budgets, expected records. TOML; a fault is named by line."""

from __future__ import annotations

import itertools
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from qwen_npu.data import data_dir, notebooks_dir
from qwen_npu.errors import SuiteError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

SCHEMA = 1
DEFAULT_BUDGET_S = 120.0


class SuiteItem(BaseModel):
    """One `[[item]]`: a notebook and, with `grid`, one run for each combination of the values listed."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    notebook: str
    id: str | None = None
    tags: tuple[str, ...] = ()
    parameters: dict[str, Any] = Field(default_factory=dict)
    grid: dict[str, list[Any]] = Field(default_factory=dict)
    budget_s: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    records: tuple[str, ...] = ()
    device: Literal["any", "npu"] = "any"
    kernel: str | None = None
    why: str = ""

    @field_validator("tags", "records", mode="before")
    @classmethod
    def _as_tuple(cls, value: Any) -> Any:
        return tuple(value) if isinstance(value, list) else value

    @field_validator("id")
    @classmethod
    def _plain_id(cls, value: str | None) -> str | None:
        if value is not None and not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", value):
            raise ValueError("an id holds letters, digits, '.', '_' and '-', and starts with a letter or digit")
        return value

    @field_validator("grid")
    @classmethod
    def _filled_grid(cls, value: dict[str, list[Any]]) -> dict[str, list[Any]]:
        for name, values in value.items():
            if not values:
                raise ValueError(f"the grid's list for {name!r} is empty")
        return value


class SuiteFile(BaseModel):
    """A suite file as it is written."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    schema_: Literal[1] = Field(alias="schema")
    name: str = Field(min_length=1)
    budget_s: float = Field(default=DEFAULT_BUDGET_S, gt=0, allow_inf_nan=False)
    notebooks: str | None = None
    baselines: str | None = None
    item: list[SuiteItem] = Field(min_length=1)


class Item(BaseModel):
    """One run: a notebook with one set of parameters. `id` is unique in the suite and safe as a file name."""

    model_config = ConfigDict(frozen=True)

    id: str
    notebook: Path
    parameters: dict[str, Any]
    tags: tuple[str, ...]
    budget_s: float
    records: tuple[str, ...]
    device: Literal["any", "npu"]
    kernel: str | None


class Suite(BaseModel):
    """A suite ready to run: its file, its items after the grids are spread, and where its baselines lie."""

    model_config = ConfigDict(frozen=True)

    name: str
    path: Path
    baselines: Path
    items: tuple[Item, ...]

    def select(self, tags: Sequence[str] = (), ids: Sequence[str] = ()) -> Suite:
        """The items that carry one of `tags` (all when empty) and whose id is in `ids` (all when empty).

        Raises:
            SuiteError: nothing is left, or an id is unknown.
        """
        known = {item.id for item in self.items}
        for name in ids:
            if name not in known:
                raise SuiteError(f"the suite {self.name} has no item {name!r}", expected=", ".join(sorted(known)))
        kept = tuple(
            item for item in self.items if (not tags or set(tags) & set(item.tags)) and (not ids or item.id in set(ids))
        )
        if not kept:
            have = sorted({tag for item in self.items for tag in item.tags})
            raise SuiteError(
                f"no item of the suite {self.name} is tagged {' or '.join(tags)}",
                expected=f"one of {', '.join(have) or '(no item has a tag)'}",
            )
        return self.model_copy(update={"items": kept})


def suites_dir() -> Path:
    """Where the suites that ship with the package lie."""
    return data_dir() / "suites"


def load_suite(name_or_path: str | Path) -> Suite:
    """Reads a suite file, or one that ships with the package by its name ("default").

    Raises:
        SuiteError: missing or unreadable file, TOML fault, unknown or badly typed key, unknown notebook, two items of
            one id; names file and line.
    """
    path = _find(name_or_path)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SuiteError(f"the suite {path} cannot be read: {error}", expected="a TOML file in UTF-8") from error
    try:
        raw = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise SuiteError(f"{path}: not TOML: {error}", expected="TOML, see data/suites/default.toml") from error
    try:
        file = SuiteFile.model_validate(raw)
    except ValidationError as error:
        raise SuiteError(
            _faults(path, text, error), fix="correct the lines named; data/suites/default.toml shows all keys"
        ) from error
    return _spread(path, text, file)


def _find(name_or_path: str | Path) -> Path:
    path = Path(name_or_path)
    if path.suffix == ".toml" or path.is_file():
        if not path.is_file():
            raise SuiteError(f"there is no suite file {path}", expected=_known_suites())
        return path.resolve()
    shipped = suites_dir() / f"{name_or_path}.toml"
    if not shipped.is_file():
        raise SuiteError(f"there is no suite {str(name_or_path)!r}", expected=_known_suites())
    return shipped


def _known_suites() -> str:
    names = sorted(path.stem for path in suites_dir().glob("*.toml"))
    return f"a TOML file, or the name of a suite that ships with the package ({', '.join(names)})"


def _spread(path: Path, text: str, file: SuiteFile) -> Suite:
    folder = path.parent / file.notebooks if file.notebooks else None
    items: list[Item] = []
    for index, entry in enumerate(file.item):
        line = line_of(text, ("item", index, "notebook"))
        notebook = _notebook(path, line, entry.notebook, folder)
        for name in entry.grid:
            if name in entry.parameters:
                line = line_of(text, ("item", index, "grid", name))
                raise SuiteError(
                    f"{path}, line {line}: {name!r} is both a parameter and in the grid", expected="one of them"
                )
        names = list(entry.grid)
        for values in itertools.product(*entry.grid.values()):
            point = dict(zip(names, values, strict=True))
            items.append(
                Item(
                    id=_slug(entry.id or notebook.stem, point),
                    notebook=notebook,
                    parameters={**entry.parameters, **point},
                    tags=entry.tags,
                    budget_s=entry.budget_s or file.budget_s,
                    records=entry.records,
                    device=entry.device,
                    kernel=entry.kernel,
                )
            )
    _unique(path, text, file, items)
    baselines = path.parent / file.baselines if file.baselines else _default_baselines(path)
    return Suite(name=file.name, path=path, baselines=baselines.resolve(), items=tuple(items))


def _default_baselines(path: Path) -> Path:
    return data_dir() / "baselines" if path.parent == suites_dir() else path.parent / "baselines"


def _unique(path: Path, text: str, file: SuiteFile, items: Sequence[Item]) -> None:
    seen: set[str] = set()
    for item in items:
        # compared without case: a report may be unpacked where file names have none
        if item.id.casefold() in seen:
            index = max(
                n for n, entry in enumerate(file.item) if item.id.startswith(entry.id or Path(entry.notebook).stem)
            )
            raise SuiteError(
                f"{path}, line {line_of(text, ('item', index))}: two items have the id {item.id!r}",
                expected="ids that differ",
                fix="give the item an `id`",
            )
        seen.add(item.id.casefold())


def _notebook(path: Path, line: int, named: str, folder: Path | None) -> Path:
    places = [folder] if folder is not None else [path.parent, notebooks_dir()]
    for place in places:
        notebook = (place / named).resolve()
        if notebook.suffix == ".ipynb" and notebook.is_file():
            return notebook
    raise SuiteError(
        f"{path}, line {line}: there is no notebook {named!r}",
        expected=f"an .ipynb file in {' or '.join(str(place) for place in places)}",
    )


def _slug(stem: str, point: Mapping[str, Any]) -> str:
    parts = [stem, *(f"{name}-{value}" for name, value in point.items())]
    return "--".join(re.sub(r"[^\w.-]+", "_", part).strip("_") or "_" for part in parts)


def _faults(path: Path, text: str, error: ValidationError) -> str:
    lines = []
    for fault in error.errors():
        location = fault["loc"]
        name = ".".join(str(part) for part in location)
        message = fault["msg"].removeprefix("Value error, ")
        if fault["type"] == "extra_forbidden":
            known = SuiteItem.model_fields if location[:1] == ("item",) else SuiteFile.model_fields
            message = f"unknown key; known are {', '.join(field.rstrip('_') for field in known)}"
        lines.append(f"{path}, line {line_of(text, location)}: {name}: {message}")
    return "\n".join(lines)


def line_of(text: str, location: Sequence[str | int]) -> int:
    """The line (from 1) of the deepest part of `location` that the TOML text spells, e.g. ("item", 2, "budget_s").

    Knows the shapes a suite uses: top-level keys, `[[item]]`, `[item.grid]` and keys in them.
    """
    best, depth = 1, -1
    table: list[str | int] = []
    counts: dict[str, int] = {}
    wanted = list(location)
    for number, line in enumerate(text.splitlines(), start=1):
        bare = line.strip()
        if array := re.match(r"\[\[\s*([\w.-]+)\s*\]\]", bare):
            name = array.group(1)
            counts[name] = counts.get(name, -1) + 1
            table = [name, counts[name]]
            here = table
        elif header := re.match(r"\[\s*([\w.-]+)\s*\]", bare):
            first, *rest = header.group(1).split(".")
            table = [first, counts[first], *rest] if first in counts else [first, *rest]
            here = table
        elif key := re.match(r"""["']?([\w-]+)["']?\s*[=.]""", bare):
            here = [*table, key.group(1)]
        else:
            continue
        shared = 0
        while shared < min(len(here), len(wanted)) and here[shared] == wanted[shared]:
            shared += 1
        if shared == len(here) and shared > depth:
            best, depth = number, shared
    return best
