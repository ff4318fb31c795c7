// Parameters of the products with quantised weights: plain data with the same layout in the launcher and on the device.
#ifndef FASTATTENTION_VOLTA_LINEAR_H
#define FASTATTENTION_VOLTA_LINEAR_H

namespace fastattention {

// out[row][column] = factor[column] * sum over k of x[row][k] * weight[k][column] + bias[column], for up to 16 rows.
//
// Weights are packed in units of 512 bytes: eight columns (a tile) and 128 of k (4 bits) or 64 (8 bits). Columns come
// first, then k: [columns / 8, units, 32 lanes, 16 bytes]. A lane has one column and a quarter of the unit's k, which
// weights.cuh describes. The last unit is filled up with any weights; x has nothing there.
//
// A scale belongs to one group of k. Groups are a power of two times a quarter of a unit long, or as long as k.
struct Linear {
  const void* x;       // fp16 [rows, x_stride]
  const void* weight;  // packed
  const void* scales;  // weights.cuh: [groups, scale_stride]
  const float* factor;         // [columns], or null
  const unsigned short* bias;  // fp16 [columns], or null
  unsigned short* out;         // fp16 [rows, columns]
  int rows, columns, units;
  int chunks;              // k / 8
  int x_stride;            // a multiple of 8
  int groups, group_shift;  // quarters of units in a group, as a power of two
  int scale_stride, scale_shift;  // of a scale's columns, as a power of two of tiles; 4 bits and int8 have none
  int tiles, more;         // of a CTA; the first `more` CTAs have one more
};

}  // namespace fastattention

#endif
