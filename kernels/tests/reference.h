// The op in float64, straight from its definition: which sequences may run, and what they compute.
#pragma once

#include <algorithm>
#include <set>

#include "arrays.h"

namespace reference {

enum class Verdict { Compute, Skip, Fail };

struct Plan {
    std::vector<int64_t> first;      // token, by sequence
    std::vector<int64_t> length;     // tokens that are there; those behind the last sequence are nobody's
    std::vector<Verdict> verdict;
    std::vector<int64_t> read;       // slot, by sequence; -1 if it does not run
    std::vector<std::set<int64_t>> written;
};

struct Answer {
    Plan plan;
    std::vector<double> out;    // [T, NV, DV], NaN where a sequence failed
    std::vector<double> state;  // [slots, NV, DV, DK]
};

constexpr int64_t most_tokens = 8;

inline Plan plan_of(const cases::Case& c) {
    const cases::Array& lengths = c.at("lengths");
    const cases::Array& indices = c.at("indices");
    const int64_t tokens = c.at("query").dims[0], slots = c.at("state").dims[0];
    const int64_t count = lengths.dims[0];
    const bool rows = indices.dims.size() == 2;
    Plan plan;
    int64_t end = 0;
    std::vector<bool> complete;
    for (int64_t i = 0; i < count; ++i) {
        const int64_t length = std::max<int64_t>(lengths.integer(i), 0), there = std::min(length, tokens - end);
        plan.first.push_back(end);
        plan.length.push_back(there);
        complete.push_back(there == length);
        end += there;
    }
    plan.verdict.assign(count, Verdict::Fail);
    plan.read.assign(count, -1);
    plan.written.resize(count);

    for (int64_t i = 0; i < count; ++i) {
        const int64_t length = lengths.integer(i);
        const int64_t width = rows ? indices.dims[1] : length;
        if (length < 1 || length > most_tokens || !complete[i]) continue;
        const auto slot = [&](int64_t position) {
            return indices.integer(rows ? i * width + position : plan.first[i] + position);
        };
        if (c.has("pad_slot")) {
            bool all = true;
            for (int64_t position = 0; position < width; ++position)
                all = all && slot(position) == c.at("pad_slot").integer(0);
            if (all) {
                plan.verdict[i] = Verdict::Skip;
                continue;
            }
        }
        const int64_t accepted = c.has("accepted") ? c.at("accepted").integer(i) : 1;
        if (length > width) continue;
        if (accepted < 0 || accepted > width) continue;
        const int64_t read = slot(std::max<int64_t>(accepted, 1) - 1);
        std::set<int64_t> written;
        for (int64_t t = 0; t < length; ++t) written.insert(slot(t));
        const bool inside = *written.begin() >= 0 && *written.rbegin() < slots && read >= 0 && read < slots;
        const int64_t pad = c.has("pad_slot") ? c.at("pad_slot").integer(0) : -1;
        if (!inside || written.count(pad) != 0 || read == pad) continue;
        plan.verdict[i] = Verdict::Compute;
        plan.read[i] = read;
        plan.written[i] = written;
    }
    std::vector<Verdict> after = plan.verdict;
    for (int64_t i = 0; i < count; ++i)
        for (int64_t j = 0; j < count; ++j) {
            if (i == j || plan.verdict[i] != Verdict::Compute || plan.verdict[j] != Verdict::Compute) continue;
            bool clash = plan.written[j].count(plan.read[i]) != 0;
            for (const int64_t slot : plan.written[i]) clash = clash || plan.written[j].count(slot) != 0;
            if (clash) after[i] = after[j] = Verdict::Fail;
        }
    for (int64_t i = 0; i < count; ++i)
        if (after[i] != Verdict::Compute) {
            plan.read[i] = -1;
            plan.written[i].clear();
        }
    plan.verdict = after;
    return plan;
}

inline Answer answer_of(const cases::Case& c) {
    const cases::Array &q = c.at("query"), &k = c.at("key"), &v = c.at("value"), &beta = c.at("beta");
    const cases::Array &state = c.at("state"), &indices = c.at("indices");
    const int64_t tokens = q.dims[0], nk = q.dims[1], dk = q.dims[2], nv = v.dims[1], dv = v.dims[2];
    const double scale = c.has("scale") ? c.at("scale").real(0) : 1.0;
    const bool rows = indices.dims.size() == 2;
    Answer answer;
    answer.plan = plan_of(c);
    answer.out.assign(tokens * nv * dv, std::nan(""));
    answer.state.resize(state.size());
    for (size_t i = 0; i < state.size(); ++i) answer.state[i] = state.real(i);

    const std::vector<double> before = answer.state;
    for (size_t i = 0; i < answer.plan.verdict.size(); ++i) {
        const int64_t first = answer.plan.first[i], length = answer.plan.length[i];
        if (answer.plan.verdict[i] == Verdict::Skip)
            std::fill(answer.out.begin() + first * nv * dv, answer.out.begin() + (first + length) * nv * dv, 0.0);
        if (answer.plan.verdict[i] != Verdict::Compute) continue;
        for (int64_t h = 0; h < nv; ++h) {
            const int64_t key_head = h / (nv / nk), size = dv * dk;
            std::vector<double> s(before.begin() + (answer.plan.read[i] * nv + h) * size,
                                  before.begin() + (answer.plan.read[i] * nv + h + 1) * size);
            for (int64_t t = first; t < first + length; ++t) {
                const double b = beta.real(t * nv + h);
                const auto decay = [&](int64_t lane) {
                    double log = c.has("g") ? c.at("g").real(t * nv + h) : 0.0;
                    if (c.has("gk")) {
                        const bool vector = c.at("gk").dims.size() == 3;
                        log += c.at("gk").real(vector ? (t * nv + h) * dk + lane : t * nv + h);
                    }
                    return std::exp(log);
                };
                std::vector<double> factor(dk), key(dk), query(dk);
                for (int64_t lane = 0; lane < dk; ++lane) {
                    factor[lane] = decay(lane);
                    key[lane] = k.real((t * nk + key_head) * dk + lane);
                    query[lane] = scale * q.real((t * nk + key_head) * dk + lane);
                }
                const int64_t slot = indices.integer(
                    rows ? static_cast<int64_t>(i) * indices.dims[1] + (t - first) : t);
                for (int64_t row = 0; row < dv; ++row) {
                    double* at = &s[row * dk];
                    double kept = 0.0, read = 0.0;
                    for (int64_t lane = 0; lane < dk; ++lane) kept += (at[lane] *= factor[lane]) * key[lane];
                    const double d = (v.real((t * nv + h) * dv + row) - kept) * b;
                    for (int64_t lane = 0; lane < dk; ++lane) read += (at[lane] += d * key[lane]) * query[lane];
                    answer.out[(t * nv + h) * dv + row] = read;
                }
                std::copy(s.begin(), s.end(), answer.state.begin() + (slot * nv + h) * size);
            }
        }
    }
    return answer;
}

// How far `got` is from `expected`; where NaN is expected, NaN must be.
struct Distance {
    double cosine = 1.0, nrmse = 0.0, max_abs = 0.0;
    size_t misplaced_nan = 0;
    size_t elements = 0, unlike = 0;  // unlike: other bits than the answer rounded to the element type
    // The limits that are published for the op.
    bool within_published() const { return misplaced_nan == 0 && cosine >= 0.999 && nrmse <= 0.02 && max_abs <= 1.0; }
    // Ours: computed in fp32 and rounded once. Then nearly every element is the rounded answer itself; a state that was
    // carried through its 16-bit copy, or another rounding mode, is not.
    bool rounded_once() const { return misplaced_nan == 0 && unlike <= elements / 50 + 2 && nrmse <= 3e-3; }
    std::string text() const {
        return "cosine " + std::to_string(cosine) + ", nrmse " + std::to_string(nrmse) + ", max abs " +
               std::to_string(max_abs) + ", " + std::to_string(unlike) + " of " + std::to_string(elements) +
               " not the rounded answer, NaN at " + std::to_string(misplaced_nan) + " wrong places";
    }
};

inline Distance distance(const cases::Array& got, const std::vector<double>& expected) {
    Distance d;
    double dot = 0, a2 = 0, b2 = 0, e2 = 0;
    for (size_t i = 0; i < expected.size(); ++i) {
        const double a = got.real(i), b = expected[i];
        if (std::isnan(a) || std::isnan(b)) {
            d.misplaced_nan += std::isnan(a) != std::isnan(b);
            continue;
        }
        cases::Array rounded(got.type, {});
        rounded.set(0, b);
        ++d.elements;
        d.unlike += rounded.real(0) != a;
        dot += a * b;
        a2 += a * a;
        b2 += b * b;
        e2 += (a - b) * (a - b);
        d.max_abs = std::max(d.max_abs, std::abs(a - b));
    }
    if (a2 > 0 || b2 > 0) d.cosine = a2 > 0 && b2 > 0 ? dot / std::sqrt(a2 * b2) : 0.0;
    if (e2 > 0) d.nrmse = b2 > 0 ? std::sqrt(e2 / b2) : 1e300;
    return d;
}

}  // namespace reference
