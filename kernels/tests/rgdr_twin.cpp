// The op package on the twin, as a program: runs the cases of a file, or counts what one shape costs.
//
//   rgdr_twin run CASES RESULTS [soc=ascend310p] [order=forward|backward] [barriers=strict|automatic] [buffers=1|2]
//   rgdr_twin counts [dk=128] [dv=128] [nk=1] [nv=1] [sequences=1] [tokens=1] [g=1] [gk=0] [accepted=0] [rows=0] [soc=..]
//   rgdr_twin definition
//
// `run` writes out, state and a report (JSON text) for each case; `counts` prints one report,
// `definition` the op definition.
#include <cstdlib>
#include <iostream>

#include "generate.h"
#include "harness.h"

namespace {

std::string quoted(const std::string& text) {
    std::string out = "\"";
    for (const char letter : text) {
        if (letter == '"' || letter == '\\') out += '\\';
        if (letter == '\n') out += "\\n";
        else if (static_cast<unsigned char>(letter) >= 0x20) out += letter;
    }
    return out + "\"";
}

std::string report(const cases::Case& c, const twin::Soc& soc, const harness::Result& result) {
    std::ostringstream out;
    out << "{\"case\": " << quoted(c.name) << ", \"soc\": " << quoted(soc.name)
        << ", \"refused\": " << (result.refused ? quoted(result.reason) : "null");
    if (!result.refused) {
        out << ", \"cores\": " << result.cores << ", \"tile_rows\": " << result.tiling.tileRows
            << ", \"tiles\": " << result.tiling.tiles << ", \"planned_ub_bytes\": " << result.tiling.ubBytes
            << ", \"user_ub_bytes\": " << soc.user_ub_bytes() << ", \"unwritten_out\": " << result.unwritten_out
            << ", \"counts\": " << result.counts.json() << ", \"findings\": [";
        const char* comma = "";
        for (const twin::Finding& finding : result.findings.all()) {
            out << comma << quoted(finding.line());
            comma = ", ";
        }
        out << "]";
    }
    out << "}";
    return out.str();
}

class Arguments {
  public:
    Arguments(int count, char** values, int first) {
        for (int i = first; i < count; ++i) {
            const std::string text = values[i];
            const size_t equals = text.find('=');
            if (equals == std::string::npos) throw std::runtime_error("expected name=value, got " + text);
            given_[text.substr(0, equals)] = text.substr(equals + 1);
        }
    }
    std::string text(const std::string& name, const std::string& otherwise) {
        const auto found = given_.find(name);
        if (found == given_.end()) return otherwise;
        const std::string value = found->second;
        given_.erase(found);
        return value;
    }
    int64_t whole(const std::string& name, int64_t otherwise) {
        return std::stoll(text(name, std::to_string(otherwise)));
    }
    std::string choice(const std::string& name, const std::vector<std::string>& allowed) {
        const std::string value = text(name, allowed.front());
        if (std::find(allowed.begin(), allowed.end(), value) == allowed.end())
            throw std::runtime_error(name + "=" + value + " is none of its values; the first is " + allowed.front());
        return value;
    }
    void done() const {
        if (!given_.empty()) throw std::runtime_error("unknown option " + given_.begin()->first);
    }

  private:
    std::map<std::string, std::string> given_;
};

const twin::Soc& soc_of(Arguments& arguments) {
    return arguments.choice("soc", {"ascend310p", "ascend910b"}) == "ascend310p" ? twin::ascend310p()
                                                                                 : twin::ascend910b();
}

int run(const std::string& from, const std::string& to, Arguments arguments) {
    const twin::Soc& soc = soc_of(arguments);
    const bool backward = arguments.choice("order", {"forward", "backward"}) == "backward";
    harness::Settings settings;
    settings.automatic_vector_barriers = arguments.choice("barriers", {"strict", "automatic"}) == "automatic";
    settings.separate_state_out = arguments.choice("buffers", {"1", "2"}) == "2";
    arguments.done();
    if (backward)
        for (uint32_t core = soc.cores; core > 0; --core) settings.core_order.push_back(core - 1);
    std::vector<cases::Case> results;
    for (const cases::Case& c : cases::load(from)) {
        const harness::Result result = harness::run(harness::op_package(), c, soc, settings);
        cases::Case written;
        written.name = c.name;
        const std::string text = report(c, soc, result);
        cases::Array bytes(cases::U8, {static_cast<int64_t>(text.size())});
        std::copy(text.begin(), text.end(), bytes.bytes.begin());
        written.arrays["report"] = bytes;
        if (!result.refused) {
            written.arrays["out"] = result.out;
            written.arrays["state"] = result.state;
        }
        results.push_back(std::move(written));
    }
    cases::save(to, results);
    return 0;
}

int counts(Arguments arguments) {
    const twin::Soc& soc = soc_of(arguments);
    generate::Shape shape;
    shape.dk = arguments.whole("dk", 128);
    shape.dv = arguments.whole("dv", 128);
    shape.key_heads = arguments.whole("nk", 1);
    shape.value_heads = arguments.whole("nv", 1);
    shape.lengths.assign(arguments.whole("sequences", 1), arguments.whole("tokens", 1));
    shape.g = arguments.whole("g", 1) != 0;
    shape.gk = static_cast<int>(arguments.whole("gk", 0));
    shape.accepted = arguments.whole("accepted", 0) != 0;
    shape.row_width = arguments.whole("rows", 0);
    shape.element = soc.has_bfloat16 ? cases::BF16 : cases::F16;
    arguments.done();
    for (const int64_t size : {shape.dk, shape.dv, shape.key_heads, shape.value_heads, shape.lengths.at(0)})
        if (size < 1) throw std::runtime_error("sizes must be positive");
    const cases::Case c = generate::make("counts", shape, 1);
    const harness::Result result = harness::run(harness::op_package(), c, soc);
    std::cout << report(c, soc, result) << "\n";
    return result.refused || !result.findings.empty() ? 1 : 0;
}

// Inputs, outputs and attributes in their order; types as the numbers of ge::DataType, by compute unit.
void print_parameters(const std::vector<std::shared_ptr<ops::OpParamDef>>& all) {
    const char* comma = "";
    for (const auto& one : all) {
        std::cout << comma << "{\"name\": " << quoted(one->name)
                  << ", \"required\": " << (one->option == ops::REQUIRED ? "true" : "false") << ", \"types\": [";
        for (size_t i = 0; i < one->types.size(); ++i) std::cout << (i == 0 ? "" : ", ") << one->types[i];
        std::cout << "]}";
        comma = ", ";
    }
}

int definition() {
    const ops::OpDef& op = *ops::registered().at("RecurrentGatedDeltaRule");
    std::cout << "{\"op\": " << quoted(op.name) << ", \"attributes\": [";
    for (size_t i = 0; i < op.attrs.size(); ++i)
        std::cout << (i == 0 ? "" : ", ") << "{\"name\": " << quoted(op.attrs[i]->name)
                  << ", \"type\": " << quoted(op.attrs[i]->type)
                  << ", \"default\": " << op.attrs[i]->default_value << "}";
    std::cout << "], \"units\": {";
    const char* comma = "";
    for (const auto& [soc, config] : op.core.configs) {
        const ops::Parameters& own = config;
        const ops::Parameters& parameters = own.inputs.empty() ? static_cast<const ops::Parameters&>(op) : own;
        std::cout << comma << quoted(soc) << ": {\"inputs\": [";
        print_parameters(parameters.inputs);
        std::cout << "], \"outputs\": [";
        print_parameters(parameters.outputs);
        std::cout << "]}";
        comma = ", ";
    }
    std::cout << "}}\n";
    return 0;
}

}  // namespace

int main(int count, char** values) {
    try {
        const std::string verb = count > 1 ? values[1] : "";
        if (verb == "run" && count >= 4) return run(values[2], values[3], Arguments(count, values, 4));
        if (verb == "counts") return counts(Arguments(count, values, 2));
        if (verb == "definition") return definition();
        std::cerr << "usage: rgdr_twin run CASES RESULTS [name=value ..]"
                     " | rgdr_twin counts [name=value ..] | rgdr_twin definition\n";
    } catch (const std::exception& error) {
        std::cerr << "rgdr_twin: " << error.what() << "\n";
    }
    return 2;
}
