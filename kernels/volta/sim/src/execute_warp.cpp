// Exchange between the lanes of a warp, and special registers.
#include "failure.h"
#include "opcode.h"
#include "step.h"

namespace volta_sim {
namespace {

using M = Modifier;

uint32_t special_register(const Step& step, SpecialRegister which, uint32_t lane) {
  const uint32_t thread = static_cast<uint32_t>(step.warp.number) * kLanes + lane;
  const uint32_t* block = step.machine.launch.block;
  const uint32_t below = (1u << lane) - 1, own = 1u << lane;
  switch (which) {
    case SpecialRegister::kTidX:
      return thread % block[0];
    case SpecialRegister::kTidY:
      return thread / block[0] % block[1];
    case SpecialRegister::kTidZ:
      return thread / (block[0] * block[1]);
    case SpecialRegister::kCtaX:
      return step.cta.x;
    case SpecialRegister::kCtaY:
      return step.cta.y;
    case SpecialRegister::kCtaZ:
      return step.cta.z;
    case SpecialRegister::kLane:
      return lane;
    case SpecialRegister::kEqMask:
      return own;
    case SpecialRegister::kLtMask:
      return below;
    case SpecialRegister::kLeMask:
      return below | own;
    case SpecialRegister::kGtMask:
      return ~(below | own);
    case SpecialRegister::kGeMask:
      return ~below;
    case SpecialRegister::kZero:
      return 0;
  }
  fail("this special register is not known.");
}

Lanes special_registers(const Step& step) {
  const Operand& from = step.operand(1);
  if (from.kind != OperandKind::kSpecialRegister) fail("operand 1 is not a special register.");
  Lanes values;
  for (uint32_t lane = 0; lane < kLanes; ++lane) values[lane] = special_register(step, from.special, lane);
  return values;
}

void s2r(Step& step) { step.write(0, special_registers(step)); }

// Writes a pair of registers, or one with modifier 32. Compilers clear registers with it.
void cs2r(Step& step) {
  if (step.operand(1).special != SpecialRegister::kZero) fail("clocks and counters are not modelled.");
  step.write(0, special_registers(step));
  if (!step.has(M::k32)) step.write_next(0, 1, special_registers(step));
}

void vote(Step& step) {
  const size_t to = step.is(0, OperandKind::kRegister) ? 1 : 0;
  const uint32_t votes = step.predicate(to + 1) & step.lanes;
  bool holds = votes != 0;
  if (step.has(M::kAll)) holds = votes == step.lanes;
  if (step.has(M::kEQ)) holds = votes == 0 || votes == step.lanes;
  if (to == 1) {
    Lanes ballot;
    ballot.fill(votes);
    step.write(0, ballot);
  }
  step.write_predicate(to, holds ? kAllLanes : 0);
}

// As PTX defines shfl.sync: bits 12 to 8 of the last operand split the warp into segments, and its low bits bound the
// source lane.
void shfl(Step& step) {
  if (!step.is(2, OperandKind::kRegister)) fail("operand 2 of a shuffle is not a register.");
  const Lanes from = step.raw(2), by = step.integer(3), bounds = step.integer(4);
  Lanes result;
  uint32_t in_range = 0;
  for (size_t lane = 0; lane < kLanes; ++lane) {
    const uint32_t segment = bounds[lane] >> 8 & 31, clamp = bounds[lane] & 31, offset = by[lane] & 31;
    const auto own = static_cast<uint32_t>(lane);
    const auto last = static_cast<int>((own & segment) | (clamp & ~segment));
    int source = static_cast<int>((own & segment) | (offset & ~segment));
    if (step.has(M::kUp)) source = static_cast<int>(own) - static_cast<int>(offset);
    if (step.has(M::kDown)) source = static_cast<int>(own + offset);
    if (step.has(M::kBfly)) source = static_cast<int>(own ^ offset);
    const bool valid = step.has(M::kUp) ? source >= last : source <= last;
    result[lane] = from[valid ? static_cast<size_t>(source) : lane];
    in_range |= static_cast<uint32_t>(valid ? 1 : 0) << lane;
  }
  step.write(1, result);
  step.write_predicate(0, in_range);
}

constexpr NumberFormat kInteger = NumberFormat::kInteger;

}  // namespace

const std::vector<Opcode>& warp_opcodes() {
  static const auto* opcodes = new std::vector<Opcode>{
      {"S2R", Pipe::kMemory, Cost::kSpecialRegister, kInteger, "", s2r},
      {"CS2R", Pipe::kAlu, Cost::kFixed, kInteger, "32", cs2r},
      {"VOTE", Pipe::kAlu, Cost::kFixed, kInteger, "ANY ALL EQ", vote},
      {"SHFL", Pipe::kMemory, Cost::kShuffle, kInteger, "IDX UP DOWN BFLY", shfl},
  };
  return *opcodes;
}

}  // namespace volta_sim
