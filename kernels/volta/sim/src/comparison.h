// Comparisons of floating-point numbers, ordered and unordered.
#ifndef VOLTA_SIM_COMPARISON_H
#define VOLTA_SIM_COMPARISON_H

#include "modifier.h"

namespace volta_sim {

#define VOLTA_SIM_COMPARISON_WORDS "LT EQ LE GT NE GE LTU EQU LEU GTU NEU GEU NUM NAN T F"

Modifier comparison_of(const Modifiers& modifiers);
bool compare_floats(Modifier how, float a, float b);

}  // namespace volta_sim

#endif
