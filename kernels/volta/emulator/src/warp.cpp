// Matrix fragments follow the formulas of the PTX ISA ("Warp Level Matrix Multiply-Accumulate Instructions"),
// independently of the kernels' own.
#include "warp.h"

#include <cstring>
#include <vector>

#include "half.h"
#include "memory.h"

namespace volta_emulator {
namespace {

// The values of all fp16 numbers.
const std::vector<float> values = [] {
  std::vector<float> all(65536);
  for (size_t i = 0; i < all.size(); ++i) all[i] = volta_sim::half_to_float(static_cast<uint16_t>(i));
  return all;
}();

float element(const uint32_t* registers, int i) {
  return values[static_cast<uint16_t>(registers[i / 2] >> (i % 2 * 16))];
}

void shuffle(Warp& warp) {
  for (Thread& lane : warp.lanes) lane.part.out[0] = warp.lanes[lane.part.in[1] % kLanes].part.in[0];
}

template <int kRows, int kColumns, int kDepth>
struct Product {
  float a[kRows][kDepth], b[kDepth][kColumns], c[kRows][kColumns];

  void compute() {  // rounds once; tensor cores differ in the last bits
    for (int i = 0; i < kRows; ++i) {
      double sums[kColumns];
      for (int j = 0; j < kColumns; ++j) sums[j] = static_cast<double>(c[i][j]);
      for (int k = 0; k < kDepth; ++k) {
        for (int j = 0; j < kColumns; ++j) sums[j] += static_cast<double>(a[i][k] * b[k][j]);
      }
      for (int j = 0; j < kColumns; ++j) c[i][j] = static_cast<float>(sums[j]);
    }
  }
};

// mma.m8n8k4, one product per quadpair (lanes 4 q to 4 q + 3 and 4 q + 16 to 4 q + 19): "row" for a, "row" or "col" for
// b.
void multiply_quadpairs(Warp& warp, bool b_by_rows) {
  for (int quadpair = 0; quadpair < 4; ++quadpair) {
    Product<8, 8, 4> product;
    const auto each = [&](auto&& visit) {
      for (int high = 0; high < 2; ++high) {
        for (int low = 0; low < 4; ++low) visit(warp.lanes[4 * quadpair + low + 16 * high].part, low, high);
      }
    };
    const auto row_of_c = [](int low, int high, int i) { return (low & 1) + (i & 2) + 4 * high; };
    const auto column_of_c = [](int low, int i) { return (i & 4) + (low & 2) + (i & 1); };
    each([&](Part& part, int low, int high) {
      for (int i = 0; i < 4; ++i) {
        product.a[low + 4 * high][i] = element(part.in, i);
        if (b_by_rows) {
          product.b[low][i + 4 * high] = element(part.in + 2, i);
        } else {
          product.b[i][low + 4 * high] = element(part.in + 2, i);
        }
      }
      for (int i = 0; i < 8; ++i) product.c[row_of_c(low, high, i)][column_of_c(low, i)] = part.sums[i];
    });
    product.compute();
    each([&](Part& part, int low, int high) {
      for (int i = 0; i < 8; ++i) part.sums[i] = product.c[row_of_c(low, high, i)][column_of_c(low, i)];
    });
  }
}

// mma.m16n8k8 of fp16, one product per warp.
void multiply_16(Warp& warp) {
  Product<16, 8, 8> product;
  for (int lane = 0; lane < kLanes; ++lane) {
    const Part& part = warp.lanes[lane].part;
    const int group = lane >> 2, within = lane % 4;
    for (int i = 0; i < 4; ++i) {
      product.a[i < 2 ? group : group + 8][within * 2 + (i & 1)] = element(part.in, i);
      product.c[i < 2 ? group : group + 8][within * 2 + (i & 1)] = part.sums[i];
    }
    for (int i = 0; i < 2; ++i) product.b[within * 2 + i][group] = element(part.in + 2, i);
  }
  product.compute();
  for (int lane = 0; lane < kLanes; ++lane) {
    const int group = lane >> 2, within = lane % 4;
    for (int i = 0; i < 4; ++i) {
      warp.lanes[lane].part.sums[i] = product.c[i < 2 ? group : group + 8][within * 2 + (i & 1)];
    }
  }
}

// ldmatrix: 8 x 8 matrices. Lane 8 m + r supplies the address of row r of matrix m.
void load(Warp& warp) {
  const int count = warp.lanes[0].part.detail & 7;
  const bool transposed = warp.lanes[0].part.detail & 8;
  uint16_t matrix[8][8];
  for (int m = 0; m < count; ++m) {
    for (int row = 0; row < 8; ++row) {
      const unsigned char* const from = warp.lanes[8 * m + row].part.row;
      std::memcpy(matrix[row], from, sizeof(matrix[row]));
    }
    for (int lane = 0; lane < kLanes; ++lane) {
      const int a = lane / 4, b = lane % 4 * 2;
      const uint32_t low = transposed ? matrix[b][a] : matrix[a][b];
      const uint32_t high = transposed ? matrix[b + 1][a] : matrix[a][b + 1];
      warp.lanes[lane].part.out[m] = low | high << 16;
    }
  }
}

// movmatrix.trans: one matrix, of which lane 4 r + c holds the numbers 2 c and 2 c + 1 of row r.
void transpose(Warp& warp) {
  uint16_t matrix[8][8];
  for (int lane = 0; lane < kLanes; ++lane) {
    for (int i = 0; i < 2; ++i) {
      matrix[lane / 4][lane % 4 * 2 + i] = static_cast<uint16_t>(warp.lanes[lane].part.in[0] >> (16 * i));
    }
  }
  for (int lane = 0; lane < kLanes; ++lane) {
    const uint32_t low = matrix[lane % 4 * 2][lane / 4], high = matrix[lane % 4 * 2 + 1][lane / 4];
    warp.lanes[lane].part.out[0] = low | high << 16;
  }
}

}  // namespace

void execute(Warp& warp) {
  switch (warp.lanes[0].part.what) {
    case Together::kShuffle:
      return shuffle(warp);
    case Together::kProductByColumns:
      return multiply_quadpairs(warp, false);
    case Together::kProductByRows:
      return multiply_quadpairs(warp, true);
    case Together::kProduct16:
      return multiply_16(warp);
    case Together::kLoad:
      return load(warp);
    case Together::kTranspose:
      return transpose(warp);
    default:
      return;
  }
}

}  // namespace volta_emulator
