"""Bundles: what is built, kept, verified and refused."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest

from qwen_npu import bundle as bundles
from qwen_npu.bundle import GRAPHS, MANIFEST, Bundle, build_bundle, open_bundle
from qwen_npu.data import cache_directory
from qwen_npu.errors import BundleError, CheckpointError, UsageError
from tests.unit.graphs.checkpoints import random_checkpoint


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = random_checkpoint(tmp_path_factory.mktemp("checkpoints") / "small")
    (directory / "tokenizer.json").write_text("{}", encoding="utf-8")
    (directory / "chat_template.jinja").write_text("hello", encoding="utf-8")
    (directory / "train.py").write_text("raise SystemExit", encoding="utf-8")
    return directory


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("QWEN_NPU_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_a_checkpoint_is_built_once_and_opened_after(checkpoint: Path, cache: Path) -> None:
    first = open_bundle(checkpoint)
    stamps = {path: path.stat().st_mtime_ns for path in first.directory.iterdir()}
    assert open_bundle(checkpoint) == first
    assert {path: path.stat().st_mtime_ns for path in first.directory.iterdir()} == stamps
    assert [path.name for path in cache.iterdir()] == [first.directory.name]  # nothing temporary is left
    assert (first.name, first.capacity, first.grids) == ("small", 1024, ((8, 8),))
    assert first.buckets == (32, 64, 128, 256, 512)
    for graph in GRAPHS:
        for numerics in ("device", "f32"):
            assert first.path(graph, numerics=numerics).is_file()  # type: ignore[arg-type]


def test_a_bundle_stands_alone(checkpoint: Path, tmp_path: Path) -> None:
    source = tmp_path / "source"
    shutil.copytree(checkpoint, source)
    built = build_bundle(source, tmp_path / "out", grids=[(2, 4), (6, 2)], capacity=40, buckets=[20, 10])
    shutil.rmtree(source)
    moved = (tmp_path / "out").rename(tmp_path / "elsewhere")
    opened = open_bundle(moved)
    assert (opened.spec, opened.digest, opened.buckets) == (built.spec, built.digest, (10, 20))
    assert (opened.checkpoint / "chat_template.jinja").read_text(encoding="utf-8") == "hello"
    assert not (opened.checkpoint / "train.py").exists()
    assert opened.path("vision", grid=(6, 2)) != opened.path("vision") == opened.path("vision", grid=(2, 4))
    assert opened.contract("vision", grid=(6, 2)).inputs[0].shape == (12, 96)
    assert opened.contract("decode_fixed").inputs[1].shape == (1, 40)
    assert opened.contract("decode_growing", numerics="f32").inputs[5].shape[3] == "L"
    with pytest.raises(UsageError, match=r"8x8.*2x4, 6x2"):
        opened.path("vision", grid=(8, 8))


def test_every_option_has_a_bundle_of_its_own(checkpoint: Path, tmp_path: Path) -> None:
    other = random_checkpoint(tmp_path / "small", seed=1)
    found = [
        open_bundle(checkpoint),
        open_bundle(checkpoint, capacity=600),
        open_bundle(checkpoint, grids=[(2, 2)]),
        open_bundle(checkpoint, buckets=[8]),
        open_bundle(other),
    ]
    assert len({bundle.digest for bundle in found}) == len({bundle.directory for bundle in found}) == len(found)


def test_grids_come_from_the_checkpoint(tmp_path: Path) -> None:
    directory = random_checkpoint(tmp_path / "two")
    (directory / "qwen_npu.json").write_text('{"grids": [[2, 2], [2, 6]]}', encoding="utf-8")
    assert open_bundle(directory).grids == ((2, 2), (2, 6))
    (directory / "qwen_npu.json").write_text('{"grids": [[2', encoding="utf-8")
    with pytest.raises(CheckpointError, match=r"qwen_npu\.json"):
        open_bundle(directory)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"grids": [(3, 4)]}, "3x4"),
        ({"grids": [(0, 4)]}, "0x4"),
        ({"grids": []}, "at least one"),
        ({"grids": [(2, 2), (2, 2)]}, "each once"),
        ({"grids": [4]}, "rows, columns"),
        ({"capacity": 100}, "above the capacity"),
        ({"buckets": []}, "positive"),
        ({"buckets": [0, 8]}, "positive"),
    ],
)
def test_senseless_options_are_refused(checkpoint: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        open_bundle(checkpoint, **options)


@pytest.fixture
def built(checkpoint: Path, tmp_path: Path) -> Bundle:
    return build_bundle(checkpoint, tmp_path / "out", grids=[(2, 2)])


def test_options_of_a_built_bundle_are_fixed(built: Bundle) -> None:
    assert open_bundle(built.directory, capacity=1024, grids=[(2, 2)]) == built
    with pytest.raises(UsageError, match="capacity 1024, not 512"):
        open_bundle(built.directory, capacity=512)
    with pytest.raises(UsageError, match="grids"):
        open_bundle(built.directory, grids=[(4, 4)])


@pytest.mark.parametrize("name", ["weights.bin", "decode_fixed-device.onnx", "config.json", "tokenizer.json"])
@pytest.mark.parametrize("damage", ["flip", "cut", "grow", "remove"])
def test_damage_is_seen_on_opening(built: Bundle, name: str, damage: str) -> None:
    path = built.directory / name
    content = bytearray(path.read_bytes())
    if damage == "flip":
        content[len(content) // 2] ^= 1
    elif damage == "cut":
        del content[-1]
    elif damage == "grow":
        content += b" "
    path.write_bytes(content)
    if damage == "remove":
        path.unlink()
    with pytest.raises(BundleError, match="remove the directory and build it again"):
        open_bundle(built.directory)


def edited(built: Bundle, **changes: Any) -> Path:
    path = built.directory / MANIFEST
    manifest = json.loads(path.read_text(encoding="utf-8")) | changes
    path.write_text(json.dumps({key: value for key, value in manifest.items() if value is not None}), encoding="utf-8")
    return built.directory


@pytest.mark.parametrize(
    "changes",
    [
        {"schema": 2},
        {"schema": None},
        {"files": {}},
        {"files": {"../config.json": {"bytes": 1, "digest": ""}}},
        {"files": 3},
        {"weights": {"embed": 3}},
        {"capacity": "many"},
        {"digest": None},
        {"grids": [[2, 2], [4, 4]]},
    ],
)
def test_foreign_manifests_are_refused(built: Bundle, changes: dict[str, Any]) -> None:
    with pytest.raises(BundleError):
        open_bundle(edited(built, **changes))


@pytest.mark.parametrize("content", ["", "{", "[]", "7", "null", "{}"])
def test_a_manifest_that_is_none_is_refused(built: Bundle, content: str) -> None:
    (built.directory / MANIFEST).write_text(content, encoding="utf-8")
    with pytest.raises(BundleError, match=MANIFEST):
        open_bundle(built.directory)


def test_what_is_not_there_is_said(tmp_path: Path) -> None:
    with pytest.raises(BundleError, match="no bundle 'nowhere'"):
        open_bundle("nowhere")
    with pytest.raises(BundleError, match="weights of 4b do not ship"):
        open_bundle("4b")
    with pytest.raises(BundleError, match="holds neither"):
        open_bundle(tmp_path)


def test_a_directory_with_other_things_is_left_alone(checkpoint: Path, built: Bundle, tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "thesis.txt").write_text("years of work", encoding="utf-8")
    with pytest.raises(BundleError, match="is not a bundle"):
        build_bundle(checkpoint, mine)
    assert [path.name for path in mine.iterdir()] == ["thesis.txt"]
    with pytest.raises(BundleError, match="another bundle"):
        build_bundle(checkpoint, built.directory, capacity=2048)
    assert build_bundle(checkpoint, built.directory, grids=[(2, 2)]) == built


def test_a_failed_build_leaves_nothing(tmp_path: Path, cache: Path) -> None:
    directory = random_checkpoint(tmp_path / "broken")
    weights = directory / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-10])
    with pytest.raises(CheckpointError, match="damaged"):
        open_bundle(directory)
    assert list(cache.iterdir()) == []


def test_two_processes_at_once_both_get_it(checkpoint: Path, cache: Path) -> None:
    program = textwrap.dedent(
        """
        import sys, time, qwen_npu.bundle, qwen_npu.graphs.text, qwen_npu.graphs.vision
        time.sleep(max(0, float(sys.argv[2]) - time.time()))
        bundle = qwen_npu.bundle.open_bundle(sys.argv[1])
        print(bundle.verify(tokens=2, width=2, sequences=1, slots=2).is_file(), bundle.digest)
        """
    )
    start = str(time.time() + 2)
    command = [sys.executable, "-c", program, str(checkpoint), start]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(3)]
    said = [process.communicate(timeout=60) for process in running]
    assert [errors for _, errors in said] == [""] * 3
    assert {out for out, _ in said} == {f"True {open_bundle(checkpoint).digest}\n"}
    assert len(list(cache.iterdir())) == 1


def test_opening_a_built_bundle_does_not_import_onnx(built: Bundle) -> None:
    program = "import sys, qwen_npu.bundle; qwen_npu.bundle.open_bundle(sys.argv[1]); print('onnx' in sys.modules)"
    command = [sys.executable, "-c", program, str(built.directory)]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "False\n"


def test_large_files_are_digested_by_size_and_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bundles, "LARGE_FILE_BYTES", 3000)
    monkeypatch.setattr(bundles, "_SAMPLE_BYTES", 1000)
    path = tmp_path / "large"
    content = bytearray(range(250)) * 20
    path.write_bytes(content)
    whole = bundles.file_digest(path)
    seen = []
    for place in (0, 999, 2500, 4000, 4999):
        changed = bytearray(content)
        changed[place] ^= 255
        path.write_bytes(changed)
        seen.append(bundles.file_digest(path) != whole)
    assert seen == [True, True, False, True, True]
    path.write_bytes(content + content[-1:])
    assert bundles.file_digest(path) != whole


def test_the_cache_is_the_users(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("QWEN_NPU_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert cache_directory() == Path("/somewhere/qwen-npu")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_directory() == Path.home() / ".cache" / "qwen-npu"


def test_a_place_that_cannot_be_written_is_said(checkpoint: Path, cache: Path) -> None:
    cache.write_text("a file where the directory should be", encoding="utf-8")
    with pytest.raises(BundleError, match="QWEN_NPU_CACHE"):
        open_bundle(checkpoint)


def test_a_bundle_that_cannot_take_more_graphs_says_so(built: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(**_: Any) -> None:
        raise PermissionError("read-only file system")

    monkeypatch.setattr(bundles.tempfile, "mkstemp", refuse)
    with pytest.raises(BundleError, match=r"peek-fixed-device.*read-only"):
        built.peek()


def test_unknown_graph_and_numerics_are_refused(built: Bundle) -> None:
    with pytest.raises(UsageError, match="decode_shrinking"):
        built.path("decode_shrinking")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="f64"):
        built.path("prefill", numerics="f64")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="f64"):
        built.contract("prefill", numerics="f64")  # type: ignore[arg-type]
