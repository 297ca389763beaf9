// LAMB's two elementwise pieces on flat buffers. Contract: megalite/ops/lamb.py.

#pragma once

#include "common.cuh"

namespace megalite {
namespace {

constexpr int kApplyBlocks = 256;  // blocks a segment

// update may be grad itself (fp32): a thread reads its gradients before it writes.
template <typename Grad, int kVecG>
__global__ void __launch_bounds__(kThreads) direction_kernel(const float* __restrict__ param, const Grad* grad,
                                                             float* __restrict__ exp_avg,
                                                             float* __restrict__ exp_avg_sq, float* update,
                                                             const float* __restrict__ multiplier,
                                                             AdamWScalars scalars, float inv_correction1,
                                                             float weight_decay, int64_t n) {
  const int64_t start = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) * kVecG;
  if (start >= n) return;
  const float scale = multiplier ? *multiplier : 1.0f;
  const auto direction = [&](float p, float g, float& m, float& v) {
    moments(g * scale, m, v, scalars);
    return m * inv_correction1 / (sqrtf(v) * scalars.inv_sqrt_correction + scalars.eps) + weight_decay * p;
  };
  if (start + kVecG <= n) {
    const auto p = load<kVecG>(param + start);
    const auto g = load<kVecG>(grad + start);
    auto m = load<kVecG>(exp_avg + start);
    auto v = load<kVecG>(exp_avg_sq + start);
    Vec<float, kVecG> u;
#pragma unroll
    for (int i = 0; i < kVecG; ++i) u.at[i] = direction(p.at[i], widen(g.at[i]), m.at[i], v.at[i]);
    store<kVecG>(exp_avg + start, m);
    store<kVecG>(exp_avg_sq + start, v);
    store<kVecG>(update + start, u);
  } else {
    for (int64_t i = start; i < n; ++i) update[i] = direction(param[i], widen(grad[i]), exp_avg[i], exp_avg_sq[i]);
  }
}

// Segments may start anywhere: the vector loop covers the aligned middle, single elements the edges.
template <typename Out, int kVecA>
__global__ void __launch_bounds__(kThreads) apply_kernel(float* __restrict__ param, const float* __restrict__ update,
                                                         Out* __restrict__ out, const float* __restrict__ ratios,
                                                         const int64_t* __restrict__ offsets, float lr) {
  constexpr bool kHasOut = !std::is_same_v<Out, NoOut>;
  const int64_t begin = offsets[blockIdx.y], end = offsets[blockIdx.y + 1];
  const int64_t vec_begin = min((begin + kVecA - 1) / kVecA * kVecA, end);
  const int64_t vec_end = max(end / kVecA * kVecA, vec_begin);
  const float rate = lr * ratios[blockIdx.y];
  const int64_t thread = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  const int64_t stride = static_cast<int64_t>(gridDim.x) * kThreads;
  const auto single = [&](int64_t i) {
    param[i] -= rate * update[i];
    if constexpr (kHasOut) out[i] = narrow<Out>(param[i]);
  };
  for (int64_t i = vec_begin + thread * kVecA; i < vec_end; i += stride * kVecA) {
    auto p = load<kVecA>(param + i);
    const auto u = load<kVecA>(update + i);
#pragma unroll
    for (int j = 0; j < kVecA; ++j) p.at[j] -= rate * u.at[j];
    store<kVecA>(param + i, p);
    if constexpr (kHasOut) {
      Vec<Out, kVecA> o;
#pragma unroll
      for (int j = 0; j < kVecA; ++j) o.at[j] = narrow<Out>(p.at[j]);
      store<kVecA>(out + i, o);
    }
  }
  for (int64_t i = begin + thread; i < vec_begin; i += stride) single(i);
  for (int64_t i = vec_end + thread; i < end; i += stride) single(i);
}

void lamb_direction(Tensor param, Tensor grad, Tensor exp_avg, Tensor exp_avg_sq, Tensor update,
                    std::optional<Tensor> grad_multiplier, double beta1, double beta2, double eps, double weight_decay,
                    int64_t step) {
  const int64_t n = param.numel();
  check_flat_fp32(param, "param", n);
  check_flat(grad, "grad", n);
  check_flat_fp32(exp_avg, "exp_avg", n);
  check_flat_fp32(exp_avg_sq, "exp_avg_sq", n);
  check_flat_fp32(update, "update", n);
  const float* multiplier = multiplier_pointer(grad_multiplier);
  if (n == 0) return;
  const AdamWScalars scalars(1.0, beta1, beta2, eps, 0.0, step);
  const torch::stable::accelerator::DeviceGuard guard(param.get_device_index());
  const cudaStream_t stream = current_stream(param);
  const float* p = param.const_data_ptr<float>();
  float* m = exp_avg.mutable_data_ptr<float>();
  float* v = exp_avg_sq.mutable_data_ptr<float>();
  float* u = update.mutable_data_ptr<float>();
  by_dtype(grad.scalar_type(), "grad", [&](auto element) {
    using Grad = decltype(element);
    constexpr int kVecG = 16 / sizeof(Grad);
    const Grad* g = static_cast<const Grad*>(grad.const_data_ptr());
    const auto decay = static_cast<float>(weight_decay);
    if (aligned16(p) && aligned16(g) && aligned16(m) && aligned16(v) && aligned16(u)) {
      const auto blocks = static_cast<unsigned>(ceil_div(n, int64_t{kThreads} * kVecG));
      direction_kernel<Grad, kVecG>
          <<<blocks, kThreads, 0, stream>>>(p, g, m, v, u, multiplier, scalars, scalars.step_size, decay, n);
    } else {
      const auto blocks = static_cast<unsigned>(ceil_div(n, kThreads));
      direction_kernel<Grad, 1>
          <<<blocks, kThreads, 0, stream>>>(p, g, m, v, u, multiplier, scalars, scalars.step_size, decay, n);
    }
  });
  STD_CUDA_KERNEL_LAUNCH_CHECK();
}

template <typename Out>
void launch_apply(const Tensor& param, const Tensor& update, void* out, const Tensor& ratios, const Tensor& offsets,
                  double lr) {
  float* p = param.mutable_data_ptr<float>();
  const float* u = update.const_data_ptr<float>();
  Out* o = static_cast<Out*>(out);
  const float* r = ratios.const_data_ptr<float>();
  const int64_t* at = offsets.const_data_ptr<int64_t>();
  const dim3 grid(kApplyBlocks, static_cast<unsigned>(ratios.numel()));
  const cudaStream_t stream = current_stream(param);
  const auto rate = static_cast<float>(lr);
  if (aligned16(p) && aligned16(u) && aligned16(o)) {
    apply_kernel<Out, 4><<<grid, kThreads, 0, stream>>>(p, u, o, r, at, rate);
  } else {
    apply_kernel<Out, 1><<<grid, kThreads, 0, stream>>>(p, u, o, r, at, rate);
  }
  STD_CUDA_KERNEL_LAUNCH_CHECK();
}

void lamb_apply(Tensor param, Tensor update, std::optional<Tensor> out_param, Tensor ratios, Tensor offsets,
                double lr) {
  const int64_t n = param.numel();
  check_flat_fp32(param, "param", n);
  check_flat_fp32(update, "update", n);
  if (out_param) check_flat(*out_param, "out_param", n);
  check_flat_fp32(ratios, "ratios", offsets.numel() - 1);
  STD_TORCH_CHECK(offsets.scalar_type() == ScalarType::Long && offsets.is_cuda(), "offsets must be int64 on the GPU");
  STD_TORCH_CHECK(ratios.numel() <= 65535, "at most 65535 segments, got ", ratios.numel());
  if (n == 0 || ratios.numel() == 0) return;
  const torch::stable::accelerator::DeviceGuard guard(param.get_device_index());
  if (!out_param) return launch_apply<NoOut>(param, update, nullptr, ratios, offsets, lr);
  by_dtype(out_param->scalar_type(), "out_param", [&](auto o) {
    launch_apply<decltype(o)>(param, update, out_param->mutable_data_ptr(), ratios, offsets, lr);
  });
}

}  // namespace
}  // namespace megalite
