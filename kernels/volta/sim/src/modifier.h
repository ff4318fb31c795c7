// Modifiers are the words after the dots of an opcode: IMAD.WIDE.U32 has WIDE and U32.
#ifndef VOLTA_SIM_MODIFIER_H
#define VOLTA_SIM_MODIFIER_H

#include <bitset>
#include <cstddef>
#include <optional>
#include <string>
#include <vector>

namespace volta_sim {

enum class Modifier {
#define WORD(name, text) name,
#include "modifiers.def"
#undef WORD
  kCount
};

std::optional<Modifier> find_modifier(const std::string& text);

// The modifiers of one instruction, in written order.
class Modifiers {
 public:
  void add(Modifier modifier) {
    present_.set(static_cast<size_t>(modifier));
    ordered_.push_back(modifier);
  }
  bool has(Modifier modifier) const { return present_.test(static_cast<size_t>(modifier)); }
  // The first modifier that is in `choices`, otherwise `otherwise`.
  Modifier first_of(std::initializer_list<Modifier> choices, Modifier otherwise) const {
    for (const Modifier modifier : ordered_) {
      for (const Modifier choice : choices) {
        if (modifier == choice) return modifier;
      }
    }
    return otherwise;
  }
  // The number of modifiers that are in `choices`, including repetitions.
  int count_of(std::initializer_list<Modifier> choices) const {
    int count = 0;
    for (const Modifier modifier : ordered_) {
      for (const Modifier choice : choices) count += modifier == choice ? 1 : 0;
    }
    return count;
  }
  const std::vector<Modifier>& ordered() const { return ordered_; }

 private:
  std::bitset<static_cast<size_t>(Modifier::kCount)> present_;
  std::vector<Modifier> ordered_;
};

}  // namespace volta_sim

#endif
