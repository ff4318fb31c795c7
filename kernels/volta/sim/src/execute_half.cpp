// Arithmetic on pairs of fp16 numbers.
#include "comparison.h"
#include "half.h"
#include "opcode.h"
#include "step.h"

namespace volta_sim {
namespace {

using M = Modifier;

// With F32: the sum of the lower halves as an fp32 number.
void hadd2(Step& step) {
  const bool to_float = step.has(M::kF32);
  step.write(0, map(step.halves(1), step.halves(2), [&](uint32_t a, uint32_t b) {
               if (to_float) return result_bits(low_half(a) + low_half(b));
               return pack_halves(low_half(a) + low_half(b), high_half(a) + high_half(b));
             }));
}

void hmul2(Step& step) {
  step.write(0, map(step.halves(1), step.halves(2), [](uint32_t a, uint32_t b) {
               return pack_halves(low_half(a) * low_half(b), high_half(a) * high_half(b));
             }));
}

void hfma2(Step& step) {
  step.write(0, map(step.halves(1), step.halves(2), step.halves(3), [](uint32_t a, uint32_t b, uint32_t c) {
               const double low = static_cast<double>(low_half(a)) * low_half(b) + low_half(c);
               const double high = static_cast<double>(high_half(a)) * high_half(b) + high_half(c);
               return pack_halves(low, high);
             }));
}

// One predicate for each half.
void hsetp2(Step& step) {
  const Modifier how = comparison_of(step.instruction.modifiers);
  const Lanes a = step.halves(2), b = step.halves(3);
  const uint32_t further = step.predicate(4);
  const uint32_t low =
      select(a, b, [&](uint32_t x, uint32_t y) { return compare_floats(how, low_half(x), low_half(y)); });
  const uint32_t high =
      select(a, b, [&](uint32_t x, uint32_t y) { return compare_floats(how, high_half(x), high_half(y)); });
  step.write_predicate(0, combine(step.instruction.modifiers, low, further));
  step.write_predicate(1, combine(step.instruction.modifiers, high, further));
}

constexpr NumberFormat kHalf = NumberFormat::kHalf;

}  // namespace

const std::vector<Opcode>& half_opcodes() {
  static const auto* opcodes = new std::vector<Opcode>{
      {"HADD2", Pipe::kHalf, Cost::kFixed, kHalf, "F32", hadd2},
      {"HMUL2", Pipe::kHalf, Cost::kFixed, kHalf, "", hmul2},
      {"HFMA2", Pipe::kHalf, Cost::kFixed, kHalf, "", hfma2},
      {"HSETP2", Pipe::kHalf, Cost::kFixed, kHalf, VOLTA_SIM_COMPARISON_WORDS " AND OR XOR", hsetp2},
  };
  return *opcodes;
}

}  // namespace volta_sim
