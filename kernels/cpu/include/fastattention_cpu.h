/* C interface of the fastattention CPU kernels.
 *
 * It uses neither torch nor Python nor C++ types, so one build of the library works with every version of torch and
 * Python. A tensor is a pointer plus strides. Strides count elements, and the last dimension (head_size) is always
 * contiguous. All functions are thread-safe. Calls that compute take turns on the one thread pool.
 */
#ifndef FASTATTENTION_CPU_H
#define FASTATTENTION_CPU_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Incremented with every change to a struct or signature below. The Python wrapper accepts exactly one version. */
#define FA_CPU_ABI_VERSION 9

typedef enum fa_dtype {
  FA_F32 = 0,
  FA_F16 = 1,
  FA_BF16 = 2,
  /* The OCP 8-bit formats, for key and value only. torch calls them float8_e4m3fn and float8_e5m2. */
  FA_F8_E4M3 = 3,
  FA_F8_E5M2 = 4,
  /* For key and value only, with one factor for each row: see key_factors. */
  FA_I8 = 5,
} fa_dtype;

typedef enum fa_status {
  FA_OK = 0,
  FA_BAD_ARGUMENT = 1, /* fa_cpu_last_error() names it */
  FA_OUT_OF_MEMORY = 2,
} fa_status;

/* One batch of attention problems: the queries of several sequences over paged or contiguous K and V.
 *
 * Query row t of sequence s is row query_start_loc[s] + t of query. The sequence has q_len query rows and
 * kv_len = seq_lens[s] keys. Row t is at KV position p = kv_len - q_len + t (bottom-right aligned, as in
 * flash_attn 2.1+). It sees KV position j if and only if
 *     (!causal || j <= p) && (window_left < 0 || j >= p - window_left) && (window_right < 0 || j <= p + window_right)
 * A row that sees no position gets out = 0 and lse = -inf.
 *
 * With sinks, each query head has one additional key with score sinks[head] and value zero. Every row sees it:
 *     out = sum_j(e^(s_j - m) v_j) / (sum_j(e^(s_j - m)) + e^(sinks[head] - m)), where m is the maximum of all scores.
 * lse includes the sink. A row that sees no other key gets out = 0 and lse = sinks[head].
 *
 * KV position j of sequence s is read at
 *     paged      : block = block_table[s * block_table_stride + j / page_size], token = j % page_size
 *     contiguous : block_table == NULL; block = 0, token = kv_start_loc[s] + j
 * The stored number times key_scale or value_scale is the key or the value, because fp8 caches hold numbers divided by
 * the scale. int8 caches have a factor for each row (token and KV head) instead, by which its numbers are multiplied.
 * Only positions that some row sees are read. Unused pages, the unused rows of the last page and pages that
 * left the window may hold anything, including NaN. The page numbers of positions that are read must be in
 * [0, num_blocks).
 */
typedef struct fa_attention_problem {
  int32_t num_seqs;
  int32_t num_heads; /* query heads, a multiple of num_kv_heads */
  int32_t num_kv_heads;
  int32_t head_size;
  int32_t page_size; /* tokens per block; ignored when block_table is NULL */
  int32_t dtype;     /* fa_dtype of query and out; not 8 bits wide */
  int32_t kv_dtype;  /* fa_dtype of key and value */
  int32_t causal;
  int32_t window_left;  /* -1: unlimited */
  int32_t window_right; /* -1: unlimited */
  float scale;          /* multiplies q.k */
  float softcap;        /* > 0: s = softcap * tanh(s / softcap) after scaling; 0: off */
  float key_scale;      /* positive and finite; 1 unless kv_dtype is fp8 */
  float value_scale;    /* like key_scale */

  const int32_t* query_start_loc; /* [num_seqs + 1] */
  const int32_t* seq_lens;        /* [num_seqs] */
  const int32_t* block_table;     /* [num_seqs, >= ceil(max kv_len / page_size)] or NULL */
  const int32_t* kv_start_loc;    /* [num_seqs], only when block_table is NULL */
  const float* alibi_slopes;      /* NULL, or [num_seqs or 1, num_heads]: adds -slope * |p - j| to the score */
  const float* sinks;             /* NULL, or [num_heads]; scale, softcap, mask and slopes do not apply */
  int64_t num_tokens;             /* query rows; query_start_loc must not exceed it */
  int64_t num_blocks;             /* paged: pages in the cache; contiguous: rows of key and value */
  int64_t block_table_width;      /* entries in a row of block_table */
  int64_t block_table_stride;
  int64_t alibi_seq_stride; /* 0 when all sequences share the slopes */

  const void* query;          /* [num_tokens, num_heads, head_size] */
  const void* key;            /* [num_blocks, page_size, num_kv_heads, head_size] */
  const void* value;          /* like key */
  const float* key_factors;   /* NULL, or with int8 keys: [num_blocks, page_size, num_kv_heads] */
  const float* value_factors; /* like key_factors */
  void* out;                  /* [num_tokens, num_heads, head_size]; rows beyond the last query row are not written */
  float* lse;                 /* NULL, or [num_tokens, num_heads]: natural logarithm of the softmax denominator */

  int64_t query_token_stride, query_head_stride;
  int64_t key_block_stride, key_token_stride, key_head_stride;
  int64_t value_block_stride, value_token_stride, value_head_stride;
  int64_t key_factor_block_stride, key_factor_token_stride, key_factor_head_stride;
  int64_t value_factor_block_stride, value_factor_token_stride, value_factor_head_stride;
  int64_t out_token_stride, out_head_stride;
  int64_t lse_token_stride, lse_head_stride;
} fa_attention_problem;

/* Stores new K and V rows in the paged cache (vLLM's reshape_and_cache) and casts them where dtypes differ.
 * Casts round to nearest, ties to even. fp8 caches get the number divided by its scale. Numbers beyond the largest
 * finite fp8 number, including infinity, become that number, as in vLLM's CUDA kernels. NaN stays NaN.
 * int8 caches get the number divided by its row's factor, which is the row's largest magnitude / 127. A row that
 * contains infinity or NaN is stored as zeros with the factor NaN.
 * Token t goes to row slot_mapping[t] % page_size of block slot_mapping[t] / page_size. A token with a negative slot is
 * skipped. */
typedef struct fa_kv_write {
  int64_t num_tokens;
  int64_t num_blocks; /* pages in the cache; slots beyond them are refused */
  int32_t num_kv_heads;
  int32_t head_size;
  int32_t page_size;
  int32_t dtype;               /* fa_dtype of key and value; not 8 bits wide */
  int32_t kv_dtype;            /* fa_dtype of the cache */
  float key_scale;             /* positive and finite; 1 unless kv_dtype is fp8 */
  float value_scale;           /* like key_scale */
  const int64_t* slot_mapping; /* [num_tokens] */
  const void* key;             /* [num_tokens, num_kv_heads, head_size] */
  const void* value;
  void* key_cache; /* [num_blocks, page_size, num_kv_heads, head_size] */
  void* value_cache;
  float* key_factors; /* NULL, or with an int8 cache: [num_blocks, page_size, num_kv_heads] */
  float* value_factors;
  int64_t* saturated; /* NULL, or a count to which the numbers that were beyond the largest fp8 number are added */
  int64_t key_token_stride, key_head_stride;
  int64_t value_token_stride, value_head_stride;
  int64_t key_cache_block_stride, key_cache_token_stride, key_cache_head_stride;
  int64_t value_cache_block_stride, value_cache_token_stride, value_cache_head_stride;
  int64_t key_factor_block_stride, key_factor_token_stride, key_factor_head_stride;
  int64_t value_factor_block_stride, value_factor_token_stride, value_factor_head_stride;
} fa_kv_write;

/* What a Gated DeltaNet layer computes between its projections, for several requests at once (arXiv 2412.06464).
 *
 * Request r has the tokens [query_start_loc[r], query_start_loc[r + 1]). With the convolution's last width - 1 inputs
 * and the state matrix S [key_size, value_size] of each value head in slot slots[r], every token does y = act(bias +
 * sum_j weight[j] * input[j])      the causal convolution of each channel; input[width - 1] is x q, k, v = y key_heads
 * queries, key_heads keys, value_heads values q = q / |q| / sqrt(key_size);  k = k / |k|      |q|^2 has 1e-6 added g =
 * -e^a_log * softplus(a + dt_bias);  beta = sigmoid(b) S = e^g S;  S = S + k (beta (v - S^T k))^T;  out = S^T q Value
 * head h uses key head h / (value_heads / key_heads). Where begun[r] is 0, the slot's old content counts as zero. The
 * arithmetic is fp32. The slots of a call must differ.
 *
 * Speculation: a request with verified[r] > 0 computes draft tokens behind a verified one, some of which may be
 * rejected, so it keeps a state for each token. verified[r] counts the tokens of its last such step that were
 * accepted. Its states begin with slot state_slots[r][verified[r] - 1], its inputs with row verified[r] - 1 of slot
 * slots[r]. The state after token t goes to slot state_slots[r][t], and the inputs, without the oldest one, to the
 * first rows of slot slots[r]. Other requests begin with the first row, and keep their last width - 1 inputs. */
typedef struct fa_gated_delta {
  int32_t num_requests;
  int32_t key_heads;
  int32_t value_heads; /* a multiple of key_heads */
  int32_t key_size;    /* like value_size a multiple of 8 up to 256 */
  int32_t value_size;
  int32_t width;        /* of the convolution: 2, 3 or 4 */
  int32_t dtype;        /* fa_dtype of x, a, b and out; not fp8 */
  int32_t inputs_dtype; /* fa_dtype of inputs; not fp8 */
  int32_t states_dtype; /* fa_dtype of states; not fp8 */
  int32_t silu;         /* the convolution's activation: 1 silu, 0 none */

  const int32_t* query_start_loc; /* [num_requests + 1] */
  const int32_t* slots;           /* [num_requests] */
  const uint8_t* begun;           /* [num_requests] */
  int64_t num_tokens;             /* rows of x; query_start_loc must not exceed it */
  int64_t num_slots;
  const int32_t* verified;    /* [num_requests], 0 where a request has no draft tokens; or NULL */
  const int32_t* state_slots; /* [num_requests, states_per_request]; read where verified is not 0 */
  int32_t states_per_request;
  int32_t inputs_per_slot; /* at least width - 1 */

  const float* weight;  /* [width, channels]; channels = 2 * key_heads * key_size + value_heads * value_size */
  const float* bias;    /* [channels] or NULL */
  const float* a_log;   /* [value_heads] */
  const float* dt_bias; /* [value_heads] */

  const void* x; /* [num_tokens, channels]: queries, keys, values */
  const void* a; /* [num_tokens, value_heads] */
  const void* b; /* like a */
  void* out;     /* [num_tokens, value_heads, value_size], contiguous in a token */
  void* inputs;  /* [num_slots, inputs_per_slot, channels], oldest first */
  void* states;  /* [num_slots, value_heads, key_size, value_size], contiguous in a slot */

  int64_t x_token_stride, a_token_stride, b_token_stride, out_token_stride;
  int64_t inputs_slot_stride, inputs_token_stride, inputs_channel_stride;
  int64_t states_slot_stride;
} fa_gated_delta;

/* out = x / sqrt(mean(x^2) + epsilon) * weight * act(gate): the norm after these layers, for each row. */
typedef struct fa_gated_norm {
  int64_t num_rows;
  int32_t size;        /* of a row: a multiple of 8 up to 256 */
  int32_t dtype;       /* fa_dtype of x, gate and out; not fp8 */
  int32_t sigmoid;     /* act: 0 silu, 1 sigmoid */
  float epsilon;       /* not negative */
  const float* weight; /* [size] */
  const void* x;       /* [num_rows, size] */
  const void* gate;
  void* out;
  int64_t x_row_stride, gate_row_stride, out_row_stride;
} fa_gated_norm;

/* Draws tokens[row] from softmax(logits[row]). The token depends on the row's logits and seed alone. Of a row with NaN
 * it is the first NaN's, and of a row of -infinity 0. */
typedef struct fa_sampling {
  int64_t num_rows;
  int32_t vocabulary;   /* at least 1 */
  const float* logits;  /* [num_rows, vocabulary] */
  int64_t row_stride;   /* of logits */
  const int64_t* seeds; /* [num_rows] */
  int64_t* tokens;      /* [num_rows] */
} fa_sampling;

/* y = x * weight^T + bias, with fp32 products and sums. Results for one token do not depend on the others, except
 * whether they are few or many: the order of the sums differs. */
typedef struct fa_linear {
  int64_t num_tokens;
  int32_t in_features, out_features;         /* at least 1 */
  int32_t dtype;                             /* fa_dtype of all tensors; not fp8 */
  const void* x;                             /* [num_tokens, in_features] */
  const void* weight;                        /* [out_features, in_features] */
  const void* bias;                          /* [out_features], or NULL */
  void* y;                                   /* [num_tokens, out_features] */
  int64_t x_stride, weight_stride, y_stride; /* elements from one row to the next */
} fa_linear;

/* Rotary position embedding (Su et al., 2021) of neighbouring halves, in place and in fp32: of rotary_size dimensions
 * of a head, the first half x and the second half y become x * cos - y * sin and y * cos + x * sin. */
typedef struct fa_rotary {
  int64_t num_tokens;
  int32_t num_heads, num_kv_heads;
  int32_t head_size;
  int32_t rotary_size;        /* even */
  int32_t first_dimension;    /* of the rotary ones within a head */
  int32_t inverse;            /* 1: sin is negated */
  int32_t dtype, cache_dtype; /* fa_dtype of query and key, and of cos_sin; not fp8 */
  int64_t num_positions;
  const int64_t* positions;                         /* [num_tokens] in [0, num_positions) */
  const void* cos_sin;                              /* [num_positions, rotary_size]: cos, then sin */
  void* query;                                      /* [num_tokens, num_heads, head_size] */
  void* key;                                        /* [num_tokens, num_kv_heads, head_size], or NULL */
  int64_t cos_sin_stride, query_stride, key_stride; /* elements from one position or token to the next */
} fa_rotary;

int32_t fa_cpu_abi_version(void);

/* Describes the calling thread's last failed call in one sentence that names the value. Never NULL. */
const char* fa_cpu_last_error(void);

/* Instruction sets that are compiled in and usable on this machine, best first: "avx512,avx2,scalar". */
const char* fa_cpu_usable_isas(void);
/* The instruction set in use. The library chooses the best one when it is loaded. fa_cpu_set_isa selects another, or
 * returns FA_BAD_ARGUMENT if that one is not usable. */
const char* fa_cpu_isa(void);
int32_t fa_cpu_set_isa(const char* name);

/* Threads in the pool, including the calling thread. At load: the number of CPUs in the process's affinity mask. */
int32_t fa_cpu_num_threads(void);
/* Resizes the pool. The calling thread is thread 0 and keeps its affinity. The pool's own threads i = 1, 2, ... are
 * each pinned to cpus[i % num_cpus], which leaves cpus[0] to the caller. With NULL they inherit the affinity of the
 * thread that starts them. If a CPU is offline or outside the process's cpuset, the call returns FA_BAD_ARGUMENT and
 * the pool stays as it was. */
int32_t fa_cpu_set_num_threads(int32_t num_threads, const int32_t* cpus, int32_t num_cpus);

/* How long an idle thread of the pool polls before it sleeps. At load: 50 microseconds. Waking a thread takes tens of
 * microseconds, on a virtual machine hundreds. Longer polling is better where the pool has the CPUs to itself and is
 * called every millisecond. */
int32_t fa_cpu_set_spin(int32_t microseconds);

/* Measures the time from now until every thread of the pool runs, which depends on how many of them sleep.
 * *nanoseconds becomes -1 if that takes more than a second (more threads than CPUs on a busy machine), and 0 for a pool
 * of one thread. */
int32_t fa_cpu_measure_wake(int64_t* nanoseconds);

int32_t fa_cpu_attention(const fa_attention_problem* problem);
/* The same in two calls from one thread. Between them the pool's own threads compute, and the calling thread may do
 * other work. The second call joins the computation and returns when it is complete. Everything that the problem points
 * to must stay valid until then; the struct itself may go. In between, calls from other threads wait. Calls from this
 * thread are refused, except fa_cpu_write_kv with few tokens. A start that failed needs no finish. */
int32_t fa_cpu_attention_start(const fa_attention_problem* problem);
int32_t fa_cpu_attention_finish(void);
int32_t fa_cpu_write_kv(const fa_kv_write* write);
int32_t fa_cpu_gated_delta(const fa_gated_delta* problem);
int32_t fa_cpu_gated_norm(const fa_gated_norm* problem);
int32_t fa_cpu_sample(const fa_sampling* problem);
int32_t fa_cpu_linear(const fa_linear* problem);
int32_t fa_cpu_rotate(const fa_rotary* problem);

/* Calls of CUDA graphs. A graph's node cannot call the host. It writes the number of a call to the doorbell and waits
 * until the answer word has that number; meanwhile a thread of this library runs fa_cpu_write_kv and fa_cpu_attention
 * with what was given to fa_cpu_graph_add. The tensors' contents are read then, so they may change from step to step;
 * addresses, sizes and strides may not.
 *
 * The doorbell is a page of memory that the device must be able to write and read as the host does. For each call the
 * device sets the answer word, FA_CPU_ANSWER_BYTES from the beginning, to 0, then writes the number to the first word,
 * after everything that the call reads, and waits until the answer word is that number. It rings once at a time. If a
 * call fails, the process prints one sentence to stderr and exits with status 1, because the device waits in the middle
 * of a step. */
#define FA_CPU_DOORBELL_BYTES 4096
#define FA_CPU_ANSWER_BYTES 64
typedef struct fa_cpu_graph fa_cpu_graph;
typedef struct fa_cpu_graph_counters {
  int64_t calls;
  int64_t nanoseconds; /* between noticing a ring and answering it */
  int64_t kv_bytes;    /* bytes of keys and values that attention has read */
} fa_cpu_graph_counters;

/* Starts the thread, pinned to cpu, or with the caller's affinity if cpu is -1. fa_cpu_graph_close() ends it; a graph
 * that rings after that waits forever. The doorbell is never freed. */
int32_t fa_cpu_graph_open(int32_t cpu, fa_cpu_graph** graph, void** doorbell);
int32_t fa_cpu_graph_close(fa_cpu_graph* graph);
/* *number becomes the call's number. The structs are copied. Their index tensors are checked at every call. */
int32_t fa_cpu_graph_add(fa_cpu_graph* graph, const fa_kv_write* write, const fa_attention_problem* problem,
                         uint32_t* number);
/* Announces calls, so that the thread, which sleeps when it is not rung for a while, looks for them soon. */
int32_t fa_cpu_graph_wake(fa_cpu_graph* graph);
int32_t fa_cpu_graph_count(const fa_cpu_graph* graph, fa_cpu_graph_counters* counters);

/* The result of fa_cpu_place_memory() for a range of memory. */
typedef struct fa_cpu_placement {
  int64_t huge_bytes; /* bytes in huge pages now; -1: /proc does not show it */
  int32_t num_nodes;  /* NUMA nodes in the memory policy; 0: none was requested, or the policy could not be set */
  char reason[244];   /* why a request was not met in full, in sentences; empty if it was met */
} fa_cpu_placement;

/* Requests huge pages for every whole huge page (2 MiB) in the range, and the num_nodes given NUMA nodes: one node is
 * preferred, several are interleaved, and NULL leaves the policy unchanged. With discard, the range is zero afterwards
 * and has new pages, which the pool's threads touch first. Without it, contents stay, and pages move where the kernel
 * can move them. A request that cannot be met is not an error; *achieved reports it. */
int32_t fa_cpu_place_memory(void* address, int64_t bytes, const int32_t* nodes, int32_t num_nodes, int32_t discard,
                            fa_cpu_placement* achieved);

/* Measurements of what limits any attention kernel on this machine. Both run on the pool's threads.
 *
 * Reads every byte of num_pages pages once. prefetch_bytes: how far ahead a thread prefetches, 0 to leave that to the
 * hardware. streams: the number of places that a thread reads in turn, 1, 2 or 4. The sizes in bytes are multiples of
 * 8. *checksum becomes the exclusive or of all 64-bit words. */
int32_t fa_cpu_read_pages(const void* const* pages, const int64_t* bytes, int64_t num_pages, int32_t prefetch_bytes,
                          int32_t streams, uint64_t* checksum);
/* The kinds of arithmetic that this build can measure on this machine, separated by commas: "bf16_amx" and "bf16_dot"
 * (AVX-512) where available, and always "fp32_fma". The widest unit comes first, which may not be the fastest. */
const char* fa_cpu_peak_kinds(void);
/* Runs `iterations` rounds of one kind on registers alone, shared by the threads. *flops becomes the number of
 * operations; a multiply-add counts as 2. */
int32_t fa_cpu_peak(const char* kind, int64_t iterations, double* flops);

#ifdef __cplusplus
}
#endif
#endif
