// The RMS norm of rows, times a gate.
namespace fastattention {
namespace {

inline Vec sigmoid(Vec x) {
  // Below -87, e^-x overflows.
  const Vec power = exp2(mul(max(x, splat(-87.0f)), splat(-kLog2E)));
  return div(splat(1.0f), add(splat(1.0f), power));
}

void gated_norm(const fa_gated_norm& problem, int64_t row_begin, int64_t row_end) {
  with_dtype(problem.dtype, [&](auto* type) {
    using Pointer = decltype(type);
    for (int64_t row = row_begin; row < row_end; ++row) {
      const Pointer x = static_cast<Pointer>(const_cast<void*>(problem.x)) + row * problem.x_row_stride;
      const Pointer gate = static_cast<Pointer>(const_cast<void*>(problem.gate)) + row * problem.gate_row_stride;
      const Pointer out = static_cast<Pointer>(problem.out) + row * problem.out_row_stride;
      Vec squares = splat(0.0f);
      for_each_vector(problem.size, [&](int d, auto part) {
        const Vec value = part.read(x + d);
        squares = fma(value, value, squares);
      });
      const float mean = reduce_add(squares) / static_cast<float>(problem.size);
      const Vec factor = splat(1.0f / __builtin_sqrtf(mean + problem.epsilon));
      for_each_vector(problem.size, [&](int d, auto part) {
        const Vec normed = mul(mul(part.read(x + d), factor), part.read(problem.weight + d));
        const Vec value = part.read(gate + d);
        part.write(out + d, mul(normed, problem.sigmoid != 0 ? sigmoid(value) : silu(value)));
      });
    }
  });
}

}  // namespace
}  // namespace fastattention
