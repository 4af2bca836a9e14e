// The op package as it stands, built for the twin: host functions, and the kernel entry for every combination of types.
#include "harness.h"

namespace {
std::string& refusal() {
    static thread_local std::string text;
    return text;
}
}  // namespace

#define RGDR_REPORT(node, text) (refusal() = std::string(node) + ": " + (text))
#include "../rgdr/op_host/recurrent_gated_delta_rule_def.cpp"
#include "../rgdr/op_host/recurrent_gated_delta_rule_infershape.cpp"
#include "../rgdr/op_host/recurrent_gated_delta_rule_tiling.cpp"

#define DTYPE_QUERY half
#define DTYPE_ACTUAL_SEQ_LENGTHS int32_t
#define DTYPE_SSM_STATE_INDICES int32_t
#define recurrent_gated_delta_rule rgdr_half_32_32
#include "../rgdr/op_kernel/recurrent_gated_delta_rule.cpp"
#undef recurrent_gated_delta_rule
#undef DTYPE_SSM_STATE_INDICES
#define DTYPE_SSM_STATE_INDICES int64_t
#define recurrent_gated_delta_rule rgdr_half_32_64
#include "../rgdr/op_kernel/recurrent_gated_delta_rule.cpp"
#undef recurrent_gated_delta_rule
#undef DTYPE_ACTUAL_SEQ_LENGTHS
#define DTYPE_ACTUAL_SEQ_LENGTHS int64_t
#define recurrent_gated_delta_rule rgdr_half_64_64
#include "../rgdr/op_kernel/recurrent_gated_delta_rule.cpp"
#undef recurrent_gated_delta_rule
#undef DTYPE_SSM_STATE_INDICES
#define DTYPE_SSM_STATE_INDICES int32_t
#define recurrent_gated_delta_rule rgdr_half_64_32
#include "../rgdr/op_kernel/recurrent_gated_delta_rule.cpp"
#undef recurrent_gated_delta_rule
#undef DTYPE_QUERY
#define DTYPE_QUERY bfloat16_t
#define recurrent_gated_delta_rule rgdr_bf16_64_32
#include "../rgdr/op_kernel/recurrent_gated_delta_rule.cpp"
#undef recurrent_gated_delta_rule
#undef DTYPE_SSM_STATE_INDICES
#define DTYPE_SSM_STATE_INDICES int64_t
#define recurrent_gated_delta_rule rgdr_bf16_64_64
#include "../rgdr/op_kernel/recurrent_gated_delta_rule.cpp"
#undef recurrent_gated_delta_rule
#undef DTYPE_ACTUAL_SEQ_LENGTHS
#define DTYPE_ACTUAL_SEQ_LENGTHS int32_t
#define recurrent_gated_delta_rule rgdr_bf16_32_64
#include "../rgdr/op_kernel/recurrent_gated_delta_rule.cpp"
#undef recurrent_gated_delta_rule
#undef DTYPE_SSM_STATE_INDICES
#define DTYPE_SSM_STATE_INDICES int32_t
#define recurrent_gated_delta_rule rgdr_bf16_32_32
#include "../rgdr/op_kernel/recurrent_gated_delta_rule.cpp"

namespace harness {

std::string last_refusal() { return refusal(); }
void forget_refusal() { refusal().clear(); }

const Build& op_package() {
    static const Build build{optiling::TileRecurrentGatedDeltaRule,
                             [](cases::Type element, cases::Type lengths, cases::Type indices) -> Kernel {
                                 static const Kernel kernels[2][2][2] = {{{rgdr_half_32_32, rgdr_half_32_64},
                                                                          {rgdr_half_64_32, rgdr_half_64_64}},
                                                                         {{rgdr_bf16_32_32, rgdr_bf16_32_64},
                                                                          {rgdr_bf16_64_32, rgdr_bf16_64_64}}};
                                 if (element != cases::F16 && element != cases::BF16) return nullptr;
                                 return kernels[element == cases::BF16][lengths == cases::I64][indices == cases::I64];
                             }};
    return build;
}

}  // namespace harness
