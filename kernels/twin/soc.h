// What the two chips have and lack, as far as the kernel subset goes (public API documentation).
#pragma once

#include <cstdint>

namespace twin {

struct Soc {
    const char* name;          // the compute unit as the build names it
    uint32_t ub_bytes;         // unified buffer of one core
    uint32_t reserved_bytes;   // kept by the framework at the end of it
    uint32_t cores;            // that can be scheduled for a vector kernel
    uint32_t live_tensors;     // of one position at one time
    bool has_padded_copy;      // DataCopyPad
    bool has_bfloat16;

    uint32_t user_ub_bytes() const { return ub_bytes - reserved_bytes; }
};

inline const Soc& ascend310p() {
    static const Soc soc{"ascend310p", 256 * 1024, 8 * 1024, 8, 8, false, false};
    return soc;
}

inline const Soc& ascend910b() {
    static const Soc soc{"ascend910b", 192 * 1024, 8 * 1024, 40, 4, true, true};
    return soc;
}

constexpr uint32_t block_bytes = 32;    // data block: alignment of UB operands, grain of copies
constexpr uint32_t repeat_bytes = 256;  // one repeat of a vector instruction
constexpr uint32_t line_bytes = 64;     // cache line of a scalar store to global memory
constexpr uint32_t max_buffers = 64;    // InitBuffer calls count their buffers against this
constexpr uint32_t max_flag_id = 7;

}  // namespace twin
