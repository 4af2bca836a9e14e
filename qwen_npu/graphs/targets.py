"""The forms that the graphs of a model take for each target: which of them there are, and how each is written.

emulator    our own nodes with function bodies; both numerics, any length.
mslite-cpu  plain ops, f32, one prefill graph for each bucket; no verify.
ascend310p  numerics "device"; fused: `Custom` nodes; unfused: plain ops, one prefill graph for each bucket, no verify.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from qwen_npu.errors import UsageError
from qwen_npu.graphs.weights import Grid, WeightTable
from qwen_npu.spec import NUMERICS, ModelSpec, Numerics

Target = Literal["emulator", "mslite-cpu", "ascend310p"]
TARGETS: tuple[Target, ...] = get_args(Target)


@dataclass(frozen=True)
class Form:
    """How graphs are written for `target`. `fused` only means something on Ascend."""

    target: Target = "emulator"
    fused: bool = False

    @property
    def numerics(self) -> tuple[Numerics, ...]:
        if self.target == "emulator":
            return NUMERICS
        return ("f32",) if self.target == "mslite-cpu" else ("device",)

    @property
    def plain(self) -> bool:
        """Whether the recurrence is in plain ops: prefill then has one graph for each bucket."""
        return self.target == "mslite-cpu" or (self.target == "ascend310p" and not self.fused)

    @property
    def speculates(self) -> bool:
        return not self.plain

    def vision(self, spec: ModelSpec, numerics: Numerics, weights: WeightTable, grid: Grid) -> bytes:
        from qwen_npu.graphs.vision import vision_graph

        return self._finished(vision_graph(spec, numerics, weights, grid), spec)

    def prefill(
        self,
        spec: ModelSpec,
        numerics: Numerics,
        weights: WeightTable,
        *,
        all_logits: bool,
        tokens: int | None,
        buckets: Sequence[int] = (),
    ) -> bytes:
        from qwen_npu.graphs.text import prefill_graph

        state = "float32" if self.plain else ""
        return self._finished(
            prefill_graph(
                spec, numerics, weights, all_logits=all_logits, state_dtype=state, buckets=() if tokens else buckets
            ),
            spec,
            tokens,
        )

    def decode(self, spec: ModelSpec, numerics: Numerics, weights: WeightTable, *, capacity: int | None) -> bytes:
        from qwen_npu.graphs.text import decode_graph

        options: dict[str, Any] = {"state_dtype": "float32"} if self.plain else {}
        if self.target == "ascend310p" and self.fused:
            from qwen_npu.graphs.fused import FusedCache

            options["cache"] = FusedCache
        return self._finished(decode_graph(spec, numerics, weights, capacity=capacity, **options), spec)

    def verify(self, spec: ModelSpec, numerics: Numerics, weights: WeightTable, sizes: dict[str, int]) -> bytes:
        from qwen_npu.graphs.verify import verify_graph

        self._needs_pools()
        content = verify_graph(spec, numerics, weights, **sizes, whole_cache=self.target == "ascend310p")
        return self._on_pools(content, spec, sizes)

    def op(self, spec: ModelSpec, sizes: dict[str, int], dtype: str) -> bytes:
        """The op alone (graphs/op.py), for a pool driven without a model around it."""
        from qwen_npu.graphs.op import op_graph

        self._needs_pools()
        return self._on_pools(op_graph(spec, **sizes, dtype=dtype, pool_dtype=dtype), spec, sizes)

    def admit(self, spec: ModelSpec, numerics: Numerics, sizes: dict[str, int]) -> bytes:
        from qwen_npu.graphs.admit import admit_graph

        self._needs_pools()
        return self._finished(admit_graph(spec, numerics, **sizes), spec)

    def peek(self, spec: ModelSpec, numerics: Numerics, capacity: int | None) -> bytes:
        from qwen_npu.graphs.peek import peek_graph

        return self._finished(peek_graph(spec, numerics, capacity=capacity), spec)

    def peek_pools(self, spec: ModelSpec, numerics: Numerics, sizes: dict[str, int]) -> bytes:
        from qwen_npu.graphs.peek import peek_pools_graph

        self._needs_pools()
        return self._finished(peek_pools_graph(spec, numerics, **sizes), spec)

    def _needs_pools(self) -> None:
        if not self.speculates:
            raise UsageError(
                f"a bundle for {self.target} in plain ops has no graph on slot pools",
                expected="target emulator, or ascend310p with fused nodes",
            )

    def _on_pools(self, content: bytes, spec: ModelSpec, sizes: dict[str, int]) -> bytes:
        if self.target == "emulator":
            return content
        from qwen_npu.graphs.fused import fuse

        return fuse(content, spec, tokens=sizes["sequences"] * sizes["tokens"], slots=sizes["slots"])

    def _finished(self, content: bytes, spec: ModelSpec, tokens: int | None = None) -> bytes:
        if self.target == "emulator":
            return content
        if self.plain:
            from qwen_npu.graphs.lowering_plain import lower_model

            return lower_model(content, spec, tokens=tokens)
        from qwen_npu.graphs.fused import fuse

        return fuse(content, spec)


EMULATED = Form()
