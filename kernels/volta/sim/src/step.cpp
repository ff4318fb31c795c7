#include "step.h"

#include "failure.h"
#include "half.h"

namespace volta_sim {
namespace {

constexpr uint32_t kSignBit = 0x80000000u, kHalfSignBits = 0x80008000u;

Lanes filled(uint32_t value) {
  Lanes lanes;
  lanes.fill(value);
  return lanes;
}

Lanes load_constants(const Step& step, const Operand& operand, uint32_t more) {
  const uint32_t offset = operand.immediate + more;
  if (operand.index == kZeroRegister) return filled(step.machine.constants.load(operand.bank, offset, 4));
  const Lanes& base = step.warp.registers[static_cast<size_t>(operand.index)];
  Lanes values = {};
  for (int lane = 0; lane < kLanes; ++lane) {
    const auto i = static_cast<size_t>(lane);
    if (has_lane(step.lanes, lane)) values[i] = step.machine.constants.load(operand.bank, offset + base[i], 4);
  }
  return values;
}

}  // namespace

const Operand& Step::operand(size_t number) const {
  if (number >= instruction.operands.size()) fail("operand %zu is missing.", number);
  return instruction.operands[number];
}

Lanes Step::raw(size_t number) const {
  const Operand& from = operand(number);
  switch (from.kind) {
    case OperandKind::kRegister:
      return warp.registers[static_cast<size_t>(from.index)];
    case OperandKind::kImmediate:
      return filled(from.immediate);
    case OperandKind::kConstant:
      return load_constants(*this, from, 0);
    default:
      fail("operand %zu is not a number.", number);
  }
}

Lanes Step::integer(size_t number) const {
  const Operand& from = operand(number);
  Lanes values = raw(number);
  for (uint32_t& value : values) {
    if (from.absolute && (value & kSignBit) != 0) value = 0 - value;
    if (from.negate) value = 0 - value;
    if (from.invert) value = ~value;
  }
  return values;
}

Lanes Step::real(size_t number) const {
  const Operand& from = operand(number);
  Lanes values = raw(number);
  for (uint32_t& value : values) {
    if (from.absolute) value &= ~kSignBit;
    if (from.negate) value ^= kSignBit;
  }
  return values;
}

Lanes Step::halves(size_t number) const {
  const Operand& from = operand(number);
  Lanes values = raw(number);
  for (uint32_t& value : values) {
    if (from.half == HalfSelect::kLow) value = (value & 0xffff) | value << 16;
    if (from.half == HalfSelect::kHigh) value = value >> 16 | (value & 0xffff0000u);
    if (from.half == HalfSelect::kFromFloat) value = pack_halves(as_float(value), as_float(value));
    if (from.absolute) value &= ~kHalfSignBits;
    if (from.negate) value ^= kHalfSignBits;
  }
  return values;
}

WideLanes Step::wide(size_t number) const {
  const Operand& from = operand(number);
  const Lanes low = raw(number);
  Lanes high;
  if (from.kind == OperandKind::kRegister) {
    const bool zero = from.index == kZeroRegister;
    high = warp.registers[static_cast<size_t>(zero ? kZeroRegister : from.index + 1)];
  } else if (from.kind == OperandKind::kConstant) {
    high = load_constants(*this, from, 4);
  } else {
    high = filled((from.immediate & kSignBit) != 0 && !has(Modifier::kU32) ? kAllLanes : 0);
  }
  WideLanes values;
  for (size_t i = 0; i < kLanes; ++i) {
    values[i] = low[i] | static_cast<uint64_t>(high[i]) << 32;
    if (from.negate) values[i] = 0 - values[i];
    if (from.invert) values[i] = ~values[i];
  }
  return values;
}

uint32_t Step::predicate(size_t number) const {
  const Operand& from = operand(number);
  if (from.kind != OperandKind::kPredicate) fail("operand %zu is not a predicate.", number);
  const uint32_t values = warp.predicates[static_cast<size_t>(from.index)];
  return from.invert ? ~values : values;
}

uint32_t Step::uniform(size_t number) const {
  const Lanes values = integer(number);
  return values[static_cast<size_t>(__builtin_ctz(lanes))];
}

void Step::write(size_t number, const Lanes& values) { write_next(number, 0, values); }

void Step::write_next(size_t number, int registers_on, const Lanes& values) {
  const Operand& to = operand(number);
  if (to.kind != OperandKind::kRegister) fail("operand %zu is not a register.", number);
  if (to.index == kZeroRegister) return;
  if (to.index + registers_on >= kZeroRegister) fail("operand %zu reaches beyond the last register.", number);
  warp.write(to.index + registers_on, lanes, values);
}

void Step::write_predicate(size_t number, uint32_t values) {
  const Operand& to = operand(number);
  if (to.kind != OperandKind::kPredicate) fail("operand %zu is not a predicate.", number);
  warp.write_predicate(to.index, lanes, values);
}

}  // namespace volta_sim
