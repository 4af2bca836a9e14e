// What the host tells the kernel. Plain data, the same bytes on both sides.
#pragma once

#include <cstdint>

struct RecurrentGatedDeltaRuleTilingData {
    int64_t padSlot;       // a sequence whose slots are all this one is skipped, if usePadSlot
    uint64_t slots;        // of the pool
    uint32_t tokens;       // T, of all sequences
    uint32_t sequences;    // B
    uint32_t keyHeads;     // NK
    uint32_t valueHeads;   // NV
    uint32_t keyDim;       // DK
    uint32_t valueDim;     // DV
    uint32_t rowWidth;     // W of slot rows [B, W]; 0 = flat slot indices [T]
    uint32_t tileRows;     // rows of the state that are worked on together
    uint32_t tiles;        // of one head
    uint32_t mostTokens;   // of one sequence, sizes the buffers
    uint32_t ubBytes;      // what the kernel will carve up; the host has checked that it fits
    uint32_t hasG;
    uint32_t gkMode;       // 0 none, 1 one for each head, 2 one for each lane of a head
    uint32_t hasAccepted;
    uint32_t usePadSlot;
    float scale;
};
