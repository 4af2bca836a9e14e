"""RecurrentGatedDeltaRule on the CPU and the pool of states it works on.

`recurrent_gated_delta_rule` is the op (strict; native kernel when installed), `reference` the readable form, `SlotPool`
and `SlotTable` say who owns which slot, `compat` reproduces the deployed kernel's silent behaviours on request.
"""

from __future__ import annotations

from qwen_npu.rgdr.layout import layout_of_update
from qwen_npu.rgdr.memory import empty_states
from qwen_npu.rgdr.op import chunk_gated_delta_rule, native, recurrent_gated_delta_rule
from qwen_npu.rgdr.pool import Batch, SlotPool, SlotTable, Snapshot

__all__ = [
    "Batch",
    "SlotPool",
    "SlotTable",
    "Snapshot",
    "chunk_gated_delta_rule",
    "empty_states",
    "layout_of_update",
    "native",
    "recurrent_gated_delta_rule",
]
