// The kernel on the twin against float64: random cases, every order of the cores, both chips, strict and automatic
// barriers, and what must be refused, skipped or filled with NaN.
#include <chrono>

#include "check.h"
#include "generate.h"
#include "harness.h"

namespace {

using cases::Case;
using generate::Shape;
using harness::Result;
using harness::Settings;

std::vector<uint32_t> backwards(uint32_t cores) {
    std::vector<uint32_t> order;
    for (uint32_t core = cores; core > 0; --core) order.push_back(core - 1);
    return order;
}

std::vector<uint32_t> shuffled(uint32_t cores, uint64_t seed) {
    generate::Source random(seed);
    std::vector<uint32_t> order = backwards(cores);
    for (uint32_t i = cores; i > 1; --i) std::swap(order[i - 1], order[random.whole(0, i - 1)]);
    return order;
}

void same_as_reference(const Case& c, const Result& result, const char* how) {
    const std::string who = c.name + " " + how;
    if (!CHECK(!result.refused, who + ": " + result.reason)) return;
    CHECK(result.findings.empty(), who + "\n" + result.findings.text());
    CHECK(result.unwritten_out == 0, who);
    const reference::Answer answer = reference::answer_of(c);
    const reference::Distance out = reference::distance(result.out, answer.out);
    const reference::Distance state = reference::distance(result.state, answer.state);
    CHECK(out.rounded_once() && out.within_published(), who + " out: " + out.text());
    CHECK(state.rounded_once() && state.within_published(), who + " state: " + state.text());
    // Slots that no sequence writes keep their bits.
    const cases::Array& before = c.at("state");
    const size_t slot_bytes = before.bytes.size() / before.dims[0];
    std::vector<bool> written(before.dims[0], false);
    for (const auto& slots : answer.plan.written)
        for (const int64_t slot : slots) written[slot] = true;
    for (int64_t slot = 0; slot < before.dims[0]; ++slot)
        if (!written[slot])
            CHECK(std::memcmp(&before.bytes[slot * slot_bytes], &result.state.bytes[slot * slot_bytes], slot_bytes) == 0,
                  who + " slot " + std::to_string(slot));
}

void every_way(const Case& c, const twin::Soc& soc) {
    const Result first = harness::run(harness::op_package(), c, soc);
    same_as_reference(c, first, soc.name);
    if (first.refused) return;
    for (const auto& order : {backwards(first.cores), shuffled(first.cores, 1)}) {
        Settings settings;
        settings.core_order = order;
        settings.automatic_vector_barriers = order == backwards(first.cores);
        const Result other = harness::run(harness::op_package(), c, soc, settings);
        CHECK(other.findings.empty(), c.name + "\n" + other.findings.text());
        CHECK(other.out.bytes == first.out.bytes && other.state.bytes == first.state.bytes, c.name);
    }
}

void random_cases() {
    for (uint64_t seed = 0; seed < 60; ++seed) {
        Shape shape = generate::any_shape(seed);
        every_way(generate::make("random " + std::to_string(seed), shape, seed), twin::ascend310p());
        if (seed % 4 == 0) {
            shape.element = cases::BF16;
            every_way(generate::make("random bf16 " + std::to_string(seed), shape, seed), twin::ascend910b());
        }
    }
}

void model_shapes() {
    Shape shape;
    shape.key_heads = 2;
    shape.value_heads = 4;
    shape.dk = shape.dv = 128;
    every_way(generate::make("decode 128", shape, 1), twin::ascend310p());
    shape.lengths = {4, 4};
    shape.accepted = true;
    shape.row_width = 4;
    every_way(generate::make("verify 128", shape, 2), twin::ascend310p());
    shape.element = cases::BF16;
    every_way(generate::make("verify 128 bf16", shape, 2), twin::ascend910b());
    shape.element = cases::F16;
    shape.lengths = {8};
    shape.row_width = 0;
    shape.gk = 2;
    shape.dk = shape.dv = 256;
    shape.key_heads = 1;
    shape.value_heads = 2;
    every_way(generate::make("largest", shape, 3), twin::ascend310p());
}

// ---- one bad sequence, the others go on ---------------------------------------------------------------------------

Case three_sequences(bool rows, cases::Type indices = cases::I32) {
    Shape shape;
    shape.lengths = {2, 3, 2};
    shape.key_heads = 1;
    shape.value_heads = 2;
    shape.dk = 32;
    shape.dv = 48;
    shape.accepted = true;
    shape.row_width = rows ? 4 : 0;
    shape.index_type = indices;
    shape.spare_slots = 3;
    return generate::make(rows ? "rows" : "flat", shape, 5);
}

void expect_verdicts(Case c, const std::string& what, const std::string& verdicts) {
    c.name += " " + what;
    const reference::Plan plan = reference::plan_of(c);
    std::string got;
    for (const reference::Verdict verdict : plan.verdict)
        got += verdict == reference::Verdict::Compute ? 'c' : verdict == reference::Verdict::Skip ? 's' : 'F';
    CHECK(got == verdicts, c.name + " is " + got);
    every_way(c, twin::ascend310p());
}

void broken_sequences() {
    for (const bool rows : {false, true}) {
        const size_t second = rows ? 4 : 2;  // position of sequence 1's first slot
        const int64_t slots = three_sequences(rows).at("state").dims[0];
        Case c = three_sequences(rows);
        expect_verdicts(c, "sound", "ccc");
        c.arrays["indices"].set_integer(second + 1, slots);
        expect_verdicts(c, "slot behind the pool", "cFc");
        c = three_sequences(rows);
        c.arrays["indices"].set_integer(second, -1);
        expect_verdicts(c, "negative slot", "cFc");
        c = three_sequences(rows, cases::I64);
        c.arrays["indices"].set_integer(second, (int64_t{1} << 32) + 1);
        expect_verdicts(c, "slot 2^32 + 1", "cFc");
        c = three_sequences(rows);
        c.arrays["accepted"].set_integer(1, rows ? 5 : 4);
        expect_verdicts(c, "too many accepted", "cFc");
        c.arrays["accepted"].set_integer(1, -1);
        expect_verdicts(c, "accepted negative", "cFc");
        c.arrays["accepted"].set_integer(1, 0);
        expect_verdicts(c, "accepted 0", "ccc");
        c.arrays["accepted"].set_integer(1, 3);
        expect_verdicts(c, "accepted all", "ccc");
        if (rows) {
            c.arrays["accepted"].set_integer(1, 4);
            expect_verdicts(c, "accepted beyond the length, within the row", "ccc");
        }
        c = three_sequences(rows);
        c.arrays["indices"].set_integer(0, c.at("indices").integer(second + 1));
        expect_verdicts(c, "two write one slot", "FFc");
        c = three_sequences(rows);
        c.arrays["accepted"].set_integer(2, 1);
        const size_t third = rows ? 8 : 5;
        c.arrays["indices"].set_integer(third, c.at("indices").integer(second));
        expect_verdicts(c, "reads and writes another's slot", "cFF");
        // A sequence that fails by itself writes nothing, so nobody can clash with it.
        c.arrays["accepted"].set_integer(1, 7);
        expect_verdicts(c, "clash with one that fails", "cFc");
        c = three_sequences(rows);
        Case pad = c;
        for (size_t position = second; position < third; ++position) pad.arrays["indices"].set_integer(position, -7);
        expect_verdicts(pad, "all slots -7 without pad_slot", "cFc");
        pad.arrays["pad_slot"] = cases::Array(cases::I64, {});
        pad.arrays["pad_slot"].set_integer(0, -7);
        expect_verdicts(pad, "pad", "csc");
        pad.arrays["indices"].set_integer(third - 1, 1);
        expect_verdicts(pad, "half a pad", "cFc");
        const auto lengths = [&](int64_t one, int64_t two, int64_t three) {
            Case other = three_sequences(rows);
            for (size_t i = 0; i < 3; ++i) {
                other.arrays["lengths"].set_integer(i, i == 0 ? one : i == 1 ? two : three);
                other.arrays["accepted"].set_integer(i, 1);
            }
            return other;
        };
        expect_verdicts(lengths(3, 3, 2), "lengths add up to T + 1", "ccF");
        expect_verdicts(lengths(1, 3, 2), "lengths add up to T - 1", "ccc");
        expect_verdicts(lengths(1, 1, 0), "two tokens of seven", "ccF");
        expect_verdicts(lengths(-2, 7, 2), "negative length", rows ? "FFF" : "FcF");
        expect_verdicts(lengths(0, 4, 3), "length 0", "Fcc");
        expect_verdicts(lengths(0, 5, 2), "longer than the row", rows ? "FFc" : "Fcc");
        Case wide = lengths(2, 3, 2);
        wide.arrays["lengths"] = cases::Array(cases::I64, {3});
        wide.arrays["lengths"].set_integer(0, 2);
        wide.arrays["lengths"].set_integer(1, (int64_t{1} << 32) + 3);
        wide.arrays["lengths"].set_integer(2, std::numeric_limits<int64_t>::max());
        expect_verdicts(wide, "lengths that 32 bits would cut", "cFF");
        Case beside = three_sequences(rows);
        beside.arrays["pad_slot"] = cases::Array(cases::I64, {});
        beside.arrays["pad_slot"].set_integer(0, beside.at("indices").integer(second));
        expect_verdicts(beside, "the pad slot among others", "cFc");
    }
    // Rows whose unused slot is the read slot of another: nobody writes it.
    Case shared = three_sequences(true);
    shared.arrays["accepted"].set_integer(0, 4);
    shared.arrays["accepted"].set_integer(2, 3);
    shared.arrays["indices"].set_integer(8 + 2, shared.at("indices").integer(3));
    expect_verdicts(shared, "two read one slot that nobody writes", "ccc");
    // A read slot that another writes, without a common written slot.
    Case crossing = three_sequences(true);
    crossing.arrays["accepted"].set_integer(0, 4);
    crossing.arrays["indices"].set_integer(3, crossing.at("indices").integer(8 + 1));
    expect_verdicts(crossing, "reads what another writes", "FcF");
    // A length of 9 is refused where there is room for it.
    Shape long_one;
    long_one.lengths = {9, 2};
    long_one.dk = long_one.dv = 16;
    Case nine = generate::make("nine", long_one, 8);
    expect_verdicts(nine, "tokens", "Fc");
}

// A sequence's slots may repeat: the last token's state stays.
void repeats() {
    Shape shape;
    shape.lengths = {4};
    shape.dk = 16;
    shape.dv = 32;
    shape.same_slot = true;
    shape.spare_slots = 0;
    Case c = generate::make("one slot for every token", shape, 9);
    every_way(c, twin::ascend310p());
    const Result result = harness::run(harness::op_package(), c, twin::ascend310p());
    CHECK(result.counts.written_bytes.at("state") == 16 * 32 * 2, "only the last is stored");
    shape.same_slot = false;
    c = generate::make("slots 0 1 0 1", shape, 9);
    for (size_t t = 0; t < 4; ++t) c.arrays["indices"].set_integer(t, static_cast<int64_t>(t % 2));
    every_way(c, twin::ascend310p());
}

// Written once more with the same inputs, a prefix gives the same bits.
void accepted_again() {
    Shape shape;
    shape.lengths = {4};
    shape.dk = shape.dv = 32;
    shape.value_heads = 2;
    shape.accepted = true;
    Case c = generate::make("again", shape, 10);
    c.arrays["accepted"].set_integer(0, 1);
    const Result once = harness::run(harness::op_package(), c, twin::ascend310p());
    c.arrays["state"] = once.state;
    c.arrays["accepted"].set_integer(0, 4);  // go on from the last, which this step overwrites
    every_way(c, twin::ascend310p());
}

// The op's two states are right as one buffer. As two, what no token writes is never written.
void two_state_buffers() {
    Shape shape;
    shape.lengths = {2};
    shape.dk = shape.dv = 32;
    shape.spare_slots = 2;
    const Case c = generate::make("two buffers", shape, 11);
    Settings settings;
    settings.separate_state_out = true;
    const Result two = harness::run(harness::op_package(), c, twin::ascend310p(), settings);
    const Result one = harness::run(harness::op_package(), c, twin::ascend310p());
    CHECK(two.findings.empty(), two.findings.text());
    CHECK(two.out.bytes == one.out.bytes);
    const size_t slot_bytes = one.state.bytes.size() / 4;
    for (int64_t slot = 0; slot < 4; ++slot) {
        const bool written = slot == c.at("indices").integer(0) || slot == c.at("indices").integer(1);
        const bool same = std::memcmp(&one.state.bytes[slot * slot_bytes], &two.state.bytes[slot * slot_bytes],
                                      slot_bytes) == 0;
        CHECK(same == written, "slot " + std::to_string(slot));
        if (!written) CHECK(std::isnan(two.state.real(slot * slot_bytes / 2)));
    }
}

// Slots whose first element lies behind 2^31, 2^32 and more: offsets have 64 bits.
void far_slots() {
    Shape shape;
    shape.lengths = {2, 1};
    shape.value_heads = 2;
    shape.dk = shape.dv = 16;
    shape.index_type = cases::I64;
    shape.accepted = true;
    const Case c = generate::make("far slots", shape, 13);
    const Result near = harness::run(harness::op_package(), c, twin::ascend310p());
    for (const int64_t before : {int64_t{1} << 22, int64_t{1} << 23, (int64_t{1} << 23) + 1, int64_t{1} << 30}) {
        Settings settings;
        settings.slots_before = before;
        const Result far = harness::run(harness::op_package(), c, twin::ascend310p(), settings);
        CHECK(!far.refused, far.reason);
        CHECK(far.findings.empty(), far.findings.text());
        CHECK(far.out.bytes == near.out.bytes && far.state.bytes == near.state.bytes);
    }
}

// Tokens of one call equal single calls bit for bit in what is read out first, and nearly after the state was rounded.
void one_call_or_many() {
    Shape shape;
    shape.lengths = {3};
    shape.dk = shape.dv = 48;
    const Case together = generate::make("together", shape, 12);
    const Result all = harness::run(harness::op_package(), together, twin::ascend310p());
    Case single = together;
    cases::Array state = together.at("state");
    const size_t row = 48;
    for (int64_t t = 0; t < 3; ++t) {
        for (const char* key : {"query", "key", "value", "beta", "g", "indices"}) {
            cases::Array part = together.at(key);
            const size_t bytes = part.bytes.size() / 3;
            part.bytes.assign(together.at(key).bytes.begin() + t * bytes, together.at(key).bytes.begin() + (t + 1) * bytes);
            part.dims[0] = 1;
            single.arrays[key] = part;
        }
        single.arrays["lengths"].set_integer(0, 1);
        // read where the token before has written: the slot of token t gets its state
        if (t > 0) {
            const size_t slot = state.bytes.size() / state.dims[0];
            std::memcpy(&state.bytes[together.at("indices").integer(t) * slot],
                        &state.bytes[together.at("indices").integer(t - 1) * slot], slot);
        }
        single.arrays["state"] = state;
        const Result one = harness::run(harness::op_package(), single, twin::ascend310p());
        CHECK(one.findings.empty(), one.findings.text());
        state = one.state;
        for (size_t i = 0; i < row; ++i) {
            const double a = one.out.real(i), b = all.out.real(t * row + i);
            if (t == 0) CHECK(a == b);
            else CHECK(std::abs(a - b) < 0.01);
        }
    }
}

}  // namespace

int main() {
    const auto start = std::chrono::steady_clock::now();
    const auto lap = [&](const char* name) {
        const std::chrono::duration<double> passed = std::chrono::steady_clock::now() - start;
        std::printf("%6.1f s  %s\n", passed.count(), name);
    };
    model_shapes();
    lap("model shapes");
    broken_sequences();
    lap("broken sequences");
    repeats();
    accepted_again();
    two_state_buffers();
    far_slots();
    one_call_or_many();
    lap("slots");
    random_cases();
    lap("random cases");
    return check::done("kernel");
}
