// Puts a case on the twin: the host tiling on a stub context, global memory with its owners, the kernel on every core.
#pragma once

#include "kernel_operator.h"

#include "../rgdr/op_kernel/recurrent_gated_delta_rule_tiling_data.h"
#include "arrays.h"
#include "reference.h"
#include "register/op_def_registry.h"

namespace harness {

using Kernel = void (*)(GM_ADDR, GM_ADDR, GM_ADDR, GM_ADDR, GM_ADDR, GM_ADDR, GM_ADDR, GM_ADDR, GM_ADDR, GM_ADDR,
                        GM_ADDR, GM_ADDR, GM_ADDR, GM_ADDR);

// A build of the op: the tiling function, and the kernel for each combination of types (null = not built).
struct Build {
    ops::TilingFunction tiling = nullptr;
    Kernel (*kernel)(cases::Type element, cases::Type lengths, cases::Type indices) = nullptr;
};

// The op of kernels/rgdr (op_package.cpp).
const Build& op_package();
std::string last_refusal();
void forget_refusal();

inline ge::DataType data_type(cases::Type type) {
    switch (type) {
        case cases::F16: return ge::DT_FLOAT16;
        case cases::BF16: return ge::DT_BF16;
        case cases::F32: return ge::DT_FLOAT;
        case cases::I32: return ge::DT_INT32;
        case cases::I64: return ge::DT_INT64;
        default: return ge::DT_UNDEFINED;
    }
}

inline const std::vector<const char*>& input_names() {  // in the order of the op definition
    static const std::vector<const char*> names = {"query",   "key",     "value", "beta", "state",
                                                   "lengths", "indices", "g",     "gk",   "accepted"};
    return names;
}

inline gert::TilingContext context_of(const cases::Case& c, const twin::Soc& soc) {
    gert::TilingContext context;
    for (size_t index = 0; index < input_names().size(); ++index) {
        if (!c.has(input_names()[index])) continue;
        const cases::Array& array = c.at(input_names()[index]);
        context.shapes[index] = gert::StorageShape(gert::Shape(array.dims));
        context.types[index] = gert::CompileTimeTensorDesc(data_type(array.type));
    }
    context.attrs.add<float>(c.has("scale") ? static_cast<float>(c.at("scale").real(0)) : 1.0f);
    context.attrs.add<bool>(c.has("pad_slot"));
    context.attrs.add<int64_t>(c.has("pad_slot") ? c.at("pad_slot").integer(0) : 0);
    context.platform = fe::PlatFormInfos{soc.name, soc.ub_bytes, soc.cores};
    return context;
}

struct Result {
    bool refused = false;
    std::string reason;
    RecurrentGatedDeltaRuleTilingData tiling{};
    uint32_t cores = 0;
    twin::Findings findings;
    twin::Counts counts;
    cases::Array out, state;
    size_t unwritten_out = 0;  // elements of the output that no core wrote
};

struct Settings {
    bool automatic_vector_barriers = false;
    std::vector<uint32_t> core_order;
    bool separate_state_out = false;  // the graph gave the op two buffers for its state
    int64_t slots_before = 0;         // the pool has so many more slots in front of those of the case, not held in memory
};

// Who may touch what, from the definition of the op, not from the kernel.
inline void set_owners(const cases::Case& c, const reference::Plan& plan, twin::GmTensor& state,
                       twin::GmTensor& state_out, const std::vector<twin::GmTensor*>& inputs, twin::GmTensor& out) {
    const cases::Array& pool = c.at("state");
    const int64_t tokens = c.at("query").dims[0];
    const uint64_t slot_bytes = pool.bytes.size() / pool.dims[0];
    std::vector<int> readers(pool.dims[0], -1), writers(pool.dims[0], -1);
    // Tokens behind the last sequence are nobody's, and yet the kernel must fill their rows.
    std::vector<int> runs(tokens, -1), belongs(tokens, static_cast<int>(plan.verdict.size()));
    for (size_t i = 0; i < plan.verdict.size(); ++i) {
        for (int64_t t = 0; t < plan.length[i]; ++t) {
            belongs[plan.first[i] + t] = static_cast<int>(i);
            if (plan.verdict[i] == reference::Verdict::Compute) runs[plan.first[i] + t] = static_cast<int>(i);
        }
        if (plan.verdict[i] != reference::Verdict::Compute) continue;
        // Several may read one slot; whichever is named, a reader is all that matters for a slot nobody writes.
        readers[plan.read[i]] = static_cast<int>(i);
        for (const int64_t slot : plan.written[i]) writers[slot] = static_cast<int>(i);
    }
    const std::vector<int> nobody(pool.dims[0], -1);
    if (&state == &state_out) {
        state.ownership = twin::Ownership{slot_bytes, readers, writers, "slot"};
    } else {
        state.ownership = twin::Ownership{slot_bytes, readers, nobody, "slot"};
        state_out.ownership = twin::Ownership{slot_bytes, nobody, writers, "slot"};
    }
    for (twin::GmTensor* input : inputs)
        input->ownership = twin::Ownership{input->data.size() / tokens, runs, std::vector<int>(tokens, -1), "token"};
    out.ownership = twin::Ownership{out.data.size() / tokens, std::vector<int>(tokens, -1), belongs, "token"};
}

inline bool several_read_one_slot(const reference::Plan& plan) {
    std::set<int64_t> seen;
    for (size_t i = 0; i < plan.read.size(); ++i)
        if (plan.verdict[i] == reference::Verdict::Compute && !seen.insert(plan.read[i]).second) return true;
    return false;
}

inline Result run(const Build& build, const cases::Case& c, const twin::Soc& soc, const Settings& settings = {}) {
    Result result;
    cases::Case given = c;  // as the op sees it
    given.arrays["state"].dims[0] += settings.slots_before;
    for (size_t i = 0; i < given.at("indices").size() && settings.slots_before != 0; ++i)
        given.arrays["indices"].set_integer(i, c.at("indices").integer(i) + settings.slots_before);
    gert::TilingContext context = context_of(given, soc);
    forget_refusal();
    if (build.tiling(&context) != ge::GRAPH_SUCCESS) {
        result.refused = true;
        result.reason = last_refusal();
        return result;
    }
    std::memcpy(&result.tiling, context.tiling.data(), sizeof result.tiling);
    result.cores = context.block_dim;
    const Kernel kernel = build.kernel(c.at("query").type, c.at("lengths").type, c.at("indices").type);
    if (kernel == nullptr) throw std::runtime_error("no kernel built for the types of case " + c.name);

    twin::Memory memory;
    std::vector<GM_ADDR> inputs(input_names().size(), nullptr);
    std::vector<twin::GmTensor*> by_token;
    twin::GmTensor* state = nullptr;
    for (size_t index = 0; index < inputs.size(); ++index) {
        const std::string name = input_names()[index];
        if (!c.has(name)) continue;
        twin::GmTensor& tensor = memory.add(name, given.at(name).bytes.data(), given.at(name).bytes.size());
        inputs[index] = tensor.data.data();
        if (name == "state") {
            state = &tensor;
            tensor.hidden = static_cast<uint64_t>(settings.slots_before) * (tensor.data.size() / c.at(name).dims[0]);
        }
        const bool of_tokens = name == "query" || name == "key" || name == "value" || name == "beta" || name == "g" ||
                               name == "gk";
        if (of_tokens) by_token.push_back(&tensor);
    }
    const cases::Array& value = c.at("value");
    twin::GmTensor& out = memory.add("out", nullptr, value.bytes.size(), false);
    twin::GmTensor& state_out =
        settings.separate_state_out ? memory.add("state_out", nullptr, state->data.size(), false) : *state;
    const reference::Plan plan = reference::plan_of(c);
    set_owners(c, plan, *state, state_out, by_token, out);
    if (several_read_one_slot(plan)) state->ownership.unit_bytes = 0;  // lineage has room for one reader of a slot

    twin::Options options;
    options.automatic_vector_barriers = settings.automatic_vector_barriers;
    options.core_order = settings.core_order;
    options.expected_ub_bytes = result.tiling.ubBytes;
    std::vector<uint8_t> tiling = context.tiling;
    twin::Launch launch = twin::run(soc, memory, context.block_dim, options, [&] {
        kernel(inputs[0], inputs[1], inputs[2], inputs[3], inputs[4], inputs[5], inputs[6], inputs[7], inputs[8],
               inputs[9], out.data.data(), state_out.data.data(), nullptr, tiling.data());
    });
    result.findings = launch.findings;
    result.counts = launch.counts;
    result.out = cases::Array(value.type, value.dims);
    result.out.bytes = out.data;
    result.state = cases::Array(c.at("state").type, c.at("state").dims);
    result.state.bytes = state_out.data;
    for (const twin::Tag tag : out.tags) result.unwritten_out += tag == twin::undefined_tag;
    return result;
}

}  // namespace harness
