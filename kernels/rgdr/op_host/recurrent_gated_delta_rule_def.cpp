// The op as the graph sees it. Each position of the type lists is one combination that the kernel is compiled for:
// lengths and slot indices of 32 or 64 bits (graphs produce 64 by default, and a cast would cost a node a step).
#include "register/op_def_registry.h"

#include "recurrent_gated_delta_rule_infershape.h"
#include "recurrent_gated_delta_rule_tiling.h"

namespace ops {

class RecurrentGatedDeltaRule : public OpDef {
  public:
    explicit RecurrentGatedDeltaRule(const char* name) : OpDef(name) {
        Declare(*this, ge::DT_FLOAT16);
        this->Attr("scale_value").AttrType(OPTIONAL).Float(1.0f);
        this->Attr("use_pad_slot").AttrType(OPTIONAL).Bool(false);
        this->Attr("pad_slot").AttrType(OPTIONAL).Int(0);
        this->SetInferShape(InferRecurrentGatedDeltaRuleShape);
        this->SetInferDataType(InferRecurrentGatedDeltaRuleType);
        this->AICore().SetTiling(optiling::TileRecurrentGatedDeltaRule);
        this->AICore().AddConfig("ascend310p");

        OpAICoreConfig bfloat16;
        Declare(bfloat16, ge::DT_BF16);
        this->AICore().AddConfig("ascend910b", bfloat16);
    }

  private:
    template <class Target>
    static void Declare(Target& op, ge::DataType element) {
        const std::vector<ge::DataType> elements(4, element);
        const std::vector<ge::DataType> wide(4, ge::DT_FLOAT);
        const std::vector<ge::DataType> counts(4, ge::DT_INT32);
        const std::vector<ge::DataType> lengths = {ge::DT_INT32, ge::DT_INT32, ge::DT_INT64, ge::DT_INT64};
        const std::vector<ge::DataType> indices = {ge::DT_INT32, ge::DT_INT64, ge::DT_INT32, ge::DT_INT64};
        const auto input = [&op](const char* name, Option option, const std::vector<ge::DataType>& types) {
            const std::vector<ge::Format> formats(types.size(), ge::FORMAT_ND);
            op.Input(name).ParamType(option).DataType(types).Format(formats).UnknownShapeFormat(formats);
        };
        input("query", REQUIRED, elements);
        input("key", REQUIRED, elements);
        input("value", REQUIRED, elements);
        input("beta", REQUIRED, elements);
        input("state", REQUIRED, elements);
        input("actual_seq_lengths", REQUIRED, lengths);
        input("ssm_state_indices", REQUIRED, indices);
        input("g", OPTIONAL, wide);
        input("gk", OPTIONAL, wide);
        input("num_accepted_tokens", OPTIONAL, counts);
        const std::vector<ge::Format> formats(elements.size(), ge::FORMAT_ND);
        op.Output("out").ParamType(REQUIRED).DataType(elements).Format(formats).UnknownShapeFormat(formats);
        // The same name as an input: one buffer, written in place. Slots that no token writes stay what they are only then.
        op.Output("state").ParamType(REQUIRED).DataType(elements).Format(formats).UnknownShapeFormat(formats);
    }
};

OP_ADD(RecurrentGatedDeltaRule);

}  // namespace ops
