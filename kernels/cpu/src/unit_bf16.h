// The AVX-512 bf16 dot product as a Unit of the packed panels. Each lane multiplies and adds two dimensions (of K) or
// two tokens (of V). Products of bf16 are exact in fp32 and sums are fp32. Only the weights are rounded, as in
// FlashAttention-2.
namespace fastattention {
namespace {

// Element types whose every value is a bf16 number.
template <class T>
constexpr bool kExactInBf16 = false;
template <>
constexpr bool kExactInBf16<BFloat16> = true;

inline Vec bits(__m512i a) { return _mm512_castsi512_ps(a); }
inline __m512i bits(Vec a) { return _mm512_castps_si512(a); }

// The instruction flushes subnormals to zero, but weights are never subnormal.
inline void store_weights(BFloat16* p, Vec first, Vec second) {
  _mm512_storeu_si512(p, (__m512i)_mm512_cvtne2ps_pbh(second, first));
}

// Loads up to 32 elements. Those from count on are zero and their memory is not touched.
inline __m512i load_bf16(const BFloat16* p, int count) {
  const __mmask32 mask = count >= 32 ? ~0u : (1u << count) - 1;
  return _mm512_maskz_loadu_epi16(mask, p);
}
// Loads 32 elements of an 8-bit cache. Defined in bytes_to_bf16.h.
template <class T>
__m512i load_bf16(const T* p, int count);

struct Bf16Unit {
  using Element = BFloat16;
  static constexpr int kDepth = 2;

  static Vec broadcast(const BFloat16* p) {
    int32_t pair;
    __builtin_memcpy(&pair, p, sizeof(pair));
    return bits(_mm512_set1_epi32(pair));
  }
  static Vec load_operand(const BFloat16* p) { return load(reinterpret_cast<const float*>(p)); }
  static Vec accumulate(Vec a, Vec b, Vec c) { return _mm512_dpbf16_ps(c, (__m512bh)a, (__m512bh)b); }

  // Pairs of dimensions are transposed like single fp32 numbers: the same transposition as for FMA, half as often.
  template <class T>
  static void pack_keys(const KvRows<T>& rows, int column, int head_size, BFloat16* strip, int width,
                        Prefetch<T>& upcoming) {
    for (int d = 0; d < head_size; d += 2 * kWidth) {
      upcoming.advance();
      upcoming.advance();
      Vec block[kWidth];
      FA_UNROLL
      for (int i = 0; i < kWidth; ++i) block[i] = bits(load_bf16(rows.key[column + i] + d, head_size - d));
      transpose(block);
      FA_UNROLL
      for (int i = 0; i < kWidth; ++i) {
        store(reinterpret_cast<float*>(strip + (d + 2 * i) * width), block[i]);
      }
    }
  }
  // Interleaves tokens token and token + 1. Tokens past the end of the tile are zero.
  template <class T>
  static void pack_values(const KvRows<T>& rows, int token, int head_size, int stride, BFloat16* values) {
    const __m512i low = _mm512_set_epi16(47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8, 39, 7, 38, 6, 37,
                                         5, 36, 4, 35, 3, 34, 2, 33, 1, 32, 0);
    const __m512i high = _mm512_add_epi16(low, _mm512_set1_epi16(16));
    for (int d = 0; d < head_size; d += 2 * kWidth) {
      const __m512i even =
          token < rows.count ? load_bf16(rows.value[token] + d, head_size - d) : _mm512_setzero_si512();
      const __m512i odd =
          token + 1 < rows.count ? load_bf16(rows.value[token + 1] + d, head_size - d) : _mm512_setzero_si512();
      const int width = stride - d < kStrip ? stride - d : kStrip;
      float* to = reinterpret_cast<float*>(values + d * kKvTile + token * width);
      store(to, bits(_mm512_permutex2var_epi16(even, low, odd)));
      if (width > kWidth) store(to + kWidth, bits(_mm512_permutex2var_epi16(even, high, odd)));
    }
  }
};
static_assert(kStrip == 2 * kWidth, "values are packed one strip at a time");

}  // namespace
}  // namespace fastattention
