/* fastattention CPU kernels: plain C ABI.
 *
 * No torch, no Python, no C++ types cross this line, so one build of the library works under every torch and
 * every Python. Tensors are pointers plus strides; strides count elements, and the last dimension (head_size) is
 * always contiguous. All functions are thread-safe; calls that compute are serialised on the one thread pool.
 */
#ifndef FASTATTENTION_CPU_H
#define FASTATTENTION_CPU_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Raised whenever a struct or a signature below changes; the Python wrapper refuses any other number. */
#define FA_CPU_ABI_VERSION 5

typedef enum fa_dtype {
  FA_F32 = 0,
  FA_F16 = 1,
  FA_BF16 = 2,
  /* For key and value only. The OCP 8-bit formats, in torch float8_e4m3fn and float8_e5m2. */
  FA_F8_E4M3 = 3,
  FA_F8_E5M2 = 4,
} fa_dtype;

typedef enum fa_status {
  FA_OK = 0,
  FA_BAD_ARGUMENT = 1, /* fa_cpu_last_error() says which */
  FA_OUT_OF_MEMORY = 2,
} fa_status;

/* One batch of attention problems: ragged queries over paged (or contiguous) K and V.
 *
 * Query row t of sequence s stands at token query_start_loc[s] + t. With q_len = its number of query rows and
 * kv_len = seq_lens[s], row t sits at KV position kv_len - q_len + t (bottom-right aligned, as in flash_attn 2.1+).
 * Row t sees KV position j iff
 *     (!causal || j <= p)  &&  (window_left < 0 || j >= p - window_left)  &&  (window_right < 0 || j <= p +
 * window_right) with p = kv_len - q_len + t. A row that sees nothing gets out = 0 and lse = -inf.
 *
 * With sinks, each query head has one more key of score sinks[head] and value zero, which every row sees:
 *     out = sum_j(e^(s_j - m) v_j) / (sum_j(e^(s_j - m)) + e^(sinks[head] - m)), m the highest of all scores,
 * and lse includes it. A row that sees nothing else gets out = 0 and lse = sinks[head].
 *
 * KV position j of sequence s is read at
 *     paged      : block = block_table[s * block_table_stride + j / page_size], token = j % page_size
 *     contiguous : block_table == NULL; block = 0, token = kv_start_loc[s] + j
 * What is read there times key_scale or value_scale is the key or the value: fp8 caches hold numbers divided by it.
 * Only positions that some row sees are read: unused pages, the rest of the last page and pages that slid out of the
 * window may hold anything, NaN included. Page numbers of positions that are read must lie in [0, num_blocks).
 */
typedef struct fa_attention_problem {
  int32_t num_seqs;
  int32_t num_heads; /* query heads, a multiple of num_kv_heads */
  int32_t num_kv_heads;
  int32_t head_size;
  int32_t page_size; /* tokens per block; ignored when block_table is NULL */
  int32_t dtype;     /* fa_dtype of query and out; not fp8 */
  int32_t kv_dtype;  /* fa_dtype of key and value */
  int32_t causal;
  int32_t window_left;  /* -1: unlimited */
  int32_t window_right; /* -1: unlimited */
  float scale;          /* multiplies q.k */
  float softcap;        /* > 0: s = softcap * tanh(s / softcap) after scaling; 0: off */
  float key_scale;      /* positive and finite; 1 unless kv_dtype is fp8 */
  float value_scale;    /* as key_scale */

  const int32_t* query_start_loc; /* [num_seqs + 1] */
  const int32_t* seq_lens;        /* [num_seqs] */
  const int32_t* block_table;     /* [num_seqs, >= ceil(max kv_len / page_size)] or NULL */
  const int32_t* kv_start_loc;    /* [num_seqs], only when block_table is NULL */
  const float* alibi_slopes;      /* NULL, or [num_seqs or 1, num_heads]: adds -slope * |p - j| to the score */
  const float* sinks;             /* NULL, or [num_heads]: taken as it is, without scale, softcap, mask or slope */
  int64_t num_tokens;             /* query rows; query_start_loc may not go beyond */
  int64_t num_blocks;             /* paged: pages in the cache; contiguous: rows of key and value */
  int64_t block_table_width;      /* pages a row of block_table can name */
  int64_t block_table_stride;
  int64_t alibi_seq_stride; /* 0 when all sequences share the slopes */

  const void* query; /* [num_tokens, num_heads, head_size] */
  const void* key;   /* [num_blocks, page_size, num_kv_heads, head_size] */
  const void* value; /* as key */
  void* out;         /* [num_tokens, num_heads, head_size]; only rows of real query tokens are written */
  float* lse;        /* NULL, or natural-log softmax denominators, [num_tokens, num_heads] through the strides below */

  int64_t query_token_stride, query_head_stride;
  int64_t key_block_stride, key_token_stride, key_head_stride;
  int64_t value_block_stride, value_token_stride, value_head_stride;
  int64_t out_token_stride, out_head_stride;
  int64_t lse_token_stride, lse_head_stride;
} fa_attention_problem;

/* Scatter of new K and V rows into the paged cache (vLLM's reshape_and_cache), with the cast where dtypes differ.
 * Casts round to the nearest, ties to even. fp8 caches get the number divided by its scale, and what lies beyond the
 * largest finite fp8 number, infinity included, becomes that number (as vLLM's own CUDA kernels do); NaN stays NaN.
 * Token t goes to block slot_mapping[t] / page_size, row slot_mapping[t] % page_size; a negative slot is skipped. */
typedef struct fa_kv_write {
  int64_t num_tokens;
  int64_t num_blocks; /* pages in the cache; a slot beyond them is refused */
  int32_t num_kv_heads;
  int32_t head_size;
  int32_t page_size;
  int32_t dtype;               /* of key and value; not fp8 */
  int32_t kv_dtype;            /* of the cache */
  float key_scale;             /* positive and finite; 1 unless kv_dtype is fp8 */
  float value_scale;           /* as key_scale */
  const int64_t* slot_mapping; /* [num_tokens] */
  const void* key;             /* [num_tokens, num_kv_heads, head_size] */
  const void* value;
  void* key_cache; /* [num_blocks, page_size, num_kv_heads, head_size] */
  void* value_cache;
  int64_t key_token_stride, key_head_stride;
  int64_t value_token_stride, value_head_stride;
  int64_t key_cache_block_stride, key_cache_token_stride, key_cache_head_stride;
  int64_t value_cache_block_stride, value_cache_token_stride, value_cache_head_stride;
} fa_kv_write;

int32_t fa_cpu_abi_version(void);

/* Text of the calling thread's last non-zero status: one sentence that names the value. Never NULL. */
const char* fa_cpu_last_error(void);

/* Instruction sets compiled in and usable on this machine, best first, comma-separated: "avx512,avx2,scalar". */
const char* fa_cpu_usable_isas(void);
/* The one in use. The best one is chosen at load; fa_cpu_set_isa forces another (FA_BAD_ARGUMENT if unusable). */
const char* fa_cpu_isa(void);
int32_t fa_cpu_set_isa(const char* name);

/* Size of the pool, the calling thread included. At load: the CPUs in this process's affinity mask. */
int32_t fa_cpu_num_threads(void);
/* Resizes it. The calling thread is the first; its affinity is its owner's business and stays as it is. The pool's own
 * threads, i = 1, 2, ..., are each pinned to cpus[i % num_cpus], so that cpus[0] is left to the caller; with NULL they
 * inherit the affinity of the thread that calls first. A CPU that is offline or outside the process's cpuset is refused
 * (FA_BAD_ARGUMENT) and the pool stays as it was. */
int32_t fa_cpu_set_num_threads(int32_t num_threads, const int32_t* cpus, int32_t num_cpus);

/* How long an idle thread of the pool polls before it sleeps, 50 at load. Waking it takes tens of microseconds, on a
 * virtual machine hundreds; where the CPUs are the pool's alone and calls come every millisecond, polling is better. */
int32_t fa_cpu_set_spin(int32_t microseconds);

/* How long it takes, from now, until every thread of the pool runs: the wake-up time of the pool as it is. *nanoseconds
 * is -1 if that took more than a second (more threads than CPUs on a busy machine), 0 for a pool of one. */
int32_t fa_cpu_measure_wake(int64_t* nanoseconds);

int32_t fa_cpu_attention(const fa_attention_problem* problem);
/* The same in two calls of one thread, which may do other things meanwhile: between them the pool's own threads
 * compute, the second call joins them and returns when all is done. Whatever the problem points to must live that long
 * (the struct itself need not). Meanwhile other threads' calls wait; this thread's are refused, but for a
 * fa_cpu_write_kv of few tokens. A start that failed needs no finish. */
int32_t fa_cpu_attention_start(const fa_attention_problem* problem);
int32_t fa_cpu_attention_finish(void);
int32_t fa_cpu_write_kv(const fa_kv_write* write);

/* What was achieved for a range of memory. */
typedef struct fa_cpu_placement {
  int64_t huge_bytes; /* that lie in huge pages now; -1: /proc does not say */
  int32_t num_nodes;  /* NUMA nodes that the policy names; 0: none was asked for, or none could be set */
  char reason[244];   /* sentences that say why something asked for was not had; empty if all was */
} fa_cpu_placement;

/* Asks for huge pages for the part of the range that is made of whole ones (2 MiB), and for the num_nodes NUMA nodes
 * named: several in turn (interleaved), one by preference, NULL leaves the policy as it is. With discard, the range is
 * zero afterwards and its pages are new, touched first by the pool's threads; without, contents stay and pages move
 * where the kernel can. What cannot be had is no error: *achieved says so. */
int32_t fa_cpu_place_memory(void* address, int64_t bytes, const int32_t* nodes, int32_t num_nodes, int32_t discard,
                            fa_cpu_placement* achieved);

/* Measuring instruments: what any attention kernel on this machine is bound by. Both run on the pool's threads.
 *
 * Reads every byte of num_pages pages once and does nothing else with them. prefetch_bytes: how far ahead of itself a
 * thread asks for data, 0 to leave that to the hardware; streams: places it reads at a time, 1, 2 or 4. Sizes are
 * multiples of 8. *checksum becomes the exclusive or of all 64-bit words. */
int32_t fa_cpu_read_pages(const void* const* pages, const int64_t* bytes, int64_t num_pages, int32_t prefetch_bytes,
                          int32_t streams, uint64_t* checksum);
/* Arithmetic on registers alone that this build and machine can do, comma-separated: of "bf16_amx", "bf16_dot"
 * (AVX-512) and "fp32_fma", which is always there. The widest unit comes first; whether it is the fastest, measure. */
const char* fa_cpu_peak_kinds(void);
/* `iterations` rounds of it, shared by the threads; *flops becomes the operations done, a multiply-add being 2. */
int32_t fa_cpu_peak(const char* kind, int64_t iterations, double* flops);

#ifdef __cplusplus
}
#endif
#endif
