#include "half.h"

#include <cmath>
#include <vector>

namespace volta_sim {
namespace {

constexpr int kFractionBits = 10, kSmallestExponent = -14, kLargestExponent = 15;

float decode(uint32_t bits) {
  const uint32_t sign = (bits >> 15) << 31, exponent = bits >> 10 & 31, fraction = bits & 0x3ff;
  if (exponent == 31) return as_float(sign | 0x7f800000u | fraction << 13);
  const int scale = (exponent == 0 ? 1 : static_cast<int>(exponent)) - 15 - kFractionBits;
  const float magnitude = std::ldexp(static_cast<float>(fraction | (exponent == 0 ? 0 : 0x400u)), scale);
  return (sign != 0) ? -magnitude : magnitude;
}

}  // namespace

float half_to_float(uint16_t bits) {
  static const auto* table = [] {
    auto* values = new std::vector<float>(65536);
    for (uint32_t i = 0; i < 65536; ++i) (*values)[i] = decode(i);
    return values;
  }();
  return (*table)[bits];
}

uint16_t double_to_half(double value) {
  if (std::isnan(value)) return kNanHalf;
  const uint16_t sign = std::signbit(value) ? 0x8000 : 0;
  const double magnitude = std::fabs(value);
  if (std::isinf(value)) return sign | 0x7c00;
  if (magnitude == 0) return sign;
  int exponent = 0;
  std::frexp(magnitude, &exponent);
  exponent = exponent - 1 < kSmallestExponent ? kSmallestExponent : exponent - 1;
  if (exponent > kLargestExponent) return sign | 0x7c00;
  // In units of the last place. nearbyint rounds ties to even, and 2048 carries into the exponent.
  const double units = std::nearbyint(std::ldexp(magnitude, kFractionBits - exponent));
  const uint32_t steps = static_cast<uint32_t>(units) + (static_cast<uint32_t>(exponent - kSmallestExponent) << 10);
  return static_cast<uint16_t>(sign | (steps >= 0x7c00 ? 0x7c00 : steps));
}

}  // namespace volta_sim
