"""`build` and `convert`: targets, what is read back, configurations, and a converter that is made up for each case."""

from __future__ import annotations

import json
import os
import stat
import sys
from pathlib import Path
from typing import Any

import onnx
import pytest

from qwen_npu import emulator
from qwen_npu.build import build
from qwen_npu.bundle import Bundle, open_bundle
from qwen_npu.cli import main
from qwen_npu.convert import STATE_FILE, WORK_DIRECTORY, command_line, configuration, convert, find_converter
from qwen_npu.driver.mslite import MsliteDriver
from qwen_npu.errors import ConversionError, UsageError
from tests.unit.graphs.checkpoints import random_checkpoint

SIZES: dict[str, Any] = {"capacity": 32, "buckets": (8, 16), "grids": [(2, 4), (4, 4)], "drafts": 2}

FAKE = """#!{python}
import pathlib, shutil, sys, time
given = dict(part[2:].split("=", 1) for part in sys.argv[1:])
model, out = given["modelFile"], given["outputFile"]
mode = pathlib.Path(__file__).with_suffix(".mode").read_text()
with open(pathlib.Path(__file__).with_suffix(".calls"), "a") as calls:
    calls.write(pathlib.Path(model).stem + "\\n")
print("CONVERT RESULT", given.get("optimize", ""), given.get("configFile", ""))
if mode == "hang":
    time.sleep(60)
if mode == "refuse" and "decode" in model:
    print("[ERROR] LITE: unsupported op")
    sys.exit(3)
if mode == "nothing":
    sys.exit(0)
if mode == "large":
    out += "_graph"
    pathlib.Path(out.replace("_graph", "_variables")).mkdir()
shutil.copyfile(model, out + ".mindir")
if mode == "renamed":
    import onnx
    graph = onnx.load(out + ".mindir", load_external_data=False)
    graph.graph.input[0].name = "lost"
    for node in graph.graph.node:
        for index, name in enumerate(node.input):
            if name == "input_ids":
                node.input[index] = "lost"
    onnx.save(graph, out + ".mindir")
"""


class FromMindir(MsliteDriver):
    """The emulator, made to look at the converted file and not at the ONNX file beside it."""

    def load(self, path: Path, graph: str) -> Any:
        weights = path.parent / "weights.bin"
        place = path.parent / "elsewhere"
        place.mkdir(exist_ok=True)
        if not (place / weights.name).exists():
            os.link(weights, place / weights.name)
        (place / f"{path.stem}.mindir").write_bytes(path.with_suffix(".mindir").read_bytes())
        return super().load(place / path.name, graph)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_checkpoint(tmp_path_factory.mktemp("convert") / "checkpoint")


@pytest.fixture
def plain(checkpoint: Path, tmp_path: Path) -> Bundle:
    return build(checkpoint, tmp_path / "plain", "mslite-cpu", **SIZES).bundle


@pytest.fixture
def converter(tmp_path: Path) -> Path:
    path = tmp_path / "converter_lite"
    path.write_text(FAKE.format(python=sys.executable), encoding="utf-8")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    path.with_suffix(".mode").write_text("")
    return path


def calls(converter: Path) -> list[str]:
    path = converter.with_suffix(".calls")
    return path.read_text().splitlines() if path.exists() else []


def run(bundle: Bundle, converter: Path, mode: str = "", *, ascend: bool = False, **options: Any) -> list[Any]:
    converter.with_suffix(".mode").write_text(mode)
    timeout_s = options.pop("timeout_s", 60.0)
    tool = command_line(converter, ascend=ascend, timeout_s=timeout_s)
    return convert(bundle.directory, tool, version=options.pop("version", "1"), **options)


def test_build_for_every_target(checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--capacity", "32", "--buckets", "8,16", "--grid", "2x4", "--grid", "4x4", "--drafts", "2", "--json"]
    for name, target, extra in (
        ("emulator", "emulator", []),
        ("cpu", "mslite-cpu", []),
        ("fused", "ascend310p", ["--fused"]),
        ("unfused", "ascend310p", ["--unfused"]),
    ):
        out = tmp_path / name
        assert main(["build", str(checkpoint), "--out", str(out), "--target", target, *extra, *arguments]) == 0
        told = json.loads(capsys.readouterr().out)
        files = {graph["file"] for graph in told["graphs"]}
        assert files == {path.name for path in out.glob("*.onnx")}
        bundle = open_bundle(out)
        assert (bundle.form.target, bundle.form.fused) == (target, name == "fused")
        stems = {file.rpartition("-")[0] if file[-13] == "-" else file for file in files}
        for part in ("vision-2x4", "vision-4x4", "decode_fixed", "decode_growing", "peek-fixed", "peek-growing"):
            assert any(stem.startswith(part) for stem in stems), (name, part)
        pools = {
            part
            for part in ("verify-l1", "verify-l3", "op-l1", "op-l3", "admit", "peek-b1")
            for f in files
            if f.startswith(part)
        }
        assert len(pools) == (6 if name in ("emulator", "fused") else 0)
        buckets = {file for file in files if file.startswith(("prefill-8-", "prefill-16-"))}
        assert len(buckets) == (2 if name in ("cpu", "unfused") else 0)
        custom = {graph["file"]: graph["custom"] for graph in told["graphs"]}
        if name == "fused":
            assert custom["decode_fixed-device.onnx"] == {
                "RecurrentGatedDeltaRule": 3,
                "Scatter": 4,
                "IncreFlashAttention": 2,
            }
        else:
            assert not any(custom.values())
    with pytest.raises(UsageError, match="no graphs of numerics 'device'"):
        open_bundle(tmp_path / "cpu").path("prefill", numerics="device", tokens=8)
    with pytest.raises(UsageError, match="no prefill graph for 9 tokens"):
        open_bundle(tmp_path / "cpu").path("prefill", numerics="f32", tokens=9)


def test_configuration_declares_buckets_and_pictures(checkpoint: Path, tmp_path: Path, plain: Bundle) -> None:
    bundle = build(checkpoint, tmp_path / "fused", "ascend310p", **SIZES).bundle
    text = configuration(bundle, bundle.path("prefill"), "force_fp32")
    assert "ge.exec.precision_mode=force_fp32\n" in text
    hidden = bundle.spec.hidden
    shapes = f"input_ids:1,-1;attention_mask:1,-1;position_ids:4,1,-1;image_embeds:-1,{hidden}"
    assert f'input_shape="{shapes}"\n' in text
    assert 'ge.dynamicDims="8,8,8,1;8,8,8,2;8,8,8,4;16,16,16,1;16,16,16,2;16,16,16,4"\n' in text
    fixed = configuration(bundle, bundle.path("decode_fixed"), "force_fp16")
    assert "force_fp16" in fixed
    assert "acl_build_options" not in fixed
    growing = configuration(bundle, bundle.path("decode_growing"), "force_fp16")
    assert "past_kv_cache:4,1,2,-1,32" in growing
    assert "dynamicDims" not in growing
    unfused = build(checkpoint, tmp_path / "unfused", "ascend310p", fused=False, **SIZES).bundle
    text = configuration(unfused, unfused.path("prefill", tokens=16), "force_fp32")
    assert f'input_shape="input_ids:1,16;attention_mask:1,16;position_ids:4,1,16;image_embeds:-1,{hidden}"' in text
    assert 'ge.dynamicDims="1;2;4"\n' in text
    assert configuration(plain, plain.path("prefill", numerics="f32"), "force_fp32") == ""


def test_converts_checks_and_goes_on_where_it_stopped(plain: Bundle, converter: Path) -> None:
    driver = FromMindir(emulator, "cpu")
    lines: list[str] = []
    with pytest.raises(
        ConversionError, match=r"refused decode_fixed-f32 with status 3: \[ERROR\] LITE: unsupported op"
    ):
        run(plain, converter, "refuse")
    assert calls(converter) == ["decode_fixed-f32"]
    done = run(plain, converter, check=driver, progress=lines.append)
    count = len(list(plain.directory.glob("*.onnx")))
    assert len(done) == count == len(calls(converter)) - 1
    assert {item.done for item in done} == {"converted"}
    assert done[0].checked == "6 inputs and 4 outputs as in the ONNX file"
    assert lines[0] == f"[1/{count}] decode_fixed-f32: converting"
    log = plain.directory / WORK_DIRECTORY / "decode_fixed-f32.log"
    assert "--fmk=ONNX" in log.read_text()
    assert "CONVERT RESULT" in log.read_text()
    again = run(plain, converter)
    assert {item.done for item in again} == {"kept"}
    assert len(calls(converter)) == count + 1
    (plain.directory / "vision-2x4-f32.mindir").unlink()
    assert [item.graph for item in run(plain, converter) if item.done == "converted"] == ["vision-2x4-f32"]
    assert {item.done for item in run(plain, converter, version="2", graphs=["vision"])} == {"converted"}
    (plain.directory / STATE_FILE).write_text("{")
    assert {item.done for item in run(plain, converter, graphs=["vision-2x4"])} == {"converted"}


def test_what_the_converter_did_wrong(plain: Bundle, converter: Path) -> None:
    driver = FromMindir(emulator, "cpu")
    with pytest.raises(ConversionError, match="left no decode_fixed-f32"):
        run(plain, converter, "nothing")
    with pytest.raises(ConversionError, match="input 'lost' of the converted decode_fixed-f32 is int32"):
        run(plain, converter, "renamed", check=driver)
    with pytest.raises(ConversionError, match="took longer than 1 s"):
        run(plain, converter, "hang", timeout_s=1.0)
    (large,) = run(plain, converter, "large", graphs=["vision-2x4"])
    assert large.files == ("vision-2x4-f32_graph.mindir", "vision-2x4-f32_variables")
    assert large.checked == "not loaded: no device to load it on here"
    with pytest.raises(UsageError, match="no graph nonsense"):
        run(plain, converter, graphs=["nonsense"])
    with pytest.raises(UsageError, match="unknown precision"):
        run(plain, converter, precision="fp8")


def test_ascend_gets_a_configuration_and_the_op_package(
    checkpoint: Path,
    tmp_path: Path,
    converter: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    bundle = build(checkpoint, tmp_path / "fused", "ascend310p", **SIZES).bundle
    monkeypatch.delenv("ASCEND_CUSTOM_OPP_PATH", raising=False)
    command = ["convert", str(bundle.directory), "--converter", str(converter)]
    assert main(command) == 2
    assert "no op package is named" in capsys.readouterr().err
    assert main([*command, "--custom-opp", str(tmp_path), "--graph", "prefill-", "--json"]) == 0
    (done,) = json.loads(capsys.readouterr().out)
    assert done["graph"] == "prefill-device"
    work = bundle.directory / WORK_DIRECTORY
    log = (work / "prefill-device.log").read_text()
    assert "--optimize=ascend_oriented" in log
    assert f"--configFile={work / 'prefill-device.ini'}" in log
    assert "dynamicDims" in (work / "prefill-device.ini").read_text()


def test_mistakes_of_users(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    bundle = build(checkpoint, tmp_path / "emulated", "emulator", **{**SIZES, "drafts": 0}).bundle
    assert not list(bundle.directory.glob("verify*"))
    with pytest.raises(UsageError, match="built for the emulator"):
        convert(bundle.directory, lambda *_: None, version="")
    for name in ("QWEN_NPU_CONVERTER", "LITE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConversionError, match="converter_lite cannot be run"):
        find_converter()
    monkeypatch.setenv("LITE_HOME", str(tmp_path))
    tool = tmp_path / "tools/converter/converter/converter_lite"
    tool.parent.mkdir(parents=True)
    tool.write_text("")
    tool.chmod(0o755)
    assert find_converter() == tool
    monkeypatch.setenv("QWEN_NPU_CONVERTER", "/nowhere")
    with pytest.raises(ConversionError, match="/nowhere cannot be run"):
        find_converter()
    with pytest.raises(UsageError, match="9 drafts"):
        build(checkpoint, tmp_path / "x", "emulator", drafts=9)


def test_weights_are_shared_and_external(plain: Bundle) -> None:
    for path in plain.directory.glob("*.onnx"):
        model = onnx.load(str(path), load_external_data=False)
        inside = sum(len(tensor.raw_data) for tensor in model.graph.initializer)
        assert inside < 2**20
