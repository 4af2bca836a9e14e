"""Each thing that can stop the workbench on a machine, as one line: ok, warn or fail, what was found, and the fix.

Where nothing points to an NPU (no device file, no toolkit) what belongs to one is a warning: the emulator is used.
Where something does, each missing piece is a failure.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Literal

from qwen_npu.data import cache_directory
from qwen_npu.doctor.machine import Machine, Ran
from qwen_npu.driver.npu_smi import parse_usages

Status = Literal["ok", "warn", "fail"]

OP = "RecurrentGatedDeltaRule"
SOC = "ascend310p"
TOOLKIT = "/usr/local/Ascend/ascend-toolkit/latest"
DRIVER_VERSION = "/usr/local/Ascend/driver/version.info"
OLDEST_CANN = (8, 0)
ROOM_WANTED_BYTES, ROOM_NEEDED_BYTES = 40 * 2**30, 2 * 2**30
"""A 4B bundle is 17 GB of weights, and as much again converted; the tiny one needs some megabytes."""
FILES_WANTED = 1024

_API_PROBE = """
import inspect, mindspore_lite as m
takes = set(inspect.signature(m.Tensor.__init__).parameters)
outputs = "outputs" in inspect.signature(m.Model.predict).parameters
print("API", "resident" if outputs and "device" in takes else "host", getattr(m, "__version__", "?"))
"""


@dataclass(frozen=True)
class Line:
    """One finding. `fix` is empty where there is nothing to do."""

    name: str
    status: Status
    found: str
    fix: str = ""


def examine(machine: Machine) -> list[Line]:
    """All checks, in the order in which a user would mend things."""
    lines = [_python(machine), *_packages(machine), *_jupyter(machine), _native(machine)]
    npu = bool(machine.cards) or machine.path(TOOLKIT).exists() or "ASCEND_HOME_PATH" in machine.environment
    lines += [_devices(machine, npu), _driver(machine, npu), *_npu_smi(machine, npu), _cann(machine, npu)]
    lines += [_mindspore_lite(machine, npu), _op_path(machine, npu), _op(machine, npu), _converter(machine, npu)]
    return [*lines, *_variables(machine), _disk(machine), _files(machine), _verdict(machine, lines)]


def _absent(name: str, npu: bool, found: str, fix: str) -> Line:
    return Line(name, "fail" if npu else "warn", found, fix)


def _python(machine: Machine) -> Line:
    text = ".".join(map(str, machine.python))
    if machine.python < (3, 10, 0):
        return Line("python", "fail", text, "use Python 3.10 or newer")
    return Line("python", "ok", text)


def _packages(machine: Machine) -> Iterator[Line]:
    try:
        required = metadata.requires("qwen-npu") or []
    except metadata.PackageNotFoundError:
        required = []
    names = []
    for text in required:
        match = re.match(r"([A-Za-z0-9_.-]+)[^;]*>=([\d.]+)", text)
        if match and "extra ==" not in text and "python_version" not in text:
            names.append((match[1], match[2]))
    missing = [f"{name}>={least}" for name, least in names if _numbers(machine.version(name)) < _numbers(least)]
    if missing:
        command = "pip install " + " ".join(f"'{item}'" for item in missing)
        yield Line("packages", "fail", f"missing or too old: {', '.join(missing)}", command)
    else:
        yield Line("packages", "ok", f"{len(names)} as required, onnxruntime {machine.version('onnxruntime')}")


def _jupyter(machine: Machine) -> Iterator[Line]:
    version = machine.version("jupyterlab")
    if not version:
        yield Line("jupyterlab", "fail", "not installed", "pip install 'jupyterlab>=4.2'")
        return
    yield Line("jupyterlab", "ok", version)
    share = machine.prefix / "share" / "jupyter" / "labextensions"
    wanted = {"anywidget": "anywidget", "@jupyter-widgets/jupyterlab-manager": "jupyterlab_widgets"}
    lacking = [package for name, package in wanted.items() if not (share / name).is_dir()]
    if lacking:
        yield Line(
            "lab extensions",
            "fail",
            f"no files of {', '.join(lacking)} in {share}: widgets would stay blank",
            f"pip install --force-reinstall {' '.join(lacking)}",
        )
        return
    disabled = []
    for place in (machine.prefix / "etc", machine.path(Path.home()) / ".jupyter"):
        for config in sorted(place.glob("**/labconfig/page_config.json")):
            try:
                held = json.loads(config.read_text(encoding="utf-8")).get("disabledExtensions", {})
            except (OSError, ValueError, AttributeError):
                continue
            named = held.items() if isinstance(held, dict) else [(name, True) for name in held]
            disabled += [name for name, off in named if off and name.partition(":")[0] in wanted]
    if disabled:
        names = " ".join(sorted(set(disabled)))
        yield Line("lab extensions", "fail", f"disabled: {names}", f"jupyter labextension enable {names}")
    else:
        yield Line("lab extensions", "ok", "anywidget and the widget manager are there and enabled")


def _native(machine: Machine) -> Line:
    version = machine.version("qwen-npu-kernels")
    if not version:
        return Line(
            "native kernel", "warn", "not installed: the emulator is slower", "pip install ./kernels/native (needs C++)"
        )
    return Line("native kernel", "ok", version)


def _devices(machine: Machine, npu: bool) -> Line:
    cards = machine.cards
    if not cards:
        fix = "on the box: is the driver loaded? in a container: pass --device /dev/davinci0 and /dev/davinci_manager"
        return _absent("devices", npu, "no /dev/davinciN", fix)
    if not machine.path("/dev/davinci_manager").exists():
        return Line(
            "devices",
            "fail",
            f"/dev/davinci{cards[0]} without /dev/davinci_manager",
            "pass --device /dev/davinci_manager, /dev/devmm_svm and /dev/hisi_hdc into the container",
        )
    return Line("devices", "ok", ", ".join(f"/dev/davinci{card}" for card in cards))


def _driver(machine: Machine, npu: bool) -> Line:
    match = re.search(r"^Version=(\S+)", machine.read(DRIVER_VERSION), re.MULTILINE)
    if not match:
        fix = "install the NPU driver and firmware; in a container mount /usr/local/Ascend/driver"
        return _absent("driver", npu, f"no version in {DRIVER_VERSION}", fix)
    return Line("driver", "ok", match[1])


def _npu_smi(machine: Machine, npu: bool) -> Iterator[Line]:
    ran = machine.run(["npu-smi", "info", "-l"], machine.environment)
    numbers = [int(found) for found in re.findall(r"NPU ID\s*:\s*(\d+)", ran.text)]
    if ran.code != 0 or not numbers:
        said = "there is no npu-smi" if ran.code is None else f"npu-smi lists no card: {_last(ran)}"
        fix = "it comes with the driver; if it fails, the user may lack the group HwHiAiUser, or the card must be reset"
        yield _absent("npu-smi", npu, said, fix)
        return
    yield Line("npu-smi", "ok", f"{len(numbers)} card{'s' * (len(numbers) > 1)}")
    for number in numbers:
        usage = machine.run(["npu-smi", "info", "-t", "usages", "-i", str(number)], machine.environment).text
        devices = parse_usages(usage)
        if not devices:
            yield Line(f"card {number}", "warn", "npu-smi does not tell its memory", "look at npu-smi info yourself")
            continue
        free = [device.memory_bytes * (100 - device.memory_percent) / 100 / 2**30 for device in devices]
        text = f"free memory {', '.join(f'{value:.1f} GiB' for value in free)} (one figure for each device)"
        if min(free) < 12:
            yield Line(
                f"card {number}", "warn", text, "another process holds it; 4B needs about 12 GiB (qwen-npu plan)"
            )
        else:
            yield Line(f"card {number}", "ok", text)


def _cann(machine: Machine, npu: bool) -> Line:
    home = machine.environment.get("ASCEND_HOME_PATH") or machine.environment.get("ASCEND_TOOLKIT_HOME")
    if not home:
        if machine.path(TOOLKIT).exists():
            return Line(
                "cann", "fail", f"{TOOLKIT} is there, ASCEND_HOME_PATH is not set", f"source {TOOLKIT}/../set_env.sh"
            )
        return _absent(
            "cann", npu, "no toolkit", "install the CANN toolkit and kernels for 310P, then source set_env.sh"
        )
    if not machine.path(home).is_dir():
        return Line("cann", "fail", f"ASCEND_HOME_PATH is {home}, which does not exist", "source set_env.sh anew")
    version = _cann_version(machine, home)
    if not version:
        return Line("cann", "warn", f"{home} does not tell its version", "compare it with the vendor's table yourself")
    if _numbers(version) < OLDEST_CANN:
        return Line("cann", "fail", f"{version} in {home}", "install CANN 8.0 or newer: the op package is built for it")
    return Line("cann", "ok", f"{version} in {home}")


def _cann_version(machine: Machine, home: str) -> str:
    names = ("version.cfg", "version.info", "x86_64-linux/ascend_toolkit_install.info")
    for name in (*names, "aarch64-linux/ascend_toolkit_install.info"):
        text = machine.read(f"{home}/{name}")
        match = re.search(r"(?im)^(?:version|toolkit_(?:installed|running)_version)\s*=\s*\[?([\d.]+)", text)
        if match:
            return match[1].rstrip(".")
    return ""


def _mindspore_lite(machine: Machine, npu: bool) -> Line:
    where = (
        "install the wheel of the MindSpore Lite package for Ascend that came with the box "
        "(or from the download page of mindspore.cn/lite), for this Python and architecture"
    )
    version = machine.version("mindspore-lite")
    ran = machine.run([str(machine.prefix / "bin" / "python"), "-c", _API_PROBE], machine.environment)
    match = re.search(r"^API (resident|host) (\S+)", ran.text, re.MULTILINE)
    if match is None:
        if not version:
            return _absent("mindspore lite", npu, "not installed", where)
        fix = "are its libraries on LD_LIBRARY_PATH, and the CANN environment sourced?"
        return Line("mindspore lite", "fail", f"{version} cannot be imported: {_last(ran)}", fix)
    if match[1] == "host":
        return Line(
            "mindspore lite",
            "fail" if npu else "warn",
            f"{match[2]}: no device tensors, predict takes no outputs",
            f"states cannot stay on the device; {where}",
        )
    return Line("mindspore lite", "ok", f"{match[2]}, device tensors and given outputs")


def _op_directories(machine: Machine) -> list[str]:
    return [part for part in machine.environment.get("ASCEND_CUSTOM_OPP_PATH", "").split(":") if part]


def _op_path(machine: Machine, npu: bool) -> Line:
    directories = _op_directories(machine)
    if not directories:
        fix = "install the package (kernels/rgdr/README.md), then export ASCEND_CUSTOM_OPP_PATH=DIR/vendors/NAME"
        return _absent("custom op path", npu, "ASCEND_CUSTOM_OPP_PATH is not set", fix)
    gone = [directory for directory in directories if not machine.path(directory).is_dir()]
    if gone:
        fix = "it must name the directory vendors/NAME itself, in every terminal that converts or runs"
        return Line("custom op path", "fail", f"{gone[0]} does not exist", fix)
    return Line("custom op path", "ok", ":".join(directories))


def _op(machine: Machine, npu: bool) -> Line:
    homes = _op_directories(machine)
    opp = machine.environment.get("ASCEND_OPP_PATH")
    if opp:
        vendors = sorted(machine.path(f"{opp}/vendors").glob("*"))
        homes += [f"{opp}/vendors/{path.name}" for path in vendors]
    others = set()
    for home in homes:
        for info in sorted(machine.path(home).glob("op_impl/ai_core/tbe/config/*/aic-*-ops-info.json")):
            try:
                ops = json.loads(info.read_text(encoding="utf-8"))
            except (OSError, ValueError):
                return Line("op", "fail", f"{info.name} cannot be read", "install the op package anew")
            if OP in ops and info.parent.name == SOC:
                return Line("op", "ok", f"{OP} for {SOC} in {home}")
            if OP in ops:
                others.add(info.parent.name)
    if others:
        fix = f"build it with ASCEND_COMPUTE_UNIT={SOC} (kernels/rgdr/build.sh)"
        return Line("op", "fail", f"{OP} is registered for {', '.join(sorted(others))}, not for {SOC}", fix)
    return _absent("op", npu, f"{OP} is not registered", "install the op package: kernels/rgdr/README.md")


def _converter(machine: Machine, npu: bool) -> Line:
    home = machine.environment.get("LITE_HOME", "")
    named = machine.environment.get("QWEN_NPU_CONVERTER", "")
    places = [named, f"{home}/tools/converter/converter/converter_lite" if home else ""]
    places += [f"{part}/converter_lite" for part in machine.environment.get("PATH", "").split(":") if part]
    for place in places:
        if place and machine.path(place).is_file():
            return Line("converter", "ok", place)
    fix = "set LITE_HOME to the unpacked MindSpore Lite package, or QWEN_NPU_CONVERTER to converter_lite"
    return Line("converter", "warn", "no converter_lite" + (" where it is looked for" if npu else ""), fix)


def _variables(machine: Machine) -> Iterator[Line]:
    wanted = ("ASCEND_HOME_PATH", "ASCEND_OPP_PATH", "ASCEND_CUSTOM_OPP_PATH", "LITE_HOME", "LD_LIBRARY_PATH")
    names = [name for name in (*wanted, *sorted(machine.environment)) if name in machine.environment]
    ours = [name for name in dict.fromkeys(names) if name in wanted or name.startswith("QWEN_NPU_")]
    yield Line("environment", "ok", "; ".join(f"{name}={machine.environment[name]}" for name in ours) or "none of ours")
    policy = machine.environment.get("QWEN_NPU_EMULATOR_POLICY")
    if policy and policy != "raise":
        yield Line(
            "emulator policy",
            "warn",
            f"QWEN_NPU_EMULATOR_POLICY={policy}: hazards of the emulated device are no errors",
            "unset QWEN_NPU_EMULATOR_POLICY",
        )


def _disk(machine: Machine) -> Line:
    directory = cache_directory()
    free = machine.free_bytes(directory)
    text = f"{free / 2**30:.1f} GiB free for {directory}"
    if free < ROOM_NEEDED_BYTES:
        return Line("disk", "fail", text, "free some, or set QWEN_NPU_CACHE to another file system")
    if free < ROOM_WANTED_BYTES:
        return Line("disk", "warn", text, "enough for small models; a 4B bundle and its MindIR want 40 GiB")
    return Line("disk", "ok", text)


def _files(machine: Machine) -> Line:
    if 0 <= machine.open_files < FILES_WANTED:
        return Line("file limit", "warn", f"{machine.open_files} open files", f"ulimit -n {4 * FILES_WANTED}")
    return Line("file limit", "ok", f"{machine.open_files} open files")


def _verdict(machine: Machine, lines: list[Line]) -> Line:
    """Which driver "auto" takes, and why."""
    held = {line.name: line for line in lines}
    if machine.cards and held["mindspore lite"].status == "ok":
        return Line("driver auto", "ok", f"mindspore_lite: the package and /dev/davinci{machine.cards[0]} are there")
    reason = "no NPU device file" if not machine.cards else f"mindspore lite: {held['mindspore lite'].found}"
    return Line("driver auto", "ok", f"emulator, because: {reason}")


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version.partition("+")[0])[:3])


def _last(ran: Ran) -> str:
    lines = [line.strip() for line in ran.text.splitlines() if line.strip()]
    return lines[-1][:200] if lines else "it said nothing"
