"""A bundle: the directory with the graphs of one checkpoint, their weights, its tokenizer files and a manifest.

Built from a checkpoint without torch, kept in the cache directory under the digest of everything that went in, verified
when opened. Knows directories and digests; the graphs themselves come from `qwen_npu.graphs`.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any, Literal, get_args

from qwen_npu import contract
from qwen_npu.contract import GraphContract
from qwen_npu.data import cache_directory, tiny_checkpoint
from qwen_npu.errors import BundleError, CheckpointError, UsageError
from qwen_npu.graphs.targets import EMULATED, TARGETS, Form, Target
from qwen_npu.graphs.weights import WEIGHT_FILE, Checkpoint, Grid, Piece, prepare, weight_files, write
from qwen_npu.spec import NUMERICS, PRESETS, ModelSpec, Numerics

GraphName = Literal["vision", "prefill", "prefill_all", "decode_growing", "decode_fixed"]
GRAPHS: tuple[GraphName, ...] = get_args(GraphName)
PREFILLS: tuple[GraphName, ...] = ("prefill", "prefill_all")

SCHEMA = 1
MANIFEST = "manifest.json"
DEFAULT_CAPACITY_TOKENS = 1024
MOST_TOKENS = 262_144
"""Of a KV cache: `max_position_embeddings` of the published models."""
DEFAULT_BUCKETS_TOKENS = (32, 64, 128, 256, 512)
DEFAULT_GRIDS: tuple[Grid, ...] = ((8, 8),)
OPTIONS_FILE = "qwen_npu.json"
"""Optional file of a checkpoint: {"grids": [[rows, columns], ..]}, in patches."""

LARGE_FILE_BYTES = 256 * 2**20
"""A file up to this size is digested whole; of a larger one its size, its first and its last 1 MiB."""
_SAMPLE_BYTES = 2**20
_COPIED = (".json", ".jinja", ".txt", ".model")


@dataclass(frozen=True)
class Bundle:
    """An opened bundle. Lengths in tokens; grids are (rows, columns) of patches.

    Attributes:
        name: "tiny", or the name of the checkpoint's directory.
        digest: of everything that went in: checkpoint, options, builder.
        buckets: lengths of prefill, ascending.
        form: the target that the graphs are written for.
    """

    name: str
    directory: Path
    digest: str
    spec: ModelSpec
    capacity: int
    buckets: tuple[int, ...]
    grids: tuple[Grid, ...]
    weights: Mapping[str, Piece] = field(repr=False)
    form: Form = EMULATED

    @property
    def checkpoint(self) -> Path:
        """Where the tokenizer, chat template and processor files lie: the bundle stands alone."""
        return self.directory

    def path(
        self,
        graph: GraphName,
        *,
        numerics: Numerics = "device",
        grid: Grid | None = None,
        tokens: int | None = None,
    ) -> Path:
        """The ONNX file of a graph. `grid` chooses the vision graph; the first of the bundle if not given.

        Args:
            tokens: the bucket that prefill is to be given; only a target in plain ops has a graph for each.

        Raises:
            UsageError: no such graph, numerics, grid or bucket in this bundle.
        """
        bucket = None
        if self.form.plain and graph in PREFILLS:
            bucket = self.buckets[-1] if tokens is None else tokens
            if bucket not in self.buckets:
                raise UsageError(f"no {graph} graph for {bucket} tokens", expected=f"one of {list(self.buckets)}")
        return self.directory / _file_name(graph, self._checked(numerics), self._grid(graph, grid), bucket)

    def contract(self, graph: GraphName, *, numerics: Numerics = "device", grid: Grid | None = None) -> GraphContract:
        """Names, order, dtypes and shapes of a graph's tensors."""
        chosen = self._grid(graph, grid)
        if graph == "vision":
            return contract.vision(self.spec, self._checked(numerics), chosen or self.grids[0])
        if graph in PREFILLS:
            return contract.prefill(self.spec, self._checked(numerics), all_logits=graph == "prefill_all")
        return contract.decode(self.spec, self._checked(numerics), self.capacity if graph == "decode_fixed" else None)

    def verify(self, *, width: int, sequences: int, slots: int, tokens: int, numerics: Numerics = "device") -> Path:
        """The graph that verifies `tokens` (1 to `width`) tokens of each of `sequences` rows on pools of `slots` slots.

        Made when first asked for and kept beside the others; its tensors are `contract.verify(..., capacity=capacity)`.
        """
        if not 1 <= tokens <= width or min(sequences, slots) < 1:
            raise UsageError(
                f"verify of {tokens} tokens, width {width}, {sequences} sequences, {slots} slots",
                expected="1 <= tokens <= width, at least one sequence and slot",
            )
        sizes = {"tokens": tokens, "width": width, "sequences": sequences, "slots": slots, "capacity": self.capacity}
        name = f"verify-l{tokens}-w{width}-b{sequences}-s{slots}-{self._checked(numerics)}"
        return self._on_demand(name, partial(self.form.verify, self.spec, numerics, self.weights, sizes))

    def op(self, *, width: int, sequences: int, slots: int, tokens: int, numerics: Numerics = "device") -> Path:
        """The op alone on a pool of `slots` slots (`graphs.op.op_contract`); sizes as `verify`."""
        sizes = {"tokens": tokens, "width": width, "sequences": sequences, "slots": slots}
        name = f"op-l{tokens}-w{width}-b{sequences}-s{slots}-{self._checked(numerics)}"
        return self._on_demand(name, partial(self.form.op, self.spec, sizes, contract.half(numerics)))

    def admit(self, *, sequences: int, slots: int, numerics: Numerics = "device") -> Path:
        """The graph that puts one sequence's prefill states into its slot and row; `contract.admit` has its tensors."""
        if min(sequences, slots) < 1:
            raise UsageError(f"admit for {sequences} sequences, {slots} slots", expected="at least one of each")
        sizes = {"sequences": sequences, "slots": slots, "capacity": self.capacity}
        name = f"admit-b{sequences}-s{slots}-{self._checked(numerics)}"
        return self._on_demand(name, partial(self.form.admit, self.spec, numerics, sizes))

    def peek(self, *, kv: Literal["fixed", "growing"] = "fixed", numerics: Numerics = "device") -> Path:
        """The graph that reduces the states of one sequence to a few figures a head (`contract.peek`)."""
        if kv not in ("fixed", "growing"):
            raise UsageError(f"unknown kv {kv!r}", expected="fixed or growing")
        capacity = self.capacity if kv == "fixed" else None
        make = partial(self.form.peek, self.spec, self._checked(numerics), capacity)
        return self._on_demand(f"peek-{kv}-{numerics}", make)

    def peek_pools(self, *, sequences: int, slots: int, numerics: Numerics = "device") -> Path:
        """The same for chosen slots of the pools and the sequences' KV (`contract.peek_pools`)."""
        if min(sequences, slots) < 1:
            raise UsageError(f"peek at {sequences} sequences, {slots} slots", expected="at least one of each")
        sizes = {"sequences": sequences, "slots": slots, "capacity": self.capacity}
        name = f"peek-b{sequences}-s{slots}-{self._checked(numerics)}"
        return self._on_demand(name, partial(self.form.peek_pools, self.spec, numerics, sizes))

    def tap(self, linear_layer: int) -> Path:
        """Prefill with the recurrence of one linear layer (counted from 0) laid open (`contract.tap`), in f32."""
        from qwen_npu.graphs.tap import tap_graph

        make = partial(tap_graph, self.spec, self.path("prefill", numerics="f32"), linear_layer)
        return self._on_demand(f"tap-{linear_layer}", make)

    def _on_demand(self, name: str, make: Callable[[], bytes]) -> Path:
        """A graph beside the weights it refers to, with its digest in a file of its own that is written first."""
        path = self.directory / f"{name}-{_builder_digest()[:8]}.onnx"
        digest_file = path.with_suffix(".sha256")
        if not path.is_file():
            try:
                content = make()
            except KeyError as error:
                raise BundleError(
                    f"the weights of {self.directory} have no {error.args[0]!r}",
                    expected="a bundle built by this version",
                    fix="build it again",
                ) from None
            try:
                _write_atomically(digest_file, hashlib.sha256(content).hexdigest().encode())
                _write_atomically(path, content)
            except OSError as error:
                raise BundleError(
                    f"{path.name} is made on demand and cannot be written: {error}",
                    expected="a bundle in a directory you can write to: the graph must lie beside its weights",
                    fix="copy the bundle to one, or open its checkpoint instead",
                ) from None
        elif not digest_file.is_file() or digest_file.read_text(encoding="ascii") != file_digest(path):
            raise BundleError(f"the content of {path} is not what was built", fix="remove that file")
        return path

    def _checked(self, numerics: Numerics) -> Numerics:
        if _known(numerics) not in self.form.numerics:
            raise UsageError(
                f"bundle {self.name} was built for {self.form.target} and has no graphs of numerics {numerics!r}",
                expected=f"numerics {' or '.join(map(repr, self.form.numerics))}",
                fix="choose it (--numerics), or build a bundle for another target",
            )
        return numerics

    def _grid(self, graph: GraphName, grid: Grid | None) -> Grid | None:
        if graph not in GRAPHS:
            raise UsageError(f"unknown graph {graph!r}", expected=f"one of {', '.join(GRAPHS)}")
        if graph != "vision":
            return None
        if grid is not None and tuple(grid) not in self.grids:
            raise UsageError(
                f"bundle {self.name} has no vision graph for {grid[0]}x{grid[1]} patches",
                expected=f"one of {', '.join(f'{rows}x{columns}' for rows, columns in self.grids)}",
                fix=f"build it with that grid (build_bundle(..., grids=...), or {OPTIONS_FILE} in the checkpoint)",
            )
        return tuple(grid) if grid is not None else self.grids[0]  # type: ignore[return-value]


def open_bundle(
    source: str | Path,
    *,
    grids: Iterable[Grid] | None = None,
    capacity: int | None = None,
    buckets: Iterable[int] | None = None,
) -> Bundle:
    """Opens "tiny", a bundle directory, or a checkpoint directory (built into the cache the first time).

    Options given for a bundle that is built already must be the ones it was built with.

    Raises:
        BundleError: nothing there, or damaged, foreign, of another schema.
        CheckpointError: a checkpoint that cannot be built.
    """
    directory = _directory(source)
    if not (directory / MANIFEST).is_file():
        if not (directory / "config.json").is_file():
            raise BundleError(
                f"{directory} holds neither {MANIFEST} nor config.json",
                expected="a bundle directory, or a Hugging Face checkpoint directory",
            )
        return build_bundle(directory, grids=grids, capacity=capacity, buckets=buckets)
    bundle = _open(directory)
    wanted = {"grids": grids and _grids(grids), "capacity": capacity, "buckets": buckets and tuple(buckets)}
    for key, value in wanted.items():
        if value is not None and value != getattr(bundle, key):
            raise UsageError(
                f"{directory} was built with {key} {getattr(bundle, key)}, not {value}",
                fix="leave the option out, or build another bundle from the checkpoint",
            )
    return bundle


def buckets_of(directory: Path) -> tuple[int, ...]:
    """The buckets of a bundle, or those that a checkpoint is built with by default; nothing is opened or built."""
    try:
        return tuple(json.loads((directory / MANIFEST).read_text(encoding="utf-8"))["buckets"])
    except (OSError, ValueError, KeyError, TypeError):
        return DEFAULT_BUCKETS_TOKENS


def build_bundle(
    checkpoint: str | Path,
    out_dir: str | Path | None = None,
    *,
    grids: Iterable[Grid] | None = None,
    capacity: int | None = None,
    buckets: Iterable[int] | None = None,
    target: Target = "emulator",
    fused: bool = True,
) -> Bundle:
    """Builds the graphs of a checkpoint directory, or opens them if they are in the cache.

    Args:
        out_dir: a directory to build into instead of the cache; must not exist, or hold this very bundle.
        grids: (rows, columns) of patches, one vision graph each; default: the checkpoint's `qwen_npu.json`, or 8x8.
        capacity: length of the fixed KV cache in tokens; default 1024.
        buckets: lengths of prefill in tokens; default 32, 64, 128, 256, 512.
        target: what the graphs are written for (see `graphs.targets`); fused: on Ascend, with `Custom` nodes.
    """
    if target not in TARGETS:
        raise UsageError(f"unknown target {target!r}", expected=f"one of {', '.join(TARGETS)}")
    source = _directory(checkpoint)
    spec = ModelSpec.from_checkpoint(source)
    options = _options(source, grids, capacity, buckets)
    options |= {"target": target, "fused": fused and target == "ascend310p"}
    for grid in options["grids"]:
        spec.image_tokens(grid)
    digest = _build_digest(source, options)
    place = Path(out_dir) if out_dir is not None else cache_directory() / f"{source.name}-{digest[:16]}"
    if not (place / MANIFEST).is_file():
        if place.exists() and any(place.iterdir()):
            raise BundleError(
                f"{place} exists and is not a bundle", fix="name another directory, or remove it if nothing needs it"
            )
        _build(source, place, spec, options, digest)
    bundle = _open(place)
    if bundle.digest != digest:
        raise BundleError(
            f"{place} holds another bundle ({bundle.name}, digest {bundle.digest[:16]})",
            expected=f"digest {digest[:16]}",
            fix="name another directory",
        )
    return bundle


def _directory(source: str | Path) -> Path:
    if source == "tiny":
        return tiny_checkpoint()
    path = Path(source).expanduser()
    if path.is_dir():
        return path
    if str(source) in PRESETS:
        raise BundleError(
            f"the weights of {source} do not ship with this package",
            fix="download the checkpoint and give its directory",
        )
    raise BundleError(
        f"there is no bundle {str(source)!r}",
        expected="tiny, a bundle directory, or a Hugging Face checkpoint directory",
    )


def _grids(grids: Iterable[Any]) -> tuple[Grid, ...]:
    try:
        return tuple((int(rows), int(columns)) for rows, columns in grids)
    except (TypeError, ValueError):
        raise UsageError(f"grids {grids!r} cannot be read", expected="pairs of (rows, columns) in patches") from None


def _options(
    source: Path, grids: Iterable[Grid] | None, capacity: int | None, buckets: Iterable[int] | None
) -> dict[str, Any]:
    if grids is None:
        grids = DEFAULT_GRIDS
        file = source / OPTIONS_FILE
        if file.is_file():
            try:
                grids = json.loads(file.read_text(encoding="utf-8")).get("grids", grids)
            except (OSError, ValueError, AttributeError):
                raise CheckpointError(f"{file} cannot be read", expected='JSON such as {"grids": [[8, 8]]}') from None
    lengths = tuple(sorted(set(DEFAULT_BUCKETS_TOKENS if buckets is None else buckets)))
    tokens = DEFAULT_CAPACITY_TOKENS if capacity is None else capacity
    chosen = _grids(grids)
    if not chosen or len(set(chosen)) < len(chosen):
        raise UsageError(f"grids are {list(chosen)}", expected="at least one, each once")
    if not 2 <= tokens <= MOST_TOKENS or not lengths or lengths[0] < 1 or lengths[-1] > tokens:
        raise UsageError(
            f"capacity {tokens} with buckets {list(lengths)}",
            expected=f"positive lengths, no bucket above the capacity, a capacity of at most {MOST_TOKENS:,} tokens",
        )
    return {"grids": chosen, "capacity": tokens, "buckets": lengths}


def _build(source: Path, target: Path, spec: ModelSpec, options: Mapping[str, Any], digest: str) -> None:
    """Builds in a directory beside the target, then renames: another process sees all of it or nothing."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        work = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    except OSError as error:
        raise BundleError(
            f"nothing can be written to {target.parent}: {error}",
            fix="set QWEN_NPU_CACHE to a directory you can write to, or name one to build into",
        ) from None
    try:
        weights = write(prepare(spec, Checkpoint(source), options["grids"]), work / WEIGHT_FILE)
        form = Form(options["target"], options["fused"])
        for numerics in form.numerics:
            for name, make in _graph_makers(form, spec, numerics, weights, options):
                (work / name).write_bytes(make())
        for path in sorted(source.iterdir()):
            if path.is_file() and path.suffix in _COPIED and not path.name.endswith(".index.json"):
                shutil.copyfile(path, work / path.name)
        manifest = {
            "schema": SCHEMA,
            "digest": digest,
            "name": "tiny" if source == tiny_checkpoint() else source.resolve().name,
            **options,
            "weights": {name: [piece.offset, list(piece.shape)] for name, piece in weights.items()},
            "files": {path.name: _file_entry(path) for path in sorted(work.iterdir())},
        }
        (work / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
        work.chmod(0o755)
        try:
            work.rename(target)
        except OSError:
            if not (target / MANIFEST).is_file():  # else another process built the same and was first
                raise
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _graph_makers(
    form: Form, spec: ModelSpec, numerics: Numerics, weights: Mapping[str, Piece], options: Mapping[str, Any]
) -> Iterable[tuple[str, Callable[[], bytes]]]:
    for grid in options["grids"]:
        yield _file_name("vision", numerics, grid), partial(form.vision, spec, numerics, weights, grid)
    for graph in PREFILLS:
        for tokens in options["buckets"] if form.plain else (None,):
            prompt = partial(form.prefill, all_logits=graph == "prefill_all", tokens=tokens, buckets=options["buckets"])
            yield _file_name(graph, numerics, tokens=tokens), partial(prompt, spec, numerics, weights)
    token = partial(form.decode, spec, numerics, weights)
    yield _file_name("decode_growing", numerics), partial(token, capacity=None)
    yield _file_name("decode_fixed", numerics), partial(token, capacity=options["capacity"])


def _file_name(graph: GraphName, numerics: Numerics, grid: Grid | None = None, tokens: int | None = None) -> str:
    size = f"-{grid[0]}x{grid[1]}" if grid else f"-{tokens}" if tokens else ""
    return f"{graph}{size}-{numerics}.onnx"


def _known(numerics: Numerics) -> Numerics:
    if numerics not in NUMERICS:
        raise UsageError(f"unknown numerics {numerics!r}", expected=f"one of {', '.join(NUMERICS)}")
    return numerics


def _open(directory: Path) -> Bundle:
    def damaged(problem: str, expected: str = "") -> BundleError:
        return BundleError(
            f"bundle {directory}: {problem}", expected=expected, fix="remove the directory and build it again"
        )

    try:
        manifest = json.loads((directory / MANIFEST).read_text(encoding="utf-8"))
        schema = manifest["schema"]
    except (OSError, ValueError, KeyError, TypeError):
        raise damaged(f"{MANIFEST} is missing or not a manifest of ours") from None
    if schema != SCHEMA:
        raise damaged(f"schema {schema!r}", f"schema {SCHEMA}")
    try:
        bundle = Bundle(
            name=manifest["name"],
            directory=directory,
            digest=manifest["digest"],
            spec=ModelSpec.from_checkpoint(directory),
            capacity=int(manifest["capacity"]),
            buckets=tuple(manifest["buckets"]),
            grids=_grids(manifest["grids"]),
            weights={name: Piece(offset, tuple(shape)) for name, (offset, shape) in manifest["weights"].items()},
            form=Form(manifest["target"], bool(manifest["fused"])),
        )
        if bundle.form.target not in TARGETS:
            raise UsageError(f"target {bundle.form.target!r}")
        files = manifest["files"].items()
        names = {name: (entry["bytes"], entry["digest"]) for name, entry in files}
    except (KeyError, TypeError, ValueError, AttributeError, CheckpointError, UsageError) as error:
        raise damaged(f"{MANIFEST} or config.json does not make sense ({error})") from None
    needed = {
        name
        for numerics in bundle.form.numerics
        for name, _ in _graph_makers(bundle.form, bundle.spec, numerics, {}, manifest)
    }
    if lacking := sorted((needed | {WEIGHT_FILE, "config.json"}) - set(names)):
        raise damaged(f"the manifest does not list {lacking}")
    for name, (size, digest) in names.items():
        path = directory / name
        if Path(name).name != name or not path.is_file():
            raise damaged(f"{name} is missing")
        if path.stat().st_size != size:
            raise damaged(f"{name} has {path.stat().st_size} bytes", f"{size} bytes")
        if file_digest(path) != digest:
            raise damaged(f"the content of {name} is not what was built", f"SHA-256 {digest}")
    return bundle


def file_digest(path: Path) -> str:
    """SHA-256 of a file's content; of a file above LARGE_FILE_BYTES that of its size, first and last MiB."""
    size = path.stat().st_size
    with path.open("rb") as file:
        if size <= LARGE_FILE_BYTES:
            return hashlib.sha256(file.read()).hexdigest()
        sample = hashlib.sha256(str(size).encode() + file.read(_SAMPLE_BYTES))
        file.seek(size - _SAMPLE_BYTES)
        sample.update(file.read())
        return sample.hexdigest()


def _write_atomically(path: Path, content: bytes) -> None:
    """Two processes may write the same file: both write the same bytes."""
    handle, name = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        Path(name).chmod(0o644)
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def _file_entry(path: Path) -> dict[str, Any]:
    return {"bytes": path.stat().st_size, "digest": file_digest(path)}


def _build_digest(source: Path, options: Mapping[str, Any]) -> str:
    """Over the checkpoint's files, the options and the builder."""
    total = hashlib.sha256(json.dumps([options, _builder_digest()], sort_keys=True).encode())
    copied = (path for path in source.iterdir() if path.is_file() and path.suffix in _COPIED)
    for path in sorted({*copied, *weight_files(source)}):
        total.update(f"\0{path.name}\0{file_digest(path)}".encode())
    return total.hexdigest()


@cache
def _builder_digest() -> str:
    """Over the sources that decide what a bundle holds: a changed builder never meets an old bundle in the cache."""
    package = Path(__file__).parent
    sources = (package / "spec.py", package / "contract.py", package / "bundle.py", *(package / "graphs").glob("*.py"))
    total = hashlib.sha256()
    for path in sorted(sources):
        total.update(f"{path.name}\0".encode() + path.read_bytes() + b"\0")
    return total.hexdigest()
