"""The tiny model's graphs in plain operators, and their converted forms."""

from __future__ import annotations

import dataclasses
import fcntl
import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import onnx

from qwen_npu.bundle import Bundle
from qwen_npu.driver.worker import SUFFIX, WorkerDriver
from qwen_npu.graphs import lowering_plain
from tests.integration.real_mslite.environment import HOME

GRAPHS = ("vision", "prefill", "decode_growing", "decode_fixed")


def lowered(bundle: Bundle, directory: Path) -> Bundle:
    """A bundle in `directory`, which must be new, whose f32 graphs are plain."""
    directory.mkdir()
    for path in bundle.directory.iterdir():
        if path.suffix != ".onnx":
            (directory / path.name).symlink_to(path)
    plain = dataclasses.replace(bundle, directory=directory)
    for graph in GRAPHS:
        for grid in bundle.grids if graph == "vision" else (None,):
            source = bundle.path(graph, numerics="f32", grid=grid)
            model = lowering_plain.lower(source, bundle.spec, longest_tokens=max(bundle.buckets))
            onnx.save(model, str(plain.path(graph, numerics="f32", grid=grid)))
    return plain


def converted(bundle: Bundle, python: Path, directory: Path) -> Bundle:
    """`lowered`, with the .mindir and .ms of each graph beside it.

    Converting takes long: what was made is kept under build/real_mslite by the digest of its ONNX file.
    """
    plain = lowered(bundle, directory)
    with _locked(HOME / "lock"):
        for kind in SUFFIX:
            driver: WorkerDriver | None = None
            for graph in sorted(directory.glob("*.onnx")):
                kept = HOME / f"{hashlib.sha256(graph.read_bytes()).hexdigest()[:24]}{SUFFIX[kind]}"
                if not kept.exists():
                    driver = driver or WorkerDriver(python, kind=kind)
                    made = driver.convert(graph)
                    made.rename(kept)
                graph.with_suffix(SUFFIX[kind]).symlink_to(kept)
            if driver is not None:
                driver.close()
    return plain


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """One process at a time, as tests may run in several."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
