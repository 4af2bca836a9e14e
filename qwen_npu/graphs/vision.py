"""The vision tower for one grid of patches."""

from __future__ import annotations

import numpy as np

from qwen_npu import contract
from qwen_npu.contract import IMAGE_EMBEDS, PIXEL_VALUES
from qwen_npu.graphs.builder import Graph
from qwen_npu.graphs.layers import attention, project
from qwen_npu.graphs.weights import Grid, WeightTable, patch_coordinates, positions_name
from qwen_npu.spec import ModelSpec, Numerics


def vision_graph(spec: ModelSpec, numerics: Numerics, weights: WeightTable, grid: Grid) -> bytes:
    """`pixel_values` [rows*columns, lanes] in patch order to `image_embeds`, one row for each merge block."""
    g = Graph(contract.vision(spec, numerics, grid), weights)
    vision = spec.vision
    tables = _rope(g, spec, grid)
    # the bias of the patch projection is part of the positions
    x = project(g, g.wide(PIXEL_VALUES), "vision.patch", bias=g.weight(positions_name(grid)))
    for block in range(vision.depth):
        g.scope(f"blocks.{block}/")
        name = f"vision.{block}."
        attended = _attend(g, spec, _linear(g, _norm(g, x, f"{name}norm1"), f"{name}qkv"), tables)
        x = g.add(x, _linear(g, attended, f"{name}proj"))
        inner = _gelu_tanh(g, _linear(g, _norm(g, x, f"{name}norm2"), f"{name}fc1"))
        x = g.add(x, _linear(g, inner, f"{name}fc2"))
    g.scope("merger/")
    x = g.reshape(_norm(g, x, "vision.merger.norm"), -1, vision.hidden * vision.merge**2)
    x = _linear(g, x, "vision.merger.fc1")
    exact_gelu = g.mul(g.mul(x, g.number(0.5)), g.add(g.op("Erf", [g.op("Div", [x, g.number(2**0.5)])]), g.number(1.0)))
    inputs = [exact_gelu, g.weight("vision.merger.fc2"), g.weight("vision.merger.fc2_bias")]
    g.finish_as(IMAGE_EMBEDS, "Gemm", inputs)
    return g.serialize()


def _linear(g: Graph, x: str, name: str) -> str:
    return project(g, x, name, bias=g.weight(f"{name}_bias"))


def _norm(g: Graph, x: str, name: str) -> str:
    return g.op("LayerNormalization", [x, g.weight(name), g.weight(f"{name}_bias")], axis=-1, epsilon=1e-6)


def _gelu_tanh(g: Graph, x: str) -> str:
    """GELU, tanh form: 0.5 x (1 + tanh(u)) = x sigmoid(2u), u = sqrt(2/pi) (x + 0.044715 x^3)."""
    twice = 2 * (2 / np.pi) ** 0.5
    inner = g.add(g.mul(g.mul(x, x), g.number(twice * 0.044715)), g.number(twice))
    return g.mul(x, g.op("Sigmoid", [g.mul(x, inner)]))


def _rope(g: Graph, spec: ModelSpec, grid: Grid) -> tuple[str, str]:
    """cos and signed sin [patches, 1, head dim]; the row turns the first quarter of the lanes, the column the next."""
    vision = spec.vision
    dim = vision.hidden // vision.heads
    frequencies = 1 / np.float32(vision.rope_theta) ** (np.arange(0, dim // 2, 2, dtype=np.float32) / (dim // 2))
    row, column = patch_coordinates(grid, vision.merge)
    angle = np.concatenate([index[:, None].astype(np.float32) * frequencies for index in (row, column)], axis=1)
    sine = np.concatenate([-np.sin(angle), np.sin(angle)], axis=1)
    return g.const(np.cos(np.tile(angle, 2))[:, None].astype(np.float32)), g.const(sine[:, None].astype(np.float32))


def _attend(g: Graph, spec: ModelSpec, qkv: str, tables: tuple[str, str]) -> str:
    """Full attention over the patches: qkv [patches, 3*width] gives [patches, width]."""
    heads, width = spec.vision.heads, spec.vision.hidden
    dim = width // heads
    qk, value = g.split(qkv, (2 * width, width), axis=1)
    qk = g.reshape(qk, -1, 2 * heads, dim)
    first, second = g.split(qk, (dim // 2, dim // 2), axis=2)
    cosine, sine = tables
    qk = g.add(g.mul(qk, cosine), g.mul(g.concat([second, first], axis=2), sine))
    query, key = g.split(qk, (heads, heads), axis=1)
    query = g.mul(query, g.number(dim**-0.5))

    def by_head(x: str) -> str:
        return g.transpose(g.reshape(x, 1, -1, heads, dim), 0, 2, 1, 3)

    out = attention(g, by_head(query), by_head(key), by_head(value))
    return g.reshape(g.transpose(out, 0, 2, 1, 3), -1, width)
