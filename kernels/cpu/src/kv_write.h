// Stores new K and V rows in the paged cache, casts them where dtypes differ, and applies the scale of fp8 caches or
// the row's own factor of int8 caches.
namespace fastattention {
namespace {

// Where a row goes. factor: only of an int8 cache.
template <class To>
struct RowTarget {
  To* row;
  float* factor;
};

template <class T>
constexpr bool kIsFp8 = false;
template <>
constexpr bool kIsFp8<Float8E4M3> = true;
template <>
constexpr bool kIsFp8<Float8E5M2> = true;

// Returns how many numbers are beyond the largest of an fp8 cache.
template <class From, class To>
inline int64_t copy_row(const From* from, RowTarget<To> to, int head_size, float scale) {
  int64_t saturated = 0;
  // Divide like vLLM's CUDA kernels. Multiplication by the reciprocal would round some numbers to the next fp8 number.
  const Vec divisor = splat(scale);
  for_each_vector(head_size, [&](int d, auto part) {
    Vec x = part.read(from + d);
    if constexpr (kIsFp8<To>) {
      x = div(x, divisor);
      if (any_greater(abs(x), splat(Fp8Format<To>::kLargest))) {
        alignas(64) float numbers[kWidth];
        store(numbers, abs(x));
        for (const float number : numbers) saturated += number > Fp8Format<To>::kLargest;
      }
    }
    part.write(to.row + d, x);
  });
  return saturated;
}
// With equal dtypes, copy every bit, also of signalling NaNs.
template <class T>
inline int64_t copy_row(const T* from, RowTarget<T> to, int head_size, float) {
  __builtin_memcpy(to.row, from, sizeof(T) * head_size);
  return 0;
}
template <class From>
inline int64_t copy_row(const From* from, RowTarget<Int8> to, int head_size, float) {
  Vec largest = splat(0.0f), zero = splat(0.0f);
  for_each_vector(head_size, [&](int d, auto part) {
    const Vec x = part.read(from + d);
    largest = max(largest, abs(x));
    zero = fma(x, splat(0.0f), zero);  // becomes NaN if any number is infinity or NaN
  });
  const bool finite = reduce_add(zero) == 0.0f;
  const float factor = reduce_max(largest) / 127.0f;
  *to.factor = finite ? factor : __builtin_nanf("");
  if (!finite || factor == 0.0f) {
    __builtin_memset(to.row, 0, head_size);
    return 0;
  }
  const Vec divisor = splat(factor);
  for_each_vector(head_size, [&](int d, auto part) { part.write(to.row + d, div(part.read(from + d), divisor)); });
  return 0;
}

template <class From, class To>
void write_rows(const fa_kv_write& write, int64_t token_begin, int64_t token_end, const From*, To*) {
  const From* key = static_cast<const From*>(write.key);
  const From* value = static_cast<const From*>(write.value);
  To* key_cache = static_cast<To*>(write.key_cache);
  To* value_cache = static_cast<To*>(write.value_cache);
  int64_t saturated = 0;
  for (int64_t t = token_begin; t < token_end; ++t) {
    const int64_t slot = write.slot_mapping[t];
    if (slot < 0) continue;
    const int64_t block = slot / write.page_size;
    const int64_t row = slot % write.page_size;
    for (int64_t head = 0; head < write.num_kv_heads; ++head) {
      const RowTarget<To> key_target = {key_cache + block * write.key_cache_block_stride +
                                            row * write.key_cache_token_stride + head * write.key_cache_head_stride,
                                        write.key_factors + block * write.key_factor_block_stride +
                                            row * write.key_factor_token_stride + head * write.key_factor_head_stride};
      const RowTarget<To> value_target = {
          value_cache + block * write.value_cache_block_stride + row * write.value_cache_token_stride +
              head * write.value_cache_head_stride,
          write.value_factors + block * write.value_factor_block_stride + row * write.value_factor_token_stride +
              head * write.value_factor_head_stride};
      saturated += copy_row(key + t * write.key_token_stride + head * write.key_head_stride, key_target,
                            write.head_size, write.key_scale);
      saturated += copy_row(value + t * write.value_token_stride + head * write.value_head_stride, value_target,
                            write.head_size, write.value_scale);
    }
  }
  if (saturated > 0 && write.saturated != nullptr) __atomic_fetch_add(write.saturated, saturated, __ATOMIC_RELAXED);
}

void write_kv(const fa_kv_write& write, int64_t token_begin, int64_t token_end) {
  with_dtype(write.dtype, [&](auto* from) {
    with_kv_dtype(write.kv_dtype, [&](auto* to) { write_rows(write, token_begin, token_end, from, to); });
  });
}

}  // namespace
}  // namespace fastattention
