// What a token costs, counted on the twin: the promise of the design, as numbers that a change must not lose.
#include "check.h"
#include "generate.h"
#include "harness.h"

namespace {

using generate::Shape;

struct Cost {
    twin::Counts counts;
    RecurrentGatedDeltaRuleTilingData tiling;
    uint64_t token_heads;
};

Cost cost(const Shape& shape, const twin::Soc& soc) {
    const harness::Result result = harness::run(harness::op_package(), generate::make("cost", shape, 1), soc);
    CHECK(!result.refused && result.findings.empty(), result.reason + result.findings.text());
    uint64_t tokens = 0;
    for (const int64_t length : shape.lengths) tokens += static_cast<uint64_t>(length);
    return Cost{result.counts, result.tiling, tokens * static_cast<uint64_t>(shape.value_heads)};
}

void per_token_and_head(const twin::Soc& soc, const std::vector<int64_t>& lengths, int64_t nk, int64_t nv) {
    Shape shape;
    shape.lengths = lengths;
    shape.key_heads = nk;
    shape.value_heads = nv;
    shape.dk = shape.dv = 128;
    shape.element = soc.has_bfloat16 ? cases::BF16 : cases::F16;
    shape.row_width = lengths[0] == 1 ? 0 : 8;
    shape.accepted = shape.row_width != 0;
    const Cost c = cost(shape, soc);
    const uint64_t sequence_heads = lengths.size() * static_cast<uint64_t>(nv);
    // Nothing waits for the vector unit but copies that need its results.
    CHECK(c.counts.vector_to_scalar_waits() <= 4 * c.token_heads);
    CHECK(c.counts.vector_to_scalar_waits() == 0 && c.counts.flag_waits.empty(), "the design needs none at all");
    CHECK(c.counts.barriers.count("ALL") == 0 && c.counts.barriers.count("MTE3") == 0);
    // The state is read once for each sequence and head, and written once for each token and head.
    const uint64_t state = 128 * 128 * 2, row = 128 * 2;
    CHECK(c.counts.read_bytes.at("state") == sequence_heads * state);
    CHECK(c.counts.written_bytes.at("state") == c.token_heads * state);
    CHECK(c.counts.read_bytes.at("value") == c.token_heads * row);
    CHECK(c.counts.written_bytes.at("out") == c.token_heads * row);
    // Query and key come once for each core that works on the head.
    const uint64_t shares = c.counts.read_bytes.at("query") / (c.token_heads * row);
    CHECK(shares >= 1 && shares <= c.tiling.tiles);
    CHECK(sequence_heads < soc.cores || shares == 1, "one core has all tiles of a head");
    CHECK(c.counts.read_bytes.at("key") == c.counts.read_bytes.at("query"));
    CHECK(c.counts.read_bytes.size() == 4 && c.counts.written_bytes.size() == 2, "and nothing else is copied");
    // A constant number of instructions for each token and tile, whatever the rows.
    const double instructions = static_cast<double>(c.counts.vector_instructions) / (c.token_heads * c.tiling.tiles);
    CHECK(instructions <= 26, std::to_string(instructions));
    std::printf("%-10s L=%lld B=%zu NV=%-2lld tile %3u x %u: %5.1f vector instructions, %4.1f barriers, %llu waits V->S "
                "a token, head and tile; %.0f bytes in, %.0f out a token and head\n",
                soc.name, static_cast<long long>(lengths[0]), lengths.size(), static_cast<long long>(nv),
                c.tiling.tileRows, c.tiling.tiles, instructions,
                static_cast<double>(c.counts.barriers.at("V")) / (c.token_heads * c.tiling.tiles),
                static_cast<unsigned long long>(c.counts.vector_to_scalar_waits()),
                static_cast<double>(twin::Counts::sum(c.counts.read_bytes)) / c.token_heads,
                static_cast<double>(twin::Counts::sum(c.counts.written_bytes)) / c.token_heads);
}

// Rows of a state are worked on together: twice the rows, the same instructions and waits.
void rows_are_free() {
    Shape shape;
    shape.value_heads = 8;
    shape.dk = 64;
    shape.dv = 64;
    const Cost half = cost(shape, twin::ascend310p());
    shape.dv = 128;
    const Cost whole = cost(shape, twin::ascend310p());
    CHECK(whole.tiling.tiles == half.tiling.tiles);
    CHECK(whole.counts.vector_instructions == half.counts.vector_instructions);
    CHECK(whole.counts.barriers == half.counts.barriers && whole.counts.queue_waits == half.counts.queue_waits);
}

}  // namespace

int main() {
    for (const twin::Soc* soc : {&twin::ascend310p(), &twin::ascend910b()}) {
        per_token_and_head(*soc, {1}, 16, 32);
        per_token_and_head(*soc, {1, 1, 1}, 4, 8);
        per_token_and_head(*soc, {4}, 4, 8);
        per_token_and_head(*soc, {8, 8}, 2, 4);
    }
    per_token_and_head(twin::ascend310p(), {1}, 1, 1);
    rows_are_free();
    return check::done("counts");
}
