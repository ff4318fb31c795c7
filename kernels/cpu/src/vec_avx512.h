// AVX-512 (F, BW, DQ, VL): 16 lanes, 32 registers.
#include <immintrin.h>

#include "fp8_format.h"
#include "kernel.h"

namespace fastattention {
namespace {

using Vec = __m512;
constexpr int kWidth = 16;

inline Vec splat(float x) { return _mm512_set1_ps(x); }
inline Vec iota(float start) {
  return _mm512_add_ps(_mm512_set1_ps(start), _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15));
}
inline Vec add(Vec a, Vec b) { return _mm512_add_ps(a, b); }
inline Vec sub(Vec a, Vec b) { return _mm512_sub_ps(a, b); }
inline Vec mul(Vec a, Vec b) { return _mm512_mul_ps(a, b); }
inline Vec div(Vec a, Vec b) { return _mm512_div_ps(a, b); }
inline Vec fma(Vec a, Vec b, Vec c) { return _mm512_fmadd_ps(a, b, c); }
inline Vec max(Vec a, Vec b) { return _mm512_max_ps(a, b); }
inline Vec abs(Vec a) { return _mm512_abs_ps(a); }
inline Vec copysign(Vec magnitude, Vec sign) {
  return _mm512_or_ps(magnitude, _mm512_and_ps(sign, _mm512_set1_ps(-0.0f)));
}
inline Vec select_less(Vec a, Vec b, Vec yes, Vec no) {
  return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(a, b, _CMP_LT_OQ), no, yes);
}
inline Vec keep_range(Vec x, Vec otherwise, int column, int begin, int end) {
  const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  const __mmask16 from = _mm512_cmpge_epi32_mask(lane, _mm512_set1_epi32(begin - column));
  const __mmask16 keep = _mm512_mask_cmplt_epi32_mask(from, lane, _mm512_set1_epi32(end - column));
  return _mm512_mask_blend_ps(keep, otherwise, x);
}
// x - floor(x).
inline Vec fraction(Vec x) { return _mm512_reduce_ps(x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC); }
// y * 2^floor(x), or zero where x < bound.
inline Vec times_power_of_two_unless_less(Vec y, Vec x, Vec bound) {
  return _mm512_maskz_scalef_ps(_mm512_cmp_ps_mask(x, bound, _CMP_NLT_UQ), y, x);
}
inline float first_lane(Vec a) { return _mm512_cvtss_f32(a); }
inline float reduce_add(Vec a) { return _mm512_reduce_add_ps(a); }
inline float reduce_max(Vec a) { return _mm512_reduce_max_ps(a); }
inline bool any_greater(Vec a, Vec b) { return _mm512_cmp_ps_mask(a, b, _CMP_GT_OQ) != 0; }

inline Vec load(const float* p) { return _mm512_loadu_ps(p); }
inline Vec load(const Half* p) { return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))); }
inline Vec widen_bf16(__m256i x) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16)); }
inline Vec load(const BFloat16* p) { return widen_bf16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))); }

// Loads 32 numbers and separates those at even positions from those at odd ones; see panel_pairs.h.
#define FA_BF16_PAIRS
inline void load_pairs(const BFloat16* p, Vec& even, Vec& odd) {
  const __m512i pairs = _mm512_loadu_si512(p);
  even = _mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16));
  odd = _mm512_castsi512_ps(_mm512_and_si512(pairs, _mm512_set1_epi32(static_cast<int>(0xffff0000))));
}
// Separates 32 neighbours into even and odd ones, and the reverse.
inline void part_pairs(Vec& a, Vec& b) {
  const __m512i even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
  const Vec first = a;
  a = _mm512_permutex2var_ps(first, even, b);
  b = _mm512_permutex2var_ps(first, _mm512_add_epi32(even, _mm512_set1_epi32(1)), b);
}
inline void join_pairs(Vec& a, Vec& b) {
  const __m512i low = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
  const Vec even = a;
  a = _mm512_permutex2var_ps(even, low, b);
  b = _mm512_permutex2var_ps(even, _mm512_add_epi32(low, _mm512_set1_epi32(8)), b);
}

// Each byte becomes the upper byte of 16 bits.
inline __m256i upper_bytes(__m128i x) {
  const __m256i order = _mm256_setr_epi8(-1, 0, -1, 1, -1, 2, -1, 3, -1, 4, -1, 5, -1, 6, -1, 7,  //
                                         -1, 8, -1, 9, -1, 10, -1, 11, -1, 12, -1, 13, -1, 14, -1, 15);
  return _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(x), order);
}
inline Vec widen(Float8E5M2, __m128i x) { return _mm512_cvtph_ps(upper_bytes(x)); }
// fp8_format.h explains this arithmetic.
inline Vec widen(Float8E4M3, __m128i x) {
  const __m256i half = _mm256_srai_epi16(upper_bytes(x), 1);
  const __m256i carried = _mm256_add_epi16(half, _mm256_set1_epi16(0x80));
  const __m256i bits = _mm256_ternarylogic_epi32(half, carried, _mm256_set1_epi16(0x4000), 0x78);  // a ^ (b & c)
  return _mm512_mul_ps(_mm512_cvtph_ps(bits), _mm512_set1_ps(256.0f));
}
inline Vec load(const Float8E4M3* p) { return widen(*p, _mm_loadu_si128(reinterpret_cast<const __m128i*>(p))); }
inline Vec load(const Float8E5M2* p) { return widen(*p, _mm_loadu_si128(reinterpret_cast<const __m128i*>(p))); }

inline Vec load(const Int8* p) {
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
}

inline __m256i round_bf16(Vec a) {
  const __m512i bits = _mm512_castps_si512(a);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
  // Rounding could carry a NaN into infinity, so NaNs are made quiet instead.
  rounded = _mm512_mask_or_epi32(rounded, _mm512_cmp_ps_mask(a, a, _CMP_UNORD_Q), bits, _mm512_set1_epi32(0x400000));
  return _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded, 16));
}
inline __m256i round_half(Vec a) { return _mm512_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
template <class T>
inline __m128i round_fp8(Vec a) {
  using Format = Fp8Format<T>;
  // For NaN, _mm512_min_ps returns its second operand, so magnitude stays NaN.
  const __m512 magnitude = _mm512_min_ps(_mm512_set1_ps(Format::kLargest), _mm512_abs_ps(a));
  const __m512i bits = _mm512_castps_si512(magnitude);
  const __m512i last = _mm512_and_si512(_mm512_srli_epi32(bits, Format::kShift), _mm512_set1_epi32(1));
  const __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(last, _mm512_set1_epi32(Format::kHalfUnit)));
  __m512i code = _mm512_sub_epi32(_mm512_srli_epi32(rounded, Format::kShift), _mm512_set1_epi32(Format::kRebias));
  const __m512 anchor = _mm512_set1_ps(Format::kSubnormalAnchor);
  const __m512i anchored = _mm512_castps_si512(_mm512_add_ps(magnitude, anchor));
  const __mmask16 small = _mm512_cmp_ps_mask(magnitude, _mm512_set1_ps(Format::kSmallestNormal), _CMP_LT_OQ);
  code = _mm512_mask_sub_epi32(code, small, anchored, _mm512_castps_si512(anchor));
  code = _mm512_mask_mov_epi32(code, _mm512_cmp_ps_mask(a, a, _CMP_UNORD_Q), _mm512_set1_epi32(kFp8NaN));
  const __m512i sign = _mm512_and_si512(_mm512_srli_epi32(_mm512_castps_si512(a), 24), _mm512_set1_epi32(0x80));
  return _mm512_cvtepi32_epi8(_mm512_or_si512(code, sign));
}
inline void store(float* p, Vec a) { _mm512_storeu_ps(p, a); }
inline void store(Half* p, Vec a) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), round_half(a)); }
inline void store(BFloat16* p, Vec a) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), round_bf16(a)); }
inline void store(Float8E4M3* p, Vec a) { _mm_storeu_si128(reinterpret_cast<__m128i*>(p), round_fp8<Float8E4M3>(a)); }
inline void store(Float8E5M2* p, Vec a) { _mm_storeu_si128(reinterpret_cast<__m128i*>(p), round_fp8<Float8E5M2>(a)); }
inline void store(Int8* p, Vec a) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtsepi32_epi8(_mm512_cvtps_epi32(a)));
}

// Only the first 8 elements; the other lanes are zero. Head sizes are multiples of 8, so there is no other remainder.
inline Vec load_8(const float* p) { return _mm512_zextps256_ps512(_mm256_loadu_ps(p)); }
inline Vec load_8(const Half* p) {
  return _mm512_zextps256_ps512(_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
}
inline Vec load_8(const BFloat16* p) {
  return widen_bf16(_mm256_zextsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
}
inline Vec load_8(const Float8E4M3* p) { return widen(*p, _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))); }
inline Vec load_8(const Float8E5M2* p) { return widen(*p, _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))); }
inline Vec load_8(const Int8* p) {
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
}
inline void store_8(float* p, Vec a) { _mm256_storeu_ps(p, _mm512_castps512_ps256(a)); }
inline void store_8(Half* p, Vec a) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_castsi256_si128(round_half(a)));
}
inline void store_8(BFloat16* p, Vec a) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_castsi256_si128(round_bf16(a)));
}
inline void store_8(Float8E4M3* p, Vec a) { _mm_storel_epi64(reinterpret_cast<__m128i*>(p), round_fp8<Float8E4M3>(a)); }
inline void store_8(Float8E5M2* p, Vec a) { _mm_storel_epi64(reinterpret_cast<__m128i*>(p), round_fp8<Float8E5M2>(a)); }
inline void store_8(Int8* p, Vec a) {
  _mm_storel_epi64(reinterpret_cast<__m128i*>(p), _mm512_cvtsepi32_epi8(_mm512_cvtps_epi32(a)));
}

// Lane i of the result is the sum of the lanes of a[i]. This takes 45 instructions; 16 separate reductions take 160.
inline Vec reduce_add_each(const Vec (&a)[16]) {
  Vec column[4];
  FA_UNROLL
  for (int i = 0; i < 4; ++i) {
    const Vec low =
        _mm512_add_ps(_mm512_shuffle_f32x4(a[i], a[i + 4], 0x44), _mm512_shuffle_f32x4(a[i], a[i + 4], 0xee));
    const Vec high =
        _mm512_add_ps(_mm512_shuffle_f32x4(a[i + 8], a[i + 12], 0x44), _mm512_shuffle_f32x4(a[i + 8], a[i + 12], 0xee));
    column[i] = _mm512_add_ps(_mm512_shuffle_f32x4(low, high, 0x88), _mm512_shuffle_f32x4(low, high, 0xdd));
  }
  const Vec x = _mm512_add_ps(_mm512_unpacklo_ps(column[0], column[1]), _mm512_unpackhi_ps(column[0], column[1]));
  const Vec y = _mm512_add_ps(_mm512_unpacklo_ps(column[2], column[3]), _mm512_unpackhi_ps(column[2], column[3]));
  return _mm512_add_ps(_mm512_shuffle_ps(x, y, 0x44), _mm512_shuffle_ps(x, y, 0xee));
}

inline void transpose(Vec (&a)[16]) {
  Vec b[16];
  FA_UNROLL
  for (int i = 0; i < 16; i += 2) {  // pairs of rows
    b[i] = _mm512_unpacklo_ps(a[i], a[i + 1]);
    b[i + 1] = _mm512_unpackhi_ps(a[i], a[i + 1]);
  }
  FA_UNROLL
  for (int i = 0; i < 16; i += 4) {  // groups of four rows: a[i + k] holds column k of each 128-bit lane
    a[i] = _mm512_shuffle_ps(b[i], b[i + 2], 0x44);
    a[i + 1] = _mm512_shuffle_ps(b[i], b[i + 2], 0xee);
    a[i + 2] = _mm512_shuffle_ps(b[i + 1], b[i + 3], 0x44);
    a[i + 3] = _mm512_shuffle_ps(b[i + 1], b[i + 3], 0xee);
  }
  FA_UNROLL
  for (int k = 0; k < 4; ++k) {  // 4 x 4 transpose of the 128-bit lanes
    const Vec even_low = _mm512_shuffle_f32x4(a[k], a[4 + k], 0x88);
    const Vec odd_low = _mm512_shuffle_f32x4(a[k], a[4 + k], 0xdd);
    const Vec even_high = _mm512_shuffle_f32x4(a[8 + k], a[12 + k], 0x88);
    const Vec odd_high = _mm512_shuffle_f32x4(a[8 + k], a[12 + k], 0xdd);
    b[k] = _mm512_shuffle_f32x4(even_low, even_high, 0x88);
    b[4 + k] = _mm512_shuffle_f32x4(odd_low, odd_high, 0x88);
    b[8 + k] = _mm512_shuffle_f32x4(even_low, even_high, 0xdd);
    b[12 + k] = _mm512_shuffle_f32x4(odd_low, odd_high, 0xdd);
  }
  FA_UNROLL
  for (int i = 0; i < 16; ++i) a[i] = b[i];
}

// Transposes 16 consecutive rows of 16 numbers into all 16 columns, or into the first 8.
inline void load_transposed(const float* rows, Vec (&columns)[16]) {
  FA_UNROLL
  for (int i = 0; i < 16; ++i) columns[i] = load(rows + i * 16);
  transpose(columns);
}
inline void load_transposed(const float* rows, Vec (&columns)[8]) {
  Vec pairs[8];  // pairs of half rows: 0 and 4, 1 and 5, ..., 8 and 12, ...
  FA_UNROLL
  for (int i = 0; i < 8; ++i) {
    const float* row = rows + (i % 4 + i / 4 * 8) * 16;
    pairs[i] = _mm512_insertf32x8(_mm512_castps256_ps512(_mm256_loadu_ps(row)), _mm256_loadu_ps(row + 4 * 16), 1);
  }
  Vec quads[8];  // 4 rows in each lane; quads[k] and quads[4 + k] hold columns k, 4 + k, k and 4 + k
  FA_UNROLL
  for (int i = 0; i < 8; i += 4) {
    const Vec low = _mm512_unpacklo_ps(pairs[i], pairs[i + 1]), high = _mm512_unpackhi_ps(pairs[i], pairs[i + 1]);
    const Vec low2 = _mm512_unpacklo_ps(pairs[i + 2], pairs[i + 3]);
    const Vec high2 = _mm512_unpackhi_ps(pairs[i + 2], pairs[i + 3]);
    quads[i] = _mm512_shuffle_ps(low, low2, 0x44);
    quads[i + 1] = _mm512_shuffle_ps(low, low2, 0xee);
    quads[i + 2] = _mm512_shuffle_ps(high, high2, 0x44);
    quads[i + 3] = _mm512_shuffle_ps(high, high2, 0xee);
  }
  FA_UNROLL
  for (int k = 0; k < 4; ++k) {
    columns[k] = _mm512_shuffle_f32x4(quads[k], quads[4 + k], 0x88);
    columns[4 + k] = _mm512_shuffle_f32x4(quads[k], quads[4 + k], 0xdd);
  }
}

}  // namespace
}  // namespace fastattention
