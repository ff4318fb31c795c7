// Branches, and synchronisation of the lanes of a warp and of the warps of a CTA.
//
// A group of lanes runs alone until it ends, waits, or reaches the address of another group. BSSY enters the lanes of
// the group into a convergence barrier. At BSYNC they wait until all of them have arrived or left the barrier (BREAK,
// EXIT).
#include "failure.h"
#include "opcode.h"
#include "step.h"

namespace volta_sim {
namespace {

using M = Modifier;

uint32_t next_address(const Step& step) { return step.instruction.address + kInstructionBytes; }

Lanes& convergence(Step& step, size_t number) {
  const Operand& operand = step.operand(number);
  if (operand.kind != OperandKind::kConvergence) fail("operand %zu is not a convergence barrier.", number);
  return step.warp.convergence[static_cast<size_t>(operand.index)];
}

void nop(Step&) {}

void bra(Step& step) {
  // U means that all lanes of the group decide alike, which changes nothing here. DIV branches only if some lanes of
  // the warp are elsewhere, CONV only if none are.
  const bool together = step.group == step.warp.alive;
  if (step.has(M::kDiv) && together) step.lanes = 0;
  if (step.has(M::kConv) && !together) step.lanes = 0;
  if (step.is(0, OperandKind::kPredicate)) step.lanes &= step.predicate(0);
  if (step.lanes == 0) return;
  step.warp.groups.push_back({step.instruction.target, step.lanes});
  step.continue_others();
  step.rescheduled = true;
}

void call(Step& step) {
  if (step.has(M::kAbs)) fail("calls to other functions are not implemented; assert and printf make such calls.");
  step.warp.groups.push_back({step.instruction.target, step.lanes});
  step.continue_others();
  step.rescheduled = true;
}

// Jumps to a register plus an offset; the register may differ from lane to lane.
void jump(Step& step, uint32_t offset) {
  const Lanes to = step.raw(0);
  for (int lane = 0; lane < kLanes; ++lane) {
    const uint32_t address = to[static_cast<size_t>(lane)] + offset;
    if (has_lane(step.lanes, lane)) step.warp.groups.push_back({address, 1u << lane});
  }
  step.continue_others();
  step.rescheduled = true;
}

void ret(Step& step) { jump(step, step.instruction.target); }

// BRX implements a switch. Its offset is relative to the next instruction, unlike that of other branches.
void brx(Step& step) { jump(step, step.instruction.target + next_address(step)); }

void exit_lanes(Step& step) {
  step.warp.alive &= ~step.lanes;
  step.continue_others();
  step.rescheduled = true;
}

void bssy(Step& step) {
  Lanes& barrier = convergence(step, 0);
  for (int lane = 0; lane < kLanes; ++lane) {
    if (has_lane(step.lanes, lane)) barrier[static_cast<size_t>(lane)] = step.group;
  }
}

void meet(Step& step, uint32_t expected, int barrier) {
  if ((expected & step.warp.alive & ~step.lanes) == 0) {
    if (step.lanes == step.group) return;
    step.warp.groups.push_back({next_address(step), step.group});
  } else {
    step.warp.meetings.push_back({step.instruction.address, step.lanes, expected, barrier});
    step.continue_others();
  }
  step.rescheduled = true;
}

void bsync(Step& step) {
  const Lanes& barrier = convergence(step, 0);
  uint32_t expected = 0;
  for (int lane = 0; lane < kLanes; ++lane) {
    if (has_lane(step.lanes, lane)) expected |= barrier[static_cast<size_t>(lane)];
  }
  meet(step, expected, step.operand(0).index);
}

void warpsync(Step& step) { meet(step, step.uniform(0), -1); }

// BREAK: the lanes leave a convergence barrier without waiting at it.
void break_out(Step& step) {
  for (uint32_t& lanes : convergence(step, 0)) lanes &= ~step.lanes;
  for (Meeting& meeting : step.warp.meetings) {
    if (meeting.barrier == step.operand(0).index) meeting.expected &= ~step.lanes;
  }
}

// BMOV copies between a convergence barrier and a register.
void bmov(Step& step) {
  if (step.is(0, OperandKind::kRegister)) {
    Lanes& barrier = convergence(step, 1);
    step.write(0, barrier);
    if (!step.has(M::kClear)) return;
    for (int lane = 0; lane < kLanes; ++lane) {
      if (has_lane(step.lanes, lane)) barrier[static_cast<size_t>(lane)] = 0;
    }
    return;
  }
  const Lanes values = step.raw(1);
  Lanes& barrier = convergence(step, 0);
  for (int lane = 0; lane < kLanes; ++lane) {
    if (has_lane(step.lanes, lane)) barrier[static_cast<size_t>(lane)] = values[static_cast<size_t>(lane)];
  }
}

// BAR.SYNC barrier, threads: waits until that many threads have arrived. BAR.ARV arrives and does not wait. Only whole
// warps are supported.
void bar(Step& step) {
  const uint32_t barrier = step.num_operands() == 0 ? 0 : step.uniform(0);
  const bool counted = step.num_operands() > 1 && !step.is(1, OperandKind::kPredicate);
  const uint32_t threads = counted ? step.uniform(1) : 0;
  if (barrier >= kNumCtaBarriers) fail("there is no barrier %u.", barrier);
  if (threads % kLanes != 0) fail("barrier %u waits for %u threads, which is not a multiple of 32.", barrier, threads);
  const bool waits = !step.has(M::kArv);
  if (!waits && threads == 0) fail("an arrival at barrier %u must give the number of threads.", barrier);
  if (step.trace != nullptr) {
    step.detail = static_cast<uint32_t>(step.trace->arrivals.size());
    step.trace->arrivals.push_back({static_cast<int>(barrier), static_cast<int>(threads), waits});
  }
  if (!waits) {
    step.warp.arrivals.push_back(static_cast<int>(barrier));
    return;
  }
  if (!step.warp.at_barrier.empty() && step.warp.cta_barrier != static_cast<int>(barrier)) {
    fail("lanes of one warp wait at barriers %d and %u at the same time.", step.warp.cta_barrier, barrier);
  }
  step.warp.cta_barrier = static_cast<int>(barrier);
  step.warp.barrier_threads = static_cast<int>(threads);
  step.warp.at_barrier.push_back({next_address(step), step.group});
  step.rescheduled = true;
}

void trap(Step&) { fail("the kernel stopped itself with a trap."); }

constexpr NumberFormat kInteger = NumberFormat::kInteger;

}  // namespace

const std::vector<Opcode>& control_opcodes() {
  static const auto* opcodes = new std::vector<Opcode>{
      {"NOP", Pipe::kControl, Cost::kFixed, kInteger, "", nop},
      {"YIELD", Pipe::kControl, Cost::kFixed, kInteger, "", nop},
      {"NANOSLEEP", Pipe::kControl, Cost::kFixed, kInteger, "", nop},
      {"DEPBAR", Pipe::kControl, Cost::kScoreboardWait, kInteger, "LE", nop},
      {"BRA", Pipe::kControl, Cost::kFixed, kInteger, "U DIV CONV", bra},
      {"BRX", Pipe::kControl, Cost::kFixed, kInteger, "", brx},
      {"CALL", Pipe::kControl, Cost::kFixed, kInteger, "REL ABS NOINC", call},
      {"RET", Pipe::kControl, Cost::kFixed, kInteger, "REL NODEC", ret},
      {"EXIT", Pipe::kControl, Cost::kFixed, kInteger, "", exit_lanes},
      {"BSSY", Pipe::kControl, Cost::kFixed, kInteger, "", bssy},
      {"BSYNC", Pipe::kControl, Cost::kFixed, kInteger, "", bsync},
      {"BREAK", Pipe::kControl, Cost::kFixed, kInteger, "", break_out},
      {"BMOV", Pipe::kControl, Cost::kFixed, kInteger, "32 CLEAR", bmov},
      {"WARPSYNC", Pipe::kControl, Cost::kFixed, kInteger, "", warpsync},
      {"BAR", Pipe::kControl, Cost::kBarrier, kInteger, "SYNC ARV DEFER_BLOCKING", bar},
      {"BPT", Pipe::kControl, Cost::kFixed, kInteger, "TRAP", trap},
      {"KILL", Pipe::kControl, Cost::kFixed, kInteger, "", trap},
  };
  return *opcodes;
}

}  // namespace volta_sim
