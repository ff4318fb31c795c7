// The execution of one instruction of one warp: the sources of its operands and the destinations of its results.
#ifndef VOLTA_SIM_STEP_H
#define VOLTA_SIM_STEP_H

#include "memory.h"
#include "trace.h"
#include "warp.h"

namespace volta_sim {

struct Launch {
  uint32_t grid[3] = {1, 1, 1};
  uint32_t block[3] = {32, 1, 1};
  uint32_t shared_bytes = 0;
  uint32_t local_bytes = 0;  // per thread
};

struct Machine {
  GlobalMemory global;
  ConstantMemory constants;
  Launch launch;
};

struct Step {
  const Instruction& instruction;
  Machine& machine;
  Cta& cta;
  Warp& warp;
  Trace* trace;      // null: no trace is recorded
  uint32_t group;    // lanes that are at this instruction
  uint32_t lanes;    // lanes of the group whose guard holds
  uint32_t detail;   // detail of the record, see trace.h
  bool rescheduled;  // the group has been split and its lanes are in the warp's lists

  // The operand as integers, fp32 numbers or pairs of fp16 numbers, after absolute value, negation and inversion.
  Lanes integer(size_t operand) const;
  Lanes real(size_t operand) const;
  Lanes halves(size_t operand) const;
  // The operand as it is stored. 64 bits come from two consecutive registers or constants.
  Lanes raw(size_t operand) const;
  WideLanes wide(size_t operand) const;
  uint32_t predicate(size_t operand) const;
  // The value of an operand that must be the same in all lanes.
  uint32_t uniform(size_t operand) const;

  bool has(Modifier modifier) const { return instruction.modifiers.has(modifier); }
  size_t num_operands() const { return instruction.operands.size(); }
  const Operand& operand(size_t number) const;
  bool is(size_t number, OperandKind kind) const {
    return number < num_operands() && instruction.operands[number].kind == kind;
  }

  void write(size_t operand, const Lanes& values);
  void write_next(size_t operand, int registers_on, const Lanes& values);
  void write_predicate(size_t operand, uint32_t values);

  // The rest of the group continues after this instruction.
  void continue_others() {
    if ((group & ~lanes) != 0) warp.groups.push_back({instruction.address + kInstructionBytes, group & ~lanes});
  }
};

template <typename Function>
Lanes map(const Lanes& a, Function function) {
  Lanes result;
  for (size_t i = 0; i < kLanes; ++i) result[i] = function(a[i]);
  return result;
}

template <typename Function>
Lanes map(const Lanes& a, const Lanes& b, Function function) {
  Lanes result;
  for (size_t i = 0; i < kLanes; ++i) result[i] = function(a[i], b[i]);
  return result;
}

template <typename Function>
Lanes map(const Lanes& a, const Lanes& b, const Lanes& c, Function function) {
  Lanes result;
  for (size_t i = 0; i < kLanes; ++i) result[i] = function(a[i], b[i], c[i]);
  return result;
}

// The lanes for which the function returns true.
template <typename Function>
uint32_t select(const Lanes& a, const Lanes& b, Function function) {
  uint32_t result = 0;
  for (size_t i = 0; i < kLanes; ++i) result |= static_cast<uint32_t>(function(a[i], b[i]) ? 1 : 0) << i;
  return result;
}

// Combines the result of a comparison with another predicate: AND, OR or XOR.
inline uint32_t combine(const Modifiers& modifiers, uint32_t a, uint32_t b) {
  if (modifiers.has(Modifier::kOr)) return a | b;
  if (modifiers.has(Modifier::kXor)) return a ^ b;
  return a & b;
}

}  // namespace volta_sim

#endif
