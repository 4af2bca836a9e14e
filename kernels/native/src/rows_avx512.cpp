// The row kernel in AVX-512 (F, BW, VL, DQ).
#include <immintrin.h>

#include "rows.hpp"

namespace qwen_npu {
namespace {

struct Half {
  uint16_t bits;
};
struct Brain {
  uint16_t bits;
};

struct Avx512 {
  static constexpr int W = 16;
  using V = __m512;

  static V zero() { return _mm512_setzero_ps(); }
  static V set1(float x) { return _mm512_set1_ps(x); }
  static V add(V a, V b) { return _mm512_add_ps(a, b); }
  static V mul(V a, V b) { return _mm512_mul_ps(a, b); }
  static V fma(V a, V b, V c) { return _mm512_fmadd_ps(a, b, c); }

  static V load(const float* p) { return _mm512_loadu_ps(p); }
  static V load(const Half* p) { return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))); }
  static V load(const Brain* p) { return from_brain(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))); }
  static void store(float* p, V x) { _mm512_storeu_ps(p, x); }
  static void store(Half* p, V x) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), to_half(x)); }
  static void store(Brain* p, V x) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), to_brain(x)); }

  static V load_part(const float* p, int n) { return _mm512_maskz_loadu_ps(mask(n), p); }
  static V load_part(const Half* p, int n) { return _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(mask(n), p)); }
  static V load_part(const Brain* p, int n) { return from_brain(_mm256_maskz_loadu_epi16(mask(n), p)); }
  static void store_part(float* p, V x, int n) { _mm512_mask_storeu_ps(p, mask(n), x); }
  static void store_part(Half* p, V x, int n) { _mm256_mask_storeu_epi16(p, mask(n), to_half(x)); }
  static void store_part(Brain* p, V x, int n) { _mm256_mask_storeu_epi16(p, mask(n), to_brain(x)); }

  // out[i] = the sum of a[i]'s lanes, always in the same order.
  static void sum4(const V* a, float* out) {
    const V ab = _mm512_add_ps(_mm512_unpacklo_ps(a[0], a[1]), _mm512_unpackhi_ps(a[0], a[1]));
    const V cd = _mm512_add_ps(_mm512_unpacklo_ps(a[2], a[3]), _mm512_unpackhi_ps(a[2], a[3]));
    const __m512d lo = _mm512_unpacklo_pd(_mm512_castps_pd(ab), _mm512_castps_pd(cd));
    const __m512d hi = _mm512_unpackhi_pd(_mm512_castps_pd(ab), _mm512_castps_pd(cd));
    const V all = _mm512_add_ps(_mm512_castpd_ps(lo), _mm512_castpd_ps(hi));
    const __m256 half = _mm256_add_ps(_mm512_castps512_ps256(all), _mm512_extractf32x8_ps(all, 1));
    _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1)));
  }

 private:
  static __mmask16 mask(int n) { return static_cast<__mmask16>((1u << n) - 1u); }
  static __m256i to_half(V x) { return _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
  static V from_brain(__m256i x) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16)); }
  static __m256i to_brain(V x) {  // round to nearest even; a NaN stays one
    const __m512i u = _mm512_castps_si512(x);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(u, 16), _mm512_set1_epi32(1));
    const __m512i rounded = _mm512_add_epi32(u, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
    const __mmask16 nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
    const __m512i kept = _mm512_mask_or_epi32(rounded, nan, u, _mm512_set1_epi32(0x00400000));
    return _mm512_cvtepi32_epi16(_mm512_srli_epi32(kept, 16));
  }
};

#include "rows_impl.hpp"

// A state that has decayed to f32 subnormals would cost a hundred cycles an operation; they count as zero here.
// (Half-precision conversions ignore these bits, so subnormal halves stay what they are.)
void head(const Head& h, DType state, bool vector_decay) {
  const unsigned before = _mm_getcsr();
  _mm_setcsr(before | 0x8040u);
  head_of<Avx512>(h, state, vector_decay);
  _mm_setcsr(before);
}

}  // namespace

const RowKernels kAvx512Rows = {"avx512", head, widen_of<Avx512>, narrow_of<Avx512>, scale_of<Avx512>};

}  // namespace qwen_npu
