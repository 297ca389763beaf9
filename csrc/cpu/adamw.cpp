// Flat AdamW on CPU: one pass over memory. Contract: megalite/ops/adamw.py.

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include "../common/adamw_math.h"
#include "../common/checks.h"
#include "convert.h"

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

// target_clones does not apply to templates, hence a plain function per combination.
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

Kernel pick(const Tensor& grad, const std::optional<Tensor>& out) {
  const bool bf16_grad = grad.scalar_type() == ScalarType::BFloat16;
  STD_TORCH_CHECK(bf16_grad || grad.scalar_type() == ScalarType::Float, "grad must be fp32 or bf16 on CPU");
  if (!out) return bf16_grad ? adamw_bf16 : adamw_f32;
  if (out->scalar_type() == ScalarType::BFloat16) return bf16_grad ? adamw_bf16_bf16 : adamw_f32_bf16;
  STD_TORCH_CHECK(out->scalar_type() == ScalarType::Float, "out_param must be fp32 or bf16 on CPU");
  return bf16_grad ? adamw_bf16_f32 : adamw_f32_f32;
}

void adamw(Tensor param, Tensor grad, Tensor exp_avg, Tensor exp_avg_sq, std::optional<Tensor> out_param,
           std::optional<Tensor> grad_multiplier, double lr, double beta1, double beta2, double eps,
           double weight_decay, int64_t step) {
  const int64_t n = param.numel();
  check_flat_fp32(param, "param", n);
  check_flat(grad, "grad", n);
  check_flat_fp32(exp_avg, "exp_avg", n);
  check_flat_fp32(exp_avg_sq, "exp_avg_sq", n);
  if (out_param) check_flat(*out_param, "out_param", n);
  check_multiplier(grad_multiplier);
  const Kernel kernel = pick(grad, out_param);
  const AdamWScalars scalars(lr, beta1, beta2, eps, weight_decay, step);
  const Buffers buffers{
      param.mutable_data_ptr<float>(),
      exp_avg.mutable_data_ptr<float>(),
      exp_avg_sq.mutable_data_ptr<float>(),
      grad.const_data_ptr(),
      out_param ? out_param->mutable_data_ptr() : nullptr,
      grad_multiplier ? *grad_multiplier->const_data_ptr<float>() : 1.0f,
  };
  torch::stable::parallel_for(
      0, n, kGrain, [&](int64_t begin, int64_t end) { kernel(buffers, scalars, begin, end); });
}

}  // namespace
}  // namespace megalite

STABLE_TORCH_LIBRARY_IMPL(megalite, CPU, m) { m.impl("adamw_", TORCH_BOX(&megalite::adamw)); }
