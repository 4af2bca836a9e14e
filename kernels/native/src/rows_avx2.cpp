// The row kernel in AVX2, FMA and F16C.
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

struct Avx2 {
  static constexpr int W = 8;
  using V = __m256;

  static V zero() { return _mm256_setzero_ps(); }
  static V set1(float x) { return _mm256_set1_ps(x); }
  static V add(V a, V b) { return _mm256_add_ps(a, b); }
  static V mul(V a, V b) { return _mm256_mul_ps(a, b); }
  static V fma(V a, V b, V c) { return _mm256_fmadd_ps(a, b, c); }

  static V load(const float* p) { return _mm256_loadu_ps(p); }
  static V load(const Half* p) { return from_half(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))); }
  static V load(const Brain* p) { return from_brain(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))); }
  static void store(float* p, V x) { _mm256_storeu_ps(p, x); }
  static void store(Half* p, V x) { _mm_storeu_si128(reinterpret_cast<__m128i*>(p), to_half(x)); }
  static void store(Brain* p, V x) { _mm_storeu_si128(reinterpret_cast<__m128i*>(p), to_brain(x)); }

  static V load_part(const float* p, int n) { return _mm256_maskload_ps(p, mask(n)); }
  static void store_part(float* p, V x, int n) { _mm256_maskstore_ps(p, mask(n), x); }
  static V load_part(const Half* p, int n) { return from_half(part(p, n)); }
  static V load_part(const Brain* p, int n) { return from_brain(part(p, n)); }
  static void store_part(Half* p, V x, int n) { put_part(p, to_half(x), n); }
  static void store_part(Brain* p, V x, int n) { put_part(p, to_brain(x), n); }

  // out[i] = the sum of a[i]'s lanes, always in the same order.
  static void sum4(const V* a, float* out) {
    const V ab = _mm256_add_ps(_mm256_unpacklo_ps(a[0], a[1]), _mm256_unpackhi_ps(a[0], a[1]));
    const V cd = _mm256_add_ps(_mm256_unpacklo_ps(a[2], a[3]), _mm256_unpackhi_ps(a[2], a[3]));
    const __m256d lo = _mm256_unpacklo_pd(_mm256_castps_pd(ab), _mm256_castps_pd(cd));
    const __m256d hi = _mm256_unpackhi_pd(_mm256_castps_pd(ab), _mm256_castps_pd(cd));
    const V all = _mm256_add_ps(_mm256_castpd_ps(lo), _mm256_castpd_ps(hi));
    _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(all), _mm256_extractf128_ps(all, 1)));
  }

 private:
  static V from_half(__m128i x) { return _mm256_cvtph_ps(x); }
  static __m128i to_half(V x) { return _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
  static V from_brain(__m128i x) { return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(x), 16)); }
  static __m128i to_brain(V x) {  // round to nearest even; a NaN stays one
    const __m256i u = _mm256_castps_si256(x);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(u, 16), _mm256_set1_epi32(1));
    const __m256i rounded = _mm256_add_epi32(u, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
    const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
    const __m256i quiet = _mm256_or_si256(u, _mm256_set1_epi32(0x00400000));
    const __m256i high = _mm256_srli_epi32(_mm256_blendv_epi8(rounded, quiet, nan), 16);
    const __m256i packed = _mm256_packus_epi32(high, high);
    return _mm256_castsi256_si128(_mm256_permute4x64_epi64(packed, 0x08));
  }
  static __m256i mask(int n) {
    return _mm256_cmpgt_epi32(_mm256_set1_epi32(n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
  }
  template <class T>
  static __m128i part(const T* p, int n) {
    alignas(16) uint16_t x[8] = {};
    for (int i = 0; i < n; ++i) x[i] = p[i].bits;
    return _mm_load_si128(reinterpret_cast<const __m128i*>(x));
  }
  template <class T>
  static void put_part(T* p, __m128i v, int n) {
    alignas(16) uint16_t x[8];
    _mm_store_si128(reinterpret_cast<__m128i*>(x), v);
    for (int i = 0; i < n; ++i) p[i].bits = x[i];
  }
};

#include "rows_impl.hpp"

// A state that has decayed to f32 subnormals would cost a hundred cycles an operation; they count as zero here.
// (Half-precision conversions ignore these bits, so subnormal halves stay what they are.)
void head(const Head& h, DType state, bool vector_decay) {
  const unsigned before = _mm_getcsr();
  _mm_setcsr(before | 0x8040u);
  head_of<Avx2>(h, state, vector_decay);
  _mm_setcsr(before);
}

}  // namespace

const RowKernels kAvx2Rows = {"avx2", head, widen_of<Avx2>, narrow_of<Avx2>, scale_of<Avx2>};

}  // namespace qwen_npu
