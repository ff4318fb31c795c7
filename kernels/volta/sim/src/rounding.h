// fp32 arithmetic with the roundings that instructions may ask for.
#ifndef VOLTA_SIM_ROUNDING_H
#define VOLTA_SIM_ROUNDING_H

#include "modifier.h"

namespace volta_sim {

// RN (the default), RZ, RP or RM among the modifiers.
Modifier rounding_of(const Modifiers& modifiers);

// a * b + c, rounded once.
float fused_multiply_add(float a, float b, float c, Modifier rounding);

// Of an integer of up to 64 bits, which long double holds exactly.
float round_to_float(long double exact, Modifier rounding);

// Subnormal numbers become zeros of their sign.
float flush(float value);

}  // namespace volta_sim

#endif
