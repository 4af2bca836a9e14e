"""Writes a C++ file with many copies of the op, each with one fault; `test_mutants.cpp` must find every one.

Usage: mutants.py OUT PART PARTS   (the mutants whose number modulo PARTS is PART)

A mutant is one replacement in one file of kernels/rgdr. The text to replace must occur exactly once, so that a change
of the kernel that makes a mutant meaningless stops the build. Each copy lives in a namespace of its own.
"""

from __future__ import annotations

import sys
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1] / "rgdr"
FILES = {
    "budget": "ub_budget.h",
    "kernel": "op_kernel/recurrent_gated_delta_rule.h",
    "tiling": "op_host/recurrent_gated_delta_rule_tiling.cpp",
}
BARRIER = "AscendC::PipeBarrier<PIPE_V>();"

# name: (file, text, replacement)
MUTANTS: dict[str, tuple[str, str, str]] = {
    # ---- queues, flags, barriers
    "states not enqueued": ("kernel", "statesIn_.EnQue(states);", ""),
    "heads not enqueued": ("kernel", "headsIn_.EnQue(heads);", ""),
    "states never freed": ("kernel", "statesIn_.FreeTensor(states);", ""),
    "heads never freed": ("kernel", "headsIn_.FreeTensor(heads);", ""),
    "rows never freed": (
        "kernel",
        "TokenGap(item.rows)));\n        rowsOut_.FreeTensor(rows);",
        "TokenGap(item.rows)));",
    ),
    "store never freed": ("kernel", "storesOut_.FreeTensor(store);", ""),
    "heads freed to the queue of states": ("kernel", "headsIn_.FreeTensor(heads);", "statesIn_.FreeTensor(heads);"),
    "states taken from the queue of heads": (
        "kernel",
        "states = statesIn_.template DeQue<T>()",
        "states = headsIn_.template DeQue<T>()",
    ),
    "store without its queue": (
        "kernel",
        "storesOut_.EnQue(store);\n        store = storesOut_.template DeQue<T>();",
        "",
    ),
    "rows without their queue": (
        "kernel",
        "rowsOut_.EnQue(rows);\n        rows = rowsOut_.template DeQue<T>();\n"
        "        AscendC::DataCopy(out_[OutAt(item.seq",
        "AscendC::DataCopy(out_[OutAt(item.seq",
    ),
    "fill without its queue": (
        "kernel",
        "rowsOut_.EnQue(rows);\n        return rowsOut_.template DeQue<T>();",
        "return rows;",
    ),
    "states freed before they are read": (
        "kernel",
        "states = statesIn_.template DeQue<T>();",
        "states = statesIn_.template DeQue<T>();\n        statesIn_.FreeTensor(states);",
    ),
    "gk read after its buffer was freed": (
        "kernel",
        "AscendC::Cast(wideKey_, heads[p_.mostTokens * dk], RoundMode::CAST_NONE, count);",
        "AscendC::Cast(wideKey_, heads[p_.mostTokens * dk], RoundMode::CAST_NONE, count);\n"
        "        headsIn_.FreeTensor(heads);",
    ),
    "queues with one buffer": ("budget", "kDoubled = 2;", "kDoubled = 1;"),
    "no barrier before an item": (
        "kernel",
        BARRIER + "\n        if (!computed_",
        "if (!computed_",
    ),
    "no barrier after the casts of a tile": (
        "kernel",
        "statesIn_.FreeTensor(states);\n        " + BARRIER,
        "statesIn_.FreeTensor(states);",
    ),
    "no barrier after the casts of a head": (
        "kernel",
        "headsIn_.FreeTensor(heads);\n        " + BARRIER,
        "headsIn_.FreeTensor(heads);",
    ),
    "no barrier after the decay": (
        "kernel",
        "row, row, 0));\n            }\n            " + BARRIER,
        "row, row, 0));\n            }",
    ),
    "no barrier after the first products": (
        "kernel",
        "vector, width, rows, strides);\n        " + BARRIER,
        "vector, width, rows, strides);",
    ),
    "no barrier after further products": (
        "kernel",
        "LanesFrom(lane), rows, strides);\n            " + BARRIER,
        "LanesFrom(lane), rows, strides);",
    ),
    "no barrier after the sums": (
        "kernel",
        "rows, 1, 1, folded);\n        " + BARRIER,
        "rows, 1, 1, folded);",
    ),
    "no barrier after the difference": (
        "kernel",
        "wideValue_[t * rows], sums_, rows);\n        " + BARRIER,
        "wideValue_[t * rows], sums_, rows);",
    ),
    "no barrier after beta": (
        "kernel",
        "Wide(beta_.GetValue(at)), rows);\n        " + BARRIER,
        "Wide(beta_.GetValue(at)), rows);",
    ),
    "no barrier after the spread": (
        "kernel",
        "BrcbRepeatParams(1, 8));\n        " + BARRIER,
        "BrcbRepeatParams(1, 8));",
    ),
    "no barrier after the correction": (
        "kernel",
        "row, 1, 0));\n        }\n        " + BARRIER,
        "row, 1, 0));\n        }",
    ),
    # ---- slots
    "reads the slot that it writes": ("kernel", "StateAt(item.sequence.read,", "StateAt(item.sequence.slots[0],"),
    "writes the slot that it reads": ("kernel", "StateAt(item.sequence.slots[t],", "StateAt(item.sequence.read,"),
    "always the first slot": ("kernel", "StateAt(item.sequence.slots[t],", "StateAt(item.sequence.slots[0],"),
    "accepted off by one": ("kernel", "static_cast<uint32_t>(accepted - 1)", "static_cast<uint32_t>(accepted)"),
    "accepted 0 not read as 1": ("kernel", "accepted == 0 ? 1 : accepted", "accepted"),
    "accepted beyond the row": ("kernel", "accepted > int64_t(width)", "accepted > int64_t(width) + 1"),
    "accepted only up to the length": ("kernel", "accepted > int64_t(width)", "accepted > int64_t(s.length)"),
    "accepted negative": ("kernel", "if (accepted < 0 ||", "if ("),
    "one slot behind the pool": ("kernel", "uint64_t(slot) < p_.slots", "uint64_t(slot) <= p_.slots"),
    "slots of 32 bits": (
        "kernel",
        "return indices_.GetValue(at);",
        "return static_cast<int32_t>(indices_.GetValue(at));",
    ),
    "lengths of 32 bits": (
        "kernel",
        "const int64_t length = lengths_.GetValue(i);",
        "const int64_t length = static_cast<int32_t>(lengths_.GetValue(i));",
    ),
    "offsets of 32 bits": ("kernel", "((uint64_t(slot) *", "((uint32_t(slot) *"),
    "rows read as flat indices": (
        "kernel",
        "? uint64_t(i) * p_.rowWidth + position :",
        "? uint64_t(first) + position :",
    ),
    "longer than the row": ("kernel", "if (s.length > width) {\n            return s;\n        }", ""),
    "nine tokens": ("kernel", "length > int64_t(p_.mostTokens)", "length > int64_t(p_.mostTokens) + 1"),
    "tokens behind the last": ("kernel", " || length != int64_t(s.length)", ""),
    "clashes not looked for": ("kernel", "&& Clashes(i, sequence_)", "&& false"),
    "clash at the lowest slot missed": ("kernel", "near = slot >= low &&", "near = slot > low &&"),
    "clash at the highest slot missed": ("kernel", "slot <= high;", "slot < high;"),
    "read of a written slot missed": ("kernel", "bool clash = Writes(other, s.read);", "bool clash = false;"),
    "write of a read slot missed": ("kernel", "s.slots[t] == other.read ||", ""),
    "common write missed": ("kernel", "|| Writes(other, s.slots[t]);", ";"),
    "clash with one that fails by itself": ("kernel", "if (other.verdict == Verdict::COMPUTE) {", "{"),
    "a pad among slots is enough": ("kernel", "if (pads == width) {", "if (pads > 0) {"),
    "pad rows get NaN": ("kernel", "sequence_.verdict == Verdict::FAIL ? Element<T>::kNan : 0", "Element<T>::kNan"),
    "failed rows get zero": ("kernel", "sequence_.verdict == Verdict::FAIL ? Element<T>::kNan : 0", "0"),
    "failed rows of the first token only": (
        "kernel",
        "t < item.sequence.length; ++t) {\n            AscendC::DataCopy(out_",
        "t < 1; ++t) {\n            AscendC::DataCopy(out_",
    ),
    "failed sequences are computed": ("kernel", "if (sequence_.verdict == Verdict::COMPUTE) {", "{"),
    "tokens of nobody not filled": ("kernel", "        FillBehind();\n", ""),
    "every token stored, in a row": ("kernel", "s.storeMask &= ~(1u << earlier);", ""),
    "first of equal slots wins": ("kernel", "~(1u << earlier)", "~(1u << t)"),
    # ---- tiles, items, addresses
    "tile starts a grain late": (
        "kernel",
        "number % p_.tiles) * p_.tileRows;",
        "number % p_.tiles) * p_.tileRows + kRowGrain;",
    ),
    "last tile as long as the others": ("kernel", "left < p_.tileRows ? left : p_.tileRows", "p_.tileRows"),
    "an item too few": ("kernel", "end_ = items * (core + 1) / cores;", "end_ = items * (core + 1) / cores - 1;"),
    "an item of the next core": (
        "kernel",
        "end_ = items * (core + 1) / cores;",
        "end_ = items * (core + 1) / cores + 1;",
    ),
    "head and sequence swapped": (
        "kernel",
        "static_cast<uint32_t>(item.task % p_.valueHeads)",
        "static_cast<uint32_t>(item.task / p_.sequences)",
    ),
    "key head by remainder": ("kernel", "item.head / (p_.valueHeads / p_.keyHeads)", "item.head % p_.keyHeads"),
    "next query head": ("kernel", "p_.keyHeads + keyHead) * dk;", "p_.keyHeads + keyHead) * dk + kRowGrain;"),
    "gap without the tile": ("kernel", "(p_.valueHeads * p_.valueDim - rows)", "(p_.valueHeads * p_.valueDim)"),
    "key packed by length": ("kernel", "heads[p_.mostTokens * dk], key_[at]", "heads[length * dk], key_[at]"),
    "value behind a full tile": (
        "kernel",
        "DataCopy(states[item.rows * dk], value_",
        "DataCopy(states[p_.tileRows * dk], value_",
    ),
    "value of the next head": (
        "kernel",
        "OutAt(item.sequence.first, item.head, item.row);",
        "OutAt(item.sequence.first, item.head + 1, item.row);",
    ),
    "heads copied once": ("kernel", "if (!copiedIn_ || item.task != copiedTask_) {", "if (!copiedIn_) {"),
    "heads prepared once": ("kernel", "if (!computed_ || item.task != computedTask_) {", "if (!computed_) {"),
    "heads prepared for each tile": ("kernel", "if (!computed_ || item.task != computedTask_) {", "{"),
    "sequences counted one too far": ("kernel", "for (; before_ < i; ++before_)", "for (; before_ < i + 1; ++before_)"),
    # ---- arithmetic
    "scale forgotten": ("kernel", "wideQuery_, wideQuery_, p_.scale, count", "wideQuery_, wideQuery_, 1.0f, count"),
    "gk dropped when g is given": ("kernel", "log += p_.gkMode == 1 ?", "log += p_.gkMode == 1 && p_.hasG == 0 ?"),
    "g dropped when gk is a vector": ("kernel", "gk[t * dk], log, dk", "gk[t * dk], 0.0f, dk"),
    "g of the first token": (
        "kernel",
        "(item.sequence.first + t) * p_.valueHeads + item.head;\n                float",
        "(item.sequence.first) * p_.valueHeads + item.head;\n                float",
    ),
    "beta of the next head": ("kernel", "Wide(beta_.GetValue(at))", "Wide(beta_.GetValue(at + 1))"),
    "decay of the first token": ("kernel", "decay_[t * dk + lane]", "decay_[lane]"),
    "decay once for each repeat": (
        "kernel",
        "BinaryRepeatParams(1, 1, 1, row, row, 0)",
        "BinaryRepeatParams(1, 1, 1, row, row, 8)",
    ),
    "decay not exponentiated": ("kernel", "AscendC::Exp(decay_, decay_, count);", ""),
    "decay half filled": (
        "kernel",
        "Duplicate(decay_[t * dk], log, dk)",
        "Duplicate(decay_[t * dk], log, dk - kRowGrain)",
    ),
    "correction by lane": (
        "kernel",
        "BinaryRepeatParams(1, 0, 1, row, 1, 0)",
        "BinaryRepeatParams(1, 1, 1, row, 1, 0)",
    ),
    "correction of the first row": (
        "kernel",
        "BinaryRepeatParams(1, 0, 1, row, 1, 0)",
        "BinaryRepeatParams(1, 0, 1, row, 0, 0)",
    ),
    "spread one repeat short": ("kernel", "sums_, rows / 8,", "sums_, rows / 8 - 1,"),
    "all lanes of the last chunk": (
        "kernel",
        "vector[lane], LanesFrom(lane), rows, strides",
        "vector[lane], kLanes, rows, strides",
    ),
    "last chunk left out": ("kernel", "lane = kLanes; lane < p_.keyDim;", "lane = kLanes; lane + kLanes < p_.keyDim;"),
    "sums of one row too few": (
        "kernel",
        "products_, width, rows, 1, 1, folded",
        "products_, width, rows - 1, 1, 1, folded",
    ),
    "sums of half the lanes": (
        "kernel",
        "products_, width, rows, 1, 1, folded",
        "products_, width / 2, rows, 1, 1, folded",
    ),
    "read out before the correction": ("kernel", "Project(rows, wideQuery_[t * dk]);", ""),
    "state carried through its rounded copy": (
        "kernel",
        "storesOut_.EnQue(store);",
        BARRIER
        + "\n        AscendC::Cast(wideState_, store, RoundMode::CAST_NONE, count);\n        "
        + BARRIER
        + "\n        storesOut_.EnQue(store);",
    ),
    "rounded to odd": ("kernel", "kStore = RoundMode::CAST_NONE;", "kStore = RoundMode::CAST_ODD;"),
    "a cast that 310P lacks": ("kernel", "kStore = RoundMode::CAST_NONE;", "kStore = RoundMode::CAST_RINT;"),
    # ---- budget and tiling
    "heads 32 bytes short": (
        "budget",
        "(2 * kElementBytes + (vectorGk ? wide : 0));",
        "(2 * kElementBytes + (vectorGk ? wide : 0)) - 32;",
    ),
    "room for gk forgotten": ("budget", "(2 * kElementBytes + (vectorGk ? wide : 0));", "(2 * kElementBytes);"),
    "states 32 bytes short": (
        "budget",
        "tileRows * (dk + tokens) * kElementBytes;",
        "tileRows * (dk + tokens) * kElementBytes - 32;",
    ),
    "stores 32 bytes short": (
        "budget",
        "budget.stores = tileRows * dk * kElementBytes;",
        "budget.stores = tileRows * dk * kElementBytes - 32;",
    ),
    "rows 32 bytes short": (
        "budget",
        "budget.rows = tokens * tileRows * kElementBytes;",
        "budget.rows = tokens * tileRows * kElementBytes - 32;",
    ),
    "state 32 bytes short": (
        "budget",
        "budget.state = tileRows * dk * wide;",
        "budget.state = tileRows * dk * wide - 32;",
    ),
    "products 32 bytes short": ("budget", "tileRows * lanes * wide;", "tileRows * lanes * wide - 32;"),
    "query 32 bytes short": ("budget", "budget.query = tokens * dk * wide;", "budget.query = tokens * dk * wide - 32;"),
    "key 32 bytes short": ("budget", "budget.key = tokens * dk * wide;", "budget.key = tokens * dk * wide - 32;"),
    "decay 32 bytes short": ("budget", "hasDecay ? tokens * dk * wide : 0", "hasDecay ? tokens * dk * wide - 32 : 0"),
    "value 32 bytes short": (
        "budget",
        "budget.value = tokens * tileRows * wide;",
        "budget.value = tokens * tileRows * wide - 32;",
    ),
    "sums 32 bytes short": ("budget", "budget.sums = tileRows * wide;", "budget.sums = tileRows * wide - 32;"),
    "spread 32 bytes short": ("budget", "tileRows * kBlockBytes;", "tileRows * kBlockBytes - 32;"),
    "a queue counted once": (
        "budget",
        "kDoubled * (heads + states + stores + rows)",
        "kDoubled * (heads + states + stores) + rows",
    ),
    "tiles of 256 rows": ("budget", "kMaxTileRows = 240;", "kMaxTileRows = 256;"),
    "tiles of 8 rows": ("budget", "kRowGrain = 16;", "kRowGrain = 8;"),
    "four tokens at most": ("budget", "kMaxTokens = 8;", "kMaxTokens = 4;"),
    "the framework's bytes used": ("budget", "kReservedUbBytes = 8 * 1024;", "kReservedUbBytes = 0;"),
    "kernel forgets gk in its carve-up": (
        "kernel",
        "p_.tileRows, hasDecay_, p_.gkMode == 2);",
        "p_.tileRows, hasDecay_, false);",
    ),
    "host reports 32 bytes less": (
        "tiling",
        "hasDecay, vectorGk).Total();\n    tiling->hasG",
        "hasDecay, vectorGk).Total() - 32;\n    tiling->hasG",
    ),
    "host forgets gk in its budget": (
        "tiling",
        "tileRows, hasDecay, vectorGk).Total();\n    tiling->hasG",
        "tileRows, hasDecay, false).Total();\n    tiling->hasG",
    ),
    "tiles rounded down": ("tiling", "(dv + tileRows - 1) / tileRows", "dv / tileRows"),
    "g where there is none": ("tiling", "tiling->hasG = g != nullptr;", "tiling->hasG = 1;"),
    "gk scalar taken for a vector": ("tiling", "(vectorGk ? 2 : 1)", "2"),
    "padding switched on": ("tiling", "usePadSlot != nullptr && *usePadSlot;", "true;"),
    "DK not a multiple of 16 taken": ("tiling", "keyDim % rgdr::kRowGrain == 0 && valueDim", "valueDim"),
    "DV not a multiple of 16 taken": ("tiling", "== 0 && valueDim % rgdr::kRowGrain == 0,", "== 0,"),
    "NV not a multiple of NK taken": ("tiling", "valueHeads % keyHeads == 0,", "true,"),
    "fp32 pool taken": (
        "tiling",
        'read.Required(STATE, "state", element);',
        'read.Required(STATE, "state", context->GetInputDesc(STATE)->GetDataType());',
    ),
    "transposed pool taken": ("tiling", "gert::Shape({slots, valueHeads, valueDim, keyDim}),", "*state,"),
    "key of another shape taken": ("tiling", "read.Expect(*key == *query,", "read.Expect(true,"),
    "too few indices taken": ("tiling", ": indices->GetDim(0) == tokens,", ": true,"),
}

# Not faults: the same answer and the same accesses.
EQUIVALENT = {
    "CopyIn(following) after Compute(current)": "the prefetch is lost, and only time with it; the twin has no clock",
    "SetBlockDim(cores) with fewer items than cores": "the cores without items do nothing",
    "SetBlockDim(1)": "one core does all items in turn",
    "muls by scale left out when scale is 1": "multiplies by one",
    "kMostKeyDim taken out of the tiling": "the unified buffer of both chips refuses such a DK first",
    "near = true in Clashes": "only the short cut is lost: the full comparison decides",
    "PipeBarrier<PIPE_ALL> for PipeBarrier<PIPE_V>": "more order than needed; test_counts sees the waits",
}


def body(name: str, text: str) -> str:
    """The text without what must stand outside of a namespace."""
    kept = [line for line in text.splitlines() if not line.startswith(("#pragma once", "#include"))]
    return f"// ---- {name}\n" + "\n".join(kept) + "\n"


def main(target: str, part: str, parts: str) -> None:
    sources = {key: (PACKAGE / path).read_text() for key, path in FILES.items()}
    declarations = body("tiling.h", (PACKAGE / "op_host/recurrent_gated_delta_rule_tiling.h").read_text())
    out = ['#include "mutants.h"', "#include <string>", '#include "tiling/platform/platform_ascendc.h"', ""]
    entries = []
    # What a mutant does not change it takes from the first namespace, which has no fault: that halves the compile time.
    for number, (name, (file, old, new)) in enumerate([("none", ("budget", "", "")), *MUTANTS.items()]):
        if name != "none":
            found = sources[file].count(old)
            if found != 1:
                raise SystemExit(f"mutant {name!r}: its text occurs {found} times in {FILES[file]}, expected once")
            if number % int(parts) != int(part):
                continue
        changed = dict(sources)
        if old:
            changed[file] = sources[file].replace(old, new)
        space = f"mutant_{part}_{number:03d}"
        out += [f"namespace {space} {{", body("budget", changed["budget"])]
        kernel = tiling = f"mutant_{part}_000"
        if file in ("budget", "kernel"):
            out += [body("kernel", changed["kernel"]), "RGDR_MUTANT_ENTRY"]
            kernel = space
        if file in ("budget", "tiling"):
            out += [declarations, body("tiling", changed["tiling"])]
            tiling = space
        out.append(f"}}  // namespace {space}\n")
        entries.append(f'{{"{name}", {tiling}::optiling::TileRecurrentGatedDeltaRule, {kernel}::entry}},')
    out.append(f"const std::vector<Mutant>& mutants_{part}() {{")
    out.append("static const std::vector<Mutant> all = {\n" + "\n".join(entries) + "\n};\nreturn all;\n}")
    Path(target).write_text("\n".join(out) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
