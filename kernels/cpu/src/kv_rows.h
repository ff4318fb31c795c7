// Addresses of the K and V rows of one KV tile. Only this file knows about pages: to all other code, paged and
// contiguous caches with any page size and any strides look alike.
namespace fastattention {
namespace {

constexpr int kEvenRows = 16;

// The factors of an int8 cache's rows; nothing for other types.
template <class T>
struct FactorRows {
  void set(const fa_attention_problem&, const WorkItem&, int, int64_t, int64_t) {}
};
template <>
struct FactorRows<Int8> {
  const float* key_factor[kKvTile];
  const float* value_factor[kKvTile];

  // Called one tile ahead, and for neighbouring tokens in turn, so the factors' cache lines are prefetched here.
  void set(const fa_attention_problem& problem, const WorkItem& item, int i, int64_t block, int64_t token) {
    key_factor[i] = problem.key_factors + block * problem.key_factor_block_stride +
                    token * problem.key_factor_token_stride + item.kv_head * problem.key_factor_head_stride;
    value_factor[i] = problem.value_factors + block * problem.value_factor_block_stride +
                      token * problem.value_factor_token_stride + item.kv_head * problem.value_factor_head_stride;
    if (i % kFactorsPerLine == 0 || token == 0) {
      __builtin_prefetch(key_factor[i], 0, 2);
      __builtin_prefetch(value_factor[i], 0, 2);
    }
  }

 private:
  static constexpr int kFactorsPerLine = 64 / sizeof(float);
};

template <class T>
struct KvRows : FactorRows<T> {
  const T* key[kKvTile];
  const T* value[kKvTile];
  // even[i]: the kEvenRows rows from kEvenRows * i on are key_stride and value_stride apart.
  bool even[kKvTile / kEvenRows];
  int64_t key_stride, value_stride;
  int count = 0;
};

template <class T>
void locate(const fa_attention_problem& problem, const WorkItem& item, int64_t first, int count, KvRows<T>& rows) {
  const T* key_base = static_cast<const T*>(problem.key) + item.kv_head * problem.key_head_stride;
  const T* value_base = static_cast<const T*>(problem.value) + item.kv_head * problem.value_head_stride;
  const int32_t* pages = nullptr;
  int64_t page_size = INT64_MAX;  // a contiguous sequence is one endless page
  if (problem.block_table != nullptr) {
    pages = problem.block_table + item.seq * problem.block_table_stride;
    page_size = problem.page_size;
  } else {
    first += problem.kv_start_loc[item.seq];
  }
  int64_t page = first / page_size;
  int64_t token = first % page_size;
  rows.key_stride = problem.key_token_stride;
  rows.value_stride = problem.value_token_stride;
  for (bool& even : rows.even) even = false;
  for (int i = 0; i < count; ++page, token = 0) {
    const int64_t block = pages != nullptr ? pages[page] : 0;
    const T* key = key_base + block * problem.key_block_stride + token * problem.key_token_stride;
    const T* value = value_base + block * problem.value_block_stride + token * problem.value_token_stride;
    const int64_t left_in_page = page_size - token;
    const int end = left_in_page < count - i ? i + static_cast<int>(left_in_page) : count;
    for (int group = (i + kEvenRows - 1) / kEvenRows; (group + 1) * kEvenRows <= end; ++group) rows.even[group] = true;
    for (; i < end; ++i, ++token, key += problem.key_token_stride, value += problem.value_token_stride) {
      rows.key[i] = key;
      rows.value[i] = value;
      rows.set(problem, item, i, block, token);
    }
  }
  rows.count = count;
  // Scores are computed for whole groups of columns, which may extend past the tile. Those columns recompute the last
  // row, which is safe to read.
  for (int i = count; i < round_up(count, kColumnStep); ++i) rows.key[i] = rows.key[count - 1];
}

// Fetches one of `parts` parts of the tile's V from L2 into L1, in address order. Always inlined: to GCC, a function
// that only prefetches has no effect, and it drops the call.
template <class T>
inline __attribute__((always_inline)) void fetch_values(const KvRows<T>& rows, int head_size, int part, int parts) {
  const int bytes = head_size * static_cast<int>(sizeof(T));
  const int end = rows.count * (part + 1) / parts;
  for (int i = rows.count * part / parts; i < end; ++i) {
    const char* line = reinterpret_cast<const char*>(rows.value[i]);
    for (int b = 0; b < bytes; b += 64) __builtin_prefetch(line + b, 0, 3);
  }
}

// The factors of one tile's rows, read once for all panels. A key's factor multiplies its scores and a value's factor
// its weights, so that K and V themselves need no multiplication.
template <class T>
class RowFactors {
 public:
  explicit RowFactors(const KvRows<T>&) {}
  void multiply_scores(float*, int, int, int) const {}
  Vec weighted(Vec weights, int) const { return weights; }
};
template <>
class RowFactors<Int8> {
 public:
  explicit RowFactors(const KvRows<Int8>& rows) {
    for (int i = 0; i < rows.count; ++i) {
      key_[i] = plain(*rows.key_factor[i]);
      value_[i] = plain(*rows.value_factor[i]);
    }
    // Columns past the tile's tokens are masked, or not read.
    for (int i = rows.count; i < round_up(rows.count, kColumnStep); ++i) key_[i] = value_[i] = 0.0f;
  }
  void multiply_scores(float* scores, int rows, int begin, int end) const {
    for (int column = begin; column < end; column += kWidth) {
      const Vec factor = load(key_ + column);
      for (int r = 0; r < rows; ++r) {
        store(scores + r * kKvTile + column, mul(load(scores + r * kKvTile + column), factor));
      }
    }
  }
  // What multiplies the values: weights of which the softmax has taken the sums, before they are rounded. Outside of
  // what the panel sees, products may be NaN; these weights are replaced or not read.
  Vec weighted(Vec weights, int column) const { return mul(weights, load(value_ + column)); }

 private:
  // Replaces any NaN by the one that rounding to bf16 keeps; see odd_pair in panel_amx_direct.h.
  static float plain(float factor) { return factor == factor ? factor : __builtin_nanf(""); }
  alignas(64) float key_[kKvTile];
  alignas(64) float value_[kKvTile];
};

// Prefetches the next tile's rows while this tile is computed, a row or two at a time. A burst of requests would fill
// the core's queue and stall everything after it, and memory would be idle between bursts.
template <class T>
class Prefetch {
 public:
  Prefetch() = default;
  // steps: the number of advance() calls while this tile is computed.
  Prefetch(const KvRows<T>* rows, int head_size, int steps)
      : rows_(rows), bytes_(head_size * static_cast<int>(sizeof(T))), count_(rows != nullptr ? 2 * rows->count : 0) {
    rate_ = steps > 0 ? (static_cast<int64_t>(count_) << kFraction) / steps + 1 : 0;
  }
  inline void advance() {
    due_ += rate_;
    if (due_ >= at_) fetch_due();
  }
  // Call when the tile is done: prefetches the rows whose steps were skipped, for example in masked panels.
  void rest() {
    while (next_ < count_) fetch();
  }

 private:
  static constexpr int kFraction = 16;

  __attribute__((noinline)) void fetch_due() {
    while (next_ < due_ >> kFraction && next_ < count_) fetch();
    at_ = next_ < count_ ? static_cast<int64_t>(next_ + 1) << kFraction : INT64_MAX;
  }
  inline void fetch() {
    const T* const* rows = next_ & 1 ? rows_->value : rows_->key;
    const char* line = reinterpret_cast<const char*>(rows[next_ >> 1]);
    for (int b = 0; b < bytes_; b += 64) __builtin_prefetch(line + b, 0, 2);
    ++next_;
  }
  const KvRows<T>* rows_ = nullptr;
  int bytes_ = 0, count_ = 0, next_ = 0;  // rows of K and V alternately, as in a cache that stores both together
  int64_t rate_ = 0, due_ = 0, at_ = 0;   // in rows, fixed-point with kFraction bits
};

}  // namespace
}  // namespace fastattention
