// Gated linear units on packed gate|up, forward and backward in one pass. Contract: megalite/core/ops/glu.py.

#include "exp.h"
#include "rows.h"

namespace megalite {
namespace {

struct Activation {
  float value, slope;
};

inline __attribute__((always_inline)) Activation silu(float x) {
  const float sigmoid = 1.0f / (1.0f + exp_f32(-x));
  const float value = x * sigmoid;
  return {value, sigmoid + value * (1.0f - sigmoid)};
}

// The normal distribution function, from Numerical Recipes' erfcc; relative error below 1.2e-7, tails too.
inline __attribute__((always_inline)) Activation gelu(float x) {
  const float z = (x < 0.0f ? -x : x) * 0.70710678118654752f;
  const float t = 1.0f / (1.0f + 0.5f * z);
  const float t2 = t * t, t4 = t2 * t2;
  const float q = ((-1.26551223f + 1.00002368f * t) + t2 * (0.37409196f + 0.09678418f * t)) +
                  t4 * ((-0.18628806f + 0.27886807f * t) + t2 * (-1.13520398f + 1.48851587f * t) +
                        t4 * (-0.82215223f + 0.17087277f * t));
  const float tail = 0.5f * t * exp_f32(q - z * z);
  const float below = x < 0.0f ? tail : 1.0f - tail;
  return {x * below, below + x * 0.39894228040143268f * exp_f32(-0.5f * x * x)};
}

inline __attribute__((always_inline)) Activation gelu_tanh(float x) {
  const float inner = 0.79788456080286536f * (x + 0.044715f * x * x * x);
  const float tanh = 1.0f - 2.0f / (exp_f32(2.0f * inner) + 1.0f);
  const float inner_slope = 0.79788456080286536f * (1.0f + 0.134145f * x * x);
  return {0.5f * x * (1.0f + tanh), 0.5f * (1.0f + tanh) + 0.5f * x * (1.0f - tanh * tanh) * inner_slope};
}

template <int kKind>
inline __attribute__((always_inline)) Activation activate(float x) {
  if constexpr (kKind == 0) return silu(x);
  if constexpr (kKind == 1) return gelu(x);
  return gelu_tanh(x);
}

// The rows' pointers are parameters because gcc honors __restrict__ only there.
template <typename T, int kKind>
inline __attribute__((always_inline)) void forward_row(const T* __restrict__ gate, const T* __restrict__ up,
                                                       T* __restrict__ out, int64_t n) {
  for (int64_t i = 0; i < n; ++i) narrow(activate<kKind>(widen(gate[i])).value * widen(up[i]), out[i]);
}

template <typename T, int kKind>
inline __attribute__((always_inline)) void backward_row(const T* __restrict__ dy, const T* __restrict__ gate,
                                                        const T* __restrict__ up, T* __restrict__ dgate,
                                                        T* __restrict__ dup, int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    const Activation at = activate<kKind>(widen(gate[i]));
    const float out = widen(dy[i]);
    narrow(out * widen(up[i]) * at.slope, dgate[i]);
    narrow(out * at.value, dup[i]);
  }
}

struct Forward {
  const void* gate_up;
  void* out;
  int64_t width;
};

template <typename T, int kKind>
inline __attribute__((always_inline)) void forward(const Forward& f, int64_t begin, int64_t end) {
  const int64_t n = f.width;
  for (int64_t row = begin; row < end; ++row) {
    const T* gate = static_cast<const T*>(f.gate_up) + row * 2 * n;
    forward_row<T, kKind>(gate, gate + n, static_cast<T*>(f.out) + row * n, n);
  }
}

struct Backward {
  const void* dy;
  const void* gate_up;
  void* grad;
  int64_t width;
};

template <typename T, int kKind>
inline __attribute__((always_inline)) void backward(const Backward& b, int64_t begin, int64_t end) {
  const int64_t n = b.width;
  for (int64_t row = begin; row < end; ++row) {
    const T* gate = static_cast<const T*>(b.gate_up) + row * 2 * n;
    T* dgate = static_cast<T*>(b.grad) + row * 2 * n;
    backward_row<T, kKind>(static_cast<const T*>(b.dy) + row * n, gate, gate + n, dgate, dgate + n, n);
  }
}

// target_clones does not apply to templates, so there is one plain function per combination.
#define MEGALITE_GLU(suffix, T, kind)                                                     \
  MEGALITE_CLONES void forward_##suffix(const Forward& f, int64_t begin, int64_t end) {   \
    forward<T, kind>(f, begin, end);                                                      \
  }                                                                                       \
  MEGALITE_CLONES void backward_##suffix(const Backward& b, int64_t begin, int64_t end) { \
    backward<T, kind>(b, begin, end);                                                     \
  }
MEGALITE_GLU(silu_f32, float, 0)
MEGALITE_GLU(gelu_f32, float, 1)
MEGALITE_GLU(tanh_f32, float, 2)
MEGALITE_GLU(silu_bf16, BF16, 0)
MEGALITE_GLU(gelu_bf16, BF16, 1)
MEGALITE_GLU(tanh_bf16, BF16, 2)
#undef MEGALITE_GLU

// Indexed by [bf16][kind].
constexpr void (*kForward[2][3])(const Forward&, int64_t, int64_t) = {
    {forward_silu_f32, forward_gelu_f32, forward_tanh_f32}, {forward_silu_bf16, forward_gelu_bf16, forward_tanh_bf16}};
constexpr void (*kBackward[2][3])(const Backward&, int64_t, int64_t) = {
    {backward_silu_f32, backward_gelu_f32, backward_tanh_f32},
    {backward_silu_bf16, backward_gelu_bf16, backward_tanh_bf16}};

}  // namespace

void glu(const void* gate_up, void* out, int64_t rows, int64_t width, int64_t kind, bool bf16, int64_t threads) {
  const Forward f{gate_up, out, width};
  const auto kernel = kForward[bf16][kind];
  for_rows(rows, width, threads, [&](int64_t begin, int64_t end) { kernel(f, begin, end); });
}

void glu_backward(const void* dy, const void* gate_up, void* grad, int64_t rows, int64_t width, int64_t kind,
                  bool bf16, int64_t threads) {
  const Backward b{dy, gate_up, grad, width};
  const auto kernel = kBackward[bf16][kind];
  for_rows(rows, width, threads, [&](int64_t begin, int64_t end) { kernel(b, begin, end); });
}

}  // namespace megalite
