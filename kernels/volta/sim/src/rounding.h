// fp32 arithmetic with the rounding modes of instructions.
#ifndef VOLTA_SIM_ROUNDING_H
#define VOLTA_SIM_ROUNDING_H

#include "modifier.h"

namespace volta_sim {

// The rounding mode in the modifiers: RZ, RP, RM or RN (the default).
Modifier rounding_of(const Modifiers& modifiers);

// a * b + c, rounded once.
float fused_multiply_add(float a, float b, float c, Modifier rounding);

// Rounds an integer of up to 64 bits, which long double holds exactly.
float round_to_float(long double exact, Modifier rounding);

// Replaces subnormals by zero with the same sign.
float flush(float value);

}  // namespace volta_sim

#endif
