"""The doctor on this machine, on a good box laid out in a directory, and on broken ones: each line and its fix."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest

from qwen_npu.cli import main
from qwen_npu.doctor import render
from qwen_npu.doctor.checks import Line, examine
from qwen_npu.doctor.machine import Machine, Ran

HOME = "/usr/local/Ascend/ascend-toolkit/latest"
OPP = "/opt/ops/vendors/qwen_npu"
INFO = "op_impl/ai_core/tbe/config/ascend310p/aic-ascend310p-ops-info.json"
VERSIONS = {"mindspore-lite": "2.9.0", "jupyterlab": "4.4.0", "qwen-npu-kernels": "0.1.0"}
USAGES = "NPU ID : 0\nChip ID : 0\nDDR Capacity(MB) : 44280\nDDR Usage Rate(%) : 4\n"
USAGES += "Chip ID : 1\nDDR Capacity(MB) : 44280\nDDR Usage Rate(%) : 50\n"


def write(path: Path, text: str = "") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def answers(
    api: str = "API resident 2.9.0", cards: str = "Total Count : 1\nNPU ID : 0\n", usage: str = USAGES
) -> Callable[[Sequence[str], Mapping[str, str]], Ran]:
    def run(command: Sequence[str], environment: Mapping[str, str]) -> Ran:
        if command[0] == "npu-smi":
            text = cards if "-l" in command else usage
            return Ran(0, text) if text else Ran(255, "dcmi module initialize failed. ret is -8005\n")
        return Ran(0, api) if api.startswith("API") else Ran(1, api)

    return run


def version(name: str) -> str:
    return VERSIONS.get(name, "99.0")


@pytest.fixture
def box(tmp_path: Path) -> Machine:
    """A 300I Duo as one hopes to find it."""
    root = tmp_path / "root"
    for device in ("davinci0", "davinci1", "davinci_manager"):
        write(root / "dev" / device)
    write(root / "usr/local/Ascend/driver/version.info", "Version=25.2.0\nascendhal_version=7.35\n")
    write(
        root / HOME.lstrip("/") / "version.cfg",
        "# version: 1.0\nruntime_running_version=[8.5.0.1:8.5.0]\nversion=8.5.0\n",
    )
    write(root / OPP.lstrip("/") / INFO, json.dumps({"RecurrentGatedDeltaRule": {}}))
    write(root / "opt/lite/tools/converter/converter/converter_lite")
    for name in ("anywidget", "@jupyter-widgets/jupyterlab-manager"):
        (tmp_path / "prefix/share/jupyter/labextensions" / name).mkdir(parents=True)
    environment = {
        "ASCEND_HOME_PATH": HOME,
        "ASCEND_OPP_PATH": f"{HOME}/opp",
        "ASCEND_CUSTOM_OPP_PATH": OPP,
        "LITE_HOME": "/opt/lite",
        "SECRET": "not ours",
    }
    return Machine(root, environment, answers(), version, (3, 11, 7), tmp_path / "prefix", 65536)


def by_name(machine: Machine) -> dict[str, Line]:
    return {line.name: line for line in examine(machine)}


def changed(box: Machine, **environment: str | None) -> Machine:
    held = {**box.environment, **environment}
    return dataclasses.replace(box, environment={k: v for k, v in held.items() if v is not None})


def test_good_box(box: Machine) -> None:
    lines = by_name(box)
    bad = {name for name, line in lines.items() if line.status != "ok"} - {"disk"}
    assert not bad
    assert lines["driver"].found == "25.2.0"
    assert lines["cann"].found == f"8.5.0 in {HOME}"
    assert lines["npu-smi"].found == "1 card"
    assert lines["card 0"].found == "free memory 41.5 GiB, 21.6 GiB (one figure for each device)"
    assert lines["mindspore lite"].found == "2.9.0, device tensors and given outputs"
    assert lines["op"].found == f"RecurrentGatedDeltaRule for ascend310p in {OPP}"
    assert lines["driver auto"].found.startswith("mindspore_lite: ")
    assert "SECRET" not in lines["environment"].found


def test_no_npu_at_all(tmp_path: Path) -> None:
    def nothing(command: Sequence[str], environment: Mapping[str, str]) -> Ran:
        return Ran(None, "No such file or directory")

    machine = Machine(tmp_path, {}, nothing, lambda name: "" if name == "mindspore-lite" else "99.0", (3, 12, 0))
    lines = by_name(machine)
    npu = ("devices", "driver", "npu-smi", "cann", "mindspore lite", "custom op path", "op", "converter")
    assert {lines[name].status for name in npu} == {"warn"}
    assert all(lines[name].fix for name in npu)
    assert lines["driver auto"].found == "emulator, because: no NPU device file"


def test_environment_not_sourced(box: Machine) -> None:
    line = by_name(changed(box, ASCEND_HOME_PATH=None))["cann"]
    assert line.status == "fail"
    assert "set_env.sh" in line.fix


def test_toolkit_moved_away_or_too_old(box: Machine) -> None:
    line = by_name(changed(box, ASCEND_HOME_PATH="/usr/local/Ascend/8.0"))["cann"]
    assert (line.status, "does not exist" in line.found) == ("fail", True)
    write(box.path(HOME) / "version.cfg", "version=7.0.1\n")
    line = by_name(box)["cann"]
    assert (line.status, line.found) == ("fail", f"7.0.1 in {HOME}")


def test_op_path_to_nowhere(box: Machine) -> None:
    lines = by_name(changed(box, ASCEND_CUSTOM_OPP_PATH="/opt/ops"))
    assert lines["op"].status == "fail"
    lines = by_name(changed(box, ASCEND_CUSTOM_OPP_PATH="/opt/gone"))
    assert (lines["custom op path"].status, lines["custom op path"].found) == ("fail", "/opt/gone does not exist")
    assert "vendors/NAME" in lines["custom op path"].fix


def test_op_for_another_chip(box: Machine) -> None:
    other = box.path(OPP) / INFO.replace("310p", "910b")
    write(other, json.dumps({"RecurrentGatedDeltaRule": {}}))
    (box.path(OPP) / INFO).unlink()
    line = by_name(box)["op"]
    assert line.found == "RecurrentGatedDeltaRule is registered for ascend910b, not for ascend310p"
    assert "ASCEND_COMPUTE_UNIT=ascend310p" in line.fix
    write(box.path(OPP) / INFO, "{")
    assert by_name(box)["op"].status == "fail"


def test_op_installed_into_the_toolkit(box: Machine) -> None:
    home = f"{HOME}/opp/vendors/customize"
    write(box.path(home) / INFO, json.dumps({"RecurrentGatedDeltaRule": {}}))
    line = by_name(changed(box, ASCEND_CUSTOM_OPP_PATH=None))["op"]
    assert (line.status, line.found) == (
        "ok",
        f"RecurrentGatedDeltaRule for ascend310p in {HOME}/opp/vendors/customize",
    )


def test_package_without_device_tensors(box: Machine) -> None:
    old = dataclasses.replace(box, run=answers("API host 2.0.0"))
    line = by_name(old)["mindspore lite"]
    assert (line.status, line.found) == ("fail", "2.0.0: no device tensors, predict takes no outputs")
    broken = dataclasses.replace(box, run=answers("ImportError: libascendcl.so: cannot open shared object file"))
    lines = by_name(broken)
    assert "libascendcl.so" in lines["mindspore lite"].found
    assert "LD_LIBRARY_PATH" in lines["mindspore lite"].fix
    assert lines["driver auto"].found.startswith("emulator, because: mindspore lite")


def test_container_without_the_manager_device(box: Machine) -> None:
    box.path("/dev/davinci_manager").unlink()
    line = by_name(box)["devices"]
    assert (line.status, "--device /dev/davinci_manager" in line.fix) == ("fail", True)


def test_npu_smi_fails_or_the_card_is_full(box: Machine) -> None:
    line = by_name(dataclasses.replace(box, run=answers(cards="")))["npu-smi"]
    assert line.found == "npu-smi lists no card: dcmi module initialize failed. ret is -8005"
    full = USAGES.replace("Rate(%) : 50", "Rate(%) : 97")
    line = by_name(dataclasses.replace(box, run=answers(usage=full)))["card 0"]
    assert (line.status, "1.3 GiB" in line.found) == ("warn", True)
    line = by_name(dataclasses.replace(box, run=answers(usage="nothing\n")))["card 0"]
    assert line.status == "warn"


def test_driver_missing(box: Machine) -> None:
    box.path("/usr/local/Ascend/driver/version.info").unlink()
    assert by_name(box)["driver"].status == "fail"


def test_python_packages_and_lab(box: Machine) -> None:
    def held(name: str) -> str:
        return {"onnx": "1.2", "plotly": "", "jupyterlab": "4.4.0"}.get(name, "99.0")

    lines = by_name(dataclasses.replace(box, python=(3, 9, 2), version=held))
    assert lines["python"].status == "fail"
    assert lines["packages"].status == "fail"
    assert "onnx>=" in lines["packages"].fix
    assert "plotly>=" in lines["packages"].fix
    config = box.prefix / "etc/jupyter/labconfig/page_config.json"
    write(config, json.dumps({"disabledExtensions": {"anywidget": True, "other": True}}))
    line = by_name(box)["lab extensions"]
    assert (line.status, line.fix) == ("fail", "jupyter labextension enable anywidget")
    (box.prefix / "share/jupyter/labextensions/anywidget").rmdir()
    assert "stay blank" in by_name(box)["lab extensions"].found
    assert by_name(dataclasses.replace(box, version=lambda _: ""))["jupyterlab"].status == "fail"


def test_limits_policy_and_disk(box: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    few = dataclasses.replace(changed(box, QWEN_NPU_EMULATOR_POLICY="vendor"), open_files=256)
    lines = by_name(few)
    assert (lines["file limit"].status, lines["file limit"].found) == ("warn", "256 open files")
    assert lines["emulator policy"].status == "warn"
    for free, status in ((2**30, "fail"), (10 * 2**30, "warn"), (100 * 2**30, "ok")):
        monkeypatch.setattr(Machine, "free_bytes", lambda self, directory, free=free: free)
        assert by_name(box)["disk"].status == status


def test_this_machine(capsys: pytest.CaptureFixture[str], box: Machine) -> None:
    lines = examine(Machine())
    held = {line.name: line for line in lines}
    assert held["python"].status == "ok"
    assert held["packages"].status == "ok"
    text = render(lines)
    assert len(text.splitlines()) == len(lines) + sum(bool(line.fix) for line in lines)
    code = main(["doctor", "--json"])
    printed = json.loads(capsys.readouterr().out)
    assert [line["name"] for line in printed] == [line.name for line in lines]
    assert code == int(any(line["status"] == "fail" for line in printed))


def test_driver_auto_says_which_and_why(monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib.util

    from qwen_npu.driver import choose_driver, vendor_device_present

    held: dict[str, object] = {"spec": None, "cards": []}
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: held["spec"])
    monkeypatch.setattr(Path, "glob", lambda self, pattern: iter(held["cards"]))  # type: ignore[call-overload]
    assert choose_driver("auto") == ("emulator", "the package mindspore_lite is not installed")
    held["spec"] = object()
    assert choose_driver("auto") == ("emulator", "there is no NPU device file (/dev/davinciN)")
    assert not vendor_device_present()
    held["cards"] = [Path("/dev/davinci0")]
    assert choose_driver("auto")[0] == "mindspore_lite"
    assert vendor_device_present()
    assert choose_driver("emulator") == ("emulator", "as asked")
