// The checks of one call, for callers without Python: everything that must hold before anything is written.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "core.hpp"

namespace qwen_npu {

// Integers as they come from a graph: 32 or 64 bits.
struct Integers {
  const void* data = nullptr;
  bool wide = false;
  int64_t at(int64_t i) const {
    return wide ? static_cast<const int64_t*>(data)[i] : static_cast<const int32_t*>(data)[i];
  }
};

struct Plan {
  std::vector<int64_t> start, length, read, write;
  std::vector<int64_t> owner;  // per slot: the sequence that writes it, or -1
};

// Fills `plan`, or returns what is wrong (empty: nothing). Reads follow the op's contract: with `accepted` a sequence goes
// on from the slot at position accepted-1 of its row (0 reads like 1). `row_width` 0: flat indices of `tokens` entries.
QWEN_NPU_EXPORT std::string plan_recurrent(Plan& plan, int64_t tokens, int64_t slots, int64_t sequences, Integers lengths,
                           Integers indices, int64_t row_width, const Integers* accepted, int64_t max_length);

// Sequence i reads state i and leaves its last state there; any length, 0 too.
std::string plan_chunk(Plan& plan, int64_t tokens, int64_t sequences, Integers lengths);

}  // namespace qwen_npu
