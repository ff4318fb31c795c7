// Integer arithmetic, bit operations, and moves between registers and predicates.
#include <algorithm>

#include "failure.h"
#include "opcode.h"
#include "step.h"

namespace volta_sim {
namespace {

using M = Modifier;

int32_t as_signed(uint32_t value) { return static_cast<int32_t>(value); }
uint32_t high(uint64_t value) { return static_cast<uint32_t>(value >> 32); }
uint32_t low(uint64_t value) { return static_cast<uint32_t>(value); }
uint64_t pair(uint32_t low_word, uint32_t high_word) { return low_word | static_cast<uint64_t>(high_word) << 32; }
uint32_t bit(uint32_t lanes, size_t lane) { return lanes >> lane & 1; }

void mov(Step& step) { step.write(0, step.integer(1)); }

// d = a * b + c. With WIDE a 64-bit sum, with HI its upper half; in both cases c has 64 bits.
void imad(Step& step) {
  const bool carries_out = step.is(1, OperandKind::kPredicate), is_unsigned = step.has(M::kU32);
  const bool is_wide = step.has(M::kWide) || step.has(M::kHi);
  const size_t first = carries_out ? 2 : 1;
  const Lanes a = step.integer(first), b = step.integer(first + 1);
  const uint32_t carry = step.has(M::kX) ? step.predicate(first + 3) : 0;
  WideLanes sum;
  uint32_t overflow = 0;
  if (is_wide) {
    const WideLanes c = step.wide(first + 2);
    for (size_t i = 0; i < kLanes; ++i) {
      const uint64_t product = is_unsigned
                                   ? static_cast<uint64_t>(a[i]) * b[i]
                                   : static_cast<uint64_t>(static_cast<int64_t>(as_signed(a[i])) * as_signed(b[i]));
      sum[i] = product + c[i] + bit(carry, i);
      overflow |= static_cast<uint32_t>(sum[i] < product ? 1 : 0) << i;
    }
  } else {
    if (carries_out) fail("the carry of a 32-bit product is not implemented.");
    const Lanes c = step.integer(first + 2);
    for (size_t i = 0; i < kLanes; ++i) sum[i] = a[i] * b[i] + c[i] + bit(carry, i);
  }
  Lanes lower, upper;
  for (size_t i = 0; i < kLanes; ++i) {
    lower[i] = low(sum[i]);
    upper[i] = high(sum[i]);
  }
  step.write(0, step.has(M::kHi) ? upper : lower);
  if (step.has(M::kWide)) step.write_next(0, 1, upper);
  if (carries_out) step.write_predicate(1, overflow);
}

// An addend as the adder sees it: -x is ~x + 1. The 1 can carry, so the sum needs more than 32 bits.
uint64_t addend(const Operand& operand, uint32_t value) {
  if (operand.invert) value = ~value;
  return operand.negate ? static_cast<uint64_t>(~value) + 1 : value;
}

// Up to three addends, up to two carries out and, with X, one or two carries in.
void iadd3(Step& step) {
  size_t first = 1;
  while (step.is(first, OperandKind::kPredicate) && first < 3) ++first;
  size_t last = first;
  while (last < step.num_operands() && last < first + 3 && !step.is(last, OperandKind::kPredicate)) ++last;
  WideLanes sum = {};
  for (size_t number = first; number < last; ++number) {
    const Lanes values = step.raw(number);
    for (size_t i = 0; i < kLanes; ++i) sum[i] += addend(step.operand(number), values[i]);
  }
  for (size_t number = last; step.has(M::kX) && number < step.num_operands(); ++number) {
    const uint32_t carry = step.predicate(number);
    for (size_t i = 0; i < kLanes; ++i) sum[i] += bit(carry, i);
  }
  Lanes result;
  uint32_t carries[2] = {};
  for (size_t i = 0; i < kLanes; ++i) {
    result[i] = low(sum[i]);
    carries[0] |= static_cast<uint32_t>(high(sum[i]) >= 1 ? 1 : 0) << i;
    carries[1] |= static_cast<uint32_t>(high(sum[i]) >= 2 ? 1 : 0) << i;
  }
  step.write(0, result);
  for (size_t number = 1; number < first; ++number) step.write_predicate(number, carries[number - 1]);
}

// d = (a << shift) + b. With HI: the upper half of a 64-bit a, whose upper word is another operand, or a's sign with
// SX32.
void lea(Step& step) {
  const bool carries_out = step.is(1, OperandKind::kPredicate), is_high = step.has(M::kHi);
  const bool has_high_word = is_high && !step.has(M::kSX32);
  const size_t first = carries_out ? 2 : 1, shift_at = first + (has_high_word ? 3 : 2);
  const Lanes a = step.integer(first), b = step.raw(first + 1), shift = step.raw(shift_at);
  const Lanes upper = has_high_word ? step.integer(first + 2) : map(a, [](uint32_t x) { return x >> 31 ? ~0u : 0u; });
  const uint32_t carry = step.has(M::kX) ? step.predicate(shift_at + 1) : 0;
  Lanes result;
  uint32_t overflow = 0;
  for (size_t i = 0; i < kLanes; ++i) {
    const uint64_t shifted = pair(a[i], upper[i]) << (shift[i] & 31);
    const uint64_t sum =
        (is_high ? high(shifted) : low(shifted)) + addend(step.operand(first + 1), b[i]) + bit(carry, i);
    result[i] = low(sum);
    overflow |= static_cast<uint32_t>(high(sum) != 0 ? 1 : 0) << i;
  }
  step.write(0, result);
  if (carries_out) step.write_predicate(1, overflow);
}

// Any function of three bits: bit 4a + 2b + c of the table.
uint32_t lookup(uint32_t table, uint32_t a, uint32_t b, uint32_t c) {
  uint32_t result = 0;
  for (uint32_t row = 0; row < 8; ++row) {
    if ((table >> row & 1) == 0) continue;
    result |= ((row & 4) != 0 ? a : ~a) & ((row & 2) != 0 ? b : ~b) & ((row & 1) != 0 ? c : ~c);
  }
  return result;
}

void lop3(Step& step) {
  const bool has_predicate = step.is(0, OperandKind::kPredicate);
  const size_t to = has_predicate ? 1 : 0;
  const uint32_t table = step.operand(to + 4).immediate;
  const Lanes result = map(step.integer(to + 1), step.integer(to + 2), step.integer(to + 3),
                           [&](uint32_t a, uint32_t b, uint32_t c) { return lookup(table, a, b, c); });
  if (has_predicate) {
    const uint32_t further = to + 5 < step.num_operands() ? step.predicate(to + 5) : 0;
    step.write_predicate(0, select(result, result, [](uint32_t x, uint32_t) { return x != 0; }) | further);
  }
  step.write(to, result);
}

void plop3(Step& step) {
  const uint32_t a = step.predicate(2), b = step.predicate(3), c = step.predicate(4);
  const uint32_t second = step.num_operands() > 6 ? step.operand(6).immediate : 0;
  step.write_predicate(0, lookup(step.operand(5).immediate, a, b, c));
  step.write_predicate(1, lookup(second, a, b, c));
}

// Funnel shift: one word of the 64-bit number (upper, lower), shifted by 0 to 32, or to 63 for a 64-bit type.
void shf(Step& step) {
  const bool left = step.has(M::kL), wants_high = step.has(M::kHi), wraps = step.has(M::kW);
  const bool is_signed = step.has(M::kS32) || step.has(M::kS64);
  const uint32_t most = step.has(M::kU64) || step.has(M::kS64) ? 63 : 32, wrap = most == 63 ? 63 : 31;
  // A right shift of a 32-bit type with HI shifts the upper word alone.
  const bool upper_alone = !left && wants_high && most == 32;
  step.write(
      0, map(step.integer(1), step.integer(2), step.integer(3), [&](uint32_t lower, uint32_t amount, uint32_t upper) {
        const uint32_t shift = wraps ? amount & wrap : std::min(amount, most);
        if (left) {
          const uint64_t value = pair(lower, upper) << shift;
          return wants_high ? high(value) : low(value);
        }
        const uint64_t value = upper_alone ? pair(upper, is_signed && upper >> 31 ? ~0u : 0u) : pair(lower, upper);
        const uint64_t shifted =
            is_signed ? static_cast<uint64_t>(static_cast<int64_t>(value) >> shift) : value >> shift;
        return wants_high && !upper_alone ? high(shifted) : low(shifted);
      }));
}

void sel(Step& step) {
  const uint32_t chosen = step.predicate(3);
  const Lanes a = step.integer(1), b = step.integer(2);
  Lanes result;
  for (size_t i = 0; i < kLanes; ++i) result[i] = bit(chosen, i) != 0 ? a[i] : b[i];
  step.write(0, result);
}

// Selects four of the eight bytes of (c, a). Bit 3 of a selector replicates the byte's sign instead.
void prmt(Step& step) {
  step.write(0, map(step.integer(1), step.integer(2), step.integer(3), [](uint32_t a, uint32_t selectors, uint32_t c) {
               const uint64_t bytes = pair(a, c);
               uint32_t result = 0;
               for (int i = 0; i < 4; ++i) {
                 const uint32_t selector = selectors >> 4 * i & 15;
                 uint32_t byte = static_cast<uint32_t>(bytes >> 8 * (selector & 7)) & 255;
                 if ((selector & 8) != 0) byte = (byte & 128) != 0 ? 255 : 0;
                 result |= byte << 8 * i;
               }
               return result;
             }));
}

template <typename T>
bool compare(M how, T a, T b) {
  switch (how) {
    case M::kLT:
      return a < b;
    case M::kEQ:
      return a == b;
    case M::kLE:
      return a <= b;
    case M::kGT:
      return a > b;
    case M::kNE:
      return a != b;
    case M::kGE:
      return a >= b;
    default:
      return how == M::kT;
  }
}

// With EX this compares the upper words, and the comparison of the lower words is another operand.
void isetp(Step& step) {
  const M how = step.instruction.modifiers.first_of({M::kLT, M::kEQ, M::kLE, M::kGT, M::kNE, M::kGE, M::kT}, M::kF);
  const bool is_unsigned = step.has(M::kU32);
  const Lanes a = step.integer(2), b = step.integer(3);
  uint32_t holds = select(a, b, [&](uint32_t x, uint32_t y) {
    return is_unsigned ? compare(how, x, y) : compare(how, as_signed(x), as_signed(y));
  });
  if (step.has(M::kEX)) {
    const uint32_t equal = select(a, b, [](uint32_t x, uint32_t y) { return x == y; }), lower = step.predicate(5);
    if (how != M::kT && how != M::kF) holds = (holds & ~equal) | (lower & equal);
  }
  const uint32_t further = step.predicate(4);
  step.write_predicate(0, combine(step.instruction.modifiers, holds, further));
  step.write_predicate(1, combine(step.instruction.modifiers, ~holds, further));
}

void imnmx(Step& step) {
  const uint32_t wants_min = step.predicate(3);
  const Lanes a = step.integer(1), b = step.integer(2);
  Lanes result;
  for (size_t i = 0; i < kLanes; ++i) {
    const bool less = step.has(M::kU32) ? a[i] < b[i] : as_signed(a[i]) < as_signed(b[i]);
    result[i] = less == (bit(wants_min, i) != 0) ? a[i] : b[i];
  }
  step.write(0, result);
}

void iabs(Step& step) {
  step.write(0, map(step.integer(1), [](uint32_t x) { return as_signed(x) < 0 ? 0 - x : x; }));
}

void popc(Step& step) {
  step.write(0, map(step.integer(1), [](uint32_t x) { return static_cast<uint32_t>(__builtin_popcount(x)); }));
}

// The position of the highest bit that differs from the sign, or -1 if there is none. With SH it is counted from the
// top.
void flo(Step& step) {
  const bool is_unsigned = step.has(M::kU32), from_top = step.has(M::kSh);
  step.write(0, map(step.integer(1), [&](uint32_t x) {
               if (!is_unsigned && as_signed(x) < 0) x = ~x;
               if (x == 0) return ~0u;
               const auto zeros = static_cast<uint32_t>(__builtin_clz(x));
               return from_top ? zeros : 31 - zeros;
             }));
}

void brev(Step& step) {
  step.write(0, map(step.integer(1), [](uint32_t x) {
               uint32_t result = 0;
               for (int i = 0; i < 32; ++i) result |= (x >> i & 1) << (31 - i);
               return result;
             }));
}

int byte_shift(const Step& step) { return step.has(M::kB1) ? 8 : step.has(M::kB2) ? 16 : step.has(M::kB3) ? 24 : 0; }

// Copies the predicates in the mask into a byte of a register, and back.
void p2r(Step& step) {
  const int shift = byte_shift(step);
  const Lanes into = step.integer(2), mask = step.integer(3);
  Lanes result;
  for (size_t i = 0; i < kLanes; ++i) {
    uint32_t bits = 0;
    for (size_t p = 0; p < kTruePredicate; ++p) bits |= bit(step.warp.predicates[p], i) << p;
    result[i] = (into[i] & ~(mask[i] << shift)) | (bits & mask[i]) << shift;
  }
  step.write(0, result);
}

void r2p(Step& step) {
  const int shift = byte_shift(step);
  const Lanes from = step.integer(1), mask = step.integer(2);
  for (int p = 0; p < kTruePredicate; ++p) {
    uint32_t values = 0, named = 0;
    for (size_t i = 0; i < kLanes; ++i) {
      values |= (from[i] >> shift >> p & 1) << i;
      named |= (mask[i] >> p & 1) << i;
    }
    step.warp.write_predicate(p, step.lanes & named, values);
  }
}

constexpr NumberFormat kInteger = NumberFormat::kInteger;

}  // namespace

const std::vector<Opcode>& integer_opcodes() {
  static const auto* opcodes = new std::vector<Opcode>{
      {"MOV", Pipe::kAlu, Cost::kFixed, kInteger, "", mov},
      {"MOV32I", Pipe::kAlu, Cost::kFixed, kInteger, "", mov},
      {"IMAD", Pipe::kFma, Cost::kFixed, kInteger, "MOV SHL IADD U32 WIDE HI X", imad},
      {"IADD3", Pipe::kAlu, Cost::kFixed, kInteger, "X", iadd3},
      {"IADD", Pipe::kAlu, Cost::kFixed, kInteger, "X", iadd3},
      {"LEA", Pipe::kAlu, Cost::kFixed, kInteger, "HI X SX32", lea},
      {"LOP3", Pipe::kAlu, Cost::kFixed, kInteger, "LUT", lop3},
      {"PLOP3", Pipe::kAlu, Cost::kFixed, kInteger, "LUT", plop3},
      {"SHF", Pipe::kAlu, Cost::kFixed, kInteger, "L R W HI U32 S32 U64 S64", shf},
      {"SEL", Pipe::kAlu, Cost::kFixed, kInteger, "", sel},
      {"PRMT", Pipe::kAlu, Cost::kFixed, kInteger, "", prmt},
      {"ISETP", Pipe::kAlu, Cost::kFixed, kInteger, "LT EQ LE GT NE GE T F U32 AND OR XOR EX", isetp},
      {"IMNMX", Pipe::kAlu, Cost::kFixed, kInteger, "U32", imnmx},
      {"IABS", Pipe::kAlu, Cost::kFixed, kInteger, "", iabs},
      {"P2R", Pipe::kAlu, Cost::kFixed, kInteger, "B0 B1 B2 B3", p2r},
      {"R2P", Pipe::kAlu, Cost::kFixed, kInteger, "B0 B1 B2 B3", r2p},
      {"POPC", Pipe::kSpecial, Cost::kSpecialFunction, kInteger, "", popc},
      {"FLO", Pipe::kSpecial, Cost::kSpecialFunction, kInteger, "U32 SH", flo},
      {"BREV", Pipe::kSpecial, Cost::kSpecialFunction, kInteger, "", brev},
  };
  return *opcodes;
}

}  // namespace volta_sim
