// fp32 arithmetic and conversions. FTZ flushes subnormal inputs and results, as PTX defines it.
#include <cmath>
#include <limits>

#include "comparison.h"
#include "failure.h"
#include "half.h"
#include "opcode.h"
#include "rounding.h"
#include "step.h"

namespace volta_sim {
namespace {

using M = Modifier;

Lanes flushed(const Step& step, const Lanes& values) {
  return step.has(M::kFtz) ? map(values, [](uint32_t x) { return as_bits(flush(as_float(x))); }) : values;
}

void write_real(Step& step, Lanes values) {
  values = map(values, [](uint32_t x) { return result_bits(as_float(x)); });
  if (step.has(M::kSat)) {
    // NaN saturates to 0.
    values = map(values, [](uint32_t x) { return as_bits(std::fmin(std::fmax(0.0f, as_float(x)), 1.0f)); });
  }
  step.write(0, flushed(step, values));
}

void multiply_add(Step& step, const Lanes& a, const Lanes& b, const Lanes& c) {
  const Modifier rounding = rounding_of(step.instruction.modifiers);
  write_real(step, map(flushed(step, a), flushed(step, b), flushed(step, c), [&](uint32_t x, uint32_t y, uint32_t z) {
               return as_bits(fused_multiply_add(as_float(x), as_float(y), as_float(z), rounding));
             }));
}

Lanes all(float value) {
  Lanes lanes;
  lanes.fill(as_bits(value));
  return lanes;
}

void fadd(Step& step) { multiply_add(step, step.real(1), all(1.0f), step.real(2)); }

// The addend -0 keeps the sign of a zero product; +0 would not.
void fmul(Step& step) { multiply_add(step, step.real(1), step.real(2), all(-0.0f)); }

void ffma(Step& step) { multiply_add(step, step.real(1), step.real(2), step.real(3)); }

// If one operand is NaN, the other one. -0 is less than +0.
float lesser(float a, float b) {
  if (std::isnan(a)) return b;
  if (std::isnan(b)) return a;
  if (a == b) return std::signbit(a) ? a : b;
  return a < b ? a : b;
}

void fmnmx(Step& step) {
  const uint32_t wants_min = step.predicate(3);
  const Lanes a = flushed(step, step.real(1)), b = flushed(step, step.real(2));
  Lanes result;
  for (size_t i = 0; i < kLanes; ++i) {
    const float x = as_float(a[i]), y = as_float(b[i]);
    result[i] = result_bits((wants_min >> i & 1) != 0 ? lesser(x, y) : -lesser(-x, -y));
  }
  step.write(0, result);
}

void fsel(Step& step) {
  const uint32_t chosen = step.predicate(3);
  const Lanes a = flushed(step, step.real(1)), b = flushed(step, step.real(2));
  Lanes result;
  for (size_t i = 0; i < kLanes; ++i) result[i] = (chosen >> i & 1) != 0 ? a[i] : b[i];
  step.write(0, result);
}

void fsetp(Step& step) {
  const Modifier how = comparison_of(step.instruction.modifiers);
  const uint32_t further = step.predicate(4);
  const uint32_t holds = select(flushed(step, step.real(2)), flushed(step, step.real(3)),
                                [&](uint32_t x, uint32_t y) { return compare_floats(how, as_float(x), as_float(y)); });
  step.write_predicate(0, combine(step.instruction.modifiers, holds, further));
  step.write_predicate(1, combine(step.instruction.modifiers, ~holds, further));
}

float special_function(M function, float x) {
  constexpr float kTurn = 6.2831853f;  // SIN and COS take turns, not radians
  switch (function) {
    case M::kEx2:
      return std::exp2(x);
    case M::kRcp:
      return 1.0f / x;
    case M::kRsq:
      return 1.0f / std::sqrt(x);
    case M::kLg2:
      return std::log2(x);
    case M::kSqrt:
      return std::sqrt(x);
    case M::kSin:
      return std::sin(x * kTurn);
    default:
      return std::cos(x * kTurn);
  }
}

// As exact as libm, whereas the hardware is off by an ulp or two. Subnormals are flushed, because compilers add code
// that scales them.
void mufu(Step& step) {
  const M none = M::kCount;
  const M function =
      step.instruction.modifiers.first_of({M::kEx2, M::kRcp, M::kRsq, M::kLg2, M::kSqrt, M::kSin, M::kCos}, none);
  if (function == none) fail("this special function is not implemented.");
  step.write(0, map(step.real(1),
                    [&](uint32_t x) { return result_bits(flush(special_function(function, flush(as_float(x))))); }));
}

// Whether a / b needs the slow path of division. A superfluous "yes" costs time, not accuracy.
void fchk(Step& step) {
  const uint32_t slow = select(step.real(1), step.real(2), [](uint32_t x, uint32_t y) {
    const int a = static_cast<int>(x >> 23 & 255), b = static_cast<int>(y >> 23 & 255);
    const bool extreme = a == 255 || a <= 24 || b == 0 || b >= 253;
    return extreme || a - b >= 126 || a - b <= -126;
  });
  step.write_predicate(0, slow);
}

// F2F.destination.source
void f2f(Step& step) {
  const auto& modifiers = step.instruction.modifiers;
  if (modifiers.count_of({M::kF16, M::kF32}) != 2) fail("this conversion is not implemented.");
  const bool to_half = modifiers.first_of({M::kF16, M::kF32}, M::kF32) == M::kF16;
  const bool from_half = modifiers.count_of({M::kF16}) == (to_half ? 2 : 1);
  if (to_half == from_half) fail("a conversion that only rounds is not implemented.");
  if (to_half) {
    step.write(0, map(flushed(step, step.real(1)), [](uint32_t x) { return pack_halves(as_float(x), 0); }));
  } else {
    step.write(0, map(step.halves(1), [](uint32_t x) { return result_bits(low_half(x)); }));
  }
}

// Converts from 32 bits, or from a pair of registers.
void i2f(Step& step) {
  const Modifier rounding = rounding_of(step.instruction.modifiers);
  const bool from_64 = step.has(M::kU64) || step.has(M::kS64), is_unsigned = step.has(M::kU32) || step.has(M::kU64);
  const Lanes words = step.integer(1);
  const WideLanes pairs = from_64 ? step.wide(1) : WideLanes{};
  Lanes result;
  for (size_t i = 0; i < kLanes; ++i) {
    const uint64_t bits = from_64       ? pairs[i]
                          : is_unsigned ? words[i]
                                        : static_cast<uint64_t>(static_cast<int32_t>(words[i]));
    const auto exact =
        is_unsigned ? static_cast<long double>(bits) : static_cast<long double>(static_cast<int64_t>(bits));
    result[i] = as_bits(round_to_float(exact, rounding));
  }
  step.write(0, result);
}

float round_to_integer(const Step& step, float x) {
  if (step.has(M::kTrunc)) return std::trunc(x);
  if (step.has(M::kFloor)) return std::floor(x);
  if (step.has(M::kCeil)) return std::ceil(x);
  return std::nearbyint(x);
}

void frnd(Step& step) {
  step.write(0, map(flushed(step, step.real(1)),
                    [&](uint32_t x) { return result_bits(round_to_integer(step, as_float(x))); }));
}

// Out-of-range numbers become the nearest integer of the type.
template <typename Integer>
Integer saturated(float x) {
  constexpr auto kLargest = std::numeric_limits<Integer>::max();
  constexpr auto kSmallest = std::numeric_limits<Integer>::min();
  if (x >= static_cast<float>(kLargest)) return kLargest;  // as a float, kLargest is one larger
  return x <= static_cast<float>(kSmallest) ? kSmallest : static_cast<Integer>(x);
}

// NaN becomes 0, or for 64 bits a number with only the highest bit set (PTX ISA, cvt).
void f2i(Step& step) {
  const bool to_64 = step.has(M::kU64) || step.has(M::kS64), is_unsigned = step.has(M::kU32) || step.has(M::kU64);
  const Lanes from = flushed(step, step.real(1));
  Lanes low, high;
  for (size_t i = 0; i < kLanes; ++i) {
    const float x = round_to_integer(step, as_float(from[i]));
    uint64_t bits = to_64 ? uint64_t{1} << 63 : 0;
    if (!std::isnan(x)) {
      if (to_64) bits = is_unsigned ? saturated<uint64_t>(x) : static_cast<uint64_t>(saturated<int64_t>(x));
      if (!to_64) bits = is_unsigned ? saturated<uint32_t>(x) : static_cast<uint32_t>(saturated<int32_t>(x));
    }
    low[i] = static_cast<uint32_t>(bits);
    high[i] = static_cast<uint32_t>(bits >> 32);
  }
  step.write(0, low);
  if (to_64) step.write_next(0, 1, high);
}

constexpr NumberFormat kFloat = NumberFormat::kFloat;

}  // namespace

const std::vector<Opcode>& float_opcodes() {
  static const auto* opcodes = new std::vector<Opcode>{
      {"FADD", Pipe::kFma, Cost::kFixed, kFloat, "FTZ SAT RN RZ RP RM", fadd},
      {"FMUL", Pipe::kFma, Cost::kFixed, kFloat, "FTZ SAT RN RZ RP RM", fmul},
      {"FFMA", Pipe::kFma, Cost::kFixed, kFloat, "FTZ SAT RN RZ RP RM", ffma},
      {"FMNMX", Pipe::kAlu, Cost::kFixed, kFloat, "FTZ", fmnmx},
      {"FSEL", Pipe::kAlu, Cost::kFixed, kFloat, "FTZ", fsel},
      {"FSETP", Pipe::kAlu, Cost::kFixed, kFloat, VOLTA_SIM_COMPARISON_WORDS " FTZ AND OR XOR", fsetp},
      {"FCHK", Pipe::kAlu, Cost::kFixed, kFloat, "", fchk},
      {"MUFU", Pipe::kSpecial, Cost::kSpecialFunction, kFloat, "EX2 RCP RSQ LG2 SQRT SIN COS", mufu},
      {"F2F", Pipe::kSpecial, Cost::kConversion, kFloat, "F16 F32 FTZ", f2f},
      {"FRND", Pipe::kSpecial, Cost::kSpecialFunction, kFloat, "FTZ TRUNC FLOOR CEIL", frnd},
      {"F2I", Pipe::kSpecial, Cost::kSpecialFunction, kFloat, "U32 S32 U64 S64 FTZ NTZ TRUNC FLOOR CEIL", f2i},
      {"I2F", Pipe::kSpecial, Cost::kSpecialFunction, NumberFormat::kInteger, "U32 S32 U64 S64 RN RZ RP RM", i2f},
  };
  return *opcodes;
}

}  // namespace volta_sim
