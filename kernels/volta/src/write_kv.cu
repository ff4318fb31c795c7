// Writes new keys and values to their pages, with one thread block per token.
#include "cache.cuh"

namespace fastattention {

extern "C" __global__ void fa_volta_write_kv(const WriteKv w) {
  const long long token = blockIdx.x, slot = w.slot_mapping[token];
  if (slot < 0) return;
  const long long block = slot / w.page_size, row = slot - block * w.page_size;
  const int chunks = w.head_size / 8;
  for (int i = threadIdx.x; i < w.num_kv_heads * chunks; i += blockDim.x) {
    const int head = i / chunks, chunk = i - head * chunks;
    const long long to = block * w.block_stride + row * w.page_token_stride + head * w.page_head_stride + chunk * 8;
    const auto copy = [&](const void* source, long long token_stride, long long head_stride, void* target,
                          float scale) {
      const Half* const from = static_cast<const Half*>(source) + token * token_stride + head * head_stride;
      *reinterpret_cast<Eight*>(static_cast<Stored*>(target) + to) =
          to_stored(reinterpret_cast<const uint4*>(from)[chunk], scale);
    };
    copy(w.key, w.key_token_stride, w.key_head_stride, w.key_cache, w.key_scale);
    copy(w.value, w.value_token_stride, w.value_head_stride, w.value_cache, w.value_scale);
  }
}

}  // namespace fastattention
