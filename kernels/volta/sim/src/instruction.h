// One parsed instruction of a kernel: plain data.
#ifndef VOLTA_SIM_INSTRUCTION_H
#define VOLTA_SIM_INSTRUCTION_H

#include <cstdint>
#include <string>
#include <vector>

#include "modifier.h"

namespace volta_sim {

constexpr int kInstructionBytes = 16;
constexpr int kZeroRegister = 255;  // RZ: reads as 0, ignores writes
constexpr int kTruePredicate = 7;   // PT
constexpr int kNumScoreboards = 6;  // counters that instructions use to wait for the results of slow ones
constexpr int kNoScoreboard = 7;

enum class OperandKind : uint8_t {
  kRegister,
  kPredicate,
  kImmediate,
  kConstant,         // c[bank][register + immediate]
  kAddress,          // [register * scale + immediate]
  kSpecialRegister,  // for example SR_TID.X
  kConvergence,      // B0 to B15: the lanes that meet at a BSYNC
  kScoreboard,       // SB0 to SB5
  kAllPredicates,    // PR
};

enum class SpecialRegister : uint8_t {
  kTidX,
  kTidY,
  kTidZ,
  kCtaX,
  kCtaY,
  kCtaZ,
  kLane,
  kEqMask,
  kLtMask,
  kLeMask,
  kGtMask,
  kGeMask,
  kZero
};

// The 16 bits of a register that the two lanes of an fp16 operation use.
enum class HalfSelect : uint8_t { kBoth, kLow, kHigh, kFromFloat };  // the last: an fp32 number, rounded

struct Operand {
  OperandKind kind = OperandKind::kImmediate;
  int index = kZeroRegister;  // number of the register, predicate or barrier; the register that is added to an address
  int bank = 0;
  uint32_t immediate = 0;  // the value, or an offset in bytes
  uint32_t scale = 1;
  SpecialRegister special = SpecialRegister::kZero;
  HalfSelect half = HalfSelect::kBoth;
  bool negate = false, absolute = false, invert = false;
  bool row_major = false;  // for an operand of the tensor core
};

// How the timing model charges an instruction, in addition to its pipe.
enum class Cost : uint8_t {
  kFixed,
  kSpecialFunction,
  kConversion,
  kTensor,
  kShuffle,
  kSharedLoad,
  kSharedStore,
  kSharedAtomic,
  kGlobalLoad,
  kGlobalStore,
  kLocal,
  kConstantLoad,
  kSpecialRegister,
  kBarrier,
  kScoreboardWait,  // DEPBAR
};

enum class Pipe : uint8_t { kFma, kAlu, kHalf, kSpecial, kTensor, kMemory, kControl };
constexpr int kNumPipes = 7;

// How a number without 0x is interpreted.
enum class NumberFormat : uint8_t { kInteger, kFloat, kHalf };

struct Step;

struct Opcode {
  const char* name;
  Pipe pipe;
  Cost cost;
  NumberFormat format;
  const char* modifiers;  // the modifiers that `execute` supports, separated by spaces
  void (*execute)(Step&);
};

struct Instruction {
  std::string text;
  const Opcode* opcode = nullptr;
  std::string refusal;  // the reason why it cannot be executed; empty if it can
  Modifiers modifiers;
  std::vector<Operand> operands;
  int guard = kTruePredicate;
  bool guard_negated = false;
  uint32_t address = 0;
  uint32_t target = 0;  // target of a branch
  int width = 4;        // bytes per lane of a memory access
  bool sign_extend = false;
  int occupancy = 2;  // cycles that it occupies its pipe

  // Control bits, as found by Jia et al., "Dissecting the NVIDIA Volta GPU architecture", arXiv 1804.06826,
  // section 2.1.
  int stall = 1;  // cycles until the warp's next instruction
  bool yields = false;
  int write_scoreboard = kNoScoreboard;  // decremented when the result is available
  int read_scoreboard = kNoScoreboard;   // decremented when the operands have been read
  uint32_t wait_mask = 0;                // scoreboards that must be 0 before it is issued
};

using Program = std::vector<Instruction>;

}  // namespace volta_sim

#endif
