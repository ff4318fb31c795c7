// Rows of an 8-bit cache as bf16 numbers for AMX, exactly: every int8, e4m3 and e5m2 number is a bf16 number, and none
// is a subnormal one, which AMX would treat as zero.
//
// fp8: two tables of 128 bytes have the upper and the lower byte of each magnitude, and the sign is or-ed in. A lookup
// (vpermi2b) ignores the top bit of a code, so the sign needs no masking. int8: conversion to fp32 takes a few
// instructions more than the tables would, and needs no special case for -128.
//
// Tiles hold pairs of bf16 numbers. They are paired as in unit_split.h, a number with the one 16 places after it, which
// is free: int8 needs no shuffle for it, and a lookup's result has to be shuffled in any case.
namespace fastattention {
namespace {

struct Bf16Bytes {
  alignas(64) uint8_t upper[128];
  alignas(64) uint8_t lower[128];
};

// The bits of the bf16 number with the value of an fp8 magnitude.
template <class Format>
constexpr uint32_t bf16_of_magnitude(uint32_t code) {
  constexpr int kMantissaBits = 23 - Format::kShift;
  if (code == 0) return 0;
  if (code == Format::kInfinityCode) return 0x7f80;
  if (code > Format::kLargestCode) return 0x7fc0;  // NaN
  // A subnormal number is shifted until its leading bit is where the exponent 1 would be.
  uint32_t shifts = 0;
  for (; code >> kMantissaBits == 0; code <<= 1) ++shifts;
  return (code + Format::kRebias - (shifts << kMantissaBits)) << (7 - kMantissaBits);
}
template <class Format>
constexpr Bf16Bytes bytes_of_magnitudes() {
  Bf16Bytes bytes{};
  for (uint32_t code = 0; code < 128; ++code) {
    bytes.upper[code] = static_cast<uint8_t>(bf16_of_magnitude<Format>(code) >> 8);
    bytes.lower[code] = static_cast<uint8_t>(bf16_of_magnitude<Format>(code));
  }
  return bytes;
}
template <class T>
constexpr Bf16Bytes kBf16Bytes = bytes_of_magnitudes<Fp8Format<T>>();

// The pairs of 32 numbers each of two rows a and b.
enum class Paired {
  kWithinRows,  // (a[i], a[i + 16]), then (b[i], b[i + 16]): K, whose dimensions are summed
  kAcrossRows,  // (a[i], b[i]) for the first 16 dimensions, then for the others: V, whose tokens are summed
};
struct PairsOfRows {
  __m512i first, second;
};

// Where the codes of a and b go before the lookups, so that interleaving the upper and lower bytes of each 128 bits
// makes the pairs.
struct CodeOrder {
  alignas(64) uint8_t from[64];
};
constexpr CodeOrder code_order(Paired paired) {
  CodeOrder order{};
  for (int vector = 0; vector < 2; ++vector) {
    for (int word = 0; word < 32; ++word) {
      const int lane = word / 2, second = word % 2;
      const int from =
          paired == Paired::kWithinRows ? 32 * vector + 16 * second + lane : 32 * second + 16 * vector + lane;
      order.from[word / 8 * 16 + vector * 8 + word % 8] = static_cast<uint8_t>(from);
    }
  }
  return order;
}
template <Paired kPaired>
constexpr CodeOrder kCodeOrder = code_order(kPaired);

template <class T, Paired kPaired>
class BytesToBf16 {
 public:
  PairsOfRows operator()(const T* a, const T* b) const {
    const __m256i first = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(a));
    const __m256i second = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(b));
    const __m512i codes = _mm512_permutexvar_epi8(order_, _mm512_inserti64x4(_mm512_castsi256_si512(first), second, 1));
    const __m512i signs = _mm512_and_si512(codes, _mm512_set1_epi32(static_cast<int>(0x80808080)));
    const __m512i upper = _mm512_or_si512(_mm512_permutex2var_epi8(upper_[0], codes, upper_[1]), signs);
    const __m512i lower = _mm512_permutex2var_epi8(lower_[0], codes, lower_[1]);
    return {_mm512_unpacklo_epi8(lower, upper), _mm512_unpackhi_epi8(lower, upper)};
  }

 private:
  const __m512i order_ = _mm512_load_si512(kCodeOrder<kPaired>.from);
  const __m512i upper_[2] = {_mm512_load_si512(kBf16Bytes<T>.upper), _mm512_load_si512(kBf16Bytes<T>.upper + 64)};
  const __m512i lower_[2] = {_mm512_load_si512(kBf16Bytes<T>.lower), _mm512_load_si512(kBf16Bytes<T>.lower + 64)};
};

template <Paired kPaired>
class BytesToBf16<Int8, kPaired> {
 public:
  PairsOfRows operator()(const Int8* a, const Int8* b) const {
    if constexpr (kPaired == Paired::kWithinRows) return {pairs(a, a + kWidth), pairs(b, b + kWidth)};
    return {pairs(a, b), pairs(a + kWidth, b + kWidth)};
  }

 private:
  static __m512i pairs(const Int8* a, const Int8* b) { return pairs_of(bits(load(a)), bits(load(b))); }
};

constexpr CodeOrder twice_each() {
  CodeOrder order{};
  for (int byte = 0; byte < 64; ++byte) order.from[byte] = static_cast<uint8_t>(byte / 2);
  return order;
}
constexpr CodeOrder kTwiceEach = twice_each();

// 32 numbers in their order, for Bf16Unit. Head sizes are multiples of 32 here, so none is left out. A word of the
// index holds a code twice, for the lookups of its lower and its upper byte.
template <class T>
__m512i load_bf16(const T* p, int) {
  const __m256i codes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  const __m512i twice = _mm512_permutexvar_epi8(_mm512_load_si512(kTwiceEach.from), _mm512_castsi256_si512(codes));
  const auto look_up = [&](const uint8_t* table) {
    return _mm512_permutex2var_epi8(_mm512_load_si512(table), twice, _mm512_load_si512(table + 64));
  };
  const __m512i uppers = _mm512_set1_epi16(static_cast<short>(0xff00));
  const __m512i magnitude = _mm512_or_si512(_mm512_and_si512(look_up(kBf16Bytes<T>.upper), uppers),
                                            _mm512_andnot_si512(uppers, look_up(kBf16Bytes<T>.lower)));
  return _mm512_or_si512(magnitude, _mm512_and_si512(twice, _mm512_set1_epi16(static_cast<short>(0x8000))));
}
template <>
inline __m512i load_bf16(const Int8* p, int) {
  return (__m512i)_mm512_cvtne2ps_pbh(load(p + kWidth), load(p));
}

}  // namespace
}  // namespace fastattention
