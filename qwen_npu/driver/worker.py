"""A driver over the real `mindspore_lite` 2.0.0 in a process of its own, as that wheel exists for Python 3.7 alone.

The product's own session runs on it like on any driver: a CPU target without resident tensors. Arrays go through files
that both processes map; `mslite_worker.py` is the other side.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from qwen_npu.driver import mslite_worker
from qwen_npu.driver.mslite_worker import Mapped
from qwen_npu.driver.protocol import Capability, Tensor, TensorInfo
from qwen_npu.errors import DriverError
from qwen_npu.ledger.events import NOWHERE, EventSink, Place

Kind = Literal["MINDIR", "MINDIR_LITE"]
SUFFIX: dict[Kind, str] = {"MINDIR": ".mindir", "MINDIR_LITE": ".ms"}


class WorkerDriver:
    """The vendor's package in a worker process.

    Args:
        python: an interpreter that can import mindspore_lite 2.0.0.
        kind: which converted form of a graph `load` takes: FILE.mindir or FILE.ms beside FILE.onnx.
        timeout_s: longest wait for an answer before the worker is ended.

    Raises:
        DriverError: the worker does not start.
    """

    name = "mindspore_lite_worker"
    device = "cpu"
    capabilities: frozenset[Capability] = frozenset()

    def __init__(self, python: Path, *, kind: Kind = "MINDIR", timeout_s: float = 300.0) -> None:
        self.kind: Kind = kind
        self._timeout_s = timeout_s
        self._directory = tempfile.TemporaryDirectory(prefix="qwen-npu-worker-")
        directory = Path(self._directory.name)
        self._log = directory / "log"
        self.inputs = Mapped(directory / "inputs.bin")
        self.outputs = Mapped(directory / "outputs.bin")
        self._rest = b""
        try:
            with self._log.open("wb") as log:
                self._process = subprocess.Popen(
                    [str(python), str(Path(mslite_worker.__file__)), str(directory)],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    env={**os.environ, "GLOG_v": "3"},
                )
        except OSError as error:
            self._directory.cleanup()
            raise DriverError(
                f"{python} cannot be started: {error}", expected="a Python interpreter that has mindspore_lite"
            ) from None
        try:
            self.version = str(self.call("hello")["version"])
        except DriverError:
            self.close()
            raise

    def convert(self, source: Path) -> Path:
        """The converted form of an ONNX file, made beside it.

        Raises:
            DriverError: the converter refuses the graph.
        """
        target = source.with_suffix("")
        self.call("convert", source=str(source), target=str(target), kind=self.kind)
        return source.with_suffix(SUFFIX[self.kind])

    def load(self, path: Path, graph: str) -> WorkerModel:
        file = path.with_suffix(SUFFIX[self.kind])
        if not file.is_file():
            raise DriverError(f"no {file}", expected="the converted graph beside the ONNX file", fix="convert it first")
        return WorkerModel(self, self.call("build", path=str(file), kind=self.kind), path, graph)

    def wrap(self, array: np.ndarray, *, name: str, buffer: str) -> Tensor:
        return Tensor(array, name=name, buffer=buffer, dtype=array.dtype, shape=array.shape, device="host")

    def upload(self, array: np.ndarray, *, name: str, buffer: str) -> Tensor:  # noqa: ARG002 (the protocol's)
        raise DriverError(f"{name} cannot be uploaded: a cpu target has no device tensors")

    def empty(self, shape: tuple[int, ...], info: TensorInfo, *, buffer: str) -> Tensor:  # noqa: ARG002
        raise DriverError(f"{info.name} has no place on a device: a cpu target has no device tensors")

    def download(self, tensor: Tensor) -> np.ndarray:
        return np.array(tensor.raw)

    def free(self, tensor: Tensor) -> None:
        tensor.raw = None

    def address(self, tensor: Tensor) -> int | None:  # noqa: ARG002
        return None

    def memory_bytes(self) -> tuple[int, int] | None:
        return None

    def subscribe(self, sink: EventSink | None, place: Place = NOWHERE) -> None:
        """The vendor's package tells nothing of its own."""

    def close(self) -> None:
        """Ends the worker."""
        if self._process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):  # it is gone already
                self._process.stdin.close()
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()
        self._directory.cleanup()

    def call(self, name: str, **arguments: Any) -> dict[str, Any]:
        """One call of the worker.

        Raises:
            DriverError: the vendor's error, or the worker died or did not answer in time.
        """
        process = self._process
        assert process.stdin is not None
        try:
            process.stdin.write((json.dumps({"call": name, **arguments}) + "\n").encode())
            process.stdin.flush()
            answer: dict[str, Any] = json.loads(self._line(name))
        except (OSError, ValueError) as error:
            raise self._dead(name, str(error)) from error
        if "error" in answer:
            raise DriverError(f"mindspore_lite refused {name}: {answer['error']}", fix=f"its log says: {self._tail()}")
        return answer

    def _line(self, name: str) -> bytes:
        stdout = self._process.stdout
        assert stdout is not None
        while b"\n" not in self._rest:
            ready, _, _ = select.select([stdout], [], [], self._timeout_s)
            if not ready:
                self._process.kill()
                raise self._dead(name, f"no answer for {self._timeout_s:.0f} s")
            piece = os.read(stdout.fileno(), 1 << 16)
            if not piece:
                raise self._dead(name, f"it ended with status {self._process.wait()}")
            self._rest += piece
        line, _, self._rest = self._rest.partition(b"\n")
        return line

    def _dead(self, name: str, why: str) -> DriverError:
        return DriverError(
            f"the mindspore_lite worker failed in {name}: {why}", fix=f"its log says: {self._tail() or 'nothing'}"
        )

    def _tail(self) -> str:
        try:
            return " | ".join(self._log.read_text(errors="replace").splitlines()[-3:])
        except OSError:
            return ""


class WorkerModel:
    """A model in the worker. The 2.0.0 package does not describe a model's outputs: they are the ONNX file's."""

    def __init__(self, driver: WorkerDriver, built: dict[str, Any], path: Path, graph: str) -> None:
        import onnx

        self.graph = graph
        self._driver = driver
        self._number = int(built["model"])
        self.inputs = tuple(
            TensorInfo(item["name"], np.dtype(item["dtype"]), tuple(item["shape"])) for item in built["inputs"]
        )
        outputs = onnx.load(str(path), load_external_data=False).graph.output
        self.outputs = tuple(_described(value) for value in outputs)

    def resize(self, shapes: Sequence[tuple[int, ...]]) -> None:
        self._driver.call("resize", model=self._number, shapes=[list(shape) for shape in shapes])

    def predict(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor] | None = None) -> list[Tensor]:
        if outputs is not None:
            raise DriverError("outputs were given", expected="none: this package takes no destinations")
        places = self._driver.inputs.lay([tensor.raw for tensor in inputs])
        answer = self._driver.call("predict", model=self._number, inputs=places)
        arrays = [self._driver.outputs.look(place) for place in answer["outputs"]]
        return [
            self._driver.wrap(array, name=info.name, buffer=f"host.{info.name}")
            for array, info in zip(arrays, self.outputs, strict=True)
        ]

    def close(self) -> None:
        self._driver.call("release", model=self._number)


def _described(value: Any) -> TensorInfo:
    """An ONNX output as the converted model gives it: int64 is narrowed to int32."""
    import onnx

    kind = value.type.tensor_type
    dtype = np.dtype(onnx.helper.tensor_dtype_to_np_dtype(kind.elem_type))
    shape = tuple(dim.dim_value if dim.HasField("dim_value") else -1 for dim in kind.shape.dim)
    return TensorInfo(value.name, np.dtype(np.int32) if dtype == np.int64 else dtype, shape)
