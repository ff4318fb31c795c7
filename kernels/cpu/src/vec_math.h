// Elementary functions over Vec, the same for every instruction set. Included after vec_<isa>.h.
namespace fastattention {
namespace {

constexpr float kInfinity = __builtin_inff();
constexpr float kLog2E = 1.44269504088896341f;
constexpr float kLn2 = 0.69314718055994531f;

// 2^f for f in [0, 1), by polynomials that are minimax in the relative error and exactly 1 at 0 (coefficients rounded
// to fp32). Degree 5 is within 8.3e-8, for weights that stay in fp32. Degree 3 is within 8.6e-5, a twentieth of the
// error of rounding to bf16.
template <int Degree>
inline Vec exp2_fraction(Vec f) {
  static_assert(Degree == 3 || Degree == 5, "no polynomial of that degree");
  Vec y;
  if constexpr (Degree == 3) {
    y = fma(splat(0x1.3baaacp-4f), f, splat(0x1.d23786p-3f));
    y = fma(y, f, splat(0x1.63e65ap-1f));
  } else {
    y = fma(splat(0x1.e97500p-10f), f, splat(0x1.277854p-7f));
    y = fma(y, f, splat(0x1.c91ce6p-5f));
    y = fma(y, f, splat(0x1.ebdb56p-3f));
    y = fma(y, f, splat(0x1.62e4bap-1f));
  }
  return fma(y, f, splat(1.0f));
}

// 2^x for x up to a few tens, in practice <= kRescaleAbove. Results below the smallest normal number, 2^-inf included,
// are exactly 0. NaN stays NaN.
template <int Degree = 5>
inline Vec exp2(Vec x) {
  return times_power_of_two_unless_less(exp2_fraction<Degree>(fraction(x)), x, splat(-126.0f));
}

inline Vec tanh(Vec x) {
  const Vec magnitude = abs(x);
  const Vec t = exp2(mul(magnitude, splat(-2.0f * kLog2E)));
  const Vec large = copysign(div(sub(splat(1.0f), t), add(splat(1.0f), t)), x);
  // Near 0 the difference above cancels. An odd polynomial keeps the full relative precision there.
  const Vec z = mul(x, x);
  Vec y = splat(-5.70498872745e-3f);
  y = fma(y, z, splat(2.06390887954e-2f));
  y = fma(y, z, splat(-5.37397155531e-2f));
  y = fma(y, z, splat(1.33314422036e-1f));
  y = fma(y, z, splat(-3.33332819422e-1f));
  return select_less(magnitude, splat(0.625f), fma(mul(y, z), x, x), large);
}

inline float exp2(float x) { return first_lane(exp2(splat(x))); }

// Any head size is a number of whole vectors plus, with 16 lanes, at most one half vector. for_each_vector calls f(d,
// part) for each of them. part reads and writes as many elements as the vector has.
struct WholeVector {
  template <class T>
  static Vec read(const T* p) {
    return load(p);
  }
  template <class T>
  static void write(T* p, Vec a) {
    store(p, a);
  }
};
struct HalfVector {
  template <class T>
  static Vec read(const T* p) {
    return load_8(p);
  }
  template <class T>
  static void write(T* p, Vec a) {
    store_8(p, a);
  }
};
template <class F>
inline void for_each_vector(int head_size, F f) {
  int d = 0;
  for (; d + kWidth <= head_size; d += kWidth) f(d, WholeVector());
  if constexpr (kWidth > 8) {
    if (d < head_size) f(d, HalfVector());
  }
}

// The first count elements, 0 < count < kWidth; zeros after them.
template <class T>
inline Vec load_first(const T* p, int count) {
  T part[kWidth] = {};
  __builtin_memcpy(part, p, static_cast<size_t>(count) * sizeof(T));
  return load(part);
}
template <class T>
inline void store_first(T* p, Vec a, int count) {
  T part[kWidth];
  store(part, a);
  __builtin_memcpy(p, part, static_cast<size_t>(count) * sizeof(T));
}

constexpr int round_up(int n, int multiple) { return (n + multiple - 1) / multiple * multiple; }

template <int N>
struct Constant {
  static constexpr int value = N;
};

}  // namespace
}  // namespace fastattention
