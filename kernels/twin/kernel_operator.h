// What a kernel includes on the device, provided by the twin: the documented names of the subset, nothing more.
#pragma once

#include "copy.h"
#include "vector.h"

#define __aicore__
#define __global__
#define __gm__
#define __ubuf__

using GM_ADDR = uint8_t*;

namespace AscendC {

inline int64_t GetBlockIdx() { return static_cast<int64_t>(twin::core().id); }
inline int64_t GetBlockNum() { return static_cast<int64_t>(twin::core().launch.block_dim); }

}  // namespace AscendC

// The tiling data reaches the kernel as bytes; both sides read them through one struct.
#define REGISTER_TILING_DEFAULT(Type)
#define GET_TILING_DATA_WITH_STRUCT(Type, variable, address) \
    Type variable;                                           \
    std::memcpy(&variable, address, sizeof(Type))
