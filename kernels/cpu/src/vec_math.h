// Elementary functions over Vec, the same for every instruction set. Included after vec_<isa>.h.
namespace fastattention {
namespace {

constexpr float kInfinity = __builtin_inff();

// e^x for x <= 0 within 1.5 ulp; results below the smallest normal number, e^-inf included, are exactly 0; NaN stays
// NaN.
inline Vec exp_nonpositive(Vec x) {
  const Vec n = round_nearest(mul(x, splat(1.44269504088896341f)));
  Vec r = fma(n, splat(-0.693359375f), x);  // ln 2 in two parts, the first with few bits: n * part is exact
  r = fma(n, splat(2.12194440e-4f), r);
  Vec y = splat(1.9875691500e-4f);
  y = fma(y, r, splat(1.3981999507e-3f));
  y = fma(y, r, splat(8.3334519073e-3f));
  y = fma(y, r, splat(4.1665795894e-2f));
  y = fma(y, r, splat(1.6666665459e-1f));
  y = fma(y, r, splat(5.0000001201e-1f));
  y = add(fma(y, mul(r, r), r), splat(1.0f));
  return select_less(x, splat(-87.33654f), splat(0.0f), times_power_of_two(y, n));
}

inline Vec tanh(Vec x) {
  const Vec magnitude = abs(x);
  const Vec t = exp_nonpositive(mul(magnitude, splat(-2.0f)));
  const Vec large = copysign(div(sub(splat(1.0f), t), add(splat(1.0f), t)), x);
  // Near 0 the difference above cancels; an odd polynomial keeps full relative precision.
  const Vec z = mul(x, x);
  Vec y = splat(-5.70498872745e-3f);
  y = fma(y, z, splat(2.06390887954e-2f));
  y = fma(y, z, splat(-5.37397155531e-2f));
  y = fma(y, z, splat(1.33314422036e-1f));
  y = fma(y, z, splat(-3.33332819422e-1f));
  return select_less(magnitude, splat(0.625f), fma(mul(y, z), x, x), large);
}

inline float exp_nonpositive(float x) { return first_lane(exp_nonpositive(splat(x))); }

// Any head size is whole vectors plus, on 16 lanes, at most one half vector. Calls f(d, part) for each of them;
// part reads and writes as many elements as there are.
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

constexpr int round_up(int n, int multiple) { return (n + multiple - 1) / multiple * multiple; }

template <int N>
struct Constant {
  static constexpr int value = N;
};

}  // namespace
}  // namespace fastattention
