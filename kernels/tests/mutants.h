// What a generated file of mutants needs around it, and how it hands them over.
#pragma once

#define RGDR_NO_BFLOAT16  // as the build for 310P

#include "harness.h"

struct Mutant {
    const char* name;
    ops::TilingFunction tiling;
    harness::Kernel kernel;  // half, with lengths and indices of 64 bits
};

#define RGDR_REPORT(node, text) (void)(text)

#define RGDR_MUTANT_ENTRY                                                                                             \
    inline void entry(GM_ADDR q, GM_ADDR k, GM_ADDR v, GM_ADDR b, GM_ADDR s, GM_ADDR lengths, GM_ADDR indices,         \
                      GM_ADDR g, GM_ADDR gk, GM_ADDR accepted, GM_ADDR out, GM_ADDR state_out, GM_ADDR,                \
                      GM_ADDR tiling) {                                                                               \
        GET_TILING_DATA_WITH_STRUCT(RecurrentGatedDeltaRuleTilingData, data, tiling);                                 \
        AscendC::TPipe pipe;                                                                                          \
        rgdr::RecurrentGatedDeltaRule<half, int64_t, int64_t> op;                                                     \
        op.Init(q, k, v, b, s, lengths, indices, g, gk, accepted, out, state_out, data, &pipe);                       \
        op.Process();                                                                                                 \
    }

const std::vector<Mutant>& mutants_0();
const std::vector<Mutant>& mutants_1();
