#include "rounding.h"

#include <cmath>
#include <limits>

namespace volta_sim {
namespace {

// Moves the nearest number to its neighbour if the rounding direction requires it. error: exact result - nearest.
float adjust(float nearest, double error, Modifier rounding) {
  if (error == 0 || std::isnan(error) || std::isinf(error)) return nearest;
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  const bool is_down = rounding == Modifier::kRM || (rounding == Modifier::kRZ && nearest > 0);
  const bool is_up = rounding == Modifier::kRP || (rounding == Modifier::kRZ && nearest < 0);
  if (is_down && error < 0) return std::nextafterf(nearest, -kInfinity);
  if (is_up && error > 0) return std::nextafterf(nearest, kInfinity);
  return nearest;
}

}  // namespace

Modifier rounding_of(const Modifiers& modifiers) {
  return modifiers.first_of({Modifier::kRZ, Modifier::kRP, Modifier::kRM}, Modifier::kRN);
}

float fused_multiply_add(float a, float b, float c, Modifier rounding) {
  const float nearest = std::fmaf(a, b, c);
  if (rounding == Modifier::kRN) return nearest;
  // The product is exact in double, and Knuth's two-sum gives the rounding error of the sum.
  const double product = static_cast<double>(a) * b, addend = c, sum = product + addend;
  const double part = sum - product, lost = (product - (sum - part)) + (addend - part);
  return adjust(nearest, (sum - nearest) + lost, rounding);
}

float round_to_float(long double exact, Modifier rounding) {
  const auto nearest = static_cast<float>(exact);
  return rounding == Modifier::kRN ? nearest : adjust(nearest, static_cast<double>(exact - nearest), rounding);
}

float flush(float value) { return std::fpclassify(value) == FP_SUBNORMAL ? std::copysign(0.0f, value) : value; }

}  // namespace volta_sim
