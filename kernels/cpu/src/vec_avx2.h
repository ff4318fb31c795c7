// AVX2, FMA and F16C: 8 lanes, 16 registers. The Xeons that host V100s have this instruction set.
#include <immintrin.h>

#include "fp8_format.h"
#include "kernel.h"

namespace fastattention {
namespace {

using Vec = __m256;
constexpr int kWidth = 8;

inline Vec splat(float x) { return _mm256_set1_ps(x); }
inline Vec iota(float start) { return _mm256_add_ps(_mm256_set1_ps(start), _mm256_setr_ps(0, 1, 2, 3, 4, 5, 6, 7)); }
inline Vec add(Vec a, Vec b) { return _mm256_add_ps(a, b); }
inline Vec sub(Vec a, Vec b) { return _mm256_sub_ps(a, b); }
inline Vec mul(Vec a, Vec b) { return _mm256_mul_ps(a, b); }
inline Vec div(Vec a, Vec b) { return _mm256_div_ps(a, b); }
inline Vec fma(Vec a, Vec b, Vec c) { return _mm256_fmadd_ps(a, b, c); }
inline Vec max(Vec a, Vec b) { return _mm256_max_ps(a, b); }
inline Vec abs(Vec a) { return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), a); }
inline Vec copysign(Vec magnitude, Vec sign) {
  return _mm256_or_ps(magnitude, _mm256_and_ps(sign, _mm256_set1_ps(-0.0f)));
}
inline Vec select_less(Vec a, Vec b, Vec yes, Vec no) {
  return _mm256_blendv_ps(no, yes, _mm256_cmp_ps(a, b, _CMP_LT_OQ));
}
inline Vec keep_range(Vec x, Vec otherwise, int column, int begin, int end) {
  const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  const __m256i before = _mm256_cmpgt_epi32(_mm256_set1_epi32(begin - column), lane);
  const __m256i inside = _mm256_cmpgt_epi32(_mm256_set1_epi32(end - column), lane);
  return _mm256_blendv_ps(otherwise, x, _mm256_castsi256_ps(_mm256_andnot_si256(before, inside)));
}
// x - floor(x).
inline Vec fraction(Vec x) { return _mm256_sub_ps(x, _mm256_floor_ps(x)); }
// y * 2^floor(x), or zero where x < bound.
inline Vec times_power_of_two_unless_less(Vec y, Vec x, Vec bound) {
  const __m256i biased = _mm256_add_epi32(_mm256_cvtps_epi32(_mm256_floor_ps(x)), _mm256_set1_epi32(127));
  return select_less(x, bound, splat(0.0f), _mm256_mul_ps(y, _mm256_castsi256_ps(_mm256_slli_epi32(biased, 23))));
}
inline float first_lane(Vec a) { return _mm256_cvtss_f32(a); }
inline float reduce_add(Vec a) {
  __m128 x = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
  x = _mm_add_ps(x, _mm_movehl_ps(x, x));
  return _mm_cvtss_f32(_mm_add_ss(x, _mm_shuffle_ps(x, x, 1)));
}
inline float reduce_max(Vec a) {
  __m128 x = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
  x = _mm_max_ps(x, _mm_movehl_ps(x, x));
  return _mm_cvtss_f32(_mm_max_ss(x, _mm_shuffle_ps(x, x, 1)));
}

inline bool any_greater(Vec a, Vec b) { return _mm256_movemask_ps(_mm256_cmp_ps(a, b, _CMP_GT_OQ)) != 0; }

inline Vec load(const float* p) { return _mm256_loadu_ps(p); }
inline Vec load(const Half* p) { return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))); }
inline Vec load(const BFloat16* p) {
  const __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
}
// Loads 16 numbers and separates those at even positions from those at odd ones; see panel_pairs.h.
#define FA_BF16_PAIRS
inline void load_pairs(const BFloat16* p, Vec& even, Vec& odd) {
  const __m256i pairs = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  even = _mm256_castsi256_ps(_mm256_slli_epi32(pairs, 16));
  odd = _mm256_castsi256_ps(_mm256_and_si256(pairs, _mm256_set1_epi32(static_cast<int>(0xffff0000))));
}
// Separates 16 neighbours into even and odd ones, and the reverse.
inline void part_pairs(Vec& a, Vec& b) {
  const auto in_order = [](Vec halves) {
    return _mm256_castpd_ps(_mm256_permute4x64_pd(_mm256_castps_pd(halves), 0xd8));
  };
  const Vec first = a;
  a = in_order(_mm256_shuffle_ps(first, b, 0x88));
  b = in_order(_mm256_shuffle_ps(first, b, 0xdd));
}
inline void join_pairs(Vec& a, Vec& b) {
  const Vec low = _mm256_unpacklo_ps(a, b), high = _mm256_unpackhi_ps(a, b);
  a = _mm256_permute2f128_ps(low, high, 0x20);
  b = _mm256_permute2f128_ps(low, high, 0x31);
}
// Each byte becomes the upper byte of 16 bits.
inline __m128i load_upper_bytes(const void* p) {
  return _mm_unpacklo_epi8(_mm_setzero_si128(), _mm_loadl_epi64(static_cast<const __m128i*>(p)));
}
inline Vec load(const Float8E5M2* p) { return _mm256_cvtph_ps(load_upper_bytes(p)); }
// fp8_format.h explains this arithmetic.
inline Vec load(const Float8E4M3* p) {
  const __m128i half = _mm_srai_epi16(load_upper_bytes(p), 1);
  const __m128i carried = _mm_add_epi16(half, _mm_set1_epi16(0x80));
  const __m128i bits = _mm_xor_si128(half, _mm_and_si128(carried, _mm_set1_epi16(0x4000)));
  return _mm256_mul_ps(_mm256_cvtph_ps(bits), _mm256_set1_ps(256.0f));
}
inline Vec load(const Int8* p) {
  return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
}
inline void store(float* p, Vec a) { _mm256_storeu_ps(p, a); }
inline void store(Half* p, Vec a) {
  const __m128i half = _mm256_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), half);
}
inline void store(BFloat16* p, Vec a) {
  const __m256i bits = _mm256_castps_si256(a);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i rounded = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
  // Rounding could carry a NaN into infinity, so NaNs are made quiet instead.
  const __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
  const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(a, a, _CMP_UNORD_Q));
  const __m256i high = _mm256_srli_epi32(_mm256_blendv_epi8(rounded, quiet, nan), 16);
  const __m128i packed = _mm_packus_epi32(_mm256_castsi256_si128(high), _mm256_extracti128_si256(high, 1));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), packed);
}

template <class T>
inline void store_fp8(T* p, Vec a) {
  using Format = Fp8Format<T>;
  // For NaN, _mm256_min_ps returns its second operand, so magnitude stays NaN.
  const __m256 magnitude = _mm256_min_ps(_mm256_set1_ps(Format::kLargest), abs(a));
  const __m256i bits = _mm256_castps_si256(magnitude);
  const __m256i last = _mm256_and_si256(_mm256_srli_epi32(bits, Format::kShift), _mm256_set1_epi32(1));
  const __m256i rounded = _mm256_add_epi32(bits, _mm256_add_epi32(last, _mm256_set1_epi32(Format::kHalfUnit)));
  __m256i code = _mm256_sub_epi32(_mm256_srli_epi32(rounded, Format::kShift), _mm256_set1_epi32(Format::kRebias));
  const __m256 anchor = _mm256_set1_ps(Format::kSubnormalAnchor);
  const __m256i anchored = _mm256_castps_si256(_mm256_add_ps(magnitude, anchor));
  const __m256 small = _mm256_cmp_ps(magnitude, _mm256_set1_ps(Format::kSmallestNormal), _CMP_LT_OQ);
  code = _mm256_blendv_epi8(code, _mm256_sub_epi32(anchored, _mm256_castps_si256(anchor)), _mm256_castps_si256(small));
  const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(a, a, _CMP_UNORD_Q));
  code = _mm256_blendv_epi8(code, _mm256_set1_epi32(kFp8NaN), nan);
  const __m256i sign = _mm256_and_si256(_mm256_srli_epi32(_mm256_castps_si256(a), 24), _mm256_set1_epi32(0x80));
  code = _mm256_or_si256(code, sign);
  const __m128i words = _mm_packus_epi32(_mm256_castsi256_si128(code), _mm256_extracti128_si256(code, 1));
  _mm_storel_epi64(reinterpret_cast<__m128i*>(p), _mm_packus_epi16(words, words));
}
inline void store(Float8E4M3* p, Vec a) { store_fp8(p, a); }
inline void store(Float8E5M2* p, Vec a) { store_fp8(p, a); }

inline void store(Int8* p, Vec a) {
  const __m256i rounded = _mm256_cvtps_epi32(a);
  const __m128i words = _mm_packs_epi32(_mm256_castsi256_si128(rounded), _mm256_extracti128_si256(rounded, 1));
  _mm_storel_epi64(reinterpret_cast<__m128i*>(p), _mm_packs_epi16(words, words));
}

// Lane i of the result is the sum of the lanes of a[i].
inline Vec reduce_add_each(const Vec (&a)[8]) {
  const Vec low = _mm256_hadd_ps(_mm256_hadd_ps(a[0], a[1]), _mm256_hadd_ps(a[2], a[3]));
  const Vec high = _mm256_hadd_ps(_mm256_hadd_ps(a[4], a[5]), _mm256_hadd_ps(a[6], a[7]));
  return _mm256_add_ps(_mm256_permute2f128_ps(low, high, 0x20), _mm256_permute2f128_ps(low, high, 0x31));
}

inline void transpose(Vec (&a)[8]) {
  Vec b[8];
  FA_UNROLL
  for (int i = 0; i < 8; i += 2) {
    b[i] = _mm256_unpacklo_ps(a[i], a[i + 1]);
    b[i + 1] = _mm256_unpackhi_ps(a[i], a[i + 1]);
  }
  FA_UNROLL
  for (int i = 0; i < 8; i += 4) {
    a[i] = _mm256_shuffle_ps(b[i], b[i + 2], 0x44);
    a[i + 1] = _mm256_shuffle_ps(b[i], b[i + 2], 0xee);
    a[i + 2] = _mm256_shuffle_ps(b[i + 1], b[i + 3], 0x44);
    a[i + 3] = _mm256_shuffle_ps(b[i + 1], b[i + 3], 0xee);
  }
  FA_UNROLL
  for (int k = 0; k < 4; ++k) {
    b[k] = _mm256_permute2f128_ps(a[k], a[4 + k], 0x20);
    b[4 + k] = _mm256_permute2f128_ps(a[k], a[4 + k], 0x31);
  }
  FA_UNROLL
  for (int i = 0; i < 8; ++i) a[i] = b[i];
}

}  // namespace
}  // namespace fastattention
