// Adam in one pass over memory: gradient in, parameter out, states in place.
//
// Plain C interface, no headers of torch: it compiles in seconds. One call is one thread; the
// caller divides the work. Every operation is rounded by itself (-ffp-contract=off), so that the
// result does not depend on how the work is divided, or on the width of a vector.

#include <stdint.h>

namespace {

struct Bfloat16 { uint16_t bits; };
struct Float16 { uint16_t bits; };

inline float as_float(uint32_t bits) { float x; __builtin_memcpy(&x, &bits, 4); return x; }
inline uint32_t as_bits(float x) { uint32_t bits; __builtin_memcpy(&bits, &x, 4); return bits; }
inline bool is_nan(uint32_t bits) { return (bits & 0x7fffffffu) > 0x7f800000u; }

// A choice without a branch, which would keep a loop from being vectorized.
inline uint32_t pick(bool which, uint32_t yes, uint32_t no) {
  uint32_t mask = 0u - (uint32_t)which;
  return (yes & mask) | (no & ~mask);
}

inline float load(float x) { return x; }
inline double load(double x) { return x; }
inline float load(Bfloat16 x) { return as_float((uint32_t)x.bits << 16); }

inline float load(Float16 x) {
  uint32_t sign = (uint32_t)(x.bits & 0x8000u) << 16;
  uint32_t rest = (uint32_t)(x.bits & 0x7fffu) << 13;
  // Below the smallest normal number the leading 1 is not implied.
  uint32_t small = as_bits(as_float(rest + (113u << 23)) - as_float(113u << 23));
  uint32_t bits = pick(rest < (1u << 23), small, rest + (112u << 23));
  bits = pick(rest >= (31u << 23), rest | 0x7f800000u, bits);  // infinite or NaN
  return as_float(bits | sign);
}

// Rounding to the nearest, ties to even; NaN stays NaN.
inline void store(float* to, float x) { *to = x; }
inline void store(double* to, double x) { *to = x; }

inline void store(Bfloat16* to, float x) {
  uint32_t bits = as_bits(x);
  uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  to->bits = (uint16_t)pick(is_nan(bits), (bits >> 16) | 0x40u, rounded);
}

inline void store(Float16* to, float x) {
  uint32_t bits = as_bits(x), sign = (bits >> 16) & 0x8000u, rest = bits & 0x7fffffffu;
  uint32_t normal = (rest - (112u << 23) + 0xfffu + ((rest >> 13) & 1u)) >> 13;
  // Adding 1/2 puts the last digit of a small number where the addition rounds.
  uint32_t small = as_bits(as_float(rest) + 0.5f) - as_bits(0.5f);
  uint32_t half = pick(rest < (113u << 23), small, normal);
  half = pick(rest >= (143u << 23), 0x7c00u, half);
  half = pick(is_nan(bits), 0x7e00u, half);
  to->bits = (uint16_t)(half | sign);
}

// A mean over many steps changes by less than half of bfloat16's last digit, so that rounding to
// the nearest would stop it. Rounding up as often as the rest says keeps its expectation.
inline void store_mean(float* to, float x, uint32_t) { *to = x; }
inline void store_mean(double* to, double x, uint32_t) { *to = x; }

inline void store_mean(Bfloat16* to, float x, uint32_t random) {
  uint32_t bits = as_bits(x);
  to->bits = (uint16_t)pick(is_nan(bits), (bits >> 16) | 0x40u, (bits + random) >> 16);
}

inline uint32_t mixed(uint32_t x) {
  x ^= x >> 16; x *= 0x7feb352du;
  x ^= x >> 15; x *= 0x846ca68bu;
  return x ^ (x >> 16);
}

}  // namespace

extern "C" struct LightningParAdam {
  double lr, beta1, beta2, eps, decay, l2, correction1, root_correction2, scale, largest;
  uint32_t seed;
};

namespace {

template <typename Wide, typename Mean, typename In, typename Out>
void run(const LightningParAdam& rule, Wide* __restrict master, Mean* __restrict mean,
         Mean* __restrict square, const In* grad, Out* out, int64_t n, int64_t first) {
  const Wide scale = (Wide)rule.scale, largest = (Wide)rule.largest, l2 = (Wide)rule.l2;
  const Wide rest1 = (Wide)(1 - rule.beta1), beta2 = (Wide)rule.beta2;
  const Wide rest2 = (Wide)(1 - rule.beta2), keep = (Wide)(1 - rule.lr * rule.decay);
  const Wide length = (Wide)(rule.lr / rule.correction1), eps = (Wide)rule.eps;
  const Wide inverse = (Wide)(1 / rule.root_correction2);
  const uint32_t start = (uint32_t)first, seed = rule.seed;
// `out` may be where `grad` is: an entry is read before it is written.
#pragma omp simd
  for (int64_t i = 0; i < n; i++) {
    Wide g = (Wide)load(grad[i]) * scale, p = master[i];
    g = g > largest ? largest : (g < -largest ? -largest : g);  // NaN stays
    g = g + l2 * p;
    Wide m = (Wide)load(mean[i]), v = (Wide)load(square[i]);
    m = m + rest1 * (g - m);
    v = beta2 * v + rest2 * g * g;
    Wide root = sizeof(Wide) == 8 ? (Wide)__builtin_sqrt((double)v)
                                  : (Wide)__builtin_sqrtf((float)v);
    p = p * keep - length * m / (root * inverse + eps);
    uint32_t random = sizeof(Mean) == 2 ? mixed((start + (uint32_t)i) ^ seed) : 0;
    store_mean(mean + i, m, random & 0xffffu);
    store_mean(square + i, v, random >> 16);
    master[i] = p;
    store(out + i, p);
  }
}

enum Kind { FLOAT32 = 0, BFLOAT16 = 1, FLOAT16 = 2, FLOAT64 = 3 };

struct Call {
  const LightningParAdam& rule;
  float* master; void *mean, *square; const void* grad; void* out;
  int64_t n, first;

  template <typename Mean, typename In, typename Out> int go() const {
    run(rule, master, (Mean*)mean, (Mean*)square, (const In*)grad, (Out*)out, n, first);
    return 0;
  }
  template <typename Mean, typename In> int out_as(int kind) const {
    if (kind == FLOAT32) return go<Mean, In, float>();
    if (kind == BFLOAT16) return go<Mean, In, Bfloat16>();
    return kind == FLOAT16 ? go<Mean, In, Float16>() : 1;
  }
  template <typename Mean> int grad_as(int in, int out_kind) const {
    if (in == FLOAT32) return out_as<Mean, float>(out_kind);
    if (in == BFLOAT16) return out_as<Mean, Bfloat16>(out_kind);
    return in == FLOAT16 ? out_as<Mean, Float16>(out_kind) : 1;
  }
};

}  // namespace

// Returns 0, or 1 if the dtypes do not go together. Arrays hold n entries each; `first` numbers the
// first of them in the whole tensor.
extern "C" int lightning_par_adam(const LightningParAdam* rule, void* master, void* mean,
                                  void* square, const void* grad, void* out, int64_t n,
                                  int64_t first, int wide, int moments, int in, int out_kind) {
  if (wide == FLOAT64) {
    if (moments != FLOAT64 || in != FLOAT64 || out_kind != FLOAT64) return 1;
    run(*rule, (double*)master, (double*)mean, (double*)square, (const double*)grad, (double*)out,
        n, first);
    return 0;
  }
  const Call call{*rule, (float*)master, mean, square, grad, out, n, first};
  if (wide != FLOAT32) return 1;
  if (moments == FLOAT32) return call.grad_as<float>(in, out_kind);
  return moments == BFLOAT16 ? call.grad_as<Bfloat16>(in, out_kind) : 1;
}
