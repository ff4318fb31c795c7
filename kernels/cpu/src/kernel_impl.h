// The templated sources in reading order. Every kernel_<isa>.cpp includes its vec_<isa>.h, defines kTuning and then
// includes this file.
//
// Everything here is in an unnamed namespace. Translation units compiled with different -m flags must not share any
// inline function or template instance, including those of std::. Otherwise the linker could keep a copy with AVX-512
// code for a machine without AVX-512.
#include "vec_math.h"
// clang-format off: each file builds on those before it
#include "scratch.h"
#include "kv_rows.h"
#include "panel_packed.h"
#if defined(FA_AVX512_BF16)
#include "unit_bf16.h"
#endif
#if defined(FA_AMX)
#include "unit_split.h"
#include "panel_amx.h"
#include "panel_amx_direct.h"
#include "panel_amx_split.h"
#include "bytes_to_bf16.h"
#include "panel_amx_bytes.h"
#endif
#if defined(FA_AVX512_BF16)
#include "panel_dot.h"
#endif
#include "panel_direct.h"
#if defined(FA_BF16_PAIRS)
#include "panel_pairs.h"
#endif
#include "panel_transposed_k.h"
#include "softmax.h"
#include "attention_kernel.h"
#include "kv_write.h"
#include "delta_scratch.h"
#include "causal_conv.h"
#include "delta_gates.h"
#include "delta_token.h"
#include "delta_chunk.h"
#include "gated_delta.h"
#include "gated_norm.h"
#include "sampling.h"
#include "linear.h"
#include "rotary.h"
// clang-format on

// The members of KernelTable after its name.
#define FA_KERNELS                                                                                                   \
  kTuning.row_block_elements, scratch_bytes, attend, merge, write_kv, delta_scratch_bytes, gated_delta, keep_inputs, \
      gated_norm, sample, kLinear, rotate
