// The host tiling on a stub context, for every shape: what it plans is what the kernel carves up, to the byte, and fits;
// otherwise it refuses. And what it must refuse.
#include "check.h"
#include "generate.h"
#include "harness.h"

#include "../rgdr/ub_budget.h"

namespace {

using cases::Case;

// Only shapes and types; the arrays stay empty.
Case shapes(int64_t dk, int64_t dv, int64_t nv, int64_t tokens, int64_t sequences, int gk, cases::Type element) {
    Case c;
    c.name = "DK " + std::to_string(dk) + ", DV " + std::to_string(dv) + ", NV " + std::to_string(nv);
    const auto put = [&](const char* key, cases::Type type, std::vector<int64_t> dims) {
        cases::Array array;
        array.type = type;
        array.dims = std::move(dims);
        c.arrays[key] = std::move(array);
    };
    put("query", element, {tokens, 1, dk});
    put("key", element, {tokens, 1, dk});
    put("value", element, {tokens, nv, dv});
    put("beta", element, {tokens, nv});
    put("state", element, {3, nv, dv, dk});
    put("lengths", cases::I32, {sequences});
    put("indices", cases::I32, {tokens});
    put("g", cases::F32, {tokens, nv});
    if (gk == 1) put("gk", cases::F32, {tokens, nv});
    if (gk == 2) put("gk", cases::F32, {tokens, nv, dk});
    return c;
}

// The sum of the buffers, written down a second time.
uint64_t bytes_by_hand(uint64_t dk, uint64_t tokens, uint64_t rows, bool vector_gk) {
    const uint64_t doubled = tokens * dk * 2 * 2 + (vector_gk ? tokens * dk * 4 : 0)  // query, key, gk
                             + rows * dk * 2 + rows * tokens * 2                      // state and value in
                             + rows * dk * 2                                          // state out
                             + tokens * rows * 2;                                     // output
    const uint64_t single = rows * dk * 4 + rows * std::min<uint64_t>(dk, 64) * 4     // state, products
                            + 3 * tokens * dk * 4                                     // query, key, decay
                            + tokens * rows * 4 + rows * 4 + rows * 32;               // value, sums, spread
    return 2 * doubled + single;
}

// The kernel's Init on one core, with a sequence that fails at once: nothing else happens.
twin::Launch carve_up(const gert::TilingContext& context, const Case& c, const twin::Soc& soc) {
    RecurrentGatedDeltaRuleTilingData tiling;
    std::memcpy(&tiling, context.tiling.data(), sizeof tiling);
    const std::vector<int32_t> lengths(1, 1), indices(1, -1);
    const std::vector<uint8_t> nothing(64);
    twin::Memory memory;
    twin::GmTensor& input = memory.add("unread", nothing.data(), nothing.size());
    twin::GmTensor& length = memory.add("lengths", lengths.data(), 4);
    twin::GmTensor& index = memory.add("indices", indices.data(), 4);
    const uint64_t out_bytes = c.at("value").size() * 2;
    twin::GmTensor& out = memory.add("out", nullptr, out_bytes, false);
    twin::Options options;
    options.expected_ub_bytes = tiling.ubBytes;
    std::vector<uint8_t> data = context.tiling;
    const harness::Kernel kernel = harness::op_package().kernel(c.at("query").type, cases::I32, cases::I32);
    uint8_t* any = input.data.data();
    twin::Launch launch = twin::run(soc, memory, 1, options, [&] {
        kernel(any, any, any, any, any, length.data.data(), index.data.data(), any, any, any, out.data.data(), any,
               nullptr, data.data());
    });
    for (uint64_t i = 0; i < out_bytes; i += 2)
        if (!std::isnan(c.at("query").type == cases::F16 ? twin::Number<half>::load(&out.data[i])
                                                         : twin::Number<bfloat16_t>::load(&out.data[i]))) {
            CHECK(false, c.name + ": an output row is not NaN");
            break;
        }
    return launch;
}

void every_shape(const twin::Soc& soc) {
    const cases::Type element = soc.has_bfloat16 ? cases::BF16 : cases::F16;
    size_t fits = 0, refused = 0;
    double fullest = 0;
    for (const int64_t nv : {1, 2, 4, 8, 16, 32, 48, 64})
        for (int64_t dk = 16; dk <= 256; dk += 16)
            for (int64_t dv = 16; dv <= 256; dv += 16)
                for (const int64_t tokens : {1, 8}) {
                    const int gk = tokens == 8 ? static_cast<int>((dk + dv + nv) / 16 % 3) : 0;
                    const Case c = shapes(dk, dv, nv, tokens, 1, gk, element);
                    gert::TilingContext context = harness::context_of(c, soc);
                    if (harness::op_package().tiling(&context) != ge::GRAPH_SUCCESS) {
                        ++refused;
                        CHECK(bytes_by_hand(dk, tokens, 16, gk == 2) > soc.user_ub_bytes(),
                              c.name + " would fit: " + harness::last_refusal());
                        continue;
                    }
                    ++fits;
                    RecurrentGatedDeltaRuleTilingData t;
                    std::memcpy(&t, context.tiling.data(), sizeof t);
                    const uint64_t bytes = bytes_by_hand(dk, tokens, t.tileRows, gk == 2);
                    fullest = std::max(fullest, static_cast<double>(bytes) / soc.user_ub_bytes());
                    CHECK(t.ubBytes == bytes && bytes <= soc.user_ub_bytes(), c.name);
                    CHECK(t.tileRows % 16 == 0 && t.tileRows >= 16 && t.tileRows <= 240, c.name);
                    CHECK(t.tiles * t.tileRows >= dv && (t.tiles - 1) * t.tileRows < dv, c.name);
                    CHECK(context.block_dim == std::min<uint64_t>(soc.cores, uint64_t(nv) * t.tiles), c.name);
                    // One tile less would not fit, or would leave cores without work.
                    if (t.tiles > 1) {
                        const uint64_t rows = (dv / 16 + t.tiles - 2) / (t.tiles - 1) * 16;
                        const bool too_large = rows > 240 || bytes_by_hand(dk, tokens, rows, gk == 2) > soc.user_ub_bytes();
                        CHECK(too_large || uint64_t(nv) * (t.tiles - 1) < soc.cores, c.name);
                    }
                    const twin::Launch launch = carve_up(context, c, soc);
                    CHECK(launch.findings.empty(), c.name + "\n" + launch.findings.text());
                    CHECK(launch.counts.ub_bytes == t.ubBytes, c.name);
                }
    std::printf("%s: %zu shapes fit, %zu refused; at most %.1f %% of the unified buffer used\n", soc.name, fits, refused,
                fullest * 100);
    CHECK(fits + refused == 8 * 16 * 16 * 2);
}

void refusals() {
    const auto refused = [](Case c, const twin::Soc& soc, const std::string& reason) {
        gert::TilingContext context = harness::context_of(c, soc);
        harness::forget_refusal();
        CHECK(harness::op_package().tiling(&context) == ge::GRAPH_FAILED, c.name + " is not refused");
        CHECK(harness::last_refusal().find(reason) != std::string::npos,
              c.name + ": expected \"" + reason + "\" in \"" + harness::last_refusal() + "\"");
        CHECK(context.tiling.empty(), "nothing is planned after a refusal");
    };
    const twin::Soc& small = twin::ascend310p();
    for (int64_t size = 1; size <= 256; ++size) {
        if (size % 16 == 0) continue;
        refused(shapes(size, 32, 4, 2, 1, 0, cases::F16), small, "multiples of 16");
        refused(shapes(32, size, 4, 2, 1, 0, cases::F16), small, "multiples of 16");
    }
    const auto with = [](const char* key, cases::Type type, std::vector<int64_t> dims) {
        Case c = shapes(32, 48, 4, 6, 2, 1, cases::F16);
        c.arrays["accepted"].type = cases::I32;
        c.arrays["accepted"].dims = {2};
        c.arrays[key].type = type;
        c.arrays[key].dims = std::move(dims);
        c.name = key;
        return c;
    };
    {
        gert::TilingContext context = harness::context_of(with("query", cases::F16, {6, 1, 32}), small);
        CHECK(harness::op_package().tiling(&context) == ge::GRAPH_SUCCESS, harness::last_refusal());
    }
    refused(with("query", cases::F16, {6, 32}), small, "[T, NK, DK]");
    refused(with("query", cases::BF16, {6, 1, 32}), small, "data type 27");
    refused(with("key", cases::F16, {6, 2, 32}), small, "the shape of query");
    refused(with("value", cases::F16, {5, 4, 48}), small, "tokens");
    refused(with("value", cases::F16, {6, 192}), small, "[T, NV, DV]");
    refused(with("beta", cases::F32, {6, 4}), small, "beta has data type 0");
    refused(with("beta", cases::F16, {4, 6}), small, "[T, NV]");
    refused(with("state", cases::F32, {3, 4, 48, 32}), small, "state has data type 0");
    refused(with("state", cases::F16, {3, 4, 32, 48}), small, "[slots, NV, DV, DK]");
    refused(with("state", cases::F16, {0, 4, 48, 32}), small, "a dimension is 0");
    refused(with("lengths", cases::F32, {2}), small, "neither int32 nor int64");
    refused(with("lengths", cases::I32, {2, 1}), small, "[B]");
    refused(with("lengths", cases::I32, {0}), small, "a dimension is 0");
    refused(with("indices", cases::I32, {5}), small, "[T] = [6]");
    refused(with("indices", cases::I32, {7}), small, "[T] = [6]");
    refused(with("indices", cases::I32, {3, 4}), small, "with B 2");
    refused(with("indices", cases::I32, {2, 0}), small, "with B 2");
    refused(with("indices", cases::I32, {1, 2, 3}), small, "[T] or [B, W]");
    refused(with("g", cases::F16, {6, 4}), small, "g has data type 1");
    refused(with("g", cases::F32, {6, 4, 32}), small, "g is not");
    refused(with("gk", cases::F32, {6, 4, 48}), small, "gk is neither");
    refused(with("accepted", cases::I64, {2}), small, "num_accepted_tokens has data type 9");
    refused(with("accepted", cases::I32, {6}), small, "num_accepted_tokens is not [B]");
    Case c = with("value", cases::F16, {6, 3, 48});
    c.arrays["beta"].dims = {6, 3};
    c.arrays["g"].dims = c.arrays["gk"].dims = {6, 3};
    c.arrays["state"].dims = {3, 3, 48, 32};
    for (const char* key : {"query", "key"}) c.arrays[key].dims = {6, 2, 32};
    refused(c, small, "NV 3 is not a multiple of NK 2");
    refused(shapes(1024, 16, 1, 8, 1, 0, cases::F16), small, "bytes of unified buffer at least");
    refused(shapes(2048, 16, 1, 1, 1, 0, cases::F16), small, "more than 2040");
    refused(shapes(16, 16, 70000, 1, 1, 0, cases::F16), small, "longer than a copy can step over");
    refused(shapes(32, 32, 4, 2, 1, 0, cases::F16), twin::ascend910b(), "expected 27");
    c = shapes(32, 48, 4, 6, 2, 0, cases::F16);
    c.arrays.erase("beta");
    refused(c, small, "beta is missing");
}

// A tile of the budget's own choice is the largest that fits, for shapes that no table has.
void largest_tile() {
    for (uint32_t dk = 16; dk <= 1024; dk += 48)
        for (uint32_t dv = 16; dv <= 1024; dv += 112) {
            const uint32_t rows = rgdr::TileRows(dk, dv, 8, true, true, 253952, 64, 8);
            if (rows == 0) CHECK(bytes_by_hand(dk, 8, 16, true) > 253952);
            else CHECK(bytes_by_hand(dk, 8, rows, true) <= 253952);
        }
}

void definition() {
    const auto& ops = ops::registered();
    const auto found = ops.find("RecurrentGatedDeltaRule");
    if (!CHECK(found != ops.end())) return;
    const ops::OpDef& op = *found->second;
    CHECK(op.inputs.size() == 10 && op.outputs.size() == 2 && op.attrs.size() == 3);
    for (const auto& input : op.inputs) CHECK(input->types.size() == 4 && input->formats.size() == 4, input->name);
    CHECK(op.outputs[1]->name == op.inputs[4]->name, "the state goes in and out under one name: one buffer");
    CHECK(op.core.tiling == harness::op_package().tiling);
    for (const auto& [soc, config] : op.core.configs) {
        const auto& inputs = config.inputs.empty() ? op.inputs : config.inputs;
        CHECK(inputs[0]->types[0] == (soc == "ascend910b" ? ge::DT_BF16 : ge::DT_FLOAT16), soc);
    }
    gert::InferShapeContext shape;
    shape.inputs.resize(10);
    shape.outputs.resize(2);
    shape.inputs[2] = gert::Shape({5, 4, 48});
    shape.inputs[4] = gert::Shape({9, 4, 48, 32});
    CHECK(op.infer_shape(&shape) == ge::GRAPH_SUCCESS);
    CHECK(shape.outputs[0] == shape.inputs[2] && shape.outputs[1] == shape.inputs[4]);
    gert::InferDataTypeContext type;
    type.inputs.assign(10, ge::DT_FLOAT16);
    type.outputs.assign(2, ge::DT_UNDEFINED);
    CHECK(op.infer_data_type(&type) == ge::GRAPH_SUCCESS);
    CHECK(type.outputs[0] == ge::DT_FLOAT16 && type.outputs[1] == ge::DT_FLOAT16);
}

}  // namespace

int main() {
    every_shape(twin::ascend310p());
    every_shape(twin::ascend910b());
    refusals();
    largest_tile();
    definition();
    return check::done("tiling");
}
