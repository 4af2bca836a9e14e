// The two 16-bit floating types of the device and the roundings that lead to them. Knows numbers only.
#pragma once

#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

namespace AscendC {
enum class RoundMode { CAST_NONE = 0, CAST_RINT, CAST_FLOOR, CAST_CEIL, CAST_ROUND, CAST_TRUNC, CAST_ODD };
}

namespace twin {

inline uint32_t bits_of(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    return bits;
}

inline float float_of(uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

// A float as sign, exponent and mantissa of fewer bits; CAST_NONE means nearest, ties to even, as CAST_RINT.
template <int ExponentBits, int MantissaBits>
uint16_t narrow(float value, AscendC::RoundMode mode) {
    using AscendC::RoundMode;
    constexpr int bias = (1 << (ExponentBits - 1)) - 1;
    constexpr uint32_t infinity = ((1u << ExponentBits) - 1) << MantissaBits;
    const uint32_t bits = bits_of(value);
    const uint32_t sign = (bits >> 31) << (ExponentBits + MantissaBits);
    const uint32_t magnitude = bits & 0x7fffffffu;
    if (magnitude > 0x7f800000u) return static_cast<uint16_t>(sign | infinity | (1u << (MantissaBits - 1)));
    if (magnitude == 0x7f800000u) return static_cast<uint16_t>(sign | infinity);

    const int float_exponent = static_cast<int>(magnitude >> 23);
    uint64_t significand = magnitude & 0x7fffffu;
    int exponent = float_exponent - 127;
    if (float_exponent != 0) significand |= 0x800000u;
    else exponent = -126;
    const int smallest = 1 - bias;  // exponent of the smallest normal
    int shift = 23 - MantissaBits;
    if (exponent < smallest) {
        shift += smallest - exponent;
        exponent = smallest;
        if (shift > 60) shift = 60;
    }
    uint64_t kept = significand >> shift;
    const uint64_t rest = significand & ((uint64_t{1} << shift) - 1);
    const uint64_t half = uint64_t{1} << (shift - 1);
    const bool negative = sign != 0;
    bool up = false;
    switch (mode) {
        case RoundMode::CAST_NONE:
        case RoundMode::CAST_RINT: up = rest > half || (rest == half && (kept & 1)); break;
        case RoundMode::CAST_FLOOR: up = rest != 0 && negative; break;
        case RoundMode::CAST_CEIL: up = rest != 0 && !negative; break;
        case RoundMode::CAST_ROUND: up = rest >= half; break;
        case RoundMode::CAST_TRUNC: break;
        case RoundMode::CAST_ODD: kept |= rest != 0; break;
    }
    kept += up;
    // kept holds the implicit one of a normal number, so that adding it carries into the exponent by itself.
    const uint64_t biased = static_cast<uint64_t>(exponent + bias - 1);
    uint64_t packed = (biased << MantissaBits) + kept;
    if (packed >= infinity) {
        const bool towards_zero = mode == RoundMode::CAST_TRUNC || mode == RoundMode::CAST_ODD ||
                                  (mode == RoundMode::CAST_FLOOR && !negative) ||
                                  (mode == RoundMode::CAST_CEIL && negative);
        packed = towards_zero ? infinity - 1 : infinity;
    }
    return static_cast<uint16_t>(sign | packed);
}

inline float widen_half(uint16_t bits) {
    const uint32_t sign = static_cast<uint32_t>(bits & 0x8000u) << 16;
    const uint32_t exponent = (bits >> 10) & 0x1fu;
    const uint32_t mantissa = bits & 0x3ffu;
    if (exponent == 0x1f) return float_of(sign | 0x7f800000u | (mantissa << 13));
    if (exponent != 0) return float_of(sign | ((exponent + 112) << 23) | (mantissa << 13));
    const float magnitude = std::ldexp(static_cast<float>(mantissa), -24);
    return sign ? -magnitude : magnitude;
}

inline const std::array<float, 65536>& half_table() {
    static const std::array<float, 65536> table = [] {
        std::array<float, 65536> filled{};
        for (uint32_t bits = 0; bits < 65536; ++bits) filled[bits] = widen_half(static_cast<uint16_t>(bits));
        return filled;
    }();
    return table;
}

inline uint16_t to_half_bits(float value, AscendC::RoundMode mode = AscendC::RoundMode::CAST_RINT) {
    return narrow<5, 10>(value, mode);
}

inline uint16_t to_bf16_bits(float value, AscendC::RoundMode mode = AscendC::RoundMode::CAST_RINT) {
    return narrow<8, 7>(value, mode);
}

}  // namespace twin

// On the device `half` converts to and from float by itself; bfloat16_t does so only through ToFloat and ToBfloat16.
struct half {
    uint16_t bits = 0;
    half() = default;
    half(float value) : bits(twin::to_half_bits(value)) {}
    operator float() const { return twin::half_table()[bits]; }
};

struct bfloat16_t {
    uint16_t bits = 0;
};

namespace AscendC {
inline float ToFloat(const bfloat16_t& value) { return twin::float_of(static_cast<uint32_t>(value.bits) << 16); }
inline bfloat16_t ToBfloat16(float value) { return bfloat16_t{twin::to_bf16_bits(value)}; }
}  // namespace AscendC

namespace twin {

// How an element type is read as a float and written from one.
template <class T>
struct Number;

template <>
struct Number<float> {
    static constexpr const char* name = "float";
    static float load(const uint8_t* from) {
        float value;
        std::memcpy(&value, from, sizeof value);
        return value;
    }
    static void store(uint8_t* to, float value, AscendC::RoundMode = AscendC::RoundMode::CAST_RINT) {
        std::memcpy(to, &value, sizeof value);
    }
};

template <>
struct Number<half> {
    static constexpr const char* name = "half";
    static float load(const uint8_t* from) {
        uint16_t bits;
        std::memcpy(&bits, from, sizeof bits);
        return half_table()[bits];
    }
    static void store(uint8_t* to, float value, AscendC::RoundMode mode = AscendC::RoundMode::CAST_RINT) {
        const uint16_t bits = to_half_bits(value, mode);
        std::memcpy(to, &bits, sizeof bits);
    }
};

template <>
struct Number<bfloat16_t> {
    static constexpr const char* name = "bfloat16";
    static float load(const uint8_t* from) {
        uint16_t bits;
        std::memcpy(&bits, from, sizeof bits);
        return float_of(static_cast<uint32_t>(bits) << 16);
    }
    static void store(uint8_t* to, float value, AscendC::RoundMode mode = AscendC::RoundMode::CAST_RINT) {
        const uint16_t bits = to_bf16_bits(value, mode);
        std::memcpy(to, &bits, sizeof bits);
    }
};

template <>
struct Number<uint16_t> {  // only to fill with bit patterns
    static constexpr const char* name = "uint16";
    static float load(const uint8_t* from) {
        uint16_t bits;
        std::memcpy(&bits, from, sizeof bits);
        return bits;
    }
    static void store(uint8_t* to, float value, AscendC::RoundMode = AscendC::RoundMode::CAST_RINT) {
        const uint16_t bits = static_cast<uint16_t>(value);
        std::memcpy(to, &bits, sizeof bits);
    }
};

template <class T>
constexpr const char* type_name() {
    if constexpr (std::is_same_v<T, int32_t>) return "int32";
    else if constexpr (std::is_same_v<T, uint32_t>) return "uint32";
    else if constexpr (std::is_same_v<T, int64_t>) return "int64";
    else return Number<T>::name;
}

// An argument that the device narrows silently: remembers whether the value given still fits.
template <class Narrowed>
struct Checked {
    int64_t given = 0;
    Checked() = default;
    template <class Integer>
    Checked(Integer value) : given(static_cast<int64_t>(value)) {}
    bool fits() const { return given >= 0 && given <= static_cast<int64_t>(std::numeric_limits<Narrowed>::max()); }
    Narrowed value() const { return static_cast<Narrowed>(given); }
};

}  // namespace twin
