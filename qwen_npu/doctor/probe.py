"""`qwen-npu doctor --probe-device`: runs the experiments, each answer beside the emulator's prediction, into one file.

Every experiment runs in a process of its own: on a real device a wrong assumption may end the process, and that is an
answer too.
"""

from __future__ import annotations

import argparse
import importlib
import json
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

from qwen_npu.doctor.experiments import EXPERIMENTS, Bench, Experiment, NotRunError, write_graphs
from qwen_npu.driver.mslite import parse_device
from qwen_npu.errors import ConversionError, DeviceError

Verdict = Literal["agrees", "differs", "not run"]
TIMEOUT_S = 300.0
SCHEMA = 1


@dataclass(frozen=True)
class Answer:
    """One experiment's end; `found` is the answer, or why there is none."""

    name: str
    question: str
    predicted: str
    source: str
    found: str
    verdict: Verdict
    seconds: float


def ask(experiment: Experiment, bench: Bench) -> Answer:
    """Runs one experiment in this process."""
    predicted = experiment.prediction.format(device=bench.device)
    start = time.perf_counter()
    verdict: Verdict
    try:
        found = experiment.run(bench)
        verdict = "agrees" if found == predicted else "differs"
    except NotRunError as reason:
        found, verdict = str(reason), "not run"
    except Exception as error:  # whatever the vendor's package raises is an answer
        found, verdict = f"{type(error).__name__}: {error}", "differs"
    seconds = time.perf_counter() - start
    return Answer(experiment.name, experiment.question, predicted, experiment.source, found, verdict, seconds)


def ask_all(module: ModuleType, device: str, graphs: Path, names: Iterable[str] = ()) -> list[Answer]:
    """Runs the experiments (or those named) through a module with the vendor's interface, in this process."""
    wanted = tuple(names)
    bench = Bench(module, _device_id(device), graphs)
    return [ask(item, bench) for item in EXPERIMENTS if not wanted or item.name in wanted]


def probe(
    driver: str,
    device: str,
    *,
    converter: Callable[[Path, Path, Path], None] | None = None,
    progress: Callable[[Answer], None] = lambda _: None,
) -> list[Answer]:
    """Runs every experiment in a process of its own.

    Args:
        driver: "emulator" or "mindspore_lite".
        converter: makes MindIR of the graphs (see `qwen_npu.convert.command_line`); the emulator needs none.

    Raises:
        DeviceError: no such device.
    """
    _device_id(device)
    with tempfile.TemporaryDirectory(prefix="qwen-npu-probe-") as directory:
        graphs = Path(directory)
        write_graphs(graphs, fused=driver != "emulator")
        unconverted = _convert(graphs, converter) if converter is not None else {}
        answers = []
        for item in EXPERIMENTS:
            answers.append(_in_a_process(item, driver, device, graphs, unconverted))
            progress(answers[-1])
    return answers


def _convert(graphs: Path, converter: Callable[[Path, Path, Path], None]) -> dict[str, str]:
    """Converts all graphs; gives the reason for each that the converter refuses."""
    refused = {}
    for path in sorted(graphs.glob("*.onnx")):
        config = path.with_suffix(".ini")
        lines = "[acl_init_options]\nge.exec.precision_mode=must_keep_origin_dtype\n"
        if path.stem in ("dynamic", "declared"):
            lines += '\n[acl_build_options]\ninput_format="ND"\ninput_shape="x:1,-1"\n'
        if path.stem == "declared":
            lines += 'ge.dynamicDims="4;8"\n'
        config.write_text(lines, encoding="utf-8")
        try:
            converter(path, config, path.with_suffix(".log"))
        except ConversionError as error:
            refused[path.stem] = str(error)
    return refused


def _in_a_process(item: Experiment, driver: str, device: str, graphs: Path, refused: dict[str, str]) -> Answer:
    command = [sys.executable, "-m", "qwen_npu.doctor.probe", driver, device, str(graphs), item.name]
    start = time.perf_counter()
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=TIMEOUT_S, check=False)
        line = done.stdout.decode("utf-8", "replace").rpartition("ANSWER ")[2]
        found = "" if done.returncode == 0 else f"the process ended with status {done.returncode}"
    except subprocess.TimeoutExpired:
        line, found = "", f"no answer for {TIMEOUT_S:.0f} s"
    seconds = time.perf_counter() - start
    if not found:
        return Answer(**json.loads(line))
    if refused:
        found += f"; the converter refused {', '.join(f'{name} ({why})' for name, why in refused.items())}"
    predicted = item.prediction.format(device=device)
    return Answer(item.name, item.question, predicted, item.source, found, "differs", seconds)


def report(answers: Sequence[Answer], driver: str, device: str, lines: Sequence[Any], place: Path) -> Path:
    """Writes the one file to attach to a report: answers, the doctor's lines, versions."""
    import qwen_npu
    from qwen_npu.nightly.environment import environment

    content = {
        "schema": SCHEMA,
        "qwen_npu": qwen_npu.__version__,
        "driver": driver,
        "device": device,
        "python": platform.python_version(),
        "written": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "environment": environment(),
        "doctor": [asdict(line) for line in lines],
        "answers": [asdict(answer) for answer in answers],
    }
    place.parent.mkdir(parents=True, exist_ok=True)
    temporary = place.with_name(f".{place.name}.partial")
    temporary.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    temporary.replace(place)
    return place


def _device_id(device: str) -> int:
    target, number = parse_device(device)
    if target != "ascend":
        raise DeviceError(f"{device!r} cannot be probed", expected="a device 'ascend:N'")
    return number


def _module(driver: str) -> ModuleType:
    if driver != "emulator":
        return importlib.import_module(driver)
    from qwen_npu import emulator

    # the predictions are of the vendor's silence, which the emulator keeps under this policy
    emulator.configure(policy="vendor")
    return emulator


def main(arguments: Sequence[str]) -> None:
    """The process of one experiment."""
    parser = argparse.ArgumentParser()
    for name in ("driver", "device", "graphs", "experiment"):
        parser.add_argument(name)
    options = parser.parse_args(arguments)
    (answer,) = ask_all(_module(options.driver), options.device, Path(options.graphs), [options.experiment])
    print("ANSWER " + json.dumps(asdict(answer)))


if __name__ == "__main__":
    main(sys.argv[1:])
