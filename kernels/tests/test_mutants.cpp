// Every mutant of our own op must be found: by a finding of the twin, by a wrong value, or by a refusal that is missing
// or too much. The op without a fault, built the same way, must pass every case.
#include "check.h"
#include "generate.h"
#include "mutants.h"

namespace harness {
std::string last_refusal() { return ""; }
void forget_refusal() {}
}  // namespace harness

namespace {

using cases::Case;
using generate::Shape;

struct Trial {
    Case c;
    bool refused = false;
    reference::Answer answer;
    int64_t slots_before = 0;
};

std::vector<Trial> trials() {
    std::vector<Trial> all;
    const auto add = [&](Case c, bool refused = false) {
        all.push_back(Trial{c, refused, refused ? reference::Answer{} : reference::answer_of(c), 0});
    };
    const auto base = [](std::vector<int64_t> lengths) {
        Shape shape;
        shape.lengths = std::move(lengths);
        shape.length_type = shape.index_type = cases::I64;
        return shape;
    };
    // Small, with most features: several tiles, a last chunk of 16 lanes, rows, accepted, g and gk.
    Shape shape = base({2, 3});
    shape.key_heads = 2;
    shape.value_heads = 4;
    shape.dk = 80;
    shape.dv = 48;
    shape.row_width = 4;
    shape.accepted = true;
    for (const int gk : {2, 1, 0}) {
        shape.gk = gk;
        Case c = generate::make("small gk " + std::to_string(gk), shape, 20 + gk);
        c.arrays["accepted"].set_integer(0, gk == 1 ? 0 : 3);
        c.arrays["accepted"].set_integer(1, 2);
        add(c);
    }
    shape.g = false;
    add(generate::make("no decay", shape, 24));
    shape.gk = 2;
    add(generate::make("gk alone", shape, 25));

    // The pool is the end of one with more than 2^32 elements.
    shape = base({1, 2});
    add(generate::make("far slots", shape, 36));
    all.back().slots_before = int64_t{1} << 25;

    shape = base({8});
    shape.value_heads = 2;
    shape.dk = 32;
    shape.dv = 32;
    shape.gk = 2;
    add(generate::make("eight tokens", shape, 26));
    shape.same_slot = true;
    shape.spare_slots = 0;
    add(generate::make("one slot", shape, 27));

    // One core has two heads of three tiles; the last is shorter.
    shape = base({2});
    shape.key_heads = 2;
    shape.value_heads = 16;
    shape.dk = 256;
    shape.dv = 208;
    shape.gk = 2;
    add(generate::make("several tiles", shape, 28));
    // The largest tile of narrow rows.
    shape = base({1});
    shape.value_heads = 8;
    shape.dk = 16;
    shape.dv = 256;
    add(generate::make("256 rows", shape, 29));
    // Fits into what the chip has, not into what the framework leaves.
    shape.dk = 240;
    shape.dv = 80;
    add(generate::make("one tile too large", shape, 37));

    // Sequences that fail, with the others going on.
    shape = base({2, 3, 2});
    shape.value_heads = 2;
    shape.dk = 32;
    shape.dv = 48;
    shape.accepted = true;
    for (const bool rows : {true, false}) {
        shape.row_width = rows ? 4 : 0;
        const int64_t second = rows ? 4 : 2, third = rows ? 8 : 5;
        Case sound = generate::make("three", shape, 30);
        for (size_t i = 0; i < 3; ++i) sound.arrays["accepted"].set_integer(i, 1);
        for (size_t i = 0; i < sound.at("indices").size(); ++i) sound.arrays["indices"].set_integer(i, static_cast<int64_t>(i));
        const int64_t slots = sound.at("state").dims[0];
        const auto with = [&](const char* what, const char* key, std::vector<std::pair<int64_t, int64_t>> values) {
            Case c = sound;
            c.name = what;
            for (const auto& [at, value] : values) c.arrays[key].set_integer(at, value);
            add(c);
            return c;
        };
        with("slot behind the pool", "indices", {{second + 1, slots}});
        with("negative slot", "indices", {{second + 1, -1}});
        with("64-bit slot", "indices", {{second + 1, (int64_t{1} << 32) + 1}});
        with("too many accepted", "accepted", {{1, rows ? 5 : 4}});
        with("negative accepted", "accepted", {{1, -1}});
        with("none accepted", "accepted", {{1, 0}});
        with("as many accepted as there are", "accepted", {{1, rows ? 4 : 3}});
        with("one written slot in common, the first", "indices", {{0, second + 2}});
        with("one written slot in common, the last", "indices", {{third + 1, second}});
        with("clash with a sequence that fails", "indices", {{0, second}, {second + 2, -1}});
        with("too few tokens", "lengths", {{0, 1}});
        with("too many tokens", "lengths", {{2, 3}});
        with("negative length", "lengths", {{0, -2}});
        with("64-bit length", "lengths", {{1, (int64_t{1} << 32) + 3}});
        with("longer than the row", "lengths", {{0, 0}, {1, 5}});
        Case last = with("too many accepted by the last", "accepted", {{2, rows ? 5 : 3}});
        last.name = "the last longer than its row";
        last.arrays["accepted"].set_integer(2, 1);
        last.arrays["lengths"].set_integer(0, 1);
        last.arrays["lengths"].set_integer(1, 1);
        last.arrays["lengths"].set_integer(2, 5);
        add(last);
        Case common = with("one written slot in common, read by neither", "indices", {{0, second + 2}});
        common.arrays["accepted"].set_integer(0, 2);
        add(common);
        if (rows) {
            Case c = with("reads what another writes", "indices", {{3, third + 1}});
            c.arrays["accepted"].set_integer(0, 4);
            add(c);
            c = with("writes what another reads", "indices", {{third + 3, 0}});
            c.arrays["accepted"].set_integer(2, 4);
            add(c);
        }
        Case pad = sound;
        pad.name = "pads";
        pad.arrays["pad_slot"] = cases::Array(cases::I64, {});
        for (int64_t position = second; position < third; ++position) pad.arrays["indices"].set_integer(position, 0);
        for (size_t position = 0; position < static_cast<size_t>(second); ++position)
            pad.arrays["indices"].set_integer(position, third + 1 + static_cast<int64_t>(position) + 1);
        add(pad);
        pad.name = "a pad among slots";
        pad.arrays["indices"].set_integer(second + 1, slots - 1);
        add(pad);
    }
    shape = base({9, 1});
    shape.dk = 16;
    add(generate::make("nine tokens", shape, 31));

    // What the host must refuse.
    shape = base({2});
    shape.dk = 32;
    shape.dv = 48;
    shape.value_heads = 2;
    const Case whole = generate::make("refused", shape, 32);
    const auto reshaped = [&](const char* what, const char* key, std::vector<int64_t> dims) {
        Case c = whole;
        c.name = what;
        c.arrays[key].dims = std::move(dims);
        add(c, true);
    };
    reshaped("transposed pool", "state", {whole.at("state").dims[0], 2, 32, 48});
    reshaped("key of another shape", "key", {2, 2, 16});
    Case few = whole;
    few.name = "too few indices";
    few.arrays["indices"] = cases::Array(cases::I64, {1});
    add(few, true);
    Case wide = whole;
    wide.name = "fp32 pool";
    wide.arrays["state"] = cases::Array(cases::F32, whole.at("state").dims);
    add(wide, true);
    shape.dk = 24;
    add(generate::make("DK 24", shape, 33), true);
    shape.dk = 32;
    shape.dv = 40;
    add(generate::make("DV 40", shape, 34), true);
    shape.dv = 48;
    shape.key_heads = 2;
    shape.value_heads = 3;
    add(generate::make("NV 3, NK 2", shape, 35), true);
    return all;
}

// What was found first, or nothing.
std::string found(const Mutant& mutant, const std::vector<Trial>& all) {
    static thread_local harness::Kernel kernel = nullptr;
    kernel = mutant.kernel;
    const harness::Build build{mutant.tiling, [](cases::Type, cases::Type, cases::Type) { return kernel; }};
    for (const Trial& trial : all) {
        harness::Settings settings;
        settings.slots_before = trial.slots_before;
        const harness::Result result = harness::run(build, trial.c, twin::ascend310p(), settings);
        const std::string where = " (" + trial.c.name + ")";
        if (result.refused != trial.refused) return std::string(result.refused ? "refused" : "not refused") + where;
        if (result.refused) continue;
        if (!result.findings.empty()) {
            const twin::Finding& finding = result.findings.all().front();
            return "check " + std::to_string(static_cast<int>(finding.check)) + " " + check_name(finding.check) + where +
                   ": " + finding.text;
        }
        if (result.unwritten_out != 0) return "output not written" + where;
        const reference::Distance out = reference::distance(result.out, trial.answer.out);
        const reference::Distance state = reference::distance(result.state, trial.answer.state);
        if (!out.rounded_once()) return "wrong output" + where + ": " + out.text();
        if (!state.rounded_once()) return "wrong state" + where + ": " + state.text();
    }
    return "";
}

}  // namespace

int main(int count, char** values) {
    const bool tell = count > 1 && std::string(values[1]) == "-v";
    const std::vector<Trial> all = trials();
    size_t mutants = 0;
    for (const auto& part : {mutants_0(), mutants_1()}) {
        for (const Mutant& mutant : part) {
            const std::string how = found(mutant, all);
            if (std::string(mutant.name) == "none") {
                CHECK(how.empty(), "the op without a fault: " + how);
                continue;
            }
            ++mutants;
            CHECK(!how.empty(), std::string("mutant \"") + mutant.name + "\" is not found");
            if (tell) std::printf("%-42s %s\n", mutant.name, how.substr(0, 150).c_str());
        }
    }
    std::printf("%zu mutants\n", mutants);
    return check::done("mutants");
}
