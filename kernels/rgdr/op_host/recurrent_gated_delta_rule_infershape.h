// Shapes and types of the outputs.
#pragma once

#include "register/op_def_registry.h"

namespace ops {

ge::graphStatus InferRecurrentGatedDeltaRuleShape(gert::InferShapeContext* context);
ge::graphStatus InferRecurrentGatedDeltaRuleType(gert::InferDataTypeContext* context);

}  // namespace ops
