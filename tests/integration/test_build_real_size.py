"""A model of the 0.8B's dimensions with random weights: built for every target, and run on the emulator in 12 GiB."""

from __future__ import annotations

import json
import resource
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytestmark = pytest.mark.full

PEAK_BYTES = 12 * 2**30
PREFILL_TOKENS, STEPS = 64, 16
SIZES = ["--capacity", "128", "--buckets", str(PREFILL_TOKENS), "--drafts", "1"]


def config() -> dict[str, Any]:
    from tests.unit.graphs.checkpoints import config as small

    layers = ["full_attention" if (i + 1) % 4 == 0 else "linear_attention" for i in range(24)]
    held = small(
        tied=True,
        mrope_section=(11, 11, 10),
        hidden_size=1024,
        intermediate_size=3584,
        layer_types=layers,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=256,
        linear_num_key_heads=16,
        linear_num_value_heads=16,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
        vocab_size=248320,
    )
    held["vision_config"] |= {
        "depth": 12,
        "hidden_size": 768,
        "intermediate_size": 3072,
        "num_heads": 12,
        "num_position_embeddings": 2304,
        "patch_size": 16,
        "out_hidden_size": 1024,
    }
    return held


def shapes(held: dict[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes of all weights, from a recording of what the builder takes."""
    from qwen_npu.graphs.weights import prepare
    from qwen_npu.spec import ModelSpec

    found: dict[str, tuple[int, ...]] = {}

    class Recording:
        directory = Path()

        def take(self, name: str, *shape: int) -> np.ndarray:
            found[name] = shape
            return np.broadcast_to(np.float32(0), shape)

        def leftovers(self) -> list[str]:
            return []

    for _ in prepare(ModelSpec.from_config(held), Recording(), [(8, 8)]):  # type: ignore[arg-type]
        pass
    yield from found.items()


def write_checkpoint(directory: Path) -> Path:
    """One safetensors file in f16, written tensor by tensor."""
    directory.mkdir()
    held = config()
    (directory / "config.json").write_text(json.dumps(held), encoding="utf-8")
    header: dict[str, Any] = {}
    end = 0
    tensors = list(shapes(held))
    for name, shape in tensors:
        size = 2 * int(np.prod(shape))
        header[name] = {"dtype": "F16", "shape": list(shape), "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    rng = np.random.default_rng(0)
    block = (rng.standard_normal(1 << 20) * 0.02).astype(np.float16)
    with (directory / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for _, shape in tensors:
            left = int(np.prod(shape))
            while left:
                part = min(left, len(block))
                file.write(block[:part].tobytes())
                left -= part
    return directory


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("0.8b") / "checkpoint")


RUN = """
import json, resource, sys
import numpy as np
from qwen_npu.bundle import open_bundle
from qwen_npu.driver import open_driver
from qwen_npu.ledger.store import Ledger
from qwen_npu.runtime.stages import DecodeStage, open_stage, run_prefill, run_vision
from qwen_npu import emulator

directory, length, steps = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
bundle = open_bundle(directory)
driver = open_driver("emulator", "ascend:0")
events = []
emulator.instrument.subscribe(events.append)
rng = np.random.default_rng(0)
path = lambda name: bundle.path(name)
with open_stage(driver, path("vision"), "vision", bundle.contract("vision")) as model:
    embeds = run_vision(driver, model, rng.standard_normal((64, bundle.spec.vision.patch_lanes)))
ids = rng.integers(1000, 2000, length)
ids[10 : 10 + len(embeds)] = bundle.spec.image_token
positions = np.tile(np.arange(length), (4, 1))[:, None]
with open_stage(driver, path("prefill"), "prefill", bundle.contract("prefill")) as model:
    prefill = run_prefill(driver, model, ids, positions, embeds, length)
token, tokens = int(prefill.logits[0, -1].argmax()), []
states = prefill.states
kv = np.pad(states.kv, ((0, 0),) * 3 + ((0, bundle.capacity - length), (0, 0)))
with open_stage(driver, path("decode_fixed"), "decode_fixed", bundle.contract("decode_fixed")) as model:
    stage = DecodeStage(driver, model, states._replace(kv=kv), length, 0, resident=True)
    for _ in range(steps):
        logits, _ = stage.step(token)
        token = int(logits.argmax())
        tokens.append(token)
    finite = bool(np.isfinite(logits).all())
    stage.free()
alive = most = 0
for event in events:
    if event.kind == "allocate" and event.detail["what"] == "weights":
        alive += 1
        most = max(most, alive)
    if event.kind == "free" and event.detail["what"] == "weights":
        alive -= 1
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
print("RESULT " + json.dumps({"tokens": tokens, "finite": finite, "models_alive": most, "peak_bytes": peak}))
"""


def run(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


@pytest.mark.parametrize("target", ["emulator", "mslite-cpu", "ascend310p", "ascend310p --unfused"])
def test_every_target_and_the_emulator_runs(
    checkpoint: Path, tmp_path: Path, target: str, record_property: Any
) -> None:
    out = tmp_path / "bundle"
    command = [sys.executable, "-m", "qwen_npu.cli", "build", str(checkpoint), "--out", str(out), "--json"]
    told = json.loads(run([*command, "--target", *target.split(), *SIZES]))
    assert all(graph["bytes"] < 8 * 2**20 for graph in told["graphs"])
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024 < PEAK_BYTES
    custom = {graph["file"]: graph["custom"] for graph in told["graphs"]}
    if target == "ascend310p":
        wanted = {"RecurrentGatedDeltaRule": 18, "Scatter": 12, "IncreFlashAttention": 6}
        assert custom["decode_fixed-device.onnx"] == wanted
    if target == "emulator":
        text = run([sys.executable, "-c", RUN, str(out), str(PREFILL_TOKENS), str(STEPS)])
        result = json.loads(text.partition("RESULT ")[2])
        assert len(result["tokens"]) == STEPS
        assert result["finite"]
        assert result["models_alive"] == 1
        assert result["peak_bytes"] < PEAK_BYTES
        gib = result["peak_bytes"] / 2**30
        record_property("summary", f"0.8B-shaped model on the emulator: peak {gib:.1f} GiB of host memory")
    for path in out.iterdir():
        path.unlink() if path.is_file() else None  # gigabytes
