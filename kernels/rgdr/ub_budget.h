// How the unified buffer of one core is spent. The host tiling chooses the tile with it and the kernel carves the buffer
// up with it: there is no second place that knows a size, so the two cannot disagree.
#pragma once

#include <cstdint>

#if defined(__CCE_AICORE__)
#define RGDR_SHARED __aicore__ inline
#else
#define RGDR_SHARED inline
#endif

namespace rgdr {

constexpr uint32_t kBlockBytes = 32;            // grain of copies, alignment of operands
constexpr uint32_t kElementBytes = 2;           // half or bfloat16
constexpr uint32_t kRowGrain = 16;              // rows of a tile: 16 elements of the output are one block
constexpr uint32_t kMaxTileRows = 240;          // a vector instruction repeats at most 255 times, once for each row
constexpr uint32_t kLanes = 64;                 // fp32 lanes of one repeat
constexpr uint32_t kMaxTokens = 8;              // of one sequence in one call
constexpr uint32_t kReservedUbBytes = 8 * 1024; // the framework's part of the unified buffer
constexpr uint32_t kDoubled = 2;                // buffers of a queue: one is filled while the other is used

// Bytes of each buffer. T = tokens of a sequence at most, R = rows of a tile.
struct Budget {
    uint32_t heads;     // in:  query and key [T, DK] 16 bit, then gk [T, DK] fp32 if it is a vector; doubled
    uint32_t states;    // in:  state [R, DK], then value [T, R], 16 bit; doubled
    uint32_t stores;    // out: state after a token [R, DK] 16 bit; doubled
    uint32_t rows;      // out: output [T, R] 16 bit; doubled
    uint32_t state;     // fp32 [R, DK]
    uint32_t products;  // fp32 [R, min(DK, 64)]
    uint32_t query;     // fp32 [T, DK], scaled
    uint32_t key;       // fp32 [T, DK]
    uint32_t decay;     // fp32 [T, DK], or nothing
    uint32_t value;     // fp32 [T, R]
    uint32_t sums;      // fp32 [R]
    uint32_t spread;    // fp32 [R, 8]: each row's correction in all lanes of a block

    RGDR_SHARED uint32_t Total() const {
        return kDoubled * (heads + states + stores + rows) + state + products + query + key + decay + value + sums +
               spread;
    }
};

RGDR_SHARED Budget BudgetOf(uint32_t dk, uint32_t tokens, uint32_t tileRows, bool hasDecay, bool vectorGk) {
    const uint32_t wide = sizeof(float);
    const uint32_t lanes = dk < kLanes ? dk : kLanes;
    Budget budget;
    budget.heads = tokens * dk * (2 * kElementBytes + (vectorGk ? wide : 0));
    budget.states = tileRows * (dk + tokens) * kElementBytes;
    budget.stores = tileRows * dk * kElementBytes;
    budget.rows = tokens * tileRows * kElementBytes;
    budget.state = tileRows * dk * wide;
    budget.products = tileRows * lanes * wide;
    budget.query = tokens * dk * wide;
    budget.key = tokens * dk * wide;
    budget.decay = hasDecay ? tokens * dk * wide : 0;
    budget.value = tokens * tileRows * wide;
    budget.sums = tileRows * wide;
    budget.spread = tileRows * kBlockBytes;
    return budget;
}

// The rows of a tile: as many as fit, evenly spread over the tiles of a head, fewer if whole heads would leave cores
// without work. 0 = not even the smallest tile fits.
RGDR_SHARED uint32_t TileRows(uint32_t dk, uint32_t dv, uint32_t tokens, bool hasDecay, bool vectorGk,
                              uint64_t userUbBytes, uint64_t heads, uint32_t cores) {
    uint32_t most = dv < kMaxTileRows ? dv : kMaxTileRows;
    while (most >= kRowGrain && BudgetOf(dk, tokens, most, hasDecay, vectorGk).Total() > userUbBytes) {
        most -= kRowGrain;
    }
    if (most < kRowGrain) {
        return 0;
    }
    uint32_t tiles = (dv + most - 1) / most;
    const uint64_t wanted = (cores + heads - 1) / heads;
    if (wanted > tiles) {
        tiles = static_cast<uint32_t>(wanted);
    }
    const uint32_t grains = dv / kRowGrain;
    const uint32_t grainsOfTile = (grains + tiles - 1) / tiles;
    return grainsOfTile * kRowGrain;
}

}  // namespace rgdr
