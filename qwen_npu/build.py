"""`qwen-npu build`: all graphs of a checkpoint for one target, also those that the runtime makes only when asked for,
each read back before it is called done."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qwen_npu.bundle import DEFAULT_BUCKETS_TOKENS, DEFAULT_CAPACITY_TOKENS, Bundle, build_bundle
from qwen_npu.errors import ConversionError, UsageError
from qwen_npu.graphs.targets import TARGETS, Target
from qwen_npu.graphs.weights import WEIGHT_FILE, Grid

DEFAULT_DRAFTS = 4


@dataclass(frozen=True)
class BuiltGraph:
    """One graph file; `custom` counts its `Custom` nodes by type (Ascend, fused)."""

    file: str
    size_bytes: int
    custom: dict[str, int]


@dataclass(frozen=True)
class Built:
    """What a build left in its directory."""

    bundle: Bundle
    graphs: tuple[BuiltGraph, ...]
    weight_bytes: int
    seconds: float


def build(
    checkpoint: str | Path,
    out_dir: str | Path,
    target: Target,
    *,
    fused: bool = True,
    capacity: int | None = None,
    buckets: Iterable[int] | None = None,
    grids: Iterable[Grid] | None = None,
    drafts: int = DEFAULT_DRAFTS,
    sequences: int = 1,
) -> Built:
    """Builds everything of a target into `out_dir`; a build that is there already is completed.

    Args:
        drafts: K: the verify graphs take 1 and K + 1 tokens; 0 builds none of the graphs on pools.
        sequences: that the graphs on pools work for.

    Raises:
        BundleError, CheckpointError, UsageError: see `build_bundle`.
        ConversionError: a graph read back is not what the converter takes.
    """
    if not 0 <= drafts <= 7 or sequences < 1:
        raise UsageError(f"{drafts} drafts, {sequences} sequences", expected="0..7 drafts, at least one sequence")
    start = time.perf_counter()
    bundle = build_bundle(
        checkpoint, out_dir, grids=grids, capacity=capacity, buckets=buckets, target=target, fused=fused
    )
    for numerics in bundle.form.numerics:
        bundle.peek(kv="fixed", numerics=numerics)
        bundle.peek(kv="growing", numerics=numerics)
        if not drafts or not bundle.form.speculates:
            continue
        width, slots = drafts + 1, sequences * (drafts + 1)
        bundle.admit(sequences=sequences, slots=slots, numerics=numerics)
        bundle.peek_pools(sequences=sequences, slots=slots, numerics=numerics)
        for tokens in (1, width):
            sizes = {"width": width, "sequences": sequences, "slots": slots, "tokens": tokens}
            bundle.verify(**sizes, numerics=numerics)
            bundle.op(**sizes, numerics=numerics)
    graphs = tuple(_read_back(bundle, path) for path in sorted(bundle.directory.glob("*.onnx")))
    weights = (bundle.directory / WEIGHT_FILE).stat().st_size
    return Built(bundle, graphs, weights, time.perf_counter() - start)


def _read_back(bundle: Bundle, path: Path) -> BuiltGraph:
    """Counts the `Custom` nodes of a graph for Ascend and compares with the layers of the model."""
    from qwen_npu.graphs import fused

    if bundle.form.target == "emulator":
        return BuiltGraph(path.name, path.stat().st_size, {})
    counts = fused.check(path.read_bytes())
    wanted = _expected(bundle, path.name)
    if counts != wanted:
        raise ConversionError(f"{path.name} has Custom nodes {dict(counts)}", expected=str(wanted), fix="build it anew")
    return BuiltGraph(path.name, path.stat().st_size, dict(counts))


def _expected(bundle: Bundle, name: str) -> dict[str, int]:
    from qwen_npu.graphs.fused import ATTENTION, SCATTER
    from qwen_npu.graphs.nodes import CHUNK, RECURRENT

    if not bundle.form.fused:
        return {}
    linear, full = len(bundle.spec.linear_layers), len(bundle.spec.full_layers)
    if name.startswith("prefill"):
        return {CHUNK: linear}
    if name.startswith("decode_fixed"):
        return {RECURRENT: linear, SCATTER: 2 * full, ATTENTION: full}
    if name.startswith(("decode_growing", "verify")):
        return {RECURRENT: linear}
    return {RECURRENT: 1} if name.startswith("op-") else {}


def add_commands(subparsers: Any) -> None:
    """Adds `build` to the command line's parser."""
    parser = subparsers.add_parser("build", help="all graphs of a checkpoint for a target, read back and checked")
    parser.add_argument("checkpoint", help="tiny, or a Hugging Face checkpoint directory")
    parser.add_argument("--out", required=True, type=Path, metavar="DIR")
    parser.add_argument("--target", required=True, choices=TARGETS)
    parser.add_argument("--capacity", type=int, default=DEFAULT_CAPACITY_TOKENS, metavar="TOKENS")
    parser.add_argument(
        "--buckets",
        type=_lengths,
        default=DEFAULT_BUCKETS_TOKENS,
        metavar="N,N,...",
        help="lengths of prefill in tokens (default: %(default)s)",
    )
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument("--fused", dest="fused", action="store_true", default=True, help="Custom nodes (default)")
    kind.add_argument("--unfused", dest="fused", action="store_false", help="plain ops alone, on ascend310p")
    parser.add_argument(
        "--grid", type=_grid, action="append", metavar="HxW", help="a vision graph for so many patches (repeatable)"
    )
    parser.add_argument("--drafts", type=int, default=DEFAULT_DRAFTS, metavar="K", help="of the verify graphs")
    parser.add_argument("--sequences", type=int, default=1, metavar="N", help="of the graphs on slot pools")
    parser.add_argument("--json", action="store_true")
    parser.set_defaults(run=_build)


def _lengths(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


def _grid(text: str) -> Grid:
    rows, columns = text.lower().split("x")
    return int(rows), int(columns)


def _build(options: argparse.Namespace) -> int:
    built = build(
        options.checkpoint,
        options.out,
        options.target,
        fused=options.fused,
        capacity=options.capacity,
        buckets=options.buckets,
        grids=options.grid,
        drafts=options.drafts,
        sequences=options.sequences,
    )
    if options.json:
        print(json.dumps(to_json(built)))
        return 0
    bundle = built.bundle
    kind = f" ({'fused' if bundle.form.fused else 'unfused'})" if bundle.form.target == "ascend310p" else ""
    print(f"{bundle.directory} for {bundle.form.target}{kind}: {len(built.graphs)} graphs in {built.seconds:.1f} s")
    for graph in built.graphs:
        nodes = ", ".join(f"{count} {name}" for name, count in sorted(graph.custom.items()))
        print(f"  {graph.file:<52}{graph.size_bytes:>12,} B  {nodes}")
    print(f"  {WEIGHT_FILE:<52}{built.weight_bytes:>12,} B  f32, shared by all")
    print(_next_step(bundle))
    return 0


def _next_step(bundle: Bundle) -> str:
    if bundle.form.target == "emulator":
        return f"Next: qwen-npu run --bundle {bundle.directory} --prompt TEXT"
    return f"Next: qwen-npu convert {bundle.directory}"


def to_json(built: Built) -> dict[str, Any]:
    """The build as plain JSON."""
    bundle = built.bundle
    graphs: Sequence[dict[str, Any]] = [
        {"file": graph.file, "bytes": graph.size_bytes, "custom": graph.custom} for graph in built.graphs
    ]
    return {
        "directory": str(bundle.directory),
        "target": bundle.form.target,
        "fused": bundle.form.fused,
        "capacity": bundle.capacity,
        "buckets": list(bundle.buckets),
        "grids": [list(grid) for grid in bundle.grids],
        "graphs": graphs,
        "weight_bytes": built.weight_bytes,
        "seconds": built.seconds,
    }
