"""The tiny model's graphs in plain operators, and their converted forms, made once and kept under build/real_mslite."""

from __future__ import annotations

import dataclasses
import fcntl
import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import onnx

from qwen_npu.bundle import Bundle
from qwen_npu.driver.worker import SUFFIX, Kind, WorkerDriver
from qwen_npu.graphs import lowering_plain
from tests.integration.real_mslite.environment import HOME

GRAPHS = ("vision", "prefill", "decode_growing", "decode_fixed")


def lowered(bundle: Bundle, directory: Path) -> Bundle:
    """A bundle in `directory` whose f32 graphs are plain; what is there already stays."""
    directory.mkdir(exist_ok=True)
    for path in bundle.directory.iterdir():
        link = directory / path.name
        if path.suffix != ".onnx" and not link.exists():
            link.symlink_to(path)
    plain = dataclasses.replace(bundle, directory=directory)
    for graph in GRAPHS:
        for grid in bundle.grids if graph == "vision" else (None,):
            target = plain.path(graph, numerics="f32", grid=grid)
            if not target.exists():
                source = bundle.path(graph, numerics="f32", grid=grid)
                model = lowering_plain.lower(source, bundle.spec, longest_tokens=max(bundle.buckets))
                partial = target.with_suffix(".partial")
                onnx.save(model, str(partial))
                partial.rename(target)
    return plain


def converted(bundle: Bundle, python: Path) -> Bundle:
    """The plain bundle, with the .mindir and .ms of each graph beside it; kept under build/real_mslite."""
    key = hashlib.sha256(bundle.digest.encode() + Path(lowering_plain.__file__).read_bytes()).hexdigest()[:16]
    with _locked(HOME / "lock"):
        plain = lowered(bundle, HOME / f"graphs-{key}")
        for kind in SUFFIX:
            missing = [
                path for path in sorted(plain.directory.glob("*.onnx")) if not path.with_suffix(SUFFIX[kind]).exists()
            ]
            if missing:
                _convert(missing, kind, python)
    return plain


def _convert(sources: list[Path], kind: Kind, python: Path) -> None:
    driver = WorkerDriver(python, kind=kind)
    try:
        for source in sources:
            assert driver.convert(source).stat().st_size > 0
    finally:
        driver.close()


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """One process at a time, as tests may run in several."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
