"""What fits on a device before anything is built: weights, states, pools and KV from the dimensions alone.

Every figure is modelled from `spec.py`'s formulas and says so; workspace of the vendor's runtime is not known and not
in it.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from qwen_npu.emulator.policy import CAPACITY_BYTES
from qwen_npu.errors import UsageError
from qwen_npu.spec import PRESETS, ModelSpec, Numerics, preset

DEVICES = {
    "300i-duo": CAPACITY_BYTES["atlas-300i-duo"],
    "300i-duo-48g": CAPACITY_BYTES["atlas-300i-duo-48g"],
    "300i-pro": CAPACITY_BYTES["atlas-300i-pro"],
}
"""Bytes of memory of one device, `ascend:N`. A 300I Duo is one card with two of them; its smaller version
unconfirmed."""

DEFAULT_GRID = (8, 8)


@dataclass(frozen=True)
class Plan:
    """Bytes on one device.

    Attributes:
        weights: of each stage's model.
        states: one sequence's conv, recurrent, kv (at capacity), and kv_per_token.
        decode: what is alive while decoding token by token: weights, both halves of every state, logits.
        speculation: the same with slot pools for K drafts and so many sequences; None without drafts.
        stages: peak of each stage run alone, and of all models loaded at once.
        fits: whether each of those is within the device.
        longest_capacity_tokens: the largest fixed KV that still fits while decoding; 0 if none does.
    """

    model: str
    device: str
    device_bytes: int
    capacity_tokens: int
    numerics: str
    weights: dict[str, int]
    states: dict[str, int]
    decode: dict[str, int]
    speculation: dict[str, int] | None
    stages: dict[str, int]
    fits: dict[str, bool]
    longest_capacity_tokens: int


def make_plan(
    model: str | Path,
    device: str,
    capacity: int,
    *,
    drafts: int = 0,
    sequences: int = 1,
    numerics: Numerics = "device",
    weight_bytes_each: int = 2,
    grid: tuple[int, int] = DEFAULT_GRID,
) -> Plan:
    """Plans one model on one device.

    Args:
        model: a preset or a checkpoint directory.
        device: a key of `DEVICES`.
        capacity: of the fixed KV, in tokens.
        drafts: K; 0 plans no speculation.
        sequences: that decode together with drafts.
        weight_bytes_each: size of a weight: 2 as deployed (f16), 4 on the emulated device.
        grid: of the picture, in patches.

    Raises:
        UsageError: an unknown device, or sizes that make no sense.
    """
    if device not in DEVICES:
        raise UsageError(f"unknown device {device!r}", expected=f"one of {', '.join(DEVICES)}")
    if capacity < 1 or not 0 <= drafts <= 7 or sequences < 1:
        raise UsageError(
            f"capacity {capacity}, {drafts} drafts, {sequences} sequences",
            expected="a positive capacity, 0..7 drafts, at least one sequence",
        )
    spec = preset(str(model)) if str(model) in PRESETS else ModelSpec.from_checkpoint(model)
    half = 2 if numerics == "device" else 4
    parameters = count_parameters(spec)
    weights = {name: count * weight_bytes_each for name, count in parameters.items()}
    states = {
        "conv": spec.conv_bytes(numerics=numerics),
        "recurrent": spec.recurrent_bytes(),
        "kv": spec.kv_bytes(capacity, numerics=numerics),
        "kv_per_token": spec.kv_bytes(1, numerics=numerics),
    }
    both_halves = 2 * spec.state_bytes(capacity, numerics)
    decode = {
        "weights": weights["language"],
        "state_halves": both_halves,
        "logits": spec.logits_bytes(numerics=numerics),
    }
    speculation = None
    if drafts:
        slots = sequences * (drafts + 1)
        speculation = {
            "weights": 2 * weights["language"],  # two verify graphs: one token, and all drafts
            "state_pools": spec.pool_bytes(slots, half),
            "conv_pools": spec.conv_pool_bytes(slots, numerics),
            "kv_halves": 2 * spec.kv_bytes(capacity, sequences, numerics),
            "logits": sequences * (drafts + 2) * spec.logits_bytes(numerics=numerics),
        }
    prefill_states = spec.state_bytes(capacity, numerics)
    embeds = spec.image_tokens(grid) * spec.hidden * half
    stages = {
        "vision": weights["vision"] + embeds,
        "prefill": weights["language"] + embeds + prefill_states + spec.logits_bytes(numerics=numerics),
        "decode": sum(decode.values()),
    }
    if speculation is not None:
        stages["verify"] = sum(speculation.values())
    stages["all at once"] = weights["vision"] + weights["language"] + sum(decode.values()) + prefill_states
    room = DEVICES[device] - decode["weights"] - decode["logits"]
    room -= 2 * (spec.conv_bytes(numerics=numerics) + spec.recurrent_bytes())
    return Plan(
        model=str(model),
        device=device,
        device_bytes=DEVICES[device],
        capacity_tokens=capacity,
        numerics=numerics,
        weights=weights,
        states=states,
        decode=decode,
        speculation=speculation,
        stages=stages,
        fits={name: size <= DEVICES[device] for name, size in stages.items()},
        longest_capacity_tokens=max(0, room // (2 * states["kv_per_token"])),
    )


def count_parameters(spec: ModelSpec) -> dict[str, int]:
    """Parameters of the vision tower and of the language model (the embedding once, where the head is tied to it)."""
    hidden, inter = spec.hidden, spec.intermediate
    mlp = 3 * hidden * inter
    conv, values = spec.conv_lanes, spec.nv * spec.dv
    linear = hidden * (conv + values + 2 * spec.nv) + conv * spec.conv_kernel + 2 * spec.nv + spec.dv + values * hidden
    queries, keys = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    full = hidden * (2 * queries + 2 * keys) + queries * hidden + 2 * spec.head_dim
    language = spec.vocab * hidden * (1 if spec.tied else 2) + hidden
    language += len(spec.linear_layers) * linear + len(spec.full_layers) * full + spec.layers * (mlp + 2 * hidden)
    tower = spec.vision
    width, merged = tower.hidden, tower.hidden * tower.merge**2
    block = 4 * width * (width + 1) + 2 * width * tower.intermediate + tower.intermediate + width + 4 * width
    vision = tower.patch_lanes * width + width + tower.positions * width + tower.depth * block
    vision += 2 * width + merged * (merged + 1) + merged * hidden + hidden
    return {"vision": vision, "language": language}


def add_commands(subparsers: Any) -> None:
    """Adds `plan` to the command line's parser."""
    plan = subparsers.add_parser("plan", help="what fits on a device: weights, states, pools, KV against capacity")
    plan.add_argument("--model", default="4b", help=f"{', '.join(PRESETS)}, or a checkpoint directory")
    plan.add_argument("--device", default="300i-duo", help=", ".join(DEVICES))
    plan.add_argument("--capacity", type=int, default=4096, metavar="TOKENS")
    plan.add_argument("--drafts", type=int, default=0, metavar="K")
    plan.add_argument("--sequences", type=int, default=1, metavar="N")
    plan.add_argument("--numerics", default="device", choices=("device", "f32"))
    plan.add_argument("--json", action="store_true")
    plan.set_defaults(run=_plan)


def _plan(options: argparse.Namespace) -> int:
    plan = make_plan(
        options.model,
        options.device,
        options.capacity,
        drafts=options.drafts,
        sequences=options.sequences,
        numerics=options.numerics,
    )
    if options.json:
        print(json.dumps(asdict(plan)))
        return 0
    print(f"{plan.model} on {plan.device} ({_size(plan.device_bytes)} a device), KV of {plan.capacity_tokens} tokens")
    for title, part in (("weights", plan.weights), ("states of one sequence", plan.states), ("decode", plan.decode)):
        print(f"\n{title}")
        for name, size in part.items():
            print(f"  {name:<16}{_size(size):>12}")
    if plan.speculation:
        print(f"\nspeculation with {options.drafts} drafts, {options.sequences} sequences")
        for name, size in plan.speculation.items():
            print(f"  {name:<16}{_size(size):>12}")
    print("\nstages, one alive at a time")
    for name, size in plan.stages.items():
        print(f"  {name:<16}{_size(size):>12}  {'fits' if plan.fits[name] else 'DOES NOT FIT'}")
    print(f"\nlongest fixed KV that fits while decoding: {plan.longest_capacity_tokens:,} tokens")
    print("Modelled from the dimensions; the vendor runtime's own workspace is not in it.")
    return 0


def _size(count: int) -> str:
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count} B"
