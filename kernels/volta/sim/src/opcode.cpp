#include "opcode.h"

#include <sstream>
#include <unordered_map>

namespace volta_sim {

const Opcode* find_opcode(const std::string& name) {
  static const auto* by_name = [] {
    auto* found = new std::unordered_map<std::string, const Opcode*>;
    for (const auto* family : {&control_opcodes(), &float_opcodes(), &half_opcodes(), &integer_opcodes(),
                               &memory_opcodes(), &tensor_opcodes(), &warp_opcodes()}) {
      for (const Opcode& opcode : *family) (*found)[opcode.name] = &opcode;
    }
    return found;
  }();
  const auto found = by_name->find(name);
  return found == by_name->end() ? nullptr : found->second;
}

bool allows(const Opcode& opcode, const std::string& modifier) {
  std::istringstream words(opcode.modifiers);
  for (std::string word; words >> word;) {
    if (word == modifier) return true;
  }
  return false;
}

const char* pipe_name(int pipe) {
  static const char* const kNames[kNumPipes] = {"FMA", "ALU", "FP16", "XU", "TENSOR", "MIO", "CBU"};
  return pipe >= 0 && pipe < kNumPipes ? kNames[pipe] : nullptr;
}

}  // namespace volta_sim
