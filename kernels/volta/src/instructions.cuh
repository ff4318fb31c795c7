// Instructions that C++ cannot express. The emulator has its versions in kernels/volta/emulator/src/instructions.h.
#ifndef FASTATTENTION_VOLTA_INSTRUCTIONS_CUH
#define FASTATTENTION_VOLTA_INSTRUCTIONS_CUH

#ifdef FASTATTENTION_EMULATOR
#include "instructions.h"
#endif

namespace fastattention {

using u32 = unsigned;
using Half = unsigned short;  // the bits of an fp16 number, because NVIDIA's headers with its type are not used
#define FA_DEVICE __device__ __forceinline__
#define FA_UNROLL _Pragma("unroll")

#ifndef FASTATTENTION_EMULATOR

// One 8 x 8 x 4 product per quadpair of the warp, in fp32: d += a * b. For keys: b's columns are contiguous in memory.
FA_DEVICE void multiply_by_columns(float (&d)[8], u32 a0, u32 a1, u32 b0, u32 b1) {
  asm volatile(
      "mma.sync.aligned.m8n8k4.row.col.f32.f16.f16.f32 {%0,%1,%2,%3,%4,%5,%6,%7},{%8,%9},{%10,%11},"
      "{%0,%1,%2,%3,%4,%5,%6,%7};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7])
      : "r"(a0), "r"(a1), "r"(b0), "r"(b1));
}
// For values: b's rows are contiguous in memory.
FA_DEVICE void multiply_by_rows(float (&d)[8], u32 a0, u32 a1, u32 b0, u32 b1) {
  asm volatile(
      "mma.sync.aligned.m8n8k4.row.row.f32.f16.f16.f32 {%0,%1,%2,%3,%4,%5,%6,%7},{%8,%9},{%10,%11},"
      "{%0,%1,%2,%3,%4,%5,%6,%7};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7])
      : "r"(a0), "r"(a1), "r"(b0), "r"(b1));
}

#if __CUDA_ARCH__ >= 750
// One 16 x 8 x 8 product of the warp, in fp32: d += a * b. A lane holds four elements of d.
FA_DEVICE void multiply_16x8(float* d, u32 a0, u32 a1, u32 b) {
  asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0,%1,%2,%3},{%4,%5},{%6},{%0,%1,%2,%3};"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
               : "r"(a0), "r"(a1), "r"(b));
}

// Loads 8 x 8 matrices of fp16 from shared memory. Lane 8 m + r supplies the address of row r of matrix m, which is
// tile[place ^ chunk]. Lane 4 r + c receives the numbers 2 c and 2 c + 1 of row r of each matrix, or of its transpose.
// The address is computed here, because otherwise the compiler would keep the addresses of all chunks in registers.
FA_DEVICE u32 shared_address(const uint4* tile) { return static_cast<u32>(__cvta_generic_to_shared(tile)); }
FA_DEVICE void load_matrices(u32 (&to)[4], const uint4* tile, int place, int chunk) {
  asm volatile(
      "{.reg .u32 a; xor.b32 a,%5,%6; add.u32 a,a,%4;"
      "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3},[a];}"
      : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
      : "r"(shared_address(tile)), "r"(16 * place), "r"(16 * chunk));
}
FA_DEVICE void load_matrices(u32 (&to)[2], const uint4* tile, int place, int chunk) {
  asm volatile(
      "{.reg .u32 a; xor.b32 a,%3,%4; add.u32 a,a,%2;"
      "ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0,%1},[a];}"
      : "=r"(to[0]), "=r"(to[1])
      : "r"(shared_address(tile)), "r"(16 * place), "r"(16 * chunk));
}
FA_DEVICE void load_transposed_matrices(u32 (&to)[4], const uint4* tile, int place, int chunk) {
  asm volatile(
      "{.reg .u32 a; xor.b32 a,%5,%6; add.u32 a,a,%4;"
      "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3},[a];}"
      : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
      : "r"(shared_address(tile)), "r"(16 * place), "r"(16 * chunk));
}
// Transposes an 8 x 8 matrix of fp16. Lane 4 r + c holds the numbers 2 c and 2 c + 1 of row r.
FA_DEVICE u32 transpose_matrix(u32 pair) {
  u32 transposed;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0,%1;" : "=r"(transposed) : "r"(pair));
  return transposed;
}
#endif

// Waits for the threads of another warp. `number` is 1 to 15, and the same for both; a block's barrier is number 0.
FA_DEVICE void wait_for_pair(int number) { asm volatile("bar.sync %0,64;" : : "r"(number) : "memory"); }

FA_DEVICE float exp2(float x) {  // exp2f would handle subnormals at extra cost
  float y;
  asm("ex2.approx.ftz.f32 %0,%1;" : "=f"(y) : "f"(x));
  return y;
}
FA_DEVICE Half to_half(float x) {
  Half y;
  asm("cvt.rn.f16.f32 %0,%1;" : "=h"(y) : "f"(x));
  return y;
}
FA_DEVICE u32 pack(float a, float b) {
  u32 both;
  asm("mov.b32 %0,{%1,%2};" : "=r"(both) : "h"(to_half(a)), "h"(to_half(b)));
  return both;
}
// a * b. The compiler does not merge it with operations on its bits; NVRTC 12.9 has done so wrongly.
FA_DEVICE float multiply(float a, float b) {
  float y;
  asm("mul.rn.f32 %0,%1,%2;" : "=f"(y) : "f"(a), "f"(b));
  return y;
}
FA_DEVICE float to_float(Half x) {
  float y;
  asm("cvt.f32.f16 %0,%1;" : "=f"(y) : "h"(x));
  return y;
}
FA_DEVICE u32 add_halves(u32 a, u32 b) {  // a and b are pairs
  u32 sums;
  asm("add.rn.f16x2 %0,%1,%2;" : "=r"(sums) : "r"(a), "r"(b));
  return sums;
}
FA_DEVICE u32 multiply_halves(u32 a, u32 b) {
  u32 products;
  asm("mul.rn.f16x2 %0,%1,%2;" : "=r"(products) : "r"(a), "r"(b));
  return products;
}
FA_DEVICE u32 multiply_add_halves(u32 a, u32 b, u32 c) {
  u32 sums;
  asm("fma.rn.f16x2 %0,%1,%2,%3;" : "=r"(sums) : "r"(a), "r"(b), "r"(c));
  return sums;
}
FA_DEVICE u32 and_or(u32 a, u32 b, u32 c) {  // (a & b) | c, in one instruction
  u32 d;
  asm("lop3.b32 %0,%1,%2,%3,0xea;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
  return d;
}
// 16 bytes that another GPU writes, or reads, meanwhile. Each half is written and read as a whole.
FA_DEVICE void store_to_peer(uint4* to, const uint4& x) {
  asm volatile("{.reg .b64 a, b; mov.b64 a,{%1,%2}; mov.b64 b,{%3,%4}; st.volatile.global.v2.u64 [%0],{a,b};}"
               :
               : "l"(to), "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w)
               : "memory");
}
FA_DEVICE uint4 load_from_peer(const uint4* from) {
  uint4 x;
  asm volatile("{.reg .b64 a, b; ld.volatile.global.v2.u64 {a,b},[%4]; mov.b64 {%0,%1},a; mov.b64 {%2,%3},b;}"
               : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
               : "l"(from)
               : "memory");
  return x;
}
FA_DEVICE int round_to_int(float x) {  // ties to even; NaN becomes 0
  int y;
  asm("cvt.rni.s32.f32 %0,%1;" : "=r"(y) : "f"(x));
  return y;
}

#endif  // FASTATTENTION_EMULATOR

}  // namespace fastattention

#endif
