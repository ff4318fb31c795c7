#include "modifier.h"

#include <unordered_map>

namespace volta_sim {

std::optional<Modifier> find_modifier(const std::string& text) {
  static const auto* words = new std::unordered_map<std::string, Modifier>{
#define WORD(name, text) {text, Modifier::name},
#include "modifiers.def"
#undef WORD
  };
  const auto found = words->find(text);
  if (found == words->end()) return std::nullopt;
  return found->second;
}

}  // namespace volta_sim
