// Conversions between fp16, fp32 and their bits.
#ifndef VOLTA_SIM_HALF_H
#define VOLTA_SIM_HALF_H

#include <cstdint>
#include <cstring>

namespace volta_sim {

inline float as_float(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

inline uint32_t as_bits(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits;
}

// The only NaN that arithmetic produces, whatever NaN its operands are (PTX ISA, "Floating Point Instructions").
// Kernels that compute with bits see it. x86 keeps the bits of an operand, or sets the sign.
constexpr uint32_t kNan = 0x7fffffff;
constexpr uint16_t kNanHalf = 0x7fff;

// The bits of a result.
inline uint32_t result_bits(float value) { return value != value ? kNan : as_bits(value); }

// Exact; looks the number up in a table.
float half_to_float(uint16_t bits);

// Rounds to nearest, ties to even. The argument is double so that a fused multiply-add of fp16 numbers rounds once: in
// double, product and sum are exact whenever they are close to a tie.
uint16_t double_to_half(double value);

inline float low_half(uint32_t pair) { return half_to_float(static_cast<uint16_t>(pair)); }
inline float high_half(uint32_t pair) { return half_to_float(static_cast<uint16_t>(pair >> 16)); }
inline uint32_t pack_halves(double low, double high) {
  return double_to_half(low) | static_cast<uint32_t>(double_to_half(high)) << 16;
}

}  // namespace volta_sim

#endif
