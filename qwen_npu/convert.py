"""`qwen-npu convert`: the graphs of a bundle through the vendor's converter, one after another.

Each graph gets a configuration of its own, a log file, and a look at what came out. What is done is noted in
`convert.json`, so that a run taken up again converts only what is missing or has changed.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from qwen_npu.bundle import Bundle, file_digest, open_bundle
from qwen_npu.contract import IMAGE_EMBEDS, INPUT_IDS
from qwen_npu.driver.protocol import TensorInfo
from qwen_npu.errors import ConversionError, DriverError, UsageError, WorkbenchError

if TYPE_CHECKING:
    from qwen_npu.driver.protocol import Driver

CONVERTER = "converter_lite"
CONVERTER_VARIABLE = "QWEN_NPU_CONVERTER"
OPP_VARIABLE = "ASCEND_CUSTOM_OPP_PATH"
STATE_FILE = "convert.json"
WORK_DIRECTORY = "convert"
PRECISIONS = ("force_fp32", "force_fp16", "allow_mix_precision", "must_keep_origin_dtype")
DEFAULT_TIMEOUT_S = 3600.0

Kind = Literal["MINDIR", "MINDIR_LITE"]
SUFFIX: Mapping[Kind, str] = {"MINDIR": ".mindir", "MINDIR_LITE": ".ms"}

Convert = Callable[[Path, Path, Path], None]
"""Converts an ONNX file (first), with a configuration (second), writing a log (third); raises ConversionError."""


@dataclass(frozen=True)
class Converted:
    """One graph: `done` is "converted" or "kept" (from an earlier run); `checked` what was compared, or why not."""

    graph: str
    done: Literal["converted", "kept"]
    files: tuple[str, ...]
    size_bytes: int
    seconds: float
    checked: str


def find_converter(named: str | Path | None = None) -> Path:
    """The vendor's converter: as named, or by QWEN_NPU_CONVERTER, on PATH, or in LITE_HOME.

    Raises:
        ConversionError: there is none.
    """
    wanted = named or os.environ.get(CONVERTER_VARIABLE)
    home = os.environ.get("LITE_HOME")
    candidates = [Path(wanted)] if wanted else []
    if not wanted:
        on_path = shutil.which(CONVERTER)
        candidates += [Path(on_path)] if on_path else []
        candidates += [Path(home, "tools", "converter", "converter", CONVERTER)] if home else []
    for path in candidates:
        if path.is_file() and os.access(path, os.X_OK):
            return path
    raise ConversionError(
        f"{wanted or CONVERTER} cannot be run",
        expected=f"the vendor's {CONVERTER}, from the MindSpore Lite package of the box",
        fix=f"name it with --converter or {CONVERTER_VARIABLE}, or set LITE_HOME to the unpacked package",
    )


def convert(
    directory: str | Path,
    converter: Convert,
    *,
    version: str,
    precision: str = PRECISIONS[0],
    kind: Kind = "MINDIR",
    graphs: Iterable[str] = (),
    check: Driver | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> list[Converted]:
    """Converts the graphs of a bundle directory; those that are done already are kept.

    Args:
        converter: see `command_line` and `in_worker`.
        version: what the converter says of itself; another version converts everything anew.
        graphs: beginnings of file names; all graphs where there are none.
        check: loads each result and compares names, dtypes and shapes with the ONNX file.

    Raises:
        UsageError: a bundle for the emulator, or no graph of such a name.
        ConversionError: the converter failed, or what it wrote is not the graph.
    """
    if precision not in PRECISIONS:
        raise UsageError(f"unknown precision {precision!r}", expected=f"one of {', '.join(PRECISIONS)}")
    bundle = open_bundle(directory)
    if bundle.form.target == "emulator":
        raise UsageError(
            f"{directory} was built for the emulator, which runs the ONNX files",
            expected="a bundle for mslite-cpu or ascend310p",
            fix="qwen-npu build CHECKPOINT --target ascend310p --out DIR",
        )
    wanted = tuple(graphs)
    files = [path for path in sorted(bundle.directory.glob("*.onnx")) if not wanted or path.name.startswith(wanted)]
    if not files:
        raise UsageError(f"{directory} has no graph {' or '.join(wanted)}", expected="the beginning of a file's name")
    work = bundle.directory / WORK_DIRECTORY
    work.mkdir(exist_ok=True)
    state = _State(bundle.directory / STATE_FILE)
    found = []
    for number, path in enumerate(files, 1):
        text = configuration(bundle, path, precision)
        key = _key(bundle, path, text, kind, version)
        done = state.of(path.stem, key)
        label = f"[{number}/{len(files)}] {path.stem}"
        if done is not None:
            progress(f"{label}: kept")
        else:
            progress(f"{label}: converting")
            done = _convert_one(path, work, text, converter, kind, check)
            state.put(path.stem, key, done)
            progress(f"{label}: {done.size_bytes:,} bytes in {done.seconds:.1f} s; {done.checked}")
        found.append(done)
    return found


def _convert_one(path: Path, work: Path, text: str, converter: Convert, kind: Kind, check: Driver | None) -> Converted:
    config, log = work / f"{path.stem}.ini", work / f"{path.stem}.log"
    config.write_text(text, encoding="utf-8")
    for old in _results(path, kind):
        shutil.rmtree(old) if old.is_dir() else old.unlink()
    start = time.perf_counter()
    converter(path, config, log)
    seconds = time.perf_counter() - start
    files = _results(path, kind)
    if not files:
        raise ConversionError(
            f"the converter left no {path.stem}{SUFFIX[kind]}", expected="a file beside the graph", fix=f"read {log}"
        )
    size = sum(item.stat().st_size for file in files for item in ([file] if file.is_file() else file.rglob("*")))
    if size == 0:
        raise ConversionError(f"what the converter left of {path.stem} is empty", fix=f"read {log}")
    checked = compare(path, check) if check is not None else "not loaded: no device to load it on here"
    return Converted(path.stem, "converted", tuple(file.name for file in files), size, seconds, checked)


def _results(path: Path, kind: Kind) -> list[Path]:
    """Above 2 GB there are a graph file and a directory of its variables."""
    stem = path.with_suffix("")
    suffix = SUFFIX[kind]
    places = (f"{stem}{suffix}", f"{stem}_graph{suffix}", f"{stem}_variables")
    return [Path(place) for place in places if Path(place).exists()]


def compare(path: Path, driver: Driver) -> str:
    """Loads the converted form of an ONNX file and compares its tensors with it.

    Raises:
        ConversionError: other names, dtypes or shapes, or it cannot be loaded.
    """
    import onnx

    graph = onnx.load(str(path), load_external_data=False).graph
    try:
        model = driver.load(path, path.stem)
    except DriverError as error:
        raise ConversionError(f"what came of {path.name} cannot be loaded: {error}", fix="read its log") from error
    try:
        for side, declared, infos in (("input", graph.input, model.inputs), ("output", graph.output, model.outputs)):
            if len(declared) != len(infos):
                raise ConversionError(f"{path.stem} has {len(infos)} {side}s", expected=str(len(declared)))
            for value, info in zip(declared, infos, strict=True):
                _compare_tensor(path.stem, side, value, info, driver.device)
        return f"{len(model.inputs)} inputs and {len(model.outputs)} outputs as in the ONNX file"
    finally:
        model.close()


def _compare_tensor(graph: str, side: str, value: Any, info: TensorInfo, device: str) -> None:
    import onnx

    kind = value.type.tensor_type
    dtype = np.dtype(onnx.helper.tensor_dtype_to_np_dtype(kind.elem_type))
    if dtype == np.int64:
        dtype = np.dtype(np.int32)  # the converter narrows it
    if device == "cpu" and dtype == np.float16:
        dtype = np.dtype(np.float32)
    shape = [dim.dim_value if dim.HasField("dim_value") else -1 for dim in kind.shape.dim]
    held = list(info.shape)
    fits = len(held) == len(shape) and all(a == b or -1 in (a, b) for a, b in zip(held, shape, strict=True))
    unknown = side == "output" and held in ([], [-1])  # a dynamic output has no rank until it was computed
    if info.name != value.name or info.dtype != dtype or not (fits or unknown):
        raise ConversionError(
            f"{side} {info.name!r} of the converted {graph} is {info.dtype.name}{held}",
            expected=f"{value.name!r}, {dtype.name}{shape}",
            fix="convert it again; when names are lost, tensors are bound by their order",
        )


def configuration(bundle: Bundle, path: Path, precision: str) -> str:
    """The converter's configuration for one graph; nothing for a CPU target.

    Sizes that are free in the graph and known beforehand become declared sizes ("gears"): the buckets of prefill, each
    with the rows of every picture's embeddings and with the one row of a prompt without a picture.
    """
    if bundle.form.target != "ascend310p":
        return ""
    import onnx

    lines = ["[acl_init_options]", f"ge.exec.precision_mode={precision}", "", "[ascend_context]", "device_id=0"]
    inputs = onnx.load(str(path), load_external_data=False).graph.input
    shapes = {
        value.name: [dim.dim_value if dim.HasField("dim_value") else -1 for dim in value.type.tensor_type.shape.dim]
        for value in inputs
    }
    if any(-1 in shape for shape in shapes.values()):
        text = ";".join(f"{name}:{','.join(map(str, shape))}" for name, shape in shapes.items())
        lines += ["", "[acl_build_options]", 'input_format="ND"', f'input_shape="{text}"']
        if path.stem.startswith("prefill"):
            lines.append(f'ge.dynamicDims="{";".join(_gears(bundle, shapes))}"')
    return "\n".join(lines) + "\n"


def _gears(bundle: Bundle, shapes: Mapping[str, Sequence[int]]) -> list[str]:
    """One text for each choice of sizes: a number for every -1, in the order of the inputs."""
    rows = sorted({1, *(bundle.spec.image_tokens(grid) for grid in bundle.grids)})
    buckets: Sequence[int] = bundle.buckets if -1 in shapes[INPUT_IDS] else (0,)
    gears = []
    for tokens, count in itertools.product(buckets, rows):
        sizes = [
            count if name == IMAGE_EMBEDS else tokens for name, shape in shapes.items() for dim in shape if dim == -1
        ]
        gears.append(",".join(map(str, sizes)))
    return gears


def command_line(
    converter: Path, *, ascend: bool, opp_path: str | None = None, timeout_s: float = DEFAULT_TIMEOUT_S
) -> Convert:
    """Runs the vendor's `converter_lite`, in a process group of its own that ends with us.

    Args:
        opp_path: where our op package is installed; the converter finds the ops of `Custom` nodes there.
    """

    def run(path: Path, config: Path, log: Path) -> None:
        command = [
            str(converter),
            "--fmk=ONNX",
            f"--modelFile={path}",
            f"--outputFile={path.with_suffix('')}",
            "--saveType=MINDIR",
        ]
        if ascend:
            command += ["--optimize=ascend_oriented", f"--configFile={config}"]
        environment = {**os.environ, **({OPP_VARIABLE: opp_path} if opp_path else {})}
        with log.open("wb") as output:
            output.write((" ".join(command) + "\n").encode())
            output.flush()
            process = subprocess.Popen(
                command,
                stdout=output,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env=environment,
                start_new_session=True,
            )
            try:
                code = process.wait(timeout=timeout_s)
            except subprocess.TimeoutExpired:
                raise ConversionError(
                    f"converting {path.stem} took longer than {timeout_s:.0f} s",
                    fix=f"read {log}; give it more time with --timeout",
                ) from None
            finally:
                if process.poll() is None:
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
        if code:
            raise ConversionError(
                f"the converter refused {path.stem} with status {code}: {_tail(log)}", fix=f"read {log}"
            )

    return run


def in_worker(python: Path, kind: Kind) -> Convert:
    """Converts through the package in another interpreter (the 2.0.0 wheel, Python 3.7), for a CPU target."""

    def run(path: Path, config: Path, log: Path) -> None:  # noqa: ARG001 (a CPU target has no configuration)
        from qwen_npu.driver.worker import WorkerDriver

        driver = WorkerDriver(python, kind=kind, timeout_s=DEFAULT_TIMEOUT_S)
        try:
            driver.convert(path)
            log.write_text(f"converted by mindspore_lite {driver.version}\n", encoding="utf-8")
        except DriverError as error:
            log.write_text(f"{error}\n", encoding="utf-8")
            raise ConversionError(f"the converter refused {path.stem}: {error}", fix=f"read {log}") from error
        finally:
            driver.close()

    return run


def _tail(log: Path) -> str:
    lines = [line for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    errors = [line for line in lines if "ERROR" in line]
    return " | ".join((errors or lines)[-2:]) or "it said nothing"


class _State:
    """What was converted, and from what; written after every graph."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._held: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            self._held = {}  # nothing that could not be made again

    def of(self, graph: str, key: str) -> Converted | None:
        """The earlier conversion, if it is of the same things and its files are still there."""
        entry = self._held.get(graph)
        if not isinstance(entry, dict) or entry.get("key") != key:
            return None
        directory = self._path.parent
        if not all((directory / name).exists() for name in entry["files"]):
            return None
        return Converted(graph, "kept", tuple(entry["files"]), entry["size_bytes"], entry["seconds"], entry["checked"])

    def put(self, graph: str, key: str, done: Converted) -> None:
        self._held[graph] = {"key": key, **asdict(done)}
        temporary = self._path.with_suffix(".partial")
        temporary.write_text(json.dumps(self._held, indent=1) + "\n", encoding="utf-8")
        temporary.replace(self._path)


def _key(bundle: Bundle, path: Path, configuration: str, kind: Kind, version: str) -> str:
    parts = (bundle.digest, file_digest(path), configuration, kind, version)
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def add_commands(subparsers: Any) -> None:
    """Adds `convert` to the command line's parser."""
    parser = subparsers.add_parser("convert", help="a built bundle through the vendor's converter, to MindIR")
    parser.add_argument("directory", type=Path, metavar="DIR", help="from qwen-npu build")
    parser.add_argument("--converter", type=Path, metavar="FILE", help=f"the vendor's {CONVERTER}")
    parser.add_argument("--python", type=Path, metavar="FILE", help="an interpreter with mindspore_lite (CPU targets)")
    parser.add_argument("--precision", choices=PRECISIONS, default=PRECISIONS[0], help="(default: %(default)s)")
    parser.add_argument("--save-type", choices=tuple(SUFFIX), default="MINDIR", help="MINDIR_LITE: CPU targets only")
    parser.add_argument("--graph", action="append", default=[], metavar="NAME", help="only files that begin with NAME")
    parser.add_argument("--custom-opp", metavar="DIR", help=f"the installed op package (default: ${OPP_VARIABLE})")
    parser.add_argument("--timeout", type=float, default=DEFAULT_TIMEOUT_S, metavar="S", help="for one graph")
    parser.add_argument("--json", action="store_true")
    parser.set_defaults(run=_convert)


def _convert(options: argparse.Namespace) -> int:
    bundle = open_bundle(options.directory)
    ascend = bundle.form.target == "ascend310p"
    check: Driver | None = None
    try:
        if options.python is not None:
            if ascend:
                raise UsageError("--python for a bundle for ascend310p", expected="--converter")
            from qwen_npu.driver.worker import WorkerDriver

            check = WorkerDriver(options.python, kind=options.save_type)
            converter, version = in_worker(options.python, options.save_type), check.version
        else:
            if options.save_type != "MINDIR":
                raise UsageError("--save-type MINDIR_LITE without --python", expected="--save-type MINDIR")
            tool = find_converter(options.converter)
            opp = options.custom_opp or os.environ.get(OPP_VARIABLE)
            if bundle.form.fused and not opp:
                raise ConversionError(
                    "the bundle has Custom nodes, and no op package is named",
                    expected=f"the directory of the installed package in {OPP_VARIABLE}",
                    fix="install it (kernels/rgdr/README.md) and give --custom-opp, or build with --unfused",
                )
            converter = command_line(tool, ascend=ascend, opp_path=opp, timeout_s=options.timeout)
            version = f"{tool} {tool.stat().st_size}"
            check = _device_driver(ascend)
        done = convert(
            options.directory,
            converter,
            version=version,
            precision=options.precision,
            kind=options.save_type,
            graphs=options.graph,
            check=check,
            progress=lambda line: print(line, file=sys.stderr, flush=True),
        )
    finally:
        if check is not None:
            check.close()
    if options.json:
        print(json.dumps([asdict(item) for item in done]))
    else:
        total = sum(item.size_bytes for item in done)
        print(f"{len(done)} graphs, {total:,} bytes; logs in {bundle.directory / WORK_DIRECTORY}")
    return 0


def _device_driver(ascend: bool) -> Driver | None:
    """The vendor's package on the target's device, if both are here."""
    from qwen_npu.driver import open_driver, vendor_device_present

    if ascend and not vendor_device_present():
        return None
    try:
        return open_driver("mindspore_lite", "ascend:0" if ascend else "cpu")
    except WorkbenchError:
        return None
