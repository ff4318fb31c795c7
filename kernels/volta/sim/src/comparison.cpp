#include "comparison.h"

#include <cmath>

namespace volta_sim {

using M = Modifier;

Modifier comparison_of(const Modifiers& modifiers) {
  return modifiers.first_of({M::kLT, M::kEQ, M::kLE, M::kGT, M::kNE, M::kGE, M::kLTU, M::kEQU, M::kLEU, M::kGTU,
                             M::kNEU, M::kGEU, M::kNum, M::kNan, M::kT},
                            M::kF);
}

bool compare_floats(Modifier how, float a, float b) {
  const bool unordered = std::isnan(a) || std::isnan(b);
  switch (how) {
    case M::kLT:
      return a < b;
    case M::kEQ:
      return a == b;
    case M::kLE:
      return a <= b;
    case M::kGT:
      return a > b;
    case M::kNE:
      return !unordered && a != b;
    case M::kGE:
      return a >= b;
    case M::kLTU:
      return unordered || a < b;
    case M::kEQU:
      return unordered || a == b;
    case M::kLEU:
      return unordered || a <= b;
    case M::kGTU:
      return unordered || a > b;
    case M::kNEU:
      return a != b;
    case M::kGEU:
      return unordered || a >= b;
    case M::kNum:
      return !unordered;
    case M::kNan:
      return unordered;
    default:
      return how == M::kT;
  }
}

}  // namespace volta_sim
