"""Runs the real `mindspore_lite` 2.0.0 for another process: a script for Python 3.7, NumPy and that package only.

    python3.7 mslite_worker.py DIRECTORY

Calls come as JSON lines on standard input, answers go as JSON lines to standard output; arrays go through two files in
DIRECTORY that both sides map: `inputs.bin` belongs to the caller, `outputs.bin` to this script. Ends with its input.
"""

from __future__ import annotations

import json
import mmap
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np

ALIGNMENT_BYTES = 64


class Mapped:
    """A file of arrays, mapped anew whenever it has grown. One side lays arrays into it, the other looks at them."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.map: mmap.mmap | None = None

    def lay(self, arrays: list[np.ndarray]) -> list[dict[str, Any]]:
        """Copies arrays into the file; says where each lies."""
        places: list[dict[str, Any]] = []
        end = 0
        for array in arrays:
            places.append({"offset": end, "dtype": str(array.dtype), "shape": list(array.shape)})
            end += -(-array.nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        if not self.path.exists() or self.path.stat().st_size < end:
            with self.path.open("ab") as file:
                file.truncate(max(end, ALIGNMENT_BYTES))
        for array, place in zip(arrays, places):  # noqa: B905 (Python 3.7)
            self.look(place)[...] = array
        return places

    def look(self, place: dict[str, Any]) -> np.ndarray:
        """A view of the array that lies there, until the next `lay`."""
        dtype, shape, offset = np.dtype(place["dtype"]), place["shape"], place["offset"]
        count = int(np.prod(shape, dtype=np.int64))
        if self.map is None or len(self.map) < offset + count * dtype.itemsize:
            with self.path.open("r+b") as file:
                self.map = mmap.mmap(file.fileno(), 0)  # arrays over the former map keep it alive
        view: np.ndarray = np.frombuffer(self.map, dtype, count, offset)
        shaped: np.ndarray = view.reshape(shape)
        return shaped


class Worker:
    def __init__(self, directory: Path) -> None:
        import mindspore_lite

        self.mslite = mindspore_lite
        self.models: dict[int, Any] = {}
        self.number = 0
        self.incoming = Mapped(directory / "inputs.bin")
        self.outgoing = Mapped(directory / "outputs.bin")
        self.context = mindspore_lite.Context()
        self.context.target = ["cpu"]
        self.context.cpu.thread_num = 1

    def hello(self) -> dict[str, Any]:
        return {"version": self.mslite.__version__, "python": sys.version.split()[0]}

    def convert(self, source: str, target: str, kind: str) -> dict[str, Any]:
        """`target` without its suffix, which the converter adds."""
        converter = self.mslite.Converter()
        converter.save_type = getattr(self.mslite.ModelType, kind)
        converter.input_format = self.mslite.Format.NCHW  # else .ms files take 4-D inputs transposed
        converter.convert(self.mslite.FmkType.ONNX, source, target)
        return {}

    def build(self, path: str, kind: str) -> dict[str, Any]:
        model = self.mslite.Model()
        model.build_from_file(path, getattr(self.mslite.ModelType, kind), self.context)
        self.number += 1
        self.models[self.number] = model
        inputs = [
            {"name": tensor.name, "dtype": tensor.dtype.name.lower(), "shape": tensor.shape}
            for tensor in model.get_inputs()
        ]
        return {"model": self.number, "inputs": inputs}

    def resize(self, model: int, shapes: list[list[int]]) -> dict[str, Any]:
        built = self.models[model]
        built.resize(built.get_inputs(), shapes)
        return {}

    def predict(self, model: int, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        built = self.models[model]
        tensors = built.get_inputs()
        for tensor, place in zip(tensors, inputs):  # noqa: B905 (Python 3.7)
            tensor.set_data_from_numpy(self.incoming.look(place))
        results = [tensor.get_data_to_numpy() for tensor in built.predict(tensors)]
        return {"outputs": self.outgoing.lay(results)}

    def release(self, model: int) -> dict[str, Any]:
        del self.models[model]
        return {}


def main(directory: str) -> None:
    answers = os.fdopen(os.dup(1), "w", 1)
    os.dup2(2, 1)  # what the package prints must not come between the answers
    worker = Worker(Path(directory))
    for line in sys.stdin:
        call = json.loads(line)
        try:
            answer = getattr(worker, call.pop("call"))(**call)
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    main(sys.argv[1])
