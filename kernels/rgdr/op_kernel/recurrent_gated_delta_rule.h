// The recurrence on one core. Knows no host types; sizes come from ub_budget.h, dimensions from the tiling data.
//
// Work is cut into items: (sequence, value head, tile of state rows). Rows of a state are independent, so an item runs
// all tokens of its sequence by itself, its state staying in fp32 on the chip from the first token to the last. A core
// has a contiguous run of items. While it computes one, the next item's rows are already being read and the last one's
// are being stored.
//
// The vector unit never waits for a scalar of its own: factors that depend on a row or a lane are operands of vector
// instructions (a stride of 0 reuses them), and the scalars that are used (beta, g) come from the inputs.
#pragma once

#include "kernel_operator.h"

#include "../ub_budget.h"
#include "recurrent_gated_delta_rule_tiling_data.h"

namespace rgdr {

using AscendC::BinaryRepeatParams;
using AscendC::BrcbRepeatParams;
using AscendC::DataCopyParams;
using AscendC::GlobalTensor;
using AscendC::LocalTensor;
using AscendC::RoundMode;
using AscendC::TPosition;

// What differs between the element types.
template <typename T>
struct Element;

template <>
struct Element<half> {
    static constexpr uint16_t kNan = 0x7e00;
    static constexpr RoundMode kStore = RoundMode::CAST_NONE;  // nearest even; the only mode that all chips have
    __aicore__ static inline float Wide(half value) { return static_cast<float>(value); }
};

#if !defined(RGDR_NO_BFLOAT16)
template <>
struct Element<bfloat16_t> {
    static constexpr uint16_t kNan = 0x7fc0;
    static constexpr RoundMode kStore = RoundMode::CAST_RINT;
    __aicore__ static inline float Wide(bfloat16_t value) { return AscendC::ToFloat(value); }
};
#endif

enum class Verdict : uint8_t { COMPUTE, SKIP, FAIL };

struct Sequence {
    Verdict verdict = Verdict::FAIL;
    uint8_t storeMask = 0;            // bit t: no later token of the sequence stores to the same slot
    uint32_t first = 0;               // token
    uint32_t length = 0;              // tokens
    int64_t read = 0;                 // slot
    int64_t slots[kMaxTokens] = {0};  // after each token
};

struct Item {
    Sequence sequence;
    uint32_t head = 0;
    uint32_t row = 0;      // first of its tile
    uint32_t rows = 0;
    uint64_t task = 0;     // number of its (sequence, head)
};

template <typename T, typename LengthT, typename IndexT>
class RecurrentGatedDeltaRule {
  public:
    __aicore__ inline RecurrentGatedDeltaRule() {}

    __aicore__ inline void Init(GM_ADDR query, GM_ADDR key, GM_ADDR value, GM_ADDR beta, GM_ADDR state,
                                GM_ADDR lengths, GM_ADDR indices, GM_ADDR g, GM_ADDR gk, GM_ADDR accepted, GM_ADDR out,
                                GM_ADDR stateOut, const RecurrentGatedDeltaRuleTilingData& tiling,
                                AscendC::TPipe* pipe) {
        p_ = tiling;
        hasDecay_ = p_.hasG != 0 || p_.gkMode != 0;
        const uint64_t tokens = p_.tokens;
        const uint64_t pool = p_.slots * p_.valueHeads * p_.valueDim * p_.keyDim;
        query_.SetGlobalBuffer(reinterpret_cast<__gm__ T*>(query), tokens * p_.keyHeads * p_.keyDim);
        key_.SetGlobalBuffer(reinterpret_cast<__gm__ T*>(key), tokens * p_.keyHeads * p_.keyDim);
        value_.SetGlobalBuffer(reinterpret_cast<__gm__ T*>(value), tokens * p_.valueHeads * p_.valueDim);
        beta_.SetGlobalBuffer(reinterpret_cast<__gm__ T*>(beta), tokens * p_.valueHeads);
        state_.SetGlobalBuffer(reinterpret_cast<__gm__ T*>(state), pool);
        stateOut_.SetGlobalBuffer(reinterpret_cast<__gm__ T*>(stateOut), pool);
        out_.SetGlobalBuffer(reinterpret_cast<__gm__ T*>(out), tokens * p_.valueHeads * p_.valueDim);
        lengths_.SetGlobalBuffer(reinterpret_cast<__gm__ LengthT*>(lengths), p_.sequences);
        const uint64_t indexCount = p_.rowWidth != 0 ? uint64_t(p_.sequences) * p_.rowWidth : tokens;
        indices_.SetGlobalBuffer(reinterpret_cast<__gm__ IndexT*>(indices), indexCount);
        if (p_.hasG != 0) {
            g_.SetGlobalBuffer(reinterpret_cast<__gm__ float*>(g), tokens * p_.valueHeads);
        }
        if (p_.gkMode != 0) {
            const uint64_t lanes = p_.gkMode == 2 ? p_.keyDim : 1;
            gk_.SetGlobalBuffer(reinterpret_cast<__gm__ float*>(gk), tokens * p_.valueHeads * lanes);
        }
        if (p_.hasAccepted != 0) {
            accepted_.SetGlobalBuffer(reinterpret_cast<__gm__ int32_t*>(accepted), p_.sequences);
        }

        const Budget budget = BudgetOf(p_.keyDim, p_.mostTokens, p_.tileRows, hasDecay_, p_.gkMode == 2);
        pipe->InitBuffer(headsIn_, kDoubled, budget.heads);
        pipe->InitBuffer(statesIn_, kDoubled, budget.states);
        pipe->InitBuffer(storesOut_, kDoubled, budget.stores);
        pipe->InitBuffer(rowsOut_, kDoubled, budget.rows);
        pipe->InitBuffer(stateBuf_, budget.state);
        pipe->InitBuffer(productsBuf_, budget.products);
        pipe->InitBuffer(queryBuf_, budget.query);
        pipe->InitBuffer(keyBuf_, budget.key);
        pipe->InitBuffer(valueBuf_, budget.value);
        pipe->InitBuffer(sumsBuf_, budget.sums);
        pipe->InitBuffer(spreadBuf_, budget.spread);
        wideState_ = stateBuf_.Get<float>();
        products_ = productsBuf_.Get<float>();
        wideQuery_ = queryBuf_.Get<float>();
        wideKey_ = keyBuf_.Get<float>();
        wideValue_ = valueBuf_.Get<float>();
        sums_ = sumsBuf_.Get<float>();
        spread_ = spreadBuf_.Get<float>();
        if (hasDecay_) {
            pipe->InitBuffer(decayBuf_, budget.decay);
            decay_ = decayBuf_.Get<float>();
        }
    }

    __aicore__ inline void Process() {
        FillBehind();
        const uint64_t items = uint64_t(p_.sequences) * p_.valueHeads * p_.tiles;
        const uint64_t cores = AscendC::GetBlockNum();
        const uint64_t core = AscendC::GetBlockIdx();
        next_ = items * core / cores;
        end_ = items * (core + 1) / cores;

        Item current;
        Item following;
        bool more = Next(current);
        if (more) {
            CopyIn(current);
        }
        while (more) {
            more = Next(following);
            if (more) {
                CopyIn(following);
            }
            Compute(current);
            current = following;
        }
    }

  private:
    // ---- which sequences may run ---------------------------------------------------------------------------------

    // The token behind a sequence of `length` tokens, as far as there are tokens. Lengths below 1 count as 0.
    __aicore__ inline uint32_t Behind(uint32_t first, int64_t length) {
        if (length < 1) {
            return first;
        }
        const uint64_t end = first + uint64_t(length);
        return end < p_.tokens ? static_cast<uint32_t>(end) : p_.tokens;
    }

    __aicore__ inline int64_t SlotAt(uint32_t i, uint32_t first, uint32_t position) {
        const uint64_t at = p_.rowWidth != 0 ? uint64_t(i) * p_.rowWidth + position : uint64_t(first) + position;
        return indices_.GetValue(at);
    }

    // In the pool, and not the pad slot, which stands alone or not at all.
    __aicore__ inline bool Usable(int64_t slot) {
        return slot >= 0 && uint64_t(slot) < p_.slots && !(p_.usePadSlot != 0 && slot == p_.padSlot);
    }

    // The checks that need no other sequence.
    __aicore__ inline Sequence Examine(uint32_t i, uint32_t first) {
        Sequence s;
        const int64_t length = lengths_.GetValue(i);
        s.first = first;
        s.length = Behind(first, length) - first;
        if (length < 1 || length > int64_t(p_.mostTokens) || length != int64_t(s.length)) {
            return s;
        }
        const uint32_t width = p_.rowWidth != 0 ? p_.rowWidth : s.length;
        if (p_.usePadSlot != 0) {
            uint32_t pads = 0;
            while (pads < width && SlotAt(i, first, pads) == p_.padSlot) {
                ++pads;
            }
            if (pads == width) {
                s.verdict = Verdict::SKIP;
                return s;
            }
        }
        if (s.length > width) {
            return s;
        }
        int64_t accepted = 1;
        if (p_.hasAccepted != 0) {
            accepted = accepted_.GetValue(i);
            if (accepted < 0 || accepted > int64_t(width)) {
                return s;
            }
            accepted = accepted == 0 ? 1 : accepted;
        }
        s.read = SlotAt(i, first, static_cast<uint32_t>(accepted - 1));
        if (!Usable(s.read)) {
            return s;
        }
        for (uint32_t t = 0; t < s.length; ++t) {
            s.slots[t] = SlotAt(i, first, t);
            if (!Usable(s.slots[t])) {
                return s;
            }
            s.storeMask |= 1u << t;
            for (uint32_t earlier = 0; earlier < t; ++earlier) {
                if (s.slots[earlier] == s.slots[t]) {
                    s.storeMask &= ~(1u << earlier);
                }
            }
        }
        s.verdict = Verdict::COMPUTE;
        return s;
    }

    __aicore__ inline bool Writes(const Sequence& s, int64_t slot) {
        for (uint32_t t = 0; t < s.length; ++t) {
            if (s.slots[t] == slot) {
                return true;
            }
        }
        return false;
    }

    // Does another sequence that may run write what `s` writes or reads, or read what it writes?
    __aicore__ inline bool Clashes(uint32_t i, const Sequence& s) {
        int64_t low = s.read;
        int64_t high = s.read;
        for (uint32_t t = 0; t < s.length; ++t) {
            low = s.slots[t] < low ? s.slots[t] : low;
            high = s.slots[t] > high ? s.slots[t] : high;
        }
        uint32_t first = 0;
        for (uint32_t j = 0; j < p_.sequences; ++j) {
            const uint32_t behind = Behind(first, lengths_.GetValue(j));
            const uint32_t width = p_.rowWidth != 0 ? p_.rowWidth : behind - first;
            bool near = false;  // rows of slots mostly lie apart: look closer only where they do not
            for (uint32_t position = 0; position < width && j != i && !near; ++position) {
                const int64_t slot = SlotAt(j, first, position);
                near = slot >= low && slot <= high;
            }
            if (near) {
                const Sequence other = Examine(j, first);
                if (other.verdict == Verdict::COMPUTE) {
                    bool clash = Writes(other, s.read);
                    for (uint32_t t = 0; t < s.length; ++t) {
                        clash = clash || s.slots[t] == other.read || Writes(other, s.slots[t]);
                    }
                    if (clash) {
                        return true;
                    }
                }
            }
            first = behind;
        }
        return false;
    }

    // ---- the run of items ------------------------------------------------------------------------------------------

    // The next item to compute. Rows of sequences that do not run are filled on the way.
    __aicore__ inline bool Next(Item& item) {
        while (next_ < end_) {
            const uint64_t number = next_++;
            item.task = number / p_.tiles;
            item.row = static_cast<uint32_t>(number % p_.tiles) * p_.tileRows;
            item.rows = RowsFrom(item.row);
            item.head = static_cast<uint32_t>(item.task % p_.valueHeads);
            Enter(static_cast<uint32_t>(item.task / p_.valueHeads));
            item.sequence = sequence_;
            if (sequence_.verdict == Verdict::COMPUTE) {
                return true;
            }
            Fill(item, sequence_.verdict == Verdict::FAIL ? Element<T>::kNan : 0);
        }
        return false;
    }

    __aicore__ inline uint32_t RowsFrom(uint32_t row) {
        const uint32_t left = p_.valueDim - row;
        return left < p_.tileRows ? left : p_.tileRows;
    }

    // Makes sequence i the one in `sequence_`; items come in order, so lengths are added up once.
    __aicore__ inline void Enter(uint32_t i) {
        if (entered_ && index_ == i) {
            return;
        }
        for (; before_ < i; ++before_) {
            firstToken_ = Behind(firstToken_, lengths_.GetValue(before_));
        }
        index_ = i;
        entered_ = true;
        sequence_ = Examine(i, firstToken_);
        if (sequence_.verdict == Verdict::COMPUTE && Clashes(i, sequence_)) {
            sequence_.verdict = Verdict::FAIL;
        }
    }

    // ---- copies ------------------------------------------------------------------------------------------------------

    __aicore__ inline uint64_t StateAt(int64_t slot, uint32_t head, uint32_t row) {
        return ((uint64_t(slot) * p_.valueHeads + head) * p_.valueDim + row) * p_.keyDim;
    }

    __aicore__ inline void CopyIn(const Item& item) {
        const uint32_t dk = p_.keyDim;
        const uint32_t length = item.sequence.length;
        if (!copiedIn_ || item.task != copiedTask_) {
            copiedIn_ = true;
            copiedTask_ = item.task;
            const uint32_t keyHead = item.head / (p_.valueHeads / p_.keyHeads);
            const uint64_t at = (uint64_t(item.sequence.first) * p_.keyHeads + keyHead) * dk;
            LocalTensor<T> heads = headsIn_.template AllocTensor<T>();
            const DataCopyParams lanes(length, dk * sizeof(T) / kBlockBytes,
                                       (p_.keyHeads - 1) * dk * sizeof(T) / kBlockBytes, 0);
            AscendC::DataCopy(heads, query_[at], lanes);
            AscendC::DataCopy(heads[p_.mostTokens * dk], key_[at], lanes);
            if (p_.gkMode == 2) {
                const DataCopyParams decays(length, dk * sizeof(float) / kBlockBytes,
                                            (p_.valueHeads - 1) * dk * sizeof(float) / kBlockBytes, 0);
                LocalTensor<float> gk = heads[2 * p_.mostTokens * dk].template ReinterpretCast<float>();
                AscendC::DataCopy(gk, gk_[(uint64_t(item.sequence.first) * p_.valueHeads + item.head) * dk], decays);
            }
            headsIn_.EnQue(heads);
        }
        LocalTensor<T> states = statesIn_.template AllocTensor<T>();
        AscendC::DataCopy(states, state_[StateAt(item.sequence.read, item.head, item.row)], item.rows * dk);
        const uint64_t at = OutAt(item.sequence.first, item.head, item.row);
        AscendC::DataCopy(states[item.rows * dk], value_[at],
                          DataCopyParams(length, item.rows * sizeof(T) / kBlockBytes, TokenGap(item.rows), 0));
        statesIn_.EnQue(states);
    }

    // Value and output lie alike: [T, NV, DV].
    __aicore__ inline uint64_t OutAt(uint32_t token, uint32_t head, uint32_t row) {
        return (uint64_t(token) * p_.valueHeads + head) * p_.valueDim + row;
    }

    // Blocks from the end of a tile's rows in one token to their start in the next.
    __aicore__ inline uint32_t TokenGap(uint32_t rows) {
        return (p_.valueHeads * p_.valueDim - rows) * sizeof(T) / kBlockBytes;
    }

    // Output rows of all tokens of a sequence that does not run.
    __aicore__ inline void Fill(const Item& item, uint16_t bits) {
        LocalTensor<T> rows = Filled(item.rows, bits);
        for (uint32_t t = 0; t < item.sequence.length; ++t) {
            AscendC::DataCopy(out_[OutAt(item.sequence.first + t, item.head, item.row)], rows, item.rows);
        }
        rowsOut_.FreeTensor(rows);
    }

    __aicore__ inline LocalTensor<T> Filled(uint32_t count, uint16_t bits) {
        LocalTensor<T> rows = rowsOut_.template AllocTensor<T>();
        AscendC::Duplicate(rows.template ReinterpretCast<uint16_t>(), bits, count);
        rowsOut_.EnQue(rows);
        return rowsOut_.template DeQue<T>();
    }

    // NaN to the tokens behind the last sequence, where lengths add up to less than T; shared among the cores.
    __aicore__ inline void FillBehind() {
        uint32_t behind = 0;
        for (uint32_t i = 0; i < p_.sequences; ++i) {
            behind = Behind(behind, lengths_.GetValue(i));
        }
        if (behind == p_.tokens) {
            return;
        }
        const uint64_t pieces = uint64_t(p_.tokens - behind) * p_.valueHeads * p_.tiles;
        const uint64_t cores = AscendC::GetBlockNum();
        const uint64_t core = AscendC::GetBlockIdx();
        LocalTensor<T> rows = Filled(p_.tileRows, Element<T>::kNan);
        for (uint64_t piece = pieces * core / cores; piece < pieces * (core + 1) / cores; ++piece) {
            const uint32_t row = static_cast<uint32_t>(piece % p_.tiles) * p_.tileRows;
            AscendC::DataCopy(out_[OutAt(behind, 0, row) + piece / p_.tiles * p_.valueDim], rows, RowsFrom(row));
        }
        rowsOut_.FreeTensor(rows);
    }

    // ---- arithmetic ---------------------------------------------------------------------------------------------------

    __aicore__ inline void Compute(const Item& item) {
        const uint32_t dk = p_.keyDim;
        const uint32_t length = item.sequence.length;
        AscendC::PipeBarrier<PIPE_V>();
        if (!computed_ || item.task != computedTask_) {
            computed_ = true;
            computedTask_ = item.task;
            PrepareHead(item);
        }
        LocalTensor<T> states = statesIn_.template DeQue<T>();
        AscendC::Cast(wideState_, states, RoundMode::CAST_NONE, item.rows * dk);
        AscendC::Cast(wideValue_, states[item.rows * dk], RoundMode::CAST_NONE, length * item.rows);
        statesIn_.FreeTensor(states);
        AscendC::PipeBarrier<PIPE_V>();

        LocalTensor<T> rows = rowsOut_.template AllocTensor<T>();
        for (uint32_t t = 0; t < length; ++t) {
            Step(item, t);
            AscendC::Cast(rows[t * item.rows], sums_, Element<T>::kStore, item.rows);
            if ((item.sequence.storeMask >> t & 1) != 0) {
                Store(item, t);
            }
        }
        rowsOut_.EnQue(rows);
        rows = rowsOut_.template DeQue<T>();
        AscendC::DataCopy(out_[OutAt(item.sequence.first, item.head, item.row)], rows,
                          DataCopyParams(length, item.rows * sizeof(T) / kBlockBytes, 0, TokenGap(item.rows)));
        rowsOut_.FreeTensor(rows);
    }

    // Query (scaled), key and the factor exp(g + gk) of every lane, for all tokens of the sequence.
    __aicore__ inline void PrepareHead(const Item& item) {
        const uint32_t dk = p_.keyDim;
        const uint32_t count = item.sequence.length * dk;
        LocalTensor<T> heads = headsIn_.template DeQue<T>();
        AscendC::Cast(wideQuery_, heads, RoundMode::CAST_NONE, count);
        AscendC::Cast(wideKey_, heads[p_.mostTokens * dk], RoundMode::CAST_NONE, count);
        if (hasDecay_) {
            for (uint32_t t = 0; t < item.sequence.length; ++t) {
                const uint64_t at = uint64_t(item.sequence.first + t) * p_.valueHeads + item.head;
                float log = p_.hasG != 0 ? g_.GetValue(at) : 0.0f;
                if (p_.gkMode == 2) {
                    LocalTensor<float> gk = heads[2 * p_.mostTokens * dk].template ReinterpretCast<float>();
                    AscendC::Adds(decay_[t * dk], gk[t * dk], log, dk);
                } else {
                    log += p_.gkMode == 1 ? gk_.GetValue(at) : 0.0f;
                    AscendC::Duplicate(decay_[t * dk], log, dk);
                }
            }
        }
        headsIn_.FreeTensor(heads);
        AscendC::PipeBarrier<PIPE_V>();
        AscendC::Muls(wideQuery_, wideQuery_, p_.scale, count);
        if (hasDecay_) {
            AscendC::Exp(decay_, decay_, count);
        }
    }

    __aicore__ inline uint32_t LanesFrom(uint32_t lane) {
        const uint32_t left = p_.keyDim - lane;
        return left < kLanes ? left : kLanes;
    }

    // One token: decay, correct, read out. Leaves the read-out of each row in sums_.
    __aicore__ inline void Step(const Item& item, uint32_t t) {
        const uint32_t dk = p_.keyDim;
        const uint32_t rows = item.rows;
        const uint32_t row = dk * sizeof(float) / kBlockBytes;
        if (hasDecay_) {
            for (uint32_t lane = 0; lane < dk; lane += kLanes) {
                AscendC::Mul(wideState_[lane], wideState_[lane], decay_[t * dk + lane], LanesFrom(lane), rows,
                             BinaryRepeatParams(1, 1, 1, row, row, 0));
            }
            AscendC::PipeBarrier<PIPE_V>();
        }
        Project(rows, wideKey_[t * dk]);
        AscendC::Sub(sums_, wideValue_[t * rows], sums_, rows);
        AscendC::PipeBarrier<PIPE_V>();
        const uint64_t at = uint64_t(item.sequence.first + t) * p_.valueHeads + item.head;
        AscendC::Muls(sums_, sums_, Element<T>::Wide(beta_.GetValue(at)), rows);
        AscendC::PipeBarrier<PIPE_V>();
        AscendC::Brcb(spread_, sums_, rows / 8, BrcbRepeatParams(1, 8));
        AscendC::PipeBarrier<PIPE_V>();
        for (uint32_t lane = 0; lane < dk; lane += kLanes) {
            AscendC::MulAddDst(wideState_[lane], spread_, wideKey_[t * dk + lane], LanesFrom(lane), rows,
                               BinaryRepeatParams(1, 0, 1, row, 1, 0));
        }
        AscendC::PipeBarrier<PIPE_V>();
        Project(rows, wideQuery_[t * dk]);
    }

    // sums_[r] = state row r times `vector`; the products of all lanes are folded to 64 before they are added up.
    __aicore__ inline void Project(uint32_t rows, const LocalTensor<float>& vector) {
        const uint32_t row = p_.keyDim * sizeof(float) / kBlockBytes;
        const uint32_t width = LanesFrom(0);
        const uint32_t folded = width * sizeof(float) / kBlockBytes;
        const BinaryRepeatParams strides(1, 1, 1, folded, row, 0);
        AscendC::Mul(products_, wideState_, vector, width, rows, strides);
        AscendC::PipeBarrier<PIPE_V>();
        for (uint32_t lane = kLanes; lane < p_.keyDim; lane += kLanes) {
            AscendC::MulAddDst(products_, wideState_[lane], vector[lane], LanesFrom(lane), rows, strides);
            AscendC::PipeBarrier<PIPE_V>();
        }
        AscendC::WholeReduceSum(sums_, products_, width, rows, 1, 1, folded);
        AscendC::PipeBarrier<PIPE_V>();
    }

    // The rows as they stand after token t go to its slot, rounded; the fp32 ones go on.
    __aicore__ inline void Store(const Item& item, uint32_t t) {
        const uint32_t count = item.rows * p_.keyDim;
        LocalTensor<T> store = storesOut_.template AllocTensor<T>();
        AscendC::Cast(store, wideState_, Element<T>::kStore, count);
        storesOut_.EnQue(store);
        store = storesOut_.template DeQue<T>();
        AscendC::DataCopy(stateOut_[StateAt(item.sequence.slots[t], item.head, item.row)], store, count);
        storesOut_.FreeTensor(store);
    }

    RecurrentGatedDeltaRuleTilingData p_;
    bool hasDecay_ = false;

    GlobalTensor<T> query_, key_, value_, beta_, state_, stateOut_, out_;
    GlobalTensor<LengthT> lengths_;
    GlobalTensor<IndexT> indices_;
    GlobalTensor<float> g_, gk_;
    GlobalTensor<int32_t> accepted_;

    AscendC::TQue<TPosition::VECIN, kDoubled> headsIn_, statesIn_;
    AscendC::TQue<TPosition::VECOUT, kDoubled> storesOut_, rowsOut_;
    AscendC::TBuf<TPosition::VECCALC> stateBuf_, productsBuf_, queryBuf_, keyBuf_, decayBuf_, valueBuf_, sumsBuf_,
        spreadBuf_;
    LocalTensor<float> wideState_, products_, wideQuery_, wideKey_, decay_, wideValue_, sums_, spread_;

    uint64_t next_ = 0, end_ = 0;      // items of this core
    Sequence sequence_;                // of the item that Next looked at last
    uint32_t index_ = 0, before_ = 0, firstToken_ = 0;
    bool entered_ = false;
    uint64_t copiedTask_ = 0, computedTask_ = 0;
    bool copiedIn_ = false, computed_ = false;
};

}  // namespace rgdr
