#include "parse.h"

#include <cstring>
#include <sstream>

#include "failure.h"
#include "opcode.h"

namespace volta_sim {
namespace {

std::string trimmed(const std::string& text) {
  const size_t begin = text.find_first_not_of(" \t\r"), end = text.find_last_not_of(" \t\r");
  return begin == std::string::npos ? "" : text.substr(begin, end - begin + 1);
}

// Removes the first word from the text and returns it.
std::string take_word(std::string& text) {
  const size_t end = text.find(' ');
  const std::string word = text.substr(0, end);
  text = end == std::string::npos ? "" : trimmed(text.substr(end));
  return word;
}

std::vector<std::string> split(const std::string& text, char separator) {
  std::vector<std::string> parts;
  std::istringstream stream(text);
  for (std::string part; std::getline(stream, part, separator);) {
    if (!trimmed(part).empty()) parts.push_back(trimmed(part));
  }
  return parts;
}

void parse_guard(const std::string& word, Instruction& instruction) {
  const Operand guard = parse_operand(word.substr(1), NumberFormat::kInteger);
  if (guard.kind != OperandKind::kPredicate) fail("%s is not a predicate.", word.c_str());
  instruction.guard = guard.index;
  instruction.guard_negated = guard.invert;
}

void parse_opcode(const std::string& word, Instruction& instruction) {
  const std::vector<std::string> parts = split(word, '.');
  instruction.opcode = find_opcode(parts[0]);
  if (instruction.opcode == nullptr) fail("opcode %s is not implemented.", parts[0].c_str());
  for (size_t i = 1; i < parts.size(); ++i) {
    const auto modifier = find_modifier(parts[i]);
    if (!modifier || !allows(*instruction.opcode, parts[i])) {
      fail("%s with .%s is not implemented.", parts[0].c_str(), parts[i].c_str());
    }
    instruction.modifiers.add(*modifier);
  }
}

// Joins the two fp16 numbers of a pair, which are written as two operands.
void join_halves(std::vector<Operand>& operands) {
  for (size_t i = 0; i + 1 < operands.size(); ++i) {
    if (operands[i].kind != OperandKind::kImmediate || operands[i + 1].kind != OperandKind::kImmediate) continue;
    operands[i].immediate = (operands[i].immediate & 0xffff) | operands[i + 1].immediate << 16;
    operands.erase(operands.begin() + static_cast<std::ptrdiff_t>(i) + 1);
  }
}

void parse_operands(std::string text, Instruction& instruction) {
  const NumberFormat format = instruction.opcode->format;
  // Half instructions write a constant with a space: c[0x0] [0x160].
  for (size_t at; (at = text.find("] [")) != std::string::npos;) text.erase(at + 1, 1);
  for (const std::string& part : split(text, ',')) {
    // RET has no comma between register and offset.
    for (const std::string& word : split(part, ' ')) instruction.operands.push_back(parse_operand(word, format));
  }
  if (format == NumberFormat::kHalf) join_halves(instruction.operands);
  for (const Operand& operand : instruction.operands) {
    if (operand.kind == OperandKind::kImmediate) instruction.target = operand.immediate;
  }
}

void set_width(Instruction& instruction) {
  const auto has = [&](Modifier modifier) { return instruction.modifiers.has(modifier); };
  if (instruction.opcode->pipe != Pipe::kMemory) return;
  if (has(Modifier::k128)) instruction.width = 16;
  if (has(Modifier::k64)) instruction.width = 8;
  if (has(Modifier::kU16) || has(Modifier::kS16)) instruction.width = 2;
  if (has(Modifier::kU8) || has(Modifier::kS8)) instruction.width = 1;
  instruction.sign_extend = has(Modifier::kS8) || has(Modifier::kS16);
}

int occupancy(const Instruction& instruction) {
  const Opcode& opcode = *instruction.opcode;
  if (opcode.pipe == Pipe::kSpecial) return 8;
  if (opcode.pipe == Pipe::kTensor) return instruction.modifiers.count_of({Modifier::kF16}) == 2 ? 4 : 2;
  if (opcode.pipe == Pipe::kControl && opcode.cost != Cost::kBarrier) return 1;
  return 2;
}

void read_control(const uint8_t* bytes, Instruction& instruction) {
  uint64_t upper = 0;
  std::memcpy(&upper, bytes + 8, sizeof(upper));
  const auto control = static_cast<uint32_t>(upper >> 41);
  instruction.stall = static_cast<int>(control & 15);
  instruction.yields = (control >> 4 & 1) == 0;
  instruction.write_scoreboard = static_cast<int>(control >> 5 & 7);
  instruction.read_scoreboard = static_cast<int>(control >> 8 & 7);
  instruction.wait_mask = control >> 11 & 63;
}

Instruction parse_instruction(const std::string& text) {
  Instruction instruction;
  instruction.text = text;
  try {
    std::string rest = text;
    if (rest[0] == '@') parse_guard(take_word(rest), instruction);
    parse_opcode(take_word(rest), instruction);
    parse_operands(rest, instruction);
    set_width(instruction);
    instruction.occupancy = occupancy(instruction);
  } catch (const Failure& failure) {
    instruction.refusal = failure.what();
  }
  return instruction;
}

}  // namespace

Program parse(const std::string& listing, const uint8_t* code, uint64_t code_bytes) {
  Program program;
  std::istringstream lines(listing);
  for (std::string line; std::getline(lines, line);) {
    const size_t begin = line.find("/*"), end = line.find("*/"), last = line.find(';');
    if (begin == std::string::npos || end == std::string::npos || last == std::string::npos) continue;
    char* after = nullptr;
    const std::string number = line.substr(begin + 2, end - begin - 2);
    const uint64_t address = std::strtoull(number.c_str(), &after, 16);
    if (*after != '\0') continue;
    if (address != program.size() * kInstructionBytes || address + kInstructionBytes > code_bytes) {
      fail("the disassembly and the code disagree at address 0x%s.", number.c_str());
    }
    program.push_back(parse_instruction(trimmed(line.substr(end + 2, last - end - 2))));
    program.back().address = static_cast<uint32_t>(address);
    read_control(code + address, program.back());
  }
  if (program.size() * kInstructionBytes != code_bytes) {
    fail("the disassembly has %zu instructions, but the code has %llu.", program.size(),
         static_cast<unsigned long long>(code_bytes / kInstructionBytes));
  }
  return program;
}

}  // namespace volta_sim
