// Random cases that keep to the contract, and ways to break one rule at a time.
#pragma once

#include <random>

#include "arrays.h"

namespace generate {

struct Shape {
    std::vector<int64_t> lengths{1};
    int64_t key_heads = 1, value_heads = 1, dk = 16, dv = 16;
    int64_t row_width = 0;        // 0 = flat slot indices
    int64_t spare_slots = 1;
    bool g = true, accepted = false, same_slot = false;
    int gk = 0;                   // 0 none, 1 scalar, 2 vector
    cases::Type element = cases::F16, length_type = cases::I32, index_type = cases::I32;
};

class Source {
  public:
    explicit Source(uint64_t seed) : engine_(seed) {}
    int64_t whole(int64_t low, int64_t high) { return low + static_cast<int64_t>(engine_() % (high - low + 1)); }
    double between(double low, double high) {
        return low + (high - low) * static_cast<double>(engine_() >> 11) / 9007199254740992.0;
    }
    double normal() {  // sum of twelve: the same on every standard library
        double sum = -6.0;
        for (int i = 0; i < 12; ++i) sum += between(0.0, 1.0);
        return sum;
    }
    bool coin() { return (engine_() & 1) != 0; }

  private:
    std::mt19937_64 engine_;
};

inline cases::Case make(const std::string& name, const Shape& shape, uint64_t seed) {
    using cases::Array;
    Source random(seed);
    const int64_t count = static_cast<int64_t>(shape.lengths.size());
    int64_t tokens = 0, needed = 0;
    for (const int64_t length : shape.lengths) tokens += length;
    needed = shape.same_slot ? count : (shape.row_width != 0 ? count * shape.row_width : tokens);
    const int64_t slots = needed + shape.spare_slots;
    cases::Case c;
    c.name = name;
    const auto fill = [&](const char* key, std::vector<int64_t> dims, cases::Type type, auto value) {
        Array array(type, std::move(dims));
        for (size_t i = 0; i < array.size(); ++i) array.set(i, value());
        c.arrays[key] = std::move(array);
    };
    const auto unit = [&](const char* key) {
        Array array(shape.element, {tokens, shape.key_heads, shape.dk});
        for (size_t row = 0; row < array.size(); row += shape.dk) {
            std::vector<double> lanes(shape.dk);
            double square = 1e-6;
            for (double& lane : lanes) {
                lane = random.normal();
                square += lane * lane;
            }
            for (int64_t lane = 0; lane < shape.dk; ++lane) array.set(row + lane, lanes[lane] / std::sqrt(square));
        }
        c.arrays[key] = std::move(array);
    };
    unit("query");
    unit("key");
    fill("value", {tokens, shape.value_heads, shape.dv}, shape.element, [&] { return random.normal(); });
    fill("beta", {tokens, shape.value_heads}, shape.element, [&] { return random.between(0.05, 1.0); });
    fill("state", {slots, shape.value_heads, shape.dv, shape.dk}, shape.element, [&] { return random.normal() * 0.5; });
    if (shape.g)
        fill("g", {tokens, shape.value_heads}, cases::F32, [&] { return random.between(-1.5, 0.0); });
    if (shape.gk == 1)
        fill("gk", {tokens, shape.value_heads}, cases::F32, [&] { return random.between(-0.8, 0.0); });
    if (shape.gk == 2)
        fill("gk", {tokens, shape.value_heads, shape.dk}, cases::F32, [&] { return random.between(-0.8, 0.0); });
    Array lengths(shape.length_type, {count});
    for (int64_t i = 0; i < count; ++i) lengths.set_integer(i, shape.lengths[i]);
    c.arrays["lengths"] = std::move(lengths);

    std::vector<int64_t> order(slots);
    for (int64_t i = 0; i < slots; ++i) order[i] = i;
    for (int64_t i = slots - 1; i > 0; --i) std::swap(order[i], order[random.whole(0, i)]);
    const bool rows = shape.row_width != 0;
    Array indices(shape.index_type,
                  rows ? std::vector<int64_t>{count, shape.row_width} : std::vector<int64_t>{tokens});
    size_t at = 0, taken = 0;
    for (int64_t i = 0; i < count; ++i) {
        for (int64_t position = 0; position < (rows ? shape.row_width : shape.lengths[i]); ++position)
            indices.set_integer(at++, shape.same_slot ? order[i] : order[taken++]);
    }
    c.arrays["indices"] = std::move(indices);
    if (shape.accepted) {
        Array accepted(cases::I32, {count});
        for (int64_t i = 0; i < count; ++i)
            accepted.set_integer(i, random.whole(0, rows ? shape.row_width : shape.lengths[i]));
        c.arrays["accepted"] = std::move(accepted);
    }
    Array scale(cases::F32, {});
    scale.set(0, 1.0 / std::sqrt(static_cast<double>(shape.dk)));
    c.arrays["scale"] = std::move(scale);
    return c;
}

// Any shape that the contract allows, small enough to be many.
inline Shape any_shape(uint64_t seed) {
    Source random(seed * 7919 + 17);
    Shape shape;
    const int64_t count = random.whole(1, 4);
    shape.lengths.clear();
    for (int64_t i = 0; i < count; ++i) shape.lengths.push_back(random.whole(1, random.coin() ? 8 : 3));
    shape.key_heads = random.whole(1, 3);
    shape.value_heads = shape.key_heads * random.whole(1, 4);
    shape.dk = 16 * random.whole(1, random.whole(0, 5) == 0 ? 16 : 6);
    shape.dv = 16 * random.whole(1, random.whole(0, 5) == 0 ? 16 : 6);
    if (random.coin()) shape.row_width = 8 - random.whole(0, 1) * (random.coin() ? 1 : 0);
    for (int64_t& length : shape.lengths)
        if (shape.row_width != 0) length = std::min(length, shape.row_width);
    shape.spare_slots = random.whole(0, 3);
    shape.g = random.whole(0, 3) != 0;
    shape.gk = static_cast<int>(random.whole(0, 2));
    shape.accepted = random.coin();
    shape.same_slot = random.whole(0, 5) == 0;
    shape.length_type = random.coin() ? cases::I64 : cases::I32;
    shape.index_type = random.coin() ? cases::I64 : cases::I32;
    return shape;
}

}  // namespace generate
