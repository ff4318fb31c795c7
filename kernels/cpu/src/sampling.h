// The token that a row of logits gives with noise of its own: softmax sampling without a softmax. If every e[i] is
// exponentially distributed, the largest logits[i] - log(e[i]) belongs to token i with probability softmax(logits)[i].
//
// The noise of a token is a function of the row's seed and the token alone, so neither threads nor other rows change
// it. The loops are plain C++ over lanes, which the compiler makes vectors of, because the vectors of vec_<isa>.h have
// no integers.
namespace fastattention {
namespace {

constexpr int kLanes = 32;

inline float float_of(uint32_t bits) {
  float value;
  __builtin_memcpy(&value, &bits, sizeof value);
  return value;
}
inline uint32_t bits_of(float value) {
  uint32_t bits;
  __builtin_memcpy(&bits, &value, sizeof bits);
  return bits;
}
// chosen ? a : b. The compiler would make a branch of that, and no vectors.
inline uint32_t select(bool chosen, uint32_t a, uint32_t b) {
  const uint32_t mask = -static_cast<uint32_t>(chosen);
  return (a & mask) | (b & ~mask);
}
inline float select(bool chosen, float a, float b) { return float_of(select(chosen, bits_of(a), bits_of(b))); }

// log(x) for normal x > 0: x = m * 2^k with m in [sqrt(1/2), sqrt(2)), and log(m) by
// the polynomial of Cephes' logf (netlib.org/cephes).
inline float log_of_normal(float x) {
  const uint32_t shifted = bits_of(x) - 0x3f3504f3u;  // sqrt(1/2)
  const int32_t k = static_cast<int32_t>(shifted) >> 23;
  const float m = float_of((shifted & 0x007fffffu) + 0x3f3504f3u) - 1.0f;
  float y = 7.0376836292e-2f;
  y = y * m - 1.1514610310e-1f;
  y = y * m + 1.1676998740e-1f;
  y = y * m - 1.2420140846e-1f;
  y = y * m + 1.4249322787e-1f;
  y = y * m - 1.6668057665e-1f;
  y = y * m + 2.0000714765e-1f;
  y = y * m - 2.4999993993e-1f;
  y = y * m + 3.3333331174e-1f;
  const float z = m * m;
  const float scale = static_cast<float>(k);
  return m + (y * m * z - 0.5f * z + scale * -2.12194440e-4f) + scale * 0.693359375f;
}

// Exponentially distributed, from 31 random bits: -log(1 - v) for v = (bits + 1/2) / 2^31. What wins is a small value,
// so these have full precision.
inline float exponential(uint32_t random) {
  const float v = (static_cast<float>(static_cast<int32_t>(random >> 1)) + 0.5f) * 0x1p-31f;
  float y = 1.0f / 6;  // the series for small v
  y = y * v + 1.0f / 5;
  y = y * v + 1.0f / 4;
  y = y * v + 1.0f / 3;
  y = y * v + 1.0f / 2;
  const float small = y * v * v + v;
  const float rest = 1.0f - v;
  const float large = -log_of_normal(select(rest > 0x1p-24f, rest, 0x1p-24f));
  return select(v < 0.0625f, small, large);
}

struct NoiseKey {
  uint32_t first, second;
};

// SplitMix64 of the seed (Steele, Lea and Flood, 2014), so that neighbouring seeds have unrelated keys.
inline NoiseKey noise_key(uint64_t seed) {
  uint64_t z = seed + 0x9e3779b97f4a7c15u;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
  z ^= z >> 31;
  return {static_cast<uint32_t>(z), static_cast<uint32_t>(z >> 32)};
}

// 32 random bits of a token: MurmurHash3's mixing, twice, with half of the key before each.
inline uint32_t noise_of(NoiseKey key, uint32_t token) {
  uint32_t h = token * 0x9e3779b1u + key.first;
  h ^= h >> 16;
  h *= 0x85ebca6bu;
  h ^= h >> 13;
  h *= 0xc2b2ae35u;
  h ^= h >> 16;
  h += key.second;
  h ^= h >> 16;
  h *= 0x85ebca6bu;
  h ^= h >> 13;
  h *= 0xc2b2ae35u;
  return h ^ (h >> 16);
}

inline float score(float logit, NoiseKey key, int token) {
  return logit - log_of_normal(exponential(noise_of(key, static_cast<uint32_t>(token))));
}

// The best of the tokens [begin, end) of a row. NaN is better than any number, and the first of equal ones wins.
Candidate sample(const fa_sampling& problem, int64_t row, int begin, int end) {
  const float* logits = problem.logits + row * problem.row_stride;
  const NoiseKey key = noise_key(static_cast<uint64_t>(problem.seeds[row]));
  float best[kLanes];
  uint32_t at[kLanes];
  int32_t damaged = 0;
  for (int l = 0; l < kLanes; ++l) best[l] = -kInfinity, at[l] = static_cast<uint32_t>(begin);
  int i = begin;
  for (; i + kLanes <= end; i += kLanes) {
    for (int l = 0; l < kLanes; ++l) {
      const float value = score(logits[i + l], key, i + l);
      damaged |= value != value;
      const bool better = value > best[l];
      at[l] = select(better, static_cast<uint32_t>(i + l), at[l]);
      best[l] = select(better, value, best[l]);
    }
  }
  Candidate found{-kInfinity, begin};
  for (int l = 0; l < kLanes; ++l) {
    const int32_t token = static_cast<int32_t>(at[l]);
    if (best[l] > found.score || (best[l] == found.score && token < found.token)) found = {best[l], token};
  }
  for (; i < end; ++i) {
    const float value = score(logits[i], key, i);
    damaged |= value != value;
    if (value > found.score) found = {value, i};
  }
  if (damaged == 0) return found;
  int first = begin;
  while (logits[first] == logits[first]) ++first;
  return {logits[first], first};
}

}  // namespace
}  // namespace fastattention
