// One instruction of a kernel as the parser understands it; plain data.
#ifndef VOLTA_SIM_INSTRUCTION_H
#define VOLTA_SIM_INSTRUCTION_H

#include <cstdint>
#include <string>
#include <vector>

#include "modifier.h"

namespace volta_sim {

constexpr int kInstructionBytes = 16;
constexpr int kZeroRegister = 255;  // RZ: reads as 0, swallows what is written
constexpr int kTruePredicate = 7;   // PT
constexpr int kNumScoreboards = 6;  // counters by which an instruction waits for results of slow ones
constexpr int kNoScoreboard = 7;

enum class OperandKind : uint8_t {
  kRegister,
  kPredicate,
  kImmediate,
  kConstant,         // c[bank][register + immediate]
  kAddress,          // [register * scale + immediate]
  kSpecialRegister,  // SR_TID.X and the like
  kConvergence,      // B0 to B15: which lanes meet at a BSYNC
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

// Which 16 bits of a register feed the two lanes of an fp16 operation.
enum class HalfSelect : uint8_t { kBoth, kLow, kHigh };

struct Operand {
  OperandKind kind = OperandKind::kImmediate;
  int index = kZeroRegister;  // number of register, predicate, barrier; the register that an address adds
  int bank = 0;
  uint32_t immediate = 0;  // value, or offset in bytes
  uint32_t scale = 1;
  SpecialRegister special = SpecialRegister::kZero;
  HalfSelect half = HalfSelect::kBoth;
  bool negate = false, absolute = false, invert = false;
  bool row_major = false;  // of a tensor core operand
};

// How the timing model charges an instruction beyond its pipe.
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

// How a number without 0x is meant.
enum class NumberFormat : uint8_t { kInteger, kFloat, kHalf };

struct Step;

struct Opcode {
  const char* name;
  Pipe pipe;
  Cost cost;
  NumberFormat format;
  const char* modifiers;  // those that `execute` knows, separated by spaces
  void (*execute)(Step&);
};

struct Instruction {
  std::string text;
  const Opcode* opcode = nullptr;
  std::string refusal;  // why it cannot be executed; empty if it can
  Modifiers modifiers;
  std::vector<Operand> operands;
  int guard = kTruePredicate;
  bool guard_negated = false;
  uint32_t address = 0;
  uint32_t target = 0;  // of a branch
  int width = 4;        // bytes per lane of a memory access
  bool sign_extend = false;
  int occupancy = 2;  // cycles of its pipe

  // Control bits, as found by Jia et al., "Dissecting the NVIDIA Volta GPU architecture", arXiv 1804.06826,
  // section 2.1.
  int stall = 1;  // cycles until the warp's next instruction
  bool yields = false;
  int write_scoreboard = kNoScoreboard;  // counted down when the result is there
  int read_scoreboard = kNoScoreboard;   // counted down when the operands have been read
  uint32_t wait_mask = 0;                // scoreboards that must be 0 before it
};

using Program = std::vector<Instruction>;

}  // namespace volta_sim

#endif
