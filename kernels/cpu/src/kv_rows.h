// Where the K and V rows of one KV tile lie. The only place that knows about pages: paged and contiguous caches, any
// page size and any strides look alike from here on.
namespace fastattention {
namespace {

template <class T>
struct KvRows {
  const T* key[kKvBlock];
  const T* value[kKvBlock];
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
  for (int i = 0; i < count; ++page, token = 0) {
    const int64_t block = pages != nullptr ? pages[page] : 0;
    const T* key = key_base + block * problem.key_block_stride + token * problem.key_token_stride;
    const T* value = value_base + block * problem.value_block_stride + token * problem.value_token_stride;
    const int64_t left_in_page = page_size - token;
    const int end = left_in_page < count - i ? i + static_cast<int>(left_in_page) : count;
    for (; i < end; ++i, key += problem.key_token_stride, value += problem.value_token_stride) {
      rows.key[i] = key;
      rows.value[i] = value;
    }
  }
  rows.count = count;
  // Columns of scores come in groups and reach past the end of the tile: let them recompute its last row, which is safe
  // to read.
  for (int i = count; i < round_up(count, kColumnStep); ++i) rows.key[i] = rows.key[count - 1];
}

// Fetches the next tile's rows into the cache while this tile is computed, spread evenly over the computation: memory
// is idle whenever no request is out, and a burst of requests waits for itself.
template <class T>
class Prefetch {
 public:
  // steps: calls of advance(1) that the computation of this tile will make.
  Prefetch(const KvRows<T>* rows, int head_size, int steps)
      : rows_(rows), bytes_(head_size * static_cast<int>(sizeof(T))), count_(rows != nullptr ? rows->count : 0) {
    rows_per_step_ = steps > 0 ? static_cast<float>(count_) / steps : 0.0f;
  }
  inline void advance(int steps) {
    if (next_ >= count_) return;
    due_ += rows_per_step_ * steps;
    const int end = due_ < count_ ? static_cast<int>(due_) : count_;
    for (; next_ < end; ++next_) {
      fetch(rows_->key[next_]);
      fetch(rows_->value[next_]);
    }
  }
  void rest() { due_ = static_cast<float>(count_), advance(0); }

 private:
  void fetch(const T* row) const {
    const char* line = reinterpret_cast<const char*>(row);
    for (int b = 0; b < bytes_; b += 64) __builtin_prefetch(line + b, 0, 2);
  }
  const KvRows<T>* rows_;
  int bytes_, count_, next_ = 0;
  float rows_per_step_, due_ = 0.0f;
};

}  // namespace
}  // namespace fastattention
