// The output has the shape and type of `value`, the state those of the state that goes in.
#include "recurrent_gated_delta_rule_infershape.h"

namespace ops {
namespace {
constexpr size_t kValue = 2, kState = 4, kOut = 0, kStateOut = 1;
}

ge::graphStatus InferRecurrentGatedDeltaRuleShape(gert::InferShapeContext* context) {
    const gert::Shape* value = context->GetInputShape(kValue);
    const gert::Shape* state = context->GetInputShape(kState);
    gert::Shape* out = context->GetOutputShape(kOut);
    gert::Shape* stateOut = context->GetOutputShape(kStateOut);
    if (value == nullptr || state == nullptr || out == nullptr || stateOut == nullptr) {
        return ge::GRAPH_FAILED;
    }
    *out = *value;
    *stateOut = *state;
    return ge::GRAPH_SUCCESS;
}

ge::graphStatus InferRecurrentGatedDeltaRuleType(gert::InferDataTypeContext* context) {
    context->SetOutputDataType(kOut, context->GetInputDataType(kValue));
    context->SetOutputDataType(kStateOut, context->GetInputDataType(kState));
    return ge::GRAPH_SUCCESS;
}

}  // namespace ops
