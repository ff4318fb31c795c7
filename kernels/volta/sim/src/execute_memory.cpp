// Global, shared, local and constant memory.
#include <algorithm>
#include <cinttypes>
#include <cstring>

#include "failure.h"
#include "opcode.h"
#include "step.h"

namespace volta_sim {
namespace {

using M = Modifier;

uint32_t extended(const Instruction& instruction, uint32_t value) {
  if (!instruction.sign_extend) return value;
  return instruction.width == 1 ? static_cast<uint32_t>(static_cast<int8_t>(value))
                                : static_cast<uint32_t>(static_cast<int16_t>(value));
}

int num_words(const Instruction& instruction) { return std::max(1, instruction.width / 4); }

// Loads of all lanes, into as many registers as the width needs.
struct LaneLoad {
  Lanes words[4] = {};

  void take(const Instruction& instruction, size_t lane, const uint8_t* from) {
    const size_t bytes = static_cast<size_t>(std::min(4, instruction.width));
    for (int i = 0; i < num_words(instruction); ++i) {
      uint32_t value = 0;
      std::memcpy(&value, from + 4 * i, bytes);
      words[i][lane] = extended(instruction, value);
    }
  }
  void write(Step& step) const {
    for (int i = 0; i < num_words(step.instruction); ++i) step.write_next(0, i, words[i]);
  }
};

void store(const Step& step, size_t operand, size_t lane, uint8_t* to) {
  const Operand& from = step.operand(operand);
  if (from.kind != OperandKind::kRegister) fail("operand %zu of a store is not a register.", operand);
  const size_t bytes = static_cast<size_t>(std::min(4, step.instruction.width));
  for (int i = 0; i < num_words(step.instruction); ++i) {
    const int index = from.index == kZeroRegister ? kZeroRegister : from.index + i;
    std::memcpy(to + 4 * i, &step.warp.registers[static_cast<size_t>(index)][lane], bytes);
  }
}

const Operand& address_operand(const Step& step, size_t number) {
  const Operand& operand = step.operand(number);
  if (operand.kind != OperandKind::kAddress) fail("operand %zu is not an address.", number);
  return operand;
}

template <typename Function>
void for_each_lane(const Step& step, Function function) {
  for (int lane = 0; lane < kLanes; ++lane) {
    if (has_lane(step.lanes, lane)) function(static_cast<size_t>(lane));
  }
}

// --- global ---------------------------------------------------------------------------------------------------------

WideLanes global_addresses(const Step& step, size_t number) {
  const Operand& operand = address_operand(step, number);
  if (!step.has(M::kE)) fail("global addresses of 32 bits are not implemented.");
  const bool zero = operand.index == kZeroRegister;
  const Lanes& low = step.warp.registers[static_cast<size_t>(operand.index)];
  const Lanes& high = step.warp.registers[static_cast<size_t>(zero ? kZeroRegister : operand.index + 1)];
  const auto offset = static_cast<uint64_t>(static_cast<int64_t>(static_cast<int32_t>(operand.immediate)));
  WideLanes addresses;
  for (size_t i = 0; i < kLanes; ++i) addresses[i] = (low[i] | static_cast<uint64_t>(high[i]) << 32) + offset;
  return addresses;
}

uint8_t* global(const Step& step, size_t lane, uint64_t address, bool writing) {
  const char* why = nullptr;
  uint8_t* host = step.machine.global.find(address, static_cast<uint32_t>(step.instruction.width), writing, &why);
  if (host == nullptr) {
    fail("global address 0x%" PRIx64 " (%d bytes, lane %zu) %s.", address, step.instruction.width, lane, why);
  }
  return host;
}

void record_global(Step& step, const WideLanes& addresses) {
  if (step.trace == nullptr) return;
  step.detail = static_cast<uint32_t>(step.trace->accesses.size());
  step.trace->accesses.push_back(global_access(step.lanes, addresses, step.trace->sectors));
}

void ldg(Step& step) {
  const WideLanes addresses = global_addresses(step, 1);
  LaneLoad load;
  for_each_lane(step,
                [&](size_t lane) { load.take(step.instruction, lane, global(step, lane, addresses[lane], false)); });
  load.write(step);
  record_global(step, addresses);
}

void stg(Step& step) {
  const WideLanes addresses = global_addresses(step, 0);
  for_each_lane(step, [&](size_t lane) { store(step, 1, lane, global(step, lane, addresses[lane], true)); });
  record_global(step, addresses);
}

// --- shared ---------------------------------------------------------------------------------------------------------

Lanes shared_addresses(const Step& step, size_t number) {
  const Operand& operand = address_operand(step, number);
  return map(step.warp.registers[static_cast<size_t>(operand.index)],
             [&](uint32_t base) { return base * operand.scale + operand.immediate; });
}

uint8_t* shared(const Step& step, size_t lane, uint32_t address) {
  const int width = step.instruction.width;
  if (uint64_t{address} + static_cast<uint64_t>(width) > step.cta.shared.size()) {
    fail("shared address 0x%x (%d bytes, lane %zu) lies outside of the CTA's %zu bytes.", address, width, lane,
         step.cta.shared.size());
  }
  if (address % static_cast<uint32_t>(width) != 0) {
    fail("shared address 0x%x (%d bytes, lane %zu) is not a multiple of the access's size.", address, width, lane);
  }
  return step.cta.shared.data() + address;
}

void record_shared(Step& step, const Lanes& addresses) {
  if (step.trace == nullptr) return;
  step.detail = static_cast<uint32_t>(step.trace->accesses.size());
  step.trace->accesses.push_back(shared_access(step.lanes, addresses, step.instruction.width));
}

void lds(Step& step) {
  const Lanes addresses = shared_addresses(step, 1);
  LaneLoad load;
  for_each_lane(step, [&](size_t lane) { load.take(step.instruction, lane, shared(step, lane, addresses[lane])); });
  load.write(step);
  record_shared(step, addresses);
}

void sts(Step& step) {
  const Lanes addresses = shared_addresses(step, 0);
  for_each_lane(step, [&](size_t lane) { store(step, 1, lane, shared(step, lane, addresses[lane])); });
  record_shared(step, addresses);
}

uint32_t combined(const Step& step, uint32_t old, uint32_t value) {
  const auto less = [&](uint32_t a, uint32_t b) {
    return step.has(M::kS32) ? static_cast<int32_t>(a) < static_cast<int32_t>(b) : a < b;
  };
  if (step.has(M::kAdd)) return old + value;
  if (step.has(M::kMin)) return less(value, old) ? value : old;
  if (step.has(M::kMax)) return less(old, value) ? value : old;
  if (step.has(M::kAnd)) return old & value;
  if (step.has(M::kOr)) return old | value;
  if (step.has(M::kXor)) return old ^ value;
  if (step.has(M::kExch)) return value;
  fail("this atomic operation is not implemented.");
}

void atoms(Step& step) {
  const Lanes addresses = shared_addresses(step, 1), values = step.integer(2);
  LaneLoad before;
  for_each_lane(step, [&](size_t lane) {
    uint8_t* host = shared(step, lane, addresses[lane]);
    before.take(step.instruction, lane, host);
    const uint32_t after = combined(step, before.words[0][lane], values[lane]);
    std::memcpy(host, &after, sizeof(after));
  });
  before.write(step);
  record_shared(step, addresses);
}

// --- local and constant ---------------------------------------------------------------------------------------------

uint8_t* local(const Step& step, size_t operand_number, size_t lane) {
  const Operand& operand = address_operand(step, operand_number);
  const uint32_t address = step.warp.registers[static_cast<size_t>(operand.index)][lane] + operand.immediate;
  const uint32_t size = step.machine.launch.local_bytes;
  const auto width = static_cast<uint32_t>(step.instruction.width);
  if (uint64_t{address} + width > size || address % width != 0) {
    fail("local address 0x%x (%u bytes, lane %zu) is misaligned or outside of the thread's %u bytes.", address, width,
         lane, size);
  }
  return step.warp.local.data() + lane * size + address;
}

void ldl(Step& step) {
  LaneLoad load;
  for_each_lane(step, [&](size_t lane) { load.take(step.instruction, lane, local(step, 1, lane)); });
  load.write(step);
}

void stl(Step& step) {
  for_each_lane(step, [&](size_t lane) { store(step, 1, lane, local(step, 0, lane)); });
}

void ldc(Step& step) {
  const Operand& from = step.operand(1);
  if (from.kind != OperandKind::kConstant) fail("operand 1 is not a constant.");
  const Lanes& base = step.warp.registers[static_cast<size_t>(from.index)];
  LaneLoad load;
  for_each_lane(step, [&](size_t lane) {
    uint8_t bytes[16];
    for (int i = 0; i < num_words(step.instruction); ++i) {
      const auto size = static_cast<uint32_t>(std::min(4, step.instruction.width));
      const uint32_t offset = base[lane] + from.immediate + static_cast<uint32_t>(4 * i);
      const uint32_t word = step.machine.constants.load(from.bank, offset, size);
      std::memcpy(bytes + 4 * i, &word, sizeof(word));
    }
    load.take(step.instruction, lane, bytes);
  });
  load.write(step);
}

// Each warp runs until it waits, so memory accesses are always in the order that fences require.
void fence(Step&) {}

constexpr NumberFormat kInteger = NumberFormat::kInteger;
constexpr const char* kGlobalWords = "E SYS GPU CTA CONSTANT STRONG WEAK EF EL LU NA U8 S8 U16 S16 64 128";
constexpr const char* kSharedWords = "U U8 S8 U16 S16 32 64 128";

}  // namespace

const std::vector<Opcode>& memory_opcodes() {
  static const auto* opcodes = new std::vector<Opcode>{
      {"LDG", Pipe::kMemory, Cost::kGlobalLoad, kInteger, kGlobalWords, ldg},
      {"STG", Pipe::kMemory, Cost::kGlobalStore, kInteger, kGlobalWords, stg},
      // Generic addresses. Those of shared and local memory are not mapped, so they cause an error.
      {"LD", Pipe::kMemory, Cost::kGlobalLoad, kInteger, kGlobalWords, ldg},
      {"ST", Pipe::kMemory, Cost::kGlobalStore, kInteger, kGlobalWords, stg},
      {"LDS", Pipe::kMemory, Cost::kSharedLoad, kInteger, kSharedWords, lds},
      {"STS", Pipe::kMemory, Cost::kSharedStore, kInteger, kSharedWords, sts},
      {"ATOMS", Pipe::kMemory, Cost::kSharedAtomic, kInteger, "ADD MIN MAX AND OR XOR EXCH S32 U32", atoms},
      {"LDL", Pipe::kMemory, Cost::kLocal, kInteger, "U8 S8 U16 S16 64 128 LU", ldl},
      {"STL", Pipe::kMemory, Cost::kLocal, kInteger, "U8 S8 U16 S16 64 128", stl},
      {"LDC", Pipe::kMemory, Cost::kConstantLoad, kInteger, "U8 S8 U16 S16 64", ldc},
      {"MEMBAR", Pipe::kMemory, Cost::kFixed, kInteger, "SC ALL SYS GPU CTA VC", fence},
      {"ERRBAR", Pipe::kControl, Cost::kFixed, kInteger, "", fence},
  };
  return *opcodes;
}

}  // namespace volta_sim
