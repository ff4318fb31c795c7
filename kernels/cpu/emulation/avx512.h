// Emulates the AVX-512 operations of these kernels on processors with AVX2, so that their results can be tested there.
// Vectors of 64 bytes are an extension of the compiler, which divides them. Numbers are those of the instructions, with
// the exceptions that these kernels do not meet: a bf16 product of subnormal numbers is not zero here.
#ifndef FASTATTENTION_AVX512_EMULATION_H
#define FASTATTENTION_AVX512_EMULATION_H

#include <immintrin.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

// Not inline: thousands of these would take minutes to compile.
#define FA_OPERATION [[maybe_unused]] __attribute__((noinline)) static

namespace {
namespace emulated512 {

using Floats = float __attribute__((vector_size(64)));
using Ints = int32_t __attribute__((vector_size(64)));
using Words = uint32_t __attribute__((vector_size(64)));
using Halves = uint16_t __attribute__((vector_size(64)));

inline Floats f(__m512 a) { return reinterpret_cast<Floats>(a); }
inline Ints i(__m512i a) { return reinterpret_cast<Ints>(a); }
inline Words u(__m512i a) { return reinterpret_cast<Words>(a); }
inline Halves h(__m512i a) { return reinterpret_cast<Halves>(a); }
template <class V>
inline __m512 ps(V a) {
  return reinterpret_cast<__m512>(a);
}
template <class V>
inline __m512i si(V a) {
  return reinterpret_cast<__m512i>(a);
}
// The result of `of` for each of the 16 numbers.
template <class Of>
inline __m512 each(Of of) {
  Floats to;
  for (int k = 0; k < 16; ++k) to[k] = of(k);
  return ps(to);
}
template <class Of>
inline __m512i each_int(Of of) {
  Ints to;
  for (int k = 0; k < 16; ++k) to[k] = static_cast<int32_t>(of(k));
  return si(to);
}
template <class Of>
inline __mmask16 mask_of(Of of) {
  unsigned mask = 0;
  for (int k = 0; k < 16; ++k) mask |= (of(k) ? 1u : 0u) << k;
  return static_cast<__mmask16>(mask);
}
template <class To, class From>
inline To part(const From& a, int number) {
  To to;
  memcpy(&to, reinterpret_cast<const char*>(&a) + number * sizeof(To), sizeof(To));
  return to;
}
template <class To, class From>
inline To joined(const From& low, const From& high) {
  To to;
  static_assert(sizeof(To) == 2 * sizeof(From), "two halves");
  memcpy(&to, &low, sizeof(From));
  memcpy(reinterpret_cast<char*>(&to) + sizeof(From), &high, sizeof(From));
  return to;
}

FA_OPERATION __m512 set1_ps(float x) {
  return each([=](int) { return x; });
}
FA_OPERATION __m512i set1_epi32(int x) {
  return each_int([=](int) { return x; });
}
FA_OPERATION __m512i set1_epi16(short x) {
  Halves to;
  for (int k = 0; k < 32; ++k) to[k] = static_cast<uint16_t>(x);
  return si(to);
}
FA_OPERATION __m512 setzero_ps() { return set1_ps(0.0f); }
FA_OPERATION __m512i setzero_si512() { return set1_epi32(0); }
template <class... X>
FA_OPERATION __m512 setr_ps(X... x) {
  return ps(Floats{static_cast<float>(x)...});
}
template <class... X>
FA_OPERATION __m512i setr_epi32(X... x) {
  return si(Ints{static_cast<int32_t>(x)...});
}
template <class... X>
FA_OPERATION __m512i set_epi16(X... x) {
  const uint16_t from[32] = {static_cast<uint16_t>(x)...};
  Halves to;
  for (int k = 0; k < 32; ++k) to[k] = from[31 - k];
  return si(to);
}

FA_OPERATION __m512 loadu_ps(const void* p) { return part<__m512>(*static_cast<const char (*)[64]>(p), 0); }
FA_OPERATION __m512i loadu_si512(const void* p) { return part<__m512i>(*static_cast<const char (*)[64]>(p), 0); }
FA_OPERATION void storeu_ps(void* p, __m512 a) { memcpy(p, &a, 64); }
FA_OPERATION void storeu_si512(void* p, __m512i a) { memcpy(p, &a, 64); }
// Addresses that are not a multiple of 64 end the process, as there.
inline const void* aligned(const void* p) {
  if (reinterpret_cast<uintptr_t>(p) % 64 != 0) __builtin_trap();
  return p;
}
FA_OPERATION __m512 load_ps(const void* p) { return loadu_ps(aligned(p)); }
FA_OPERATION __m512i load_si512(const void* p) { return loadu_si512(aligned(p)); }
FA_OPERATION void store_ps(void* p, __m512 a) { storeu_ps(const_cast<void*>(aligned(p)), a); }
FA_OPERATION void store_si512(void* p, __m512i a) { storeu_si512(const_cast<void*>(aligned(p)), a); }
template <class To, int Count>
inline To loaded_where(uint64_t mask, const void* p) {
  uint16_t to[Count] = {};
  for (int k = 0; k < Count; ++k) {
    if (mask >> k & 1) memcpy(&to[k], static_cast<const uint16_t*>(p) + k, sizeof(uint16_t));
  }
  return part<To>(to, 0);
}
FA_OPERATION __m512i maskz_loadu_epi16(__mmask32 mask, const void* p) { return loaded_where<__m512i, 32>(mask, p); }
FA_OPERATION __m256i maskz_loadu_epi16_256(__mmask16 mask, const void* p) { return loaded_where<__m256i, 16>(mask, p); }

FA_OPERATION __m512 add_ps(__m512 a, __m512 b) { return ps(f(a) + f(b)); }
FA_OPERATION __m512 sub_ps(__m512 a, __m512 b) { return ps(f(a) - f(b)); }
FA_OPERATION __m512 mul_ps(__m512 a, __m512 b) { return ps(f(a) * f(b)); }
FA_OPERATION __m512 div_ps(__m512 a, __m512 b) { return ps(f(a) / f(b)); }
FA_OPERATION __m512 fmadd_ps(__m512 a, __m512 b, __m512 c) {
  const auto half = [&](int n) { return _mm256_fmadd_ps(part<__m256>(a, n), part<__m256>(b, n), part<__m256>(c, n)); };
  return joined<__m512>(half(0), half(1));
}
FA_OPERATION __m512 max_ps(__m512 a, __m512 b) { return ps(f(a) > f(b) ? f(a) : f(b)); }
FA_OPERATION __m512 min_ps(__m512 a, __m512 b) { return ps(f(a) < f(b) ? f(a) : f(b)); }
FA_OPERATION __m512i add_epi32(__m512i a, __m512i b) { return si(u(a) + u(b)); }
FA_OPERATION __m512i sub_epi32(__m512i a, __m512i b) { return si(u(a) - u(b)); }
FA_OPERATION __m512i add_epi16(__m512i a, __m512i b) { return si(h(a) + h(b)); }
FA_OPERATION __m512i and_si512(__m512i a, __m512i b) { return si(u(a) & u(b)); }
FA_OPERATION __m512i or_si512(__m512i a, __m512i b) { return si(u(a) | u(b)); }
FA_OPERATION __m512i andnot_si512(__m512i a, __m512i b) { return si(~u(a) & u(b)); }
FA_OPERATION __m512i slli_epi32(__m512i a, unsigned count) { return si(u(a) << count); }
FA_OPERATION __m512i srli_epi32(__m512i a, unsigned count) { return si(u(a) >> count); }
FA_OPERATION __m512i castps_si512(__m512 a) { return si(a); }
FA_OPERATION __m512 castsi512_ps(__m512i a) { return ps(a); }
FA_OPERATION __m512 and_ps(__m512 a, __m512 b) { return ps(and_si512(si(a), si(b))); }
FA_OPERATION __m512 or_ps(__m512 a, __m512 b) { return ps(or_si512(si(a), si(b))); }
FA_OPERATION __m512 abs_ps(__m512 a) { return ps(and_si512(si(a), set1_epi32(0x7fffffff))); }

FA_OPERATION __mmask16 cmp_ps_mask(__m512 a, __m512 b, int predicate) {
  return mask_of([=](int k) {
    const float x = f(a)[k], y = f(b)[k];
    switch (predicate) {
      case _CMP_LT_OQ:
        return x < y;
      case _CMP_NLT_UQ:
        return !(x < y);
      case _CMP_GT_OQ:
        return x > y;
      case _CMP_UNORD_Q:
        return x != x || y != y;
      default:
        __builtin_trap();
    }
  });
}
FA_OPERATION __mmask16 cmpge_epi32_mask(__m512i a, __m512i b) {
  return mask_of([=](int k) { return i(a)[k] >= i(b)[k]; });
}
FA_OPERATION __mmask16 mask_cmplt_epi32_mask(__mmask16 mask, __m512i a, __m512i b) {
  return mask_of([=](int k) { return (mask >> k & 1) != 0 && i(a)[k] < i(b)[k]; });
}
FA_OPERATION __m512 mask_blend_ps(__mmask16 mask, __m512 no, __m512 yes) {
  return each([=](int k) { return mask >> k & 1 ? f(yes)[k] : f(no)[k]; });
}
FA_OPERATION __m512i mask_mov_epi32(__m512i otherwise, __mmask16 mask, __m512i a) {
  return each_int([=](int k) { return mask >> k & 1 ? i(a)[k] : i(otherwise)[k]; });
}
FA_OPERATION __m512i mask_or_epi32(__m512i otherwise, __mmask16 mask, __m512i a, __m512i b) {
  return mask_mov_epi32(otherwise, mask, or_si512(a, b));
}
FA_OPERATION __m512i mask_sub_epi32(__m512i otherwise, __mmask16 mask, __m512i a, __m512i b) {
  return mask_mov_epi32(otherwise, mask, sub_epi32(a, b));
}

// What floor leaves; nothing of an infinity.
FA_OPERATION __m512 reduce_ps(__m512 a, int) {
  return each([=](int k) { return __builtin_isinf(f(a)[k]) ? 0.0f : f(a)[k] - __builtin_floorf(f(a)[k]); });
}
FA_OPERATION __m512 maskz_scalef_ps(__mmask16 mask, __m512 a, __m512 b) {
  return each([=](int k) {
    if ((mask >> k & 1) == 0) return 0.0f;
    const float power = __builtin_floorf(f(b)[k]);
    if (power != power) return power;
    const float bounded = power < -500.0f ? -500.0f : power > 500.0f ? 500.0f : power;
    return __builtin_scalbnf(f(a)[k], static_cast<int>(bounded));
  });
}
FA_OPERATION float cvtss_f32(__m512 a) { return f(a)[0]; }
// In halves, as the compiler's own.
template <class Of>
inline float folded(__m512 a, Of of) {
  float x[16];
  memcpy(x, &a, sizeof(x));
  for (int width = 8; width > 0; width /= 2) {
    for (int k = 0; k < width; ++k) x[k] = of(x[k], x[k + width]);
  }
  return x[0];
}
FA_OPERATION float reduce_add_ps(__m512 a) {
  return folded(a, [](float x, float y) { return x + y; });
}
FA_OPERATION float reduce_max_ps(__m512 a) {
  return folded(a, [](float x, float y) { return x > y ? x : y; });
}

FA_OPERATION __m512 cvtph_ps(__m256i a) {
  return joined<__m512>(_mm256_cvtph_ps(part<__m128i>(a, 0)), _mm256_cvtph_ps(part<__m128i>(a, 1)));
}
FA_OPERATION __m256i cvtps_ph(__m512 a, int) {
  constexpr int kNearest = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
  return joined<__m256i>(_mm256_cvtps_ph(part<__m256>(a, 0), kNearest), _mm256_cvtps_ph(part<__m256>(a, 1), kNearest));
}
FA_OPERATION __m512i cvtepu16_epi32(__m256i a) {
  return each_int([=](int k) { return part<uint16_t>(a, k); });
}
FA_OPERATION __m512i cvtepi8_epi32(__m128i a) {
  return each_int([=](int k) { return part<int8_t>(a, k); });
}
FA_OPERATION __m512 cvtepi32_ps(__m512i a) {
  return each([=](int k) { return static_cast<float>(i(a)[k]); });
}
// To nearest even. What no int32 can hold becomes the smallest one.
FA_OPERATION __m512i cvtps_epi32(__m512 a) {
  return joined<__m512i>(_mm256_cvtps_epi32(part<__m256>(a, 0)), _mm256_cvtps_epi32(part<__m256>(a, 1)));
}
template <class To, class Number, class Of>
inline To narrowed(__m512i a, Of of) {
  Number to[16];
  for (int k = 0; k < 16; ++k) to[k] = static_cast<Number>(of(i(a)[k]));
  return part<To>(to, 0);
}
FA_OPERATION __m256i cvtepi32_epi16(__m512i a) {
  return narrowed<__m256i, uint16_t>(a, [](int x) { return x; });
}
FA_OPERATION __m128i cvtepi32_epi8(__m512i a) {
  return narrowed<__m128i, uint8_t>(a, [](int x) { return x; });
}
FA_OPERATION __m128i cvtsepi32_epi8(__m512i a) {
  return narrowed<__m128i, int8_t>(a, [](int x) { return x < -128 ? -128 : x > 127 ? 127 : x; });
}
inline uint16_t bf16_of(float x) {
  uint32_t bits;
  memcpy(&bits, &x, sizeof(bits));
  if (x != x) return static_cast<uint16_t>(bits >> 16 | 0x40);
  if ((bits & 0x7f800000) == 0) return static_cast<uint16_t>(bits >> 16 & 0x8000);  // subnormal numbers become zero
  return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
FA_OPERATION __m512bh cvtne2ps_pbh(__m512 high, __m512 low) {
  uint16_t to[32];
  for (int k = 0; k < 16; ++k) to[k] = bf16_of(f(low)[k]), to[16 + k] = bf16_of(f(high)[k]);
  return part<__m512bh>(to, 0);
}
// The odd numbers of each pair are added first.
FA_OPERATION __m512 dpbf16_ps(__m512 c, __m512bh a, __m512bh b) {
  const auto of = [](const __m512bh& from, int k) {
    const uint32_t bits = static_cast<uint32_t>(part<uint16_t>(from, k)) << 16;
    return part<float>(bits, 0);
  };
  return each([&](int k) {
    const float odd = __builtin_fmaf(of(a, 2 * k + 1), of(b, 2 * k + 1), f(c)[k]);
    return __builtin_fmaf(of(a, 2 * k), of(b, 2 * k), odd);
  });
}

FA_OPERATION __m512 castps256_ps512(__m256 a) { return joined<__m512>(a, a); }
FA_OPERATION __m512 zextps256_ps512(__m256 a) { return joined<__m512>(a, _mm256_setzero_ps()); }
FA_OPERATION __m256 castps512_ps256(__m512 a) { return part<__m256>(a, 0); }
FA_OPERATION __m512 insertf32x8(__m512 a, __m256 b, int place) {
  return place == 0 ? joined<__m512>(b, part<__m256>(a, 1)) : joined<__m512>(part<__m256>(a, 0), b);
}
FA_OPERATION __m512 shuffle_f32x4(__m512 a, __m512 b, int order) {
  return each([=](int k) {
    const int from = order >> (k / 4 * 2) & 3;
    return (k < 8 ? f(a) : f(b))[from * 4 + k % 4];
  });
}
FA_OPERATION __m512 shuffle_ps(__m512 a, __m512 b, int order) {
  return each([=](int k) {
    const int from = order >> (k % 4 * 2) & 3;
    return (k % 4 < 2 ? f(a) : f(b))[k / 4 * 4 + from];
  });
}
FA_OPERATION __m512 unpacklo_ps(__m512 a, __m512 b) {
  return each([=](int k) { return (k % 2 == 0 ? f(a) : f(b))[k / 4 * 4 + k % 4 / 2]; });
}
FA_OPERATION __m512 unpackhi_ps(__m512 a, __m512 b) {
  return each([=](int k) { return (k % 2 == 0 ? f(a) : f(b))[k / 4 * 4 + 2 + k % 4 / 2]; });
}
FA_OPERATION __m512 permutex2var_ps(__m512 a, __m512i order, __m512 b) {
  return each([=](int k) {
    const int from = i(order)[k];
    return (from & 16 ? f(b) : f(a))[from & 15];
  });
}
FA_OPERATION __m512i permutex2var_epi16(__m512i a, __m512i order, __m512i b) {
  Halves to;
  for (int k = 0; k < 32; ++k) {
    const int from = h(order)[k];
    to[k] = (from & 32 ? h(b) : h(a))[from & 31];
  }
  return si(to);
}
template <class Of>
inline __m512i each_byte(Of of) {
  uint8_t to[64];
  for (int k = 0; k < 64; ++k) to[k] = of(k);
  return part<__m512i>(to, 0);
}
inline uint8_t byte(__m512i a, int k) { return part<uint8_t>(a, k); }
FA_OPERATION __m512i permutexvar_epi8(__m512i order, __m512i a) {
  return each_byte([&](int k) { return byte(a, byte(order, k) & 63); });
}
FA_OPERATION __m512i permutex2var_epi8(__m512i a, __m512i order, __m512i b) {
  return each_byte([&](int k) {
    const int from = byte(order, k);
    return byte(from & 64 ? b : a, from & 63);
  });
}
FA_OPERATION __m512i unpacklo_epi8(__m512i a, __m512i b) {
  return each_byte([&](int k) { return byte(k % 2 == 0 ? a : b, k / 16 * 16 + k % 16 / 2); });
}
FA_OPERATION __m512i unpackhi_epi8(__m512i a, __m512i b) {
  return each_byte([&](int k) { return byte(k % 2 == 0 ? a : b, k / 16 * 16 + 8 + k % 16 / 2); });
}
FA_OPERATION __m512i castsi256_si512(__m256i a) { return joined<__m512i>(a, a); }
FA_OPERATION __m512i inserti64x4(__m512i a, __m256i b, int place) {
  return place == 0 ? joined<__m512i>(b, part<__m256i>(a, 1)) : joined<__m512i>(part<__m256i>(a, 0), b);
}
inline __m512i unpacked_epi16(__m512i a, __m512i b, int first) {
  Halves to;
  for (int k = 0; k < 32; ++k) to[k] = (k % 2 == 0 ? h(a) : h(b))[k / 8 * 8 + first + k % 8 / 2];
  return si(to);
}
FA_OPERATION __m512i unpacklo_epi16(__m512i a, __m512i b) { return unpacked_epi16(a, b, 0); }
FA_OPERATION __m512i unpackhi_epi16(__m512i a, __m512i b) { return unpacked_epi16(a, b, 4); }
FA_OPERATION __m256i ternarylogic_epi32_256(__m256i a, __m256i b, __m256i c, int table) {
  if (table != 0x78) __builtin_trap();
  return _mm256_xor_si256(a, _mm256_and_si256(b, c));
}

}  // namespace emulated512
}  // namespace

#undef _mm512_abs_ps
#define _mm512_abs_ps emulated512::abs_ps
#undef _mm512_add_epi16
#define _mm512_add_epi16 emulated512::add_epi16
#undef _mm512_add_epi32
#define _mm512_add_epi32 emulated512::add_epi32
#undef _mm512_add_ps
#define _mm512_add_ps emulated512::add_ps
#undef _mm512_and_ps
#define _mm512_and_ps emulated512::and_ps
#undef _mm512_and_si512
#define _mm512_and_si512 emulated512::and_si512
#undef _mm512_andnot_si512
#define _mm512_andnot_si512 emulated512::andnot_si512
#undef _mm512_castps256_ps512
#define _mm512_castps256_ps512 emulated512::castps256_ps512
#undef _mm512_castps512_ps256
#define _mm512_castps512_ps256 emulated512::castps512_ps256
#undef _mm512_castps_si512
#define _mm512_castps_si512 emulated512::castps_si512
#undef _mm512_castsi256_si512
#define _mm512_castsi256_si512 emulated512::castsi256_si512
#undef _mm512_castsi512_ps
#define _mm512_castsi512_ps emulated512::castsi512_ps
#undef _mm512_cmp_ps_mask
#define _mm512_cmp_ps_mask emulated512::cmp_ps_mask
#undef _mm512_cmpge_epi32_mask
#define _mm512_cmpge_epi32_mask emulated512::cmpge_epi32_mask
#undef _mm512_cvtepi32_epi16
#define _mm512_cvtepi32_epi16 emulated512::cvtepi32_epi16
#undef _mm512_cvtepi32_epi8
#define _mm512_cvtepi32_epi8 emulated512::cvtepi32_epi8
#undef _mm512_cvtepi32_ps
#define _mm512_cvtepi32_ps emulated512::cvtepi32_ps
#undef _mm512_cvtepi8_epi32
#define _mm512_cvtepi8_epi32 emulated512::cvtepi8_epi32
#undef _mm512_cvtepu16_epi32
#define _mm512_cvtepu16_epi32 emulated512::cvtepu16_epi32
#undef _mm512_cvtne2ps_pbh
#define _mm512_cvtne2ps_pbh emulated512::cvtne2ps_pbh
#undef _mm512_cvtph_ps
#define _mm512_cvtph_ps emulated512::cvtph_ps
#undef _mm512_cvtps_epi32
#define _mm512_cvtps_epi32 emulated512::cvtps_epi32
#undef _mm512_cvtps_ph
#define _mm512_cvtps_ph emulated512::cvtps_ph
#undef _mm512_cvtsepi32_epi8
#define _mm512_cvtsepi32_epi8 emulated512::cvtsepi32_epi8
#undef _mm512_cvtss_f32
#define _mm512_cvtss_f32 emulated512::cvtss_f32
#undef _mm512_div_ps
#define _mm512_div_ps emulated512::div_ps
#undef _mm512_dpbf16_ps
#define _mm512_dpbf16_ps emulated512::dpbf16_ps
#undef _mm512_fmadd_ps
#define _mm512_fmadd_ps emulated512::fmadd_ps
#undef _mm512_insertf32x8
#define _mm512_insertf32x8 emulated512::insertf32x8
#undef _mm512_inserti64x4
#define _mm512_inserti64x4 emulated512::inserti64x4
#undef _mm512_load_ps
#define _mm512_load_ps emulated512::load_ps
#undef _mm512_load_si512
#define _mm512_load_si512 emulated512::load_si512
#undef _mm512_loadu_ps
#define _mm512_loadu_ps emulated512::loadu_ps
#undef _mm512_loadu_si512
#define _mm512_loadu_si512 emulated512::loadu_si512
#undef _mm512_mask_blend_ps
#define _mm512_mask_blend_ps emulated512::mask_blend_ps
#undef _mm512_mask_cmplt_epi32_mask
#define _mm512_mask_cmplt_epi32_mask emulated512::mask_cmplt_epi32_mask
#undef _mm512_mask_mov_epi32
#define _mm512_mask_mov_epi32 emulated512::mask_mov_epi32
#undef _mm512_mask_or_epi32
#define _mm512_mask_or_epi32 emulated512::mask_or_epi32
#undef _mm512_mask_sub_epi32
#define _mm512_mask_sub_epi32 emulated512::mask_sub_epi32
#undef _mm512_maskz_loadu_epi16
#define _mm512_maskz_loadu_epi16 emulated512::maskz_loadu_epi16
#undef _mm512_maskz_scalef_ps
#define _mm512_maskz_scalef_ps emulated512::maskz_scalef_ps
#undef _mm512_max_ps
#define _mm512_max_ps emulated512::max_ps
#undef _mm512_min_ps
#define _mm512_min_ps emulated512::min_ps
#undef _mm512_mul_ps
#define _mm512_mul_ps emulated512::mul_ps
#undef _mm512_or_ps
#define _mm512_or_ps emulated512::or_ps
#undef _mm512_or_si512
#define _mm512_or_si512 emulated512::or_si512
#undef _mm512_permutex2var_epi16
#define _mm512_permutex2var_epi16 emulated512::permutex2var_epi16
#undef _mm512_permutex2var_epi8
#define _mm512_permutex2var_epi8 emulated512::permutex2var_epi8
#undef _mm512_permutex2var_ps
#define _mm512_permutex2var_ps emulated512::permutex2var_ps
#undef _mm512_permutexvar_epi8
#define _mm512_permutexvar_epi8 emulated512::permutexvar_epi8
#undef _mm512_reduce_add_ps
#define _mm512_reduce_add_ps emulated512::reduce_add_ps
#undef _mm512_reduce_max_ps
#define _mm512_reduce_max_ps emulated512::reduce_max_ps
#undef _mm512_reduce_ps
#define _mm512_reduce_ps emulated512::reduce_ps
#undef _mm512_set1_epi16
#define _mm512_set1_epi16 emulated512::set1_epi16
#undef _mm512_set1_epi32
#define _mm512_set1_epi32 emulated512::set1_epi32
#undef _mm512_set1_ps
#define _mm512_set1_ps emulated512::set1_ps
#undef _mm512_set_epi16
#define _mm512_set_epi16 emulated512::set_epi16
#undef _mm512_setr_epi32
#define _mm512_setr_epi32 emulated512::setr_epi32
#undef _mm512_setr_ps
#define _mm512_setr_ps emulated512::setr_ps
#undef _mm512_setzero_ps
#define _mm512_setzero_ps emulated512::setzero_ps
#undef _mm512_setzero_si512
#define _mm512_setzero_si512 emulated512::setzero_si512
#undef _mm512_shuffle_f32x4
#define _mm512_shuffle_f32x4 emulated512::shuffle_f32x4
#undef _mm512_shuffle_ps
#define _mm512_shuffle_ps emulated512::shuffle_ps
#undef _mm512_slli_epi32
#define _mm512_slli_epi32 emulated512::slli_epi32
#undef _mm512_srli_epi32
#define _mm512_srli_epi32 emulated512::srli_epi32
#undef _mm512_store_ps
#define _mm512_store_ps emulated512::store_ps
#undef _mm512_store_si512
#define _mm512_store_si512 emulated512::store_si512
#undef _mm512_storeu_ps
#define _mm512_storeu_ps emulated512::storeu_ps
#undef _mm512_storeu_si512
#define _mm512_storeu_si512 emulated512::storeu_si512
#undef _mm512_sub_epi32
#define _mm512_sub_epi32 emulated512::sub_epi32
#undef _mm512_sub_ps
#define _mm512_sub_ps emulated512::sub_ps
#undef _mm512_unpackhi_epi16
#define _mm512_unpackhi_epi16 emulated512::unpackhi_epi16
#undef _mm512_unpackhi_epi8
#define _mm512_unpackhi_epi8 emulated512::unpackhi_epi8
#undef _mm512_unpackhi_ps
#define _mm512_unpackhi_ps emulated512::unpackhi_ps
#undef _mm512_unpacklo_epi16
#define _mm512_unpacklo_epi16 emulated512::unpacklo_epi16
#undef _mm512_unpacklo_epi8
#define _mm512_unpacklo_epi8 emulated512::unpacklo_epi8
#undef _mm512_unpacklo_ps
#define _mm512_unpacklo_ps emulated512::unpacklo_ps
#undef _mm512_zextps256_ps512
#define _mm512_zextps256_ps512 emulated512::zextps256_ps512
#undef _mm256_maskz_loadu_epi16
#define _mm256_maskz_loadu_epi16 emulated512::maskz_loadu_epi16_256
#undef _mm256_ternarylogic_epi32
#define _mm256_ternarylogic_epi32 emulated512::ternarylogic_epi32_256

#endif
