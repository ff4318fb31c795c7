// Parameters of the products with quantised weights: plain data with the same layout in the launcher and on the device.
#ifndef FASTATTENTION_VOLTA_LINEAR_H
#define FASTATTENTION_VOLTA_LINEAR_H

namespace fastattention {

// Weights in units of 512 bytes: eight columns (a tile) and 128 of k (4 bits) or 64 (8 bits). Columns come first, then
// k: [columns / 8, units, 32 lanes, 16 bytes]. A lane has one column and a quarter of the unit's k; weights.cuh has the
// formats. The last unit is filled up with any weights.
//
// A scale belongs to one group of k. Groups are a power of two times a quarter of a unit long, or as long as k.
struct Weights {
  const void* packed;
  const void* scales;   // weights.cuh: [groups, scale_stride]
  const float* factor;  // [columns] of the columns' weights, or null
  int columns, units;
  int chunks;                     // k / 8
  int groups, group_shift;        // quarters of units in a group, as a power of two
  int scale_stride, scale_shift;  // e4m3: tiles that share a scale, as a power of two
};

// out[row][column] = sum over k of x[row][k] * weight[k][column] + bias[column], for up to 16 rows.
struct Linear {
  Weights weights;
  const void* x;               // fp16 [rows, x_stride], 16 bytes aligned
  const unsigned short* bias;  // fp16 [columns], or null
  unsigned short* out;         // fp16 [rows, columns]
  int rows;
  int x_stride;     // a multiple of 8
  int tiles, more;  // of a CTA; the first `more` CTAs have one more
};

// out[column][k] = weight[k][column], for the tiles from first_tile on: one for each CTA in x.
struct Unpack {
  Weights weights;
  unsigned short* out;  // fp16 [8 * tiles, k]
  int first_tile;
};

}  // namespace fastattention

#endif
