// The tensor core: D = A B + C for matrices of shape 8x8x4 (rows of A, columns of B, inner size), one per quadpair.
//
// Lanes 4q to 4q + 3 and 4q + 16 to 4q + 19 are quadpair q. The layout of the elements is PTX ISA's "Matrix fragments
// for mma.m8n8k4 with .f16". An mma is 4 instructions with fp32 sums, STEP0 to STEP3, or 2 with fp16 sums. Each writes
// two registers of D.
#include "failure.h"
#include "half.h"
#include "opcode.h"
#include "step.h"

namespace volta_sim {
namespace {

using M = Modifier;

constexpr int kQuadpairs = 4, kSize = 8, kInner = 4;

struct Inputs {
  float a[kQuadpairs][kSize][kInner];
  float b[kQuadpairs][kInner][kSize];
};

int quadpair(int lane) { return lane >> 2 & 3; }
int upper(int lane) { return lane >> 4; }

const Lanes& register_of(const Step& step, size_t operand, int further) {
  const Operand& from = step.operand(operand);
  if (from.kind != OperandKind::kRegister) fail("operand %zu of a matrix product is not a register.", operand);
  const int index = from.index == kZeroRegister ? kZeroRegister : from.index + further;
  return step.warp.registers[static_cast<size_t>(index)];
}

float element(const Step& step, size_t operand, int lane, int i) {
  const uint32_t two = register_of(step, operand, i / 2)[static_cast<size_t>(lane)];
  return i % 2 == 0 ? low_half(two) : high_half(two);
}

Inputs gather(const Step& step) {
  Inputs inputs;
  const bool a_by_rows = step.operand(1).row_major, b_by_rows = step.operand(2).row_major;
  for (int lane = 0; lane < kLanes; ++lane) {
    const int q = quadpair(lane), slot = (lane & 3) + 4 * upper(lane);
    for (int i = 0; i < 4; ++i) {
      const int spread = i + 4 * upper(lane);
      (a_by_rows ? inputs.a[q][slot][i] : inputs.a[q][spread][lane & 3]) = element(step, 1, lane, i);
      (b_by_rows ? inputs.b[q][lane & 3][spread] : inputs.b[q][i][slot]) = element(step, 2, lane, i);
    }
  }
  return inputs;
}

// Computed in double and rounded once by the caller. The hardware's order and truncation differ by about an ulp of the
// sum.
double dot(const Inputs& inputs, int lane, int row, int column, double sum) {
  const int q = quadpair(lane);
  for (int k = 0; k < kInner; ++k) sum += static_cast<double>(inputs.a[q][row][k]) * inputs.b[q][k][column];
  return sum;
}

void hmma(Step& step) {
  const auto& modifiers = step.instruction.modifiers;
  if (step.lanes != kAllLanes) fail("a matrix product must be executed by all lanes of the warp.");
  if (!step.has(M::k884)) fail("only matrix products of shape 884 are implemented.");
  const bool to_float = modifiers.count_of({M::kF32}) == 2;
  if (!to_float && modifiers.count_of({M::kF16}) != 2) fail("C and D of a matrix product must have the same type.");
  const M named = modifiers.first_of({M::kStep0, M::kStep1, M::kStep2, M::kStep3}, M::kStep0);
  const int number = static_cast<int>(named) - static_cast<int>(M::kStep0);

  const Inputs inputs = gather(step);
  Lanes results[2];
  for (int part = 0; part < 2; ++part) {
    const Lanes& c = register_of(step, 3, part);
    for (int lane = 0; lane < kLanes; ++lane) {
      const auto at = static_cast<size_t>(lane);
      if (to_float) {
        const int i = 2 * number + part;
        const int row = (lane & 1) + (i & 2) + 4 * upper(lane), column = (i & 4) + (lane & 2) + (i & 1);
        results[part][at] = result_bits(static_cast<float>(dot(inputs, lane, row, column, as_float(c[at]))));
      } else {
        const int row = (lane & 3) + 4 * upper(lane), column = 4 * number + 2 * part;
        results[part][at] = pack_halves(dot(inputs, lane, row, column, low_half(c[at])),
                                        dot(inputs, lane, row, column + 1, high_half(c[at])));
      }
    }
  }
  for (int part = 0; part < 2; ++part) step.write_next(0, part, results[part]);
}

}  // namespace

const std::vector<Opcode>& tensor_opcodes() {
  static const auto* opcodes = new std::vector<Opcode>{
      {"HMMA", Pipe::kTensor, Cost::kTensor, NumberFormat::kInteger, "884 F16 F32 STEP0 STEP1 STEP2 STEP3", hmma},
  };
  return *opcodes;
}

}  // namespace volta_sim
