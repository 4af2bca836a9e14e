// What the calls of the subset compute, against plain loops; and the numbers under them.
#include "check.h"
#include "generate.h"
#include "kernel_operator.h"

namespace {

using namespace AscendC;

void numbers() {
    for (uint32_t bits = 0; bits < 65536; ++bits) {
        const float wide = twin::half_table()[bits];
        if (std::isnan(wide)) continue;
        CHECK(twin::to_half_bits(wide) == bits, std::to_string(bits));
        for (const RoundMode mode : {RoundMode::CAST_FLOOR, RoundMode::CAST_CEIL, RoundMode::CAST_ODD})
            CHECK(twin::to_half_bits(wide, mode) == bits, "an exact value stays");
    }
    // Between two neighbours, by every mode. 1 + 2^-10 is one unit above 1.
    const auto rounded = [](double value, RoundMode mode) {
        return static_cast<double>(twin::half_table()[twin::to_half_bits(static_cast<float>(value), mode)]);
    };
    const double unit = std::ldexp(1.0, -10);
    for (const double sign : {1.0, -1.0}) {
        const double low = sign, high = sign * (1 + unit), half_way = sign * (1 + unit / 2);
        CHECK(rounded(half_way, RoundMode::CAST_RINT) == low, "ties to even");
        CHECK(rounded(sign * (1 + 1.5 * unit), RoundMode::CAST_RINT) == sign * (1 + 2 * unit), "ties to even");
        CHECK(rounded(half_way, RoundMode::CAST_NONE) == low);
        CHECK(rounded(half_way, RoundMode::CAST_ROUND) == high, "ties away from zero");
        CHECK(rounded(half_way, RoundMode::CAST_TRUNC) == low);
        CHECK(rounded(half_way, RoundMode::CAST_ODD) == high, "the odd neighbour");
        CHECK(rounded(half_way, RoundMode::CAST_FLOOR) == std::min(low, high));
        CHECK(rounded(half_way, RoundMode::CAST_CEIL) == std::max(low, high));
    }
    CHECK(std::isinf(rounded(65520.0, RoundMode::CAST_RINT)));
    CHECK(rounded(65519.0, RoundMode::CAST_RINT) == 65504.0);
    CHECK(rounded(1e9, RoundMode::CAST_TRUNC) == 65504.0);
    CHECK(rounded(std::ldexp(1.0, -25), RoundMode::CAST_RINT) == 0.0, "half of the smallest, ties to even");
    CHECK(rounded(std::ldexp(1.1, -25), RoundMode::CAST_RINT) == std::ldexp(1.0, -24), "the smallest");
    CHECK(rounded(0.0, RoundMode::CAST_CEIL) == 0.0);
    CHECK(std::isnan(twin::half_table()[twin::to_half_bits(NAN)]));
    CHECK(twin::to_bf16_bits(1.0f) == 0x3f80);
    CHECK(twin::to_bf16_bits(twin::float_of(0x3f808000u)) == 0x3f80, "ties to even");
    CHECK(twin::to_bf16_bits(twin::float_of(0x3f818000u)) == 0x3f82, "ties to even");
    CHECK(std::isnan(ToFloat(ToBfloat16(NAN))));
}

constexpr uint32_t kFloats = 4096;

// A kernel body on two TBufs of random floats (a, b) and a third (c), whose contents it returns.
std::vector<float> compute(const std::function<void(LocalTensor<float>, LocalTensor<float>, LocalTensor<float>)>& body,
                           std::vector<float>& a, std::vector<float>& b) {
    generate::Source random(3);
    a.resize(kFloats);
    b.resize(kFloats);
    for (float& value : a) value = static_cast<float>(random.normal());
    for (float& value : b) value = static_cast<float>(random.normal());
    twin::Memory memory;
    twin::GmTensor& ga = memory.add("a", a.data(), kFloats * 4);
    twin::GmTensor& gb = memory.add("b", b.data(), kFloats * 4);
    twin::GmTensor& gc = memory.add("c", nullptr, kFloats * 4, false);
    const twin::Launch launch = twin::run(twin::ascend310p(), memory, 1, {}, [&] {
        TPipe pipe;
        TBuf<TPosition::VECCALC> ta, tb, tc;
        pipe.InitBuffer(ta, kFloats * 4);
        pipe.InitBuffer(tb, kFloats * 4);
        pipe.InitBuffer(tc, kFloats * 4);
        GlobalTensor<float> from_a, from_b, to;
        from_a.SetGlobalBuffer(reinterpret_cast<float*>(ga.data.data()));
        from_b.SetGlobalBuffer(reinterpret_cast<float*>(gb.data.data()));
        to.SetGlobalBuffer(reinterpret_cast<float*>(gc.data.data()));
        DataCopy(ta.Get<float>(), from_a, kFloats);
        DataCopy(tb.Get<float>(), from_b, kFloats);
        SetFlag<HardEvent::MTE2_V>(0);
        WaitFlag<HardEvent::MTE2_V>(0);
        Duplicate(tc.Get<float>(), 7.0f, kFloats);
        PipeBarrier<PIPE_V>();
        body(ta.Get<float>(), tb.Get<float>(), tc.Get<float>());
        SetFlag<HardEvent::V_MTE3>(0);
        WaitFlag<HardEvent::V_MTE3>(0);
        DataCopy(to, tc.Get<float>(), kFloats);
    });
    CHECK(launch.findings.empty(), launch.findings.text());
    std::vector<float> c(kFloats);
    std::memcpy(c.data(), gc.data.data(), kFloats * 4);
    return c;
}

void strided() {
    generate::Source random(5);
    for (int round = 0; round < 40; ++round) {
        const uint32_t mask = static_cast<uint32_t>(random.whole(1, 64)), repeats = static_cast<uint32_t>(random.whole(1, 6));
        const uint32_t s0 = static_cast<uint32_t>(random.whole(0, 2)), s1 = static_cast<uint32_t>(random.whole(0, 2));
        const uint32_t r0 = static_cast<uint32_t>(random.whole(0, 20)), r1 = static_cast<uint32_t>(random.whole(0, 20));
        const uint32_t d = static_cast<uint32_t>(random.whole(1, 2)), rd = 8 * d + static_cast<uint32_t>(random.whole(0, 4));
        const bool accumulate = random.coin();
        std::vector<float> a, b;
        const std::vector<float> c = compute(
            [&](LocalTensor<float> x, LocalTensor<float> y, LocalTensor<float> z) {
                const BinaryRepeatParams strides(d, s0, s1, rd, r0, r1);
                if (accumulate) MulAddDst(z, x, y, mask, repeats, strides);
                else Mul(z, x, y, mask, repeats, strides);
            },
            a, b);
        std::vector<float> expected(kFloats, 7.0f);
        for (uint32_t repeat = 0; repeat < repeats; ++repeat)
            for (uint32_t lane = 0; lane < mask; ++lane) {
                const float x = a[(repeat * r0 + lane / 8 * s0) * 8 + lane % 8];
                const float y = b[(repeat * r1 + lane / 8 * s1) * 8 + lane % 8];
                float& z = expected[(repeat * rd + lane / 8 * d) * 8 + lane % 8];
                z = accumulate ? z + x * y : x * y;
            }
        CHECK(c == expected, "round " + std::to_string(round));
    }
}

void whole_calls() {
    std::vector<float> a, b;
    std::vector<float> c = compute(
        [](LocalTensor<float> x, LocalTensor<float>, LocalTensor<float> z) { WholeReduceSum(z, x, 48, 20, 2, 1, 6); },
        a, b);
    for (uint32_t repeat = 0; repeat < 20; ++repeat) {
        double sum = 0;
        for (uint32_t lane = 0; lane < 48; ++lane) sum += a[repeat * 48 + lane];
        CHECK(std::abs(c[repeat * 2] - sum) < 1e-4 && c[repeat * 2 + 1] == 7.0f);
    }
    for (uint32_t lanes = 1; lanes <= 64; ++lanes) {
        c = compute([&](LocalTensor<float> x, LocalTensor<float>,
                        LocalTensor<float> z) { WholeReduceSum(z, x, lanes, 1, 1, 1, 8); }, a, b);
        double sum = 0;
        for (uint32_t lane = 0; lane < lanes; ++lane) sum += a[lane];
        CHECK(std::abs(c[0] - sum) < 1e-4, std::to_string(lanes));
    }
    c = compute([](LocalTensor<float> x, LocalTensor<float>,
                   LocalTensor<float> z) { Brcb(z, x, 3, BrcbRepeatParams(1, 8)); }, a, b);
    for (uint32_t i = 0; i < 24 * 8; ++i) CHECK(c[i] == a[i / 8]);
    CHECK(c[24 * 8] == 7.0f);
    c = compute([](LocalTensor<float> x, LocalTensor<float> y, LocalTensor<float> z) {
        Add(z, x, y, 100);
        Sub(z[104], x, y, 100);
        Muls(z[208], x, 3.0f, 100);
        Adds(z[312], x, 3.0f, 100);
        Exp(z[416], x, 100);
        Mul(z[520], x, y, 100);
    }, a, b);
    for (uint32_t i = 0; i < 100; ++i) {
        CHECK(c[i] == a[i] + b[i] && c[104 + i] == a[i] - b[i] && c[208 + i] == a[i] * 3.0f);
        CHECK(c[312 + i] == a[i] + 3.0f && c[416 + i] == std::exp(a[i]) && c[520 + i] == a[i] * b[i]);
    }
    CHECK(c[100] == 7.0f && c[103] == 7.0f && c[620] == 7.0f, "exactly `count` elements");
}

// Copies with gaps, both ways, and the padded ones.
void copies() {
    std::vector<int32_t> source(1024);
    for (uint32_t i = 0; i < 1024; ++i) source[i] = static_cast<int32_t>(i);
    twin::Memory memory;
    std::vector<float> values(source.begin(), source.end());
    twin::GmTensor& from = memory.add("from", values.data(), 4096);
    twin::GmTensor& to = memory.add("to", nullptr, 4096, false);
    twin::GmTensor& padded = memory.add("padded", nullptr, 4096, false);
    const twin::Launch launch = twin::run(twin::ascend910b(), memory, 1, {}, [&] {
        TPipe pipe;
        TQue<TPosition::VECIN, 1> in;
        TQue<TPosition::VECOUT, 1> out;
        pipe.InitBuffer(in, 1, 2048);
        pipe.InitBuffer(out, 1, 2048);
        GlobalTensor<float> gm, target, pads;
        gm.SetGlobalBuffer(reinterpret_cast<float*>(from.data.data()));
        target.SetGlobalBuffer(reinterpret_cast<float*>(to.data.data()));
        pads.SetGlobalBuffer(reinterpret_cast<float*>(padded.data.data()));
        const auto through = [&](const GlobalTensor<float>& where, auto params, uint32_t count, auto load) {
            LocalTensor<float> x = in.AllocTensor<float>();
            load(x);
            in.EnQue(x);
            x = in.DeQue<float>();
            LocalTensor<float> y = out.AllocTensor<float>();
            Muls(y, x, 1.0f, count);
            in.FreeTensor(x);
            out.EnQue(y);
            y = out.DeQue<float>();
            if constexpr (std::is_same_v<decltype(params), DataCopyParams>) DataCopy(where, y, params);
            else DataCopyPad(where, y, params);
            out.FreeTensor(y);
        };
        // 3 blocks of 16 floats, 8 floats apart at the source; packed; then 24 floats apart at the target.
        through(target, DataCopyParams(3, 2, 0, 3), 48,
                [&](LocalTensor<float> x) { DataCopy(x, gm[3], DataCopyParams(3, 2, 1, 0)); });
        // 2 rows of 5 floats, 3 floats apart, filled up to 8 with -1; then 5 of each, 1 float apart.
        through(pads, DataCopyExtParams(2, 20, 0, 4, 0), 16, [&](LocalTensor<float> x) {
            DataCopyPad(x, gm, DataCopyExtParams(2, 20, 12, 0, 0), DataCopyPadExtParams<float>(true, 0, 3, -1.0f));
        });
    });
    CHECK(launch.findings.empty(), launch.findings.text());
    const auto at = [](const twin::GmTensor& gm, uint32_t i) { return twin::Number<float>::load(&gm.data[i * 4]); };
    for (uint32_t block = 0; block < 3; ++block)
        for (uint32_t i = 0; i < 16; ++i)
            CHECK(at(to, block * 40 + i) == static_cast<float>(3 + block * 24 + i), std::to_string(block));
    CHECK(std::isnan(at(to, 16)) && std::isnan(at(to, 39)), "gaps stay");
    for (uint32_t row = 0; row < 2; ++row)
        for (uint32_t i = 0; i < 5; ++i) CHECK(at(padded, row * 6 + i) == static_cast<float>(row * 8 + i));
    CHECK(std::isnan(at(padded, 5)) && std::isnan(at(padded, 11)));
    CHECK(launch.counts.read_bytes.at("from") == 3 * 64 + 2 * 20);
    CHECK(launch.counts.written_bytes.at("to") == 3 * 64 && launch.counts.written_bytes.at("padded") == 2 * 20);
}

// Counting: 64 fp32 lanes a repeat, 255 repeats an instruction; waits and barriers as they are called.
void counting() {
    twin::Memory memory;
    const twin::Launch launch = twin::run(twin::ascend310p(), memory, 1, {}, [&] {
        TPipe pipe;
        TBuf<TPosition::VECCALC> work;
        pipe.InitBuffer(work, 128 * 1024);
        LocalTensor<float> x = work.Get<float>();
        Duplicate(x, 1.0f, 64 * 255);      // one instruction
        PipeBarrier<PIPE_V>();
        Muls(x, x, 2.0f, 64 * 256);        // two
        PipeBarrier<PIPE_ALL>();
        Muls(x, x, 2.0f, 64 * 2 + 1);      // two: full repeats, and the rest
        SetFlag<HardEvent::V_S>(0);
        WaitFlag<HardEvent::V_S>(0);
    });
    CHECK(launch.counts.vector_instructions == 5);
    CHECK(launch.counts.vector_repeats == 255 + 256 + 3);
    CHECK(launch.counts.vector_to_scalar_waits() == 2, "a flag, and a barrier of all pipes");
    CHECK(launch.findings.count(twin::Check::Undefined) == 0);
    CHECK(launch.counts.ub_bytes == 128 * 1024);
}

}  // namespace

int main() {
    numbers();
    strided();
    whole_calls();
    copies();
    counting();
    return check::done("api");
}
