// Stores new K and V rows in the paged cache, casts them where dtypes differ and applies the scale of fp8 caches.
namespace fastattention {
namespace {

template <class From, class To>
inline void copy_row(const From* from, To* to, int head_size, float scale) {
  // Divide like vLLM's CUDA kernels. Multiplication by the reciprocal would round some numbers to the next fp8 number.
  const Vec divisor = splat(scale);
  for_each_vector(head_size, [&](int d, auto part) {
    const Vec x = part.read(from + d);
    part.write(to + d, sizeof(To) == 1 ? div(x, divisor) : x);
  });
}
// With equal dtypes, copy every bit, also of signalling NaNs.
template <class T>
inline void copy_row(const T* from, T* to, int head_size, float) {
  __builtin_memcpy(to, from, sizeof(T) * head_size);
}

template <class From, class To>
void write_rows(const fa_kv_write& write, int64_t token_begin, int64_t token_end, const From*, To*) {
  const From* key = static_cast<const From*>(write.key);
  const From* value = static_cast<const From*>(write.value);
  To* key_cache = static_cast<To*>(write.key_cache);
  To* value_cache = static_cast<To*>(write.value_cache);
  for (int64_t t = token_begin; t < token_end; ++t) {
    const int64_t slot = write.slot_mapping[t];
    if (slot < 0) continue;
    const int64_t block = slot / write.page_size;
    const int64_t row = slot % write.page_size;
    for (int64_t head = 0; head < write.num_kv_heads; ++head) {
      copy_row(key + t * write.key_token_stride + head * write.key_head_stride,
               key_cache + block * write.key_cache_block_stride + row * write.key_cache_token_stride +
                   head * write.key_cache_head_stride,
               write.head_size, write.key_scale);
      copy_row(value + t * write.value_token_stride + head * write.value_head_stride,
               value_cache + block * write.value_cache_block_stride + row * write.value_cache_token_stride +
                   head * write.value_cache_head_stride,
               write.head_size, write.value_scale);
    }
  }
}

void write_kv(const fa_kv_write& write, int64_t token_begin, int64_t token_end) {
  with_dtype(write.dtype, [&](auto* from) {
    with_kv_dtype(write.kv_dtype, [&](auto* to) { write_rows(write, token_begin, token_end, from, to); });
  });
}

}  // namespace
}  // namespace fastattention
