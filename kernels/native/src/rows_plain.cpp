// The row kernel in plain C++: fixed-size loops that compilers turn into whatever vectors the target has (aarch64 too).
#include <cmath>
#include <cstring>

#include "rows.hpp"

namespace qwen_npu {
namespace {

struct Half {
  uint16_t bits;
};
struct Brain {
  uint16_t bits;
};

inline float from_bits(uint32_t u) {
  float x;
  std::memcpy(&x, &u, 4);
  return x;
}

inline uint32_t to_bits(float x) {
  uint32_t u;
  std::memcpy(&u, &x, 4);
  return u;
}

inline float widen(Brain x) { return from_bits(static_cast<uint32_t>(x.bits) << 16); }

inline Brain brain(float x) {  // round to nearest even; a NaN stays one
  const uint32_t u = to_bits(x);
  if (x != x) return {static_cast<uint16_t>((u | 0x00400000u) >> 16)};
  return {static_cast<uint16_t>((u + 0x7fffu + ((u >> 16) & 1u)) >> 16)};
}

#if defined(__aarch64__)
inline float widen(Half x) {
  __fp16 h;
  std::memcpy(&h, &x.bits, 2);
  return static_cast<float>(h);
}

inline Half half(float x) {
  const __fp16 h = static_cast<__fp16>(x);
  Half r;
  std::memcpy(&r.bits, &h, 2);
  return r;
}
#else
// The exponent is moved by an exact multiplication, so subnormal halves come out right as well.
inline float widen(Half x) {
  const uint32_t magnitude = static_cast<uint32_t>(x.bits & 0x7fffu) << 13;
  const uint32_t sign = static_cast<uint32_t>(x.bits & 0x8000u) << 16;
  if (magnitude >= 0x0f800000u) return from_bits(sign | 0x70000000u | magnitude);  // infinity, NaN
  return from_bits(sign | to_bits(from_bits(magnitude) * 0x1p112f));
}

inline Half half(float x) {  // round to nearest even
  const uint32_t u = to_bits(x);
  const uint32_t sign = (u >> 16) & 0x8000u;
  const uint32_t a = u & 0x7fffffffu;
  uint32_t r;
  if (a > 0x7f800000u) {
    r = 0x7e00u | ((a >> 13) & 0x3ffu);
  } else if (a >= 0x477ff000u) {  // 65520 and above round to infinity
    r = 0x7c00u;
  } else if (a >= 0x38800000u) {
    r = (a - 0x38000000u + 0xfffu + ((a >> 13) & 1u)) >> 13;
  } else {  // subnormal: the addition rounds
    r = to_bits(from_bits(a) + 0.5f) - 0x3f000000u;
  }
  return {static_cast<uint16_t>(sign | r)};
}
#endif

inline float widen(float x) { return x; }
inline void narrow(float x, float* p) { *p = x; }
inline void narrow(float x, Half* p) { *p = half(x); }
inline void narrow(float x, Brain* p) { *p = brain(x); }

struct Plain {
  static constexpr int W = 8;
  struct V {
    float lane[W];
  };

  static V zero() { return set1(0.0f); }
  static V set1(float x) {
    V r;
    for (int i = 0; i < W; ++i) r.lane[i] = x;
    return r;
  }
  static V add(V a, V b) {
    for (int i = 0; i < W; ++i) a.lane[i] += b.lane[i];
    return a;
  }
  static V mul(V a, V b) {
    for (int i = 0; i < W; ++i) a.lane[i] *= b.lane[i];
    return a;
  }
  static V fma(V a, V b, V c) {
#if defined(__aarch64__) || defined(__FMA__)
    for (int i = 0; i < W; ++i) c.lane[i] = std::fma(a.lane[i], b.lane[i], c.lane[i]);
#else
    for (int i = 0; i < W; ++i) c.lane[i] += a.lane[i] * b.lane[i];
#endif
    return c;
  }
  template <class T>
  static V load(const T* p) {
    V r;
    for (int i = 0; i < W; ++i) r.lane[i] = widen(p[i]);
    return r;
  }
  template <class T>
  static void store(T* p, V x) {
    for (int i = 0; i < W; ++i) narrow(x.lane[i], p + i);
  }
  template <class T>
  static V load_part(const T* p, int n) {
    V r = zero();
    for (int i = 0; i < n; ++i) r.lane[i] = widen(p[i]);
    return r;
  }
  template <class T>
  static void store_part(T* p, V x, int n) {
    for (int i = 0; i < n; ++i) narrow(x.lane[i], p + i);
  }
  static void sum4(const V* a, float* out) {
    for (int r = 0; r < 4; ++r) {
      const float* x = a[r].lane;
      out[r] = ((x[0] + x[1]) + (x[2] + x[3])) + ((x[4] + x[5]) + (x[6] + x[7]));
    }
  }
};

#include "rows_impl.hpp"

}  // namespace

const RowKernels kPlainRows = {"plain", head_of<Plain>, widen_of<Plain>, narrow_of<Plain>, scale_of<Plain>};

}  // namespace qwen_npu
