// Refuses what can be seen from shapes and types, and fills in the tiling data. What depends on values (lengths, slots,
// accepted) is checked in the kernel, sequence by sequence.
#include "recurrent_gated_delta_rule_tiling.h"

#include <string>

#include "tiling/platform/platform_ascendc.h"

#include "../op_kernel/recurrent_gated_delta_rule_tiling_data.h"
#include "../ub_budget.h"

namespace optiling {
namespace {

constexpr int64_t kMostBlocks = 65535;    // a gap or length of a copy: 16 bits of 32-byte blocks
constexpr int64_t kMostKeyDim = 255 * 8;  // a repeat stride: 8 bits of 32-byte blocks, fp32
constexpr int64_t kMostCount = 0x7fffffff;

std::string Text(const gert::Shape& shape) {
    std::string text = "[";
    for (size_t i = 0; i < shape.GetDimNum(); ++i) {
        text += (i == 0 ? "" : ", ") + std::to_string(shape.GetDim(i));
    }
    return text + "]";
}

// Collects shapes and types; the first thing that is wrong is kept as the reason.
class Reader {
  public:
    explicit Reader(gert::TilingContext* context) : context_(context) {}

    const gert::Shape* Required(size_t index, const char* name, ge::DataType type) {
        const gert::StorageShape* shape = context_->GetInputShape(index);
        const auto* desc = context_->GetInputDesc(index);
        if (shape == nullptr || desc == nullptr) {
            return Fail(std::string(name) + " is missing");
        }
        return Typed(name, shape, desc->GetDataType(), type);
    }

    const gert::Shape* Optional(size_t index, const char* name, ge::DataType type) {
        const gert::StorageShape* shape = context_->GetOptionalInputShape(index);
        const auto* desc = context_->GetOptionalInputDesc(index);
        return shape == nullptr || desc == nullptr ? nullptr : Typed(name, shape, desc->GetDataType(), type);
    }

    const gert::Shape* Integers(size_t index, const char* name) {
        const gert::StorageShape* shape = context_->GetInputShape(index);
        const auto* desc = context_->GetInputDesc(index);
        if (shape == nullptr || desc == nullptr) {
            return Fail(std::string(name) + " is missing");
        }
        if (desc->GetDataType() != ge::DT_INT32 && desc->GetDataType() != ge::DT_INT64) {
            return Fail(std::string(name) + " is neither int32 nor int64");
        }
        return &shape->GetStorageShape();
    }

    void Expect(bool holds, const std::string& otherwise) {
        if (!holds) {
            Fail(otherwise);
        }
    }

    bool Ok() const { return reason_.empty(); }
    const std::string& Reason() const { return reason_; }

  private:
    const gert::Shape* Fail(const std::string& reason) {
        if (reason_.empty()) {
            reason_ = reason;
        }
        return nullptr;
    }
    const gert::Shape* Typed(const char* name, const gert::StorageShape* shape, ge::DataType has, ge::DataType wanted) {
        if (has != wanted) {
            return Fail(std::string(name) + " has data type " + std::to_string(has) + ", expected " +
                        std::to_string(wanted));
        }
        return &shape->GetStorageShape();
    }
    gert::TilingContext* context_;
    std::string reason_;
};

}  // namespace

ge::graphStatus TileRecurrentGatedDeltaRule(gert::TilingContext* context) {
    const auto refuse = [context](const std::string& reason) {
        RGDR_REPORT(context->GetNodeName(), reason.c_str());
        return ge::GRAPH_FAILED;
    };
    platform_ascendc::PlatformAscendC platform(context->GetPlatformInfo());
    const bool small = platform.GetSocVersion() == platform_ascendc::SocVersion::ASCEND310P;
    const ge::DataType element = small ? ge::DT_FLOAT16 : ge::DT_BF16;

    Reader read(context);
    const gert::Shape* query = read.Required(QUERY, "query", element);
    const gert::Shape* key = read.Required(KEY, "key", element);
    const gert::Shape* value = read.Required(VALUE, "value", element);
    const gert::Shape* beta = read.Required(BETA, "beta", element);
    const gert::Shape* state = read.Required(STATE, "state", element);
    const gert::Shape* lengths = read.Integers(LENGTHS, "actual_seq_lengths");
    const gert::Shape* indices = read.Integers(INDICES, "ssm_state_indices");
    const gert::Shape* g = read.Optional(G, "g", ge::DT_FLOAT);
    const gert::Shape* gk = read.Optional(GK, "gk", ge::DT_FLOAT);
    const gert::Shape* accepted = read.Optional(ACCEPTED, "num_accepted_tokens", ge::DT_INT32);
    if (!read.Ok()) {
        return refuse(read.Reason());
    }

    read.Expect(query->GetDimNum() == 3, "query is " + Text(*query) + ", expected [T, NK, DK]");
    read.Expect(*key == *query, "key is " + Text(*key) + ", expected the shape of query, " + Text(*query));
    read.Expect(value->GetDimNum() == 3, "value is " + Text(*value) + ", expected [T, NV, DV]");
    read.Expect(lengths->GetDimNum() == 1, "actual_seq_lengths is " + Text(*lengths) + ", expected [B]");
    read.Expect(indices->GetDimNum() == 1 || indices->GetDimNum() == 2,
                "ssm_state_indices is " + Text(*indices) + ", expected [T] or [B, W]");
    if (!read.Ok()) {
        return refuse(read.Reason());
    }
    const int64_t tokens = query->GetDim(0), keyHeads = query->GetDim(1), keyDim = query->GetDim(2);
    const int64_t valueHeads = value->GetDim(1), valueDim = value->GetDim(2);
    const int64_t sequences = lengths->GetDim(0);
    const int64_t slots = state->GetDimNum() == 4 ? state->GetDim(0) : 0;
    const bool rows = indices->GetDimNum() == 2;
    for (const int64_t dim : {tokens, keyHeads, keyDim, valueHeads, valueDim, sequences, slots}) {
        read.Expect(dim >= 1 && dim <= kMostCount,
                    "a dimension is " + std::to_string(dim) + "; query " + Text(*query) + ", value " + Text(*value) +
                        ", state " + Text(*state) + ", actual_seq_lengths " + Text(*lengths));
    }
    if (!read.Ok()) {
        return refuse(read.Reason());
    }
    read.Expect(*state == gert::Shape({slots, valueHeads, valueDim, keyDim}),
                "state is " + Text(*state) + ", expected [slots, NV, DV, DK] with NV " + std::to_string(valueHeads) +
                    ", DV " + std::to_string(valueDim) + ", DK " + std::to_string(keyDim));
    read.Expect(value->GetDim(0) == tokens,
                "value has " + std::to_string(value->GetDim(0)) + " tokens, query " + std::to_string(tokens));
    read.Expect(*beta == gert::Shape({tokens, valueHeads}), "beta is " + Text(*beta) + ", expected [T, NV]");
    read.Expect(valueHeads % keyHeads == 0, "NV " + std::to_string(valueHeads) + " is not a multiple of NK " +
                                                std::to_string(keyHeads));
    read.Expect(keyDim % rgdr::kRowGrain == 0 && valueDim % rgdr::kRowGrain == 0,
                "DK " + std::to_string(keyDim) + " and DV " + std::to_string(valueDim) +
                    " must be multiples of 16: copies move whole blocks of 32 bytes");
    read.Expect(keyDim <= kMostKeyDim, "DK " + std::to_string(keyDim) + " is more than " + std::to_string(kMostKeyDim));
    const auto blocks = [](int64_t elements, size_t bytes) { return elements * int64_t(bytes) / rgdr::kBlockBytes; };
    read.Expect(blocks(keyHeads * keyDim, rgdr::kElementBytes) <= kMostBlocks &&
                    blocks(valueHeads * valueDim, rgdr::kElementBytes) <= kMostBlocks &&
                    (gk == nullptr || blocks(valueHeads * keyDim, sizeof(float)) <= kMostBlocks),
                "a token of query, value or gk is longer than a copy can step over");
    read.Expect(rows ? indices->GetDim(0) == sequences && indices->GetDim(1) >= 1 : indices->GetDim(0) == tokens,
                "ssm_state_indices is " + Text(*indices) + ", expected [T] = [" + std::to_string(tokens) +
                    "] or [B, W] with B " + std::to_string(sequences));
    read.Expect(!rows || indices->GetDim(1) <= kMostCount, "ssm_state_indices has too long rows");
    const gert::Shape perHead({tokens, valueHeads});
    read.Expect(g == nullptr || *g == perHead, "g is not [T, NV]");
    read.Expect(gk == nullptr || *gk == perHead || *gk == gert::Shape({tokens, valueHeads, keyDim}),
                "gk is neither [T, NV] nor [T, NV, DK]");
    read.Expect(accepted == nullptr || *accepted == gert::Shape({sequences}), "num_accepted_tokens is not [B]");
    if (!read.Ok()) {
        return refuse(read.Reason());
    }

    uint64_t ubBytes = 0;
    platform.GetCoreMemSize(platform_ascendc::CoreMemType::UB, ubBytes);
    const uint64_t userUbBytes = ubBytes - rgdr::kReservedUbBytes;
    const uint32_t cores = small ? platform.GetCoreNumAic() : platform.GetCoreNumAiv();
    const uint32_t mostTokens = tokens < rgdr::kMaxTokens ? static_cast<uint32_t>(tokens) : rgdr::kMaxTokens;
    const bool vectorGk = gk != nullptr && gk->GetDimNum() == 3;
    const bool hasDecay = g != nullptr || gk != nullptr;
    const uint64_t heads = uint64_t(sequences) * uint64_t(valueHeads);
    const uint32_t dk = static_cast<uint32_t>(keyDim), dv = static_cast<uint32_t>(valueDim);
    const uint32_t tileRows = rgdr::TileRows(dk, dv, mostTokens, hasDecay, vectorGk, userUbBytes, heads, cores);
    if (tileRows == 0) {
        const rgdr::Budget least = rgdr::BudgetOf(dk, mostTokens, rgdr::kRowGrain, hasDecay, vectorGk);
        return refuse("DK " + std::to_string(keyDim) + " needs " + std::to_string(least.Total()) +
                      " bytes of unified buffer at least, there are " + std::to_string(userUbBytes));
    }
    const uint32_t tiles = (dv + tileRows - 1) / tileRows;

    auto* tiling = context->GetTilingData<RecurrentGatedDeltaRuleTilingData>();
    const gert::RuntimeAttrs* attrs = context->GetAttrs();
    const float* scale = attrs->GetFloat(SCALE);
    const bool* usePadSlot = attrs->GetBool(USE_PAD_SLOT);
    const int64_t* padSlot = attrs->GetInt(PAD_SLOT);
    tiling->padSlot = padSlot == nullptr ? 0 : *padSlot;
    tiling->slots = static_cast<uint64_t>(slots);
    tiling->tokens = static_cast<uint32_t>(tokens);
    tiling->sequences = static_cast<uint32_t>(sequences);
    tiling->keyHeads = static_cast<uint32_t>(keyHeads);
    tiling->valueHeads = static_cast<uint32_t>(valueHeads);
    tiling->keyDim = dk;
    tiling->valueDim = dv;
    tiling->rowWidth = rows ? static_cast<uint32_t>(indices->GetDim(1)) : 0;
    tiling->tileRows = tileRows;
    tiling->tiles = tiles;
    tiling->mostTokens = mostTokens;
    tiling->ubBytes = rgdr::BudgetOf(dk, mostTokens, tileRows, hasDecay, vectorGk).Total();
    tiling->hasG = g != nullptr;
    tiling->gkMode = gk == nullptr ? 0 : (vectorGk ? 2 : 1);
    tiling->hasAccepted = accepted != nullptr;
    tiling->usePadSlot = usePadSlot != nullptr && *usePadSlot;
    tiling->scale = scale == nullptr ? 1.0f : *scale;

    const uint64_t items = heads * tiles;
    context->SetBlockDim(static_cast<uint32_t>(items < cores ? items : cores));
    context->SetTilingKey(0);
    context->GetWorkspaceSizes(1)[0] = platform.GetLibApiWorkSpaceSize();
    return ge::GRAPH_SUCCESS;
}

}  // namespace optiling
