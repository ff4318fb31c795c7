// Rotary position embedding: every head's first and second half of rotary dimensions are the real and imaginary parts
// of numbers that are multiplied with cos + i * sin of the token's position, in fp32.
namespace fastattention {
namespace {

template <class T, class Cache>
inline void rotate_head(T* first, const Cache* cos, const Cache* sin, int half, float sign) {
  T* second = first + half;
  const Vec direction = splat(sign);
  int d = 0;
  const auto rotated = [&](Vec a, Vec b, Vec c, Vec s, auto write) {
    s = mul(s, direction);
    write(first + d, sub(mul(a, c), mul(b, s)));
    write(second + d, add(mul(b, c), mul(a, s)));
  };
  for (; d + kWidth <= half; d += kWidth) {
    rotated(load(first + d), load(second + d), load(cos + d), load(sin + d), [](T* p, Vec value) { store(p, value); });
  }
  if (d < half) {
    const int rest = half - d;
    rotated(load_first(first + d, rest), load_first(second + d, rest), load_first(cos + d, rest),
            load_first(sin + d, rest), [&](T* p, Vec value) { store_first(p, value, rest); });
  }
}

void rotate(const fa_rotary& problem, int64_t token_begin, int64_t token_end) {
  const int half = problem.rotary_size / 2;
  with_dtype(problem.dtype, [&](auto* type) {
    with_dtype(problem.cache_dtype, [&](auto* cache_type) {
      for (int64_t t = token_begin; t < token_end; ++t) {
        const auto* cos = static_cast<decltype(cache_type)>(const_cast<void*>(problem.cos_sin)) +
                          problem.positions[t] * problem.cos_sin_stride;
        const auto turn = [&](void* states, int heads, int64_t stride) {
          auto* head = static_cast<decltype(type)>(states) + t * stride + problem.first_dimension;
          for (int h = 0; h < heads; ++h, head += problem.head_size) {
            rotate_head(head, cos, cos + half, half, problem.inverse != 0 ? -1.0f : 1.0f);
          }
        };
        turn(problem.query, problem.num_heads, problem.query_stride);
        if (problem.key != nullptr) turn(problem.key, problem.num_kv_heads, problem.key_stride);
      }
    });
  });
}

}  // namespace
}  // namespace fastattention
