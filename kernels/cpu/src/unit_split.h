// fp16 on bf16 matrix units: every fp16 number is exactly the sum of two bf16 numbers. Widened to fp32, it has 10
// significand bits after the leading one. The upper 16 bits of the fp32 word are a bf16 with the first 7 of them, and
// the remainder has at most 3. Neither part is ever subnormal in bf16, which AMX would treat as zero, because the
// smallest bit of an fp16 is 2^-24. All four products of parts are therefore exact in fp32, and together they are the
// product of the numbers.
namespace fastattention {
namespace {

// Two bf16 parts in place of one number. 32 numbers of a row or column are stored as 16 pairs of their upper parts,
// followed by 16 pairs of their lower parts. Number i is paired with number i + 16, which needs no shuffle.
struct SplitNumber {
  BFloat16 parts[2];
};
constexpr int kSplitStep = 2 * kWidth;

template <class T>
constexpr bool kIsSumOfTwoBf16 = false;
template <>
constexpr bool kIsSumOfTwoBf16<Half> = true;

struct SplitPairs {
  __m512i upper, lower;
};
inline __m512i upper_half(Vec a) { return _mm512_and_si512(bits(a), _mm512_set1_epi32(static_cast<int>(0xffff0000))); }
inline __m512i pairs_of(__m512i first, __m512i second) { return _mm512_or_si512(_mm512_srli_epi32(first, 16), second); }
inline SplitPairs split_pairs(Vec a, Vec b) {
  const __m512i first = upper_half(a), second = upper_half(b);
  return {pairs_of(first, second), pairs_of(bits(sub(a, bits(first))), bits(sub(b, bits(second))))};
}

// A weight has more bits than two parts hold. Both parts are rounded, so their sum is off by at most 2^-17 of the
// weight. A NaN does not carry into infinity; see odd_pair in panel_amx_direct.h.
template <>
constexpr bool kFullWeights<SplitNumber> = true;
inline void store_weights(SplitNumber* p, Vec first, Vec second) {
  const auto rounded = [](Vec a) { return upper_half(bits(_mm512_add_epi32(bits(a), _mm512_set1_epi32(0x8000)))); };
  const __m512i first_upper = rounded(first), second_upper = rounded(second);
  _mm512_storeu_si512(p, pairs_of(first_upper, second_upper));
  _mm512_storeu_si512(p + kWidth,
                      pairs_of(rounded(sub(first, bits(first_upper))), rounded(sub(second, bits(second_upper)))));
}

// Loads up to 16 elements. Those from count on are zero and their memory is not touched.
inline Vec load_some(const Half* p, int count) {
  const __mmask16 mask = count >= kWidth ? 0xffff : count <= 0 ? 0 : (1u << count) - 1;
  return _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(mask, p));
}
inline SplitPairs load_split(const Half* p, int count) {
  return split_pairs(load_some(p, count), load_some(p + kWidth, count - kWidth));
}

// A Unit for packing only. For each 32 of the summed dimension, a strip holds 16 rows of upper and 16 rows of lower
// pairs.
struct SplitUnit {
  using Element = SplitNumber;
  static constexpr int kDepth = 1;

  template <class T>
  static void pack_keys(const KvRows<T>& rows, int column, int head_size, SplitNumber* strip, int width,
                        Prefetch<T>& upcoming) {
    for (int d = 0; d < head_size; d += kSplitStep) {
      upcoming.advance();
      upcoming.advance();
      Vec upper[kWidth], lower[kWidth];
      FA_UNROLL
      for (int i = 0; i < kWidth; ++i) {
        const SplitPairs pairs = load_split(rows.key[column + i] + d, head_size - d);
        upper[i] = bits(pairs.upper);
        lower[i] = bits(pairs.lower);
      }
      SplitNumber* to = strip + d * width;
      const auto store_rows = [&](Vec(&block)[kWidth], SplitNumber* first) {
        transpose(block);
        FA_UNROLL
        for (int i = 0; i < kWidth; ++i) store(reinterpret_cast<float*>(first + i * width), block[i]);
      };
      store_rows(upper, to);
      store_rows(lower, to + kWidth * width);
    }
  }
  // Packs tokens token and token + 16. Tokens past the end of the tile are zero.
  template <class T>
  static void pack_values(const KvRows<T>& rows, int token, int head_size, int stride, SplitNumber* values) {
    if (token % kSplitStep >= kWidth) return;  // was packed together with the token 16 before it
    for (int d = 0; d < head_size; d += kWidth) {
      const auto part = [&](int t) {
        return t < rows.count ? load_some(rows.value[t] + d, head_size - d) : splat(0.0f);
      };
      const SplitPairs pairs = split_pairs(part(token), part(token + kWidth));
      const int strip = d / kStrip * kStrip;
      const int width = stride - strip < kStrip ? stride - strip : kStrip;
      SplitNumber* to = values + strip * kKvTile + token * width + (d - strip);
      _mm512_storeu_si512(to, pairs.upper);
      _mm512_storeu_si512(to + kWidth * width, pairs.lower);
    }
  }
};
static_assert(kColumnStep % kSplitStep == 0 && sizeof(SplitNumber) == sizeof(float),
              "a SplitNumber takes the place of an fp32 number");

}  // namespace
}  // namespace fastattention
