"""The Ascend C op on its C++ twin: runs calls of the op there, and reads what a token costs on the chip.

Knows how to build and call the runner (kernels/tests/rgdr_twin.cpp) and its file of cases (kernels/tests/arrays.h),
nothing of what the twin checks. The runner is compiled once with the C++ compiler at hand and kept in the cache
directory under the digest of its sources. Counts are of instructions, waits and bytes; no time is derived from them.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import struct
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from qwen_npu.data import cache_directory
from qwen_npu.errors import OpError, WorkbenchError

Array = NDArray[Any]
Soc = Literal["ascend310p", "ascend910b"]

_KERNELS = Path(__file__).resolve().parents[2] / "kernels"
_SOURCES = ("tests/rgdr_twin.cpp", "tests/op_package.cpp")
_INCLUDES = ("twin", "twin/host", "tests")
_MAGIC = b"QNTWIN1\0"
_TYPES = {"float16": 0, "bfloat16": 1, "float32": 2, "float64": 3, "int32": 4, "int64": 5, "uint8": 6}


@dataclass(frozen=True)
class TwinCounts:
    """What one call of the op did on the twin, over all cores.

    Attributes:
        cores: that had work.
        tile_rows, tiles: state rows that are worked on together, and how many such tiles a head has.
        vector_instructions: as the hardware issues them, at most 255 repeats each.
        vector_repeats: of 256 bytes at most.
        vector_barriers: barriers of the vector pipe.
        vector_to_scalar_waits: times that the scalar unit stands still until the vector unit has caught up.
        queue_waits: order between copies and the vector unit, as queues give it.
        mte2_bytes, mte3_bytes: copied from and to global memory; by tensor in `read_bytes` and `written_bytes`.
        scalar_bytes: read from global memory by the scalar unit (lengths, slots, beta, g).
        ub_bytes: of the unified buffer of one core, out of `user_ub_bytes`.
    """

    soc: str
    sequences: int
    tokens: int
    value_heads: int
    cores: int
    tile_rows: int
    tiles: int
    vector_instructions: int
    vector_repeats: int
    vector_barriers: int
    vector_to_scalar_waits: int
    queue_waits: int
    mte2_bytes: int
    mte3_bytes: int
    scalar_bytes: int
    ub_bytes: int
    user_ub_bytes: int
    vector_calls: Mapping[str, int]
    read_bytes: Mapping[str, int]
    written_bytes: Mapping[str, int]

    @property
    def token_heads(self) -> int:
        """Tokens of all sequences times value heads: what "per token and head" divides by."""
        return self.tokens * self.value_heads


@dataclass(frozen=True)
class TwinResult:
    """One call on the twin: out [T, NV, DV], the pool after it, what the twin found (best: nothing), counts."""

    out: Array
    state: Array
    findings: tuple[str, ...]
    counts: TwinCounts


def counts(
    DK: int = 128,
    DV: int = 128,
    *,
    NK: int = 1,
    NV: int = 1,
    sequences: int = 1,
    tokens: int = 1,
    g: bool = True,
    gk: Literal["head", "lane"] | None = None,
    soc: Soc = "ascend310p",
) -> TwinCounts:
    """Counts one call on the twin, with sound random inputs.

    Args:
        DK, DV, NK, NV: dimensions of the op.
        sequences: B.
        tokens: of each sequence, 1..8; more than 1 is a verify step with rows of that many slots.
        g, gk: whether the decays are there; gk for each head or each lane of a head.
        soc: "ascend310p" (f16) or "ascend910b" (bf16).

    Raises:
        OpError: the host tiling refuses the shape.
        WorkbenchError: no compiler, or no sources of the twin.
    """
    command = [
        "counts",
        f"dk={DK}",
        f"dv={DV}",
        f"nk={NK}",
        f"nv={NV}",
        f"sequences={sequences}",
        f"tokens={tokens}",
        f"g={int(g)}",
        f"gk={0 if gk is None else 1 if gk == 'head' else 2}",
        f"rows={tokens if tokens > 1 else 0}",
        f"accepted={int(tokens > 1)}",
        f"soc={soc}",
    ]
    report = json.loads(_call(command, accept=(0, 1)))
    _refused(report)
    if report["findings"]:
        raise WorkbenchError(f"the twin has findings: {report['findings'][0]}", fix="run ctest in build/kernels")
    return _counts(report, sequences, sequences * tokens, NV)


def run(
    query: Array,
    key: Array,
    value: Array,
    beta: Array,
    state: Array,
    actual_seq_lengths: ArrayLike,
    ssm_state_indices: ArrayLike,
    g: Array | None = None,
    gk: Array | None = None,
    num_accepted_tokens: ArrayLike | None = None,
    scale: float = 1.0,
    pad_slot: int | None = None,
    *,
    soc: Soc = "ascend310p",
    core_order: Literal["forward", "backward"] = "forward",
    barriers: Literal["strict", "automatic"] = "strict",
) -> TwinResult:
    """One call on the twin, arguments as for `qwen_npu.rgdr.recurrent_gated_delta_rule`; `state` is not changed.

    What fails a check in the kernel gets NaN rows, as the op on the CPU does under on_error="skip".

    Raises:
        OpError: the host tiling refuses the call (shapes, dtypes, DK or DV not a multiple of 16).
        WorkbenchError: no compiler, or no sources of the twin.
    """
    arrays: dict[str, Array] = {
        "query": query,
        "key": key,
        "value": value,
        "beta": beta,
        "state": state,
        "lengths": np.asarray(actual_seq_lengths),
        "indices": np.asarray(ssm_state_indices),
        "scale": np.asarray(scale, np.float32),
    }
    if g is not None:
        arrays["g"] = g
    if gk is not None:
        arrays["gk"] = gk
    if num_accepted_tokens is not None:
        arrays["accepted"] = np.asarray(num_accepted_tokens)
    if pad_slot is not None:
        arrays["pad_slot"] = np.asarray(pad_slot, np.int64)
    with tempfile.TemporaryDirectory(prefix="qwen-npu-twin-") as directory:
        cases, results = Path(directory, "cases"), Path(directory, "results")
        cases.write_bytes(_pack("call", arrays))
        _call(["run", str(cases), str(results), f"soc={soc}", f"order={core_order}", f"barriers={barriers}"])
        answer = _unpack(results.read_bytes(), query.dtype)
    report = json.loads(answer["report"].tobytes())
    _refused(report)
    tokens, value_heads = value.shape[:2]
    return TwinResult(
        out=answer["out"],
        state=answer["state"],
        findings=tuple(report["findings"]),
        counts=_counts(report, len(arrays["lengths"]), tokens, value_heads),
    )


def definition() -> dict[str, Any]:
    """The op definition of the package: inputs, outputs and attributes in order, with types by compute unit."""
    parsed: dict[str, Any] = json.loads(_call(["definition"]))
    return parsed


def runner() -> Path:
    """The program that runs the op on the twin; compiled the first time, and again when a source changes.

    Raises:
        WorkbenchError: no sources (not a checkout), no compiler, or it fails.
    """
    if not (_KERNELS / _SOURCES[0]).is_file():
        raise WorkbenchError(
            f"the sources of the twin are not at {_KERNELS}",
            expected="a checkout of the repository: the installed package does not hold them",
            fix="run this from a checkout, installed with pip install -e",
        )
    compiler = _compiler()
    digest = hashlib.sha256(compiler.encode())
    for path in sorted(
        (*_KERNELS.glob("twin/**/*.h"), *_KERNELS.glob("rgdr/**/*.[ch]*"), *_KERNELS.glob("tests/*.[ch]*"))
    ):
        if path.suffix in (".h", ".cpp"):
            digest.update(path.relative_to(_KERNELS).as_posix().encode() + b"\0" + path.read_bytes())
    target = cache_directory() / "twin" / f"rgdr_twin-{digest.hexdigest()[:16]}"
    if target.is_file():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    handle, building = tempfile.mkstemp(prefix=target.name, dir=target.parent)
    os.close(handle)
    command = [compiler, "-std=c++17", "-O1", *(f"-I{_KERNELS / name}" for name in _INCLUDES)]
    command += [str(_KERNELS / name) for name in _SOURCES] + ["-o", building]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise WorkbenchError(
                f"{compiler} cannot build the twin: {done.stderr.strip()[:2000]}",
                expected="a compiler for C++17",
                fix="install g++ 9 or newer, or set CXX to one",
            )
        Path(building).chmod(0o755)
        Path(building).replace(target)
    finally:
        Path(building).unlink(missing_ok=True)
    return target


def _compiler() -> str:
    named = os.environ.get("CXX")
    for name in (named,) if named else ("g++", "clang++", "c++"):
        found = shutil.which(name)
        if found:
            return found
    raise WorkbenchError(
        f"no C++ compiler: CXX={named!r} is not a program"
        if named
        else "no C++ compiler: no g++, clang++ or c++ on PATH",
        expected="one that knows C++17; the twin of the kernel is compiled on this machine",
        fix="install g++ (apt-get install g++), or set CXX",
    )


def _call(arguments: list[str], accept: tuple[int, ...] = (0,)) -> str:
    done = subprocess.run([str(runner()), *arguments], capture_output=True, text=True, check=False)
    if done.returncode not in accept:
        raise WorkbenchError(f"the twin fails: {done.stderr.strip() or f'exit code {done.returncode}'}")
    return done.stdout


def _refused(report: Mapping[str, Any]) -> None:
    if report["refused"] is not None:
        raise OpError(
            f"the host tiling refuses: {report['refused']}",
            expected="a call that the chip can take",
            fix="use the op on the CPU for other shapes and dtypes",
        )


def _counts(report: Mapping[str, Any], sequences: int, tokens: int, value_heads: int) -> TwinCounts:
    raw = report["counts"]
    return TwinCounts(
        soc=report["soc"],
        sequences=sequences,
        tokens=tokens,
        value_heads=value_heads,
        cores=report["cores"],
        tile_rows=report["tile_rows"],
        tiles=report["tiles"],
        vector_instructions=raw["vector_instructions"],
        vector_repeats=raw["vector_repeats"],
        vector_barriers=raw["barriers"].get("V", 0) + raw["barriers"].get("ALL", 0),
        vector_to_scalar_waits=raw["vector_to_scalar_waits"],
        queue_waits=raw["queue_waits"],
        mte2_bytes=raw["mte2_bytes"],
        mte3_bytes=raw["mte3_bytes"],
        scalar_bytes=raw["scalar_bytes"],
        ub_bytes=raw["ub_bytes"],
        user_ub_bytes=report["user_ub_bytes"],
        vector_calls=raw["vector_calls"],
        read_bytes=raw["read_bytes"],
        written_bytes=raw["written_bytes"],
    )


def _text(value: str) -> bytes:
    raw = value.encode()
    return struct.pack("<I", len(raw)) + raw


def _pack(name: str, arrays: Mapping[str, Array]) -> bytes:
    parts = [_MAGIC, struct.pack("<I", 1), _text(name), struct.pack("<I", len(arrays))]
    for key, array in arrays.items():
        if array.dtype.name not in _TYPES:
            raise OpError(f"{key} has dtype {array.dtype}", expected=", ".join(_TYPES))
        parts += [
            _text(key),
            struct.pack("<II", _TYPES[array.dtype.name], array.ndim),
            struct.pack(f"<{array.ndim}q", *array.shape),
            np.ascontiguousarray(array).tobytes(),
        ]
    return b"".join(parts)


def _unpack(raw: bytes, element: np.dtype[Any]) -> dict[str, Array]:
    """The arrays of the single case in `raw`; 16-bit floats get the dtype of the call."""
    at = len(_MAGIC)

    def numbers(layout: str) -> tuple[int, ...]:
        nonlocal at
        found = struct.unpack_from("<" + layout, raw, at)
        at += struct.calcsize("<" + layout)
        return found

    def words() -> str:
        nonlocal at
        (length,) = numbers("I")
        at += length
        return raw[at - length : at].decode()

    if raw[:at] != _MAGIC or numbers("I") != (1,):
        raise WorkbenchError("the twin wrote no result")
    words()
    arrays: dict[str, Array] = {}
    for _ in range(numbers("I")[0]):
        key = words()
        kind, rank = numbers("II")
        shape = numbers(f"{rank}q")
        dtype = element if kind in (_TYPES["float16"], _TYPES["bfloat16"]) else np.dtype(np.uint8)
        size = int(np.prod(shape, dtype=np.int64))
        arrays[key] = np.frombuffer(raw, dtype, size, at).reshape(shape).copy()
        at += size * dtype.itemsize
    return arrays
