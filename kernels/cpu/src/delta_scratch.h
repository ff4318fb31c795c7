// The scratch memory of one item of the gated delta rule.
namespace fastattention {
namespace {

inline int64_t delta_channels(const fa_gated_delta& problem) {
  return 2 * static_cast<int64_t>(problem.key_heads) * problem.key_size +
         static_cast<int64_t>(problem.value_heads) * problem.value_size;
}

// Tokens that are computed together with matrix products.
constexpr int kChunk = 32;
static_assert(kChunk % kStrip == 0 && kChunk % kWidth == 0, "keys are transposed in whole strips");

struct DeltaScratch {
  float* rows;      // [2 * kChunk][key_stride]: the chunk's n keys and then its n queries, normalised
  float* keys;      // the keys transposed, in strips of [key_size][kStrip] tokens
  float* products;  // [2 * kChunk][kChunk]: each key, and each query, times each key
  float* weights;   // the same, times the decay between the two tokens
  float* values;    // [kChunk][value_stride] of one value head
  float* strip;     // [2 * kChunk][kStrip]: what the keys find in the state, and what the queries find
  float* states;    // [heads] in strips of [key_size][width of the strip]
  float* since;     // [kChunk]: log2 of the decay since the chunk began, upper and lower part
  float* since_low;
  float* decay;   // [kChunk]: 2^since
  float* remain;  // [kChunk]: the decay from a token to the chunk's end
  float* beta;    // [kChunk]
  int key_stride;
  int value_stride;
  size_t state_floats;
  size_t floats = 0;

  DeltaScratch(void* memory, const fa_gated_delta& problem, int num_heads) {
    // Rows that are read at the same time do not lie a power of two apart, or the L1 cache could not hold them.
    key_stride = round_up(problem.key_size, 16) + 16;
    value_stride = round_up(problem.value_size, kWidth);
    state_floats = static_cast<size_t>(problem.key_size) * value_stride;
    const auto take = [&](size_t count) {
      float* part = memory != nullptr ? static_cast<float*>(memory) + floats : nullptr;
      floats += (count + 15) / 16 * 16;
      return part;
    };
    rows = take(static_cast<size_t>(2 * kChunk) * key_stride);
    keys = take(static_cast<size_t>(round_up(problem.key_size, kWidth)) * kChunk);
    products = take(2 * kChunk * kChunk);
    weights = take(2 * kChunk * kChunk);
    values = take(static_cast<size_t>(kChunk) * value_stride);
    strip = take(2 * kChunk * kStrip);
    states = take(num_heads * state_floats);
    since = take(kChunk);
    since_low = take(kChunk);
    decay = take(kChunk);
    remain = take(kChunk);
    beta = take(kChunk);
  }
};

size_t delta_scratch_bytes(const fa_gated_delta& problem, int num_heads) {
  return DeltaScratch(nullptr, problem, num_heads).floats * sizeof(float);
}

}  // namespace
}  // namespace fastattention
