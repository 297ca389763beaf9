// Flat AdamW: unscale, clip, update and low-precision write in one pass. Contract: megalite/ops/adamw.py.

#pragma once

#include "common.cuh"

namespace megalite {
namespace {

// One thread, kVec consecutive elements. The last thread of a length that kVec does not divide works element by element.
template <typename Grad, typename Out, int kVec>
__global__ void __launch_bounds__(kThreads) adamw_kernel(float* __restrict__ param, const Grad* __restrict__ grad,
                                                         float* __restrict__ exp_avg, float* __restrict__ exp_avg_sq,
                                                         Out* __restrict__ out, const float* __restrict__ multiplier,
                                                         AdamWScalars scalars, int64_t n) {
  constexpr bool kHasOut = !std::is_same_v<Out, NoOut>;
  const int64_t start = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) * kVec;
  if (start >= n) return;
  const float scale = multiplier ? *multiplier : 1.0f;
  if (start + kVec <= n) {
    auto p = load<kVec>(param + start);
    auto m = load<kVec>(exp_avg + start);
    auto v = load<kVec>(exp_avg_sq + start);
    const auto g = load<kVec>(grad + start);
#pragma unroll
    for (int i = 0; i < kVec; ++i) adamw_element(p.at[i], widen(g.at[i]) * scale, m.at[i], v.at[i], scalars);
    store<kVec>(param + start, p);
    store<kVec>(exp_avg + start, m);
    store<kVec>(exp_avg_sq + start, v);
    if constexpr (kHasOut) {
      Vec<Out, kVec> o;
#pragma unroll
      for (int i = 0; i < kVec; ++i) o.at[i] = narrow<Out>(p.at[i]);
      store<kVec>(out + start, o);
    }
  } else {
    for (int64_t i = start; i < n; ++i) {
      adamw_element(param[i], widen(grad[i]) * scale, exp_avg[i], exp_avg_sq[i], scalars);
      if constexpr (kHasOut) out[i] = narrow<Out>(param[i]);
    }
  }
}

template <typename Grad, typename Out>
void launch_adamw(const Tensor& param, const Tensor& grad, const Tensor& exp_avg, const Tensor& exp_avg_sq, void* out,
            const float* multiplier, const AdamWScalars& scalars) {
  // 8 two-byte gradients or 4 four-byte ones make a 128-bit load.
  constexpr int kVec = 16 / sizeof(Grad);
  float* p = param.mutable_data_ptr<float>();
  float* m = exp_avg.mutable_data_ptr<float>();
  float* v = exp_avg_sq.mutable_data_ptr<float>();
  const Grad* g = static_cast<const Grad*>(grad.const_data_ptr());
  Out* o = static_cast<Out*>(out);
  const int64_t n = param.numel();
  const cudaStream_t stream = current_stream(param);
  if (aligned16(p) && aligned16(m) && aligned16(v) && aligned16(g) && aligned16(o)) {
    const auto blocks = static_cast<unsigned>(ceil_div(n, int64_t{kThreads} * kVec));
    adamw_kernel<Grad, Out, kVec><<<blocks, kThreads, 0, stream>>>(p, g, m, v, o, multiplier, scalars, n);
  } else {
    const auto blocks = static_cast<unsigned>(ceil_div(n, kThreads));
    adamw_kernel<Grad, Out, 1><<<blocks, kThreads, 0, stream>>>(p, g, m, v, o, multiplier, scalars, n);
  }
  STD_CUDA_KERNEL_LAUNCH_CHECK();
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
  const float* multiplier = multiplier_pointer(grad_multiplier);
  if (n == 0) return;
  const AdamWScalars scalars(lr, beta1, beta2, eps, weight_decay, step);
  const torch::stable::accelerator::DeviceGuard guard(param.get_device_index());
  by_dtype(grad.scalar_type(), "grad", [&](auto g) {
    using Grad = decltype(g);
    if (!out_param) return launch_adamw<Grad, NoOut>(param, grad, exp_avg, exp_avg_sq, nullptr, multiplier, scalars);
    by_dtype(out_param->scalar_type(), "out_param", [&](auto o) {
      launch_adamw<Grad, decltype(o)>(param, grad, exp_avg, exp_avg_sq, out_param->mutable_data_ptr(), multiplier, scalars);
    });
  });
}

}  // namespace
}  // namespace megalite
