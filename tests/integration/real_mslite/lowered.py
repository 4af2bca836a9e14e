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


def lowered(bundle: Bundle, python: Path) -> Bundle:
    """A bundle whose f32 graphs are plain, each with its .mindir and .ms beside it."""
    key = hashlib.sha256(bundle.digest.encode() + Path(lowering_plain.__file__).read_bytes()).hexdigest()[:16]
    directory = HOME / f"graphs-{key}"
    with _locked(HOME / "lock"):
        directory.mkdir(exist_ok=True)
        for path in bundle.directory.iterdir():
            link = directory / path.name
            if path.suffix != ".onnx" and not link.exists():
                link.symlink_to(path)
        plain = dataclasses.replace(bundle, directory=directory)
        for graph in GRAPHS:
            for grid in bundle.grids if graph == "vision" else (None,):
                source = bundle.path(graph, numerics="f32", grid=grid)
                _make(source, plain.path(graph, numerics="f32", grid=grid), bundle, python)
    return plain


def _make(source: Path, target: Path, bundle: Bundle, python: Path) -> None:
    if not target.exists():
        model = lowering_plain.lower(source, bundle.spec, longest_tokens=max(bundle.buckets))
        partial = target.with_suffix(".partial")
        onnx.save(model, str(partial))
        partial.rename(target)
    for kind in SUFFIX:
        if not target.with_suffix(SUFFIX[kind]).exists():
            _convert(target, kind, python)


def _convert(source: Path, kind: Kind, python: Path) -> None:
    driver = WorkerDriver(python, kind=kind)
    try:
        made = driver.convert(source)
        assert made.stat().st_size > 0
    finally:
        driver.close()


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """One process at a time, as tests may run in several."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
