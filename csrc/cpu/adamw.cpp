// Flat AdamW on CPU: one pass over memory. Contract: megalite/core/ops/adamw.py.

#include "../common/adamw_math.h"
#include "convert.h"
#include "kernels.h"
#include "parallel.h"

namespace megalite {
namespace {

constexpr int64_t kGrain = 1 << 15;

struct Buffers {
  float* __restrict__ param;
  float* __restrict__ exp_avg;
  float* __restrict__ exp_avg_sq;
  const void* grad;
  void* out;
  float multiplier;
};

template <typename Grad, typename Out, bool kHasOut>
inline __attribute__((always_inline)) void run(const Buffers& b, const AdamWScalars& s, int64_t begin, int64_t end) {
  const Grad* __restrict__ grad = static_cast<const Grad*>(b.grad);
  Out* __restrict__ out = static_cast<Out*>(b.out);
  float* __restrict__ param = b.param;
  float* __restrict__ exp_avg = b.exp_avg;
  float* __restrict__ exp_avg_sq = b.exp_avg_sq;
  const AdamWScalars scalars = s;
  const float multiplier = b.multiplier;
  for (int64_t i = begin; i < end; ++i) {
    float p = param[i], m = exp_avg[i], v = exp_avg_sq[i];
    adamw_element(p, widen(grad[i]) * multiplier, m, v, scalars);
    param[i] = p;
    exp_avg[i] = m;
    exp_avg_sq[i] = v;
    if constexpr (kHasOut) narrow(p, out[i]);
  }
}

// target_clones does not apply to templates, so there is one plain function per combination.
#define MEGALITE_ADAMW(name, Grad, Out, has_out)                                                   \
  MEGALITE_CLONES void name(const Buffers& b, const AdamWScalars& s, int64_t begin, int64_t end) { \
    run<Grad, Out, has_out>(b, s, begin, end);                                                     \
  }
MEGALITE_ADAMW(adamw_f32, float, float, false)
MEGALITE_ADAMW(adamw_f32_f32, float, float, true)
MEGALITE_ADAMW(adamw_f32_bf16, float, BF16, true)
MEGALITE_ADAMW(adamw_bf16, BF16, float, false)
MEGALITE_ADAMW(adamw_bf16_f32, BF16, float, true)
MEGALITE_ADAMW(adamw_bf16_bf16, BF16, BF16, true)
#undef MEGALITE_ADAMW

using Kernel = void (*)(const Buffers&, const AdamWScalars&, int64_t, int64_t);

Kernel pick(bool bf16_grad, bool has_out, bool bf16_out) {
  if (!has_out) return bf16_grad ? adamw_bf16 : adamw_f32;
  if (bf16_out) return bf16_grad ? adamw_bf16_bf16 : adamw_f32_bf16;
  return bf16_grad ? adamw_bf16_f32 : adamw_f32_f32;
}

}  // namespace

void adamw_(float* param, const void* grad, float* exp_avg, float* exp_avg_sq, void* out, const float* multiplier,
            int64_t n, bool bf16_grad, bool bf16_out, double lr, double beta1, double beta2, double eps,
            double weight_decay, int64_t step, int64_t threads) {
  const Kernel kernel = pick(bf16_grad, out != nullptr, bf16_out);
  const AdamWScalars scalars(lr, beta1, beta2, eps, weight_decay, step);
  const Buffers buffers{param, exp_avg, exp_avg_sq, grad, out, multiplier ? *multiplier : 1.0f};
  parallel_for(n, kGrain, threads, [&](int64_t begin, int64_t end) { kernel(buffers, scalars, begin, end); });
}

}  // namespace megalite
