// LAMB's two elementwise kernels on flat buffers. Contract: megalite/core/ops/lamb.py.

#pragma once

#include "common.cuh"

namespace megalite {
namespace {

constexpr int kApplyBlocks = 256;  // blocks per segment

// update and grad may be the same buffer (fp32): a thread reads its gradients before it writes.
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

// Segments may start anywhere: the vector loop covers the aligned middle; the edges are processed element by element.
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

template <typename Out>
void launch_apply(float* p, const float* u, Out* o, const float* ratios, const int64_t* offsets, int64_t segments,
                  double lr, cudaStream_t stream) {
  const dim3 grid(kApplyBlocks, static_cast<unsigned>(segments));
  const auto rate = static_cast<float>(lr);
  if (aligned16(p) && aligned16(u) && aligned16(o)) {
    apply_kernel<Out, 4><<<grid, kThreads, 0, stream>>>(p, u, o, ratios, offsets, rate);
  } else {
    apply_kernel<Out, 1><<<grid, kThreads, 0, stream>>>(p, u, o, ratios, offsets, rate);
  }
}

}  // namespace
}  // namespace megalite

// multiplier may be null.
MEGALITE_ENTRY(int64_t, lamb_direction_, const float* param, const void* grad, float* exp_avg, float* exp_avg_sq,
               float* update, const float* multiplier, int64_t n, int64_t grad_type, double beta1, double beta2,
               double eps, double weight_decay, int64_t step, void* on_stream) {
  using namespace megalite;
  if (n == 0) return 0;
  const AdamWScalars scalars(1.0, beta1, beta2, eps, 0.0, step);
  const auto stream = static_cast<cudaStream_t>(on_stream);
  const auto decay = static_cast<float>(weight_decay);
  by_type(grad_type, [&](auto element) {
    using Grad = decltype(element);
    constexpr int kVecG = 16 / sizeof(Grad);
    const Grad* g = static_cast<const Grad*>(grad);
    if (aligned16(param) && aligned16(g) && aligned16(exp_avg) && aligned16(exp_avg_sq) && aligned16(update)) {
      const auto blocks = static_cast<unsigned>(ceil_div(n, int64_t{kThreads} * kVecG));
      direction_kernel<Grad, kVecG><<<blocks, kThreads, 0, stream>>>(
          param, g, exp_avg, exp_avg_sq, update, multiplier, scalars, scalars.step_size, decay, n);
    } else {
      const auto blocks = static_cast<unsigned>(ceil_div(n, kThreads));
      direction_kernel<Grad, 1><<<blocks, kThreads, 0, stream>>>(
          param, g, exp_avg, exp_avg_sq, update, multiplier, scalars, scalars.step_size, decay, n);
    }
  });
  return cudaGetLastError();
}

// offsets [segments + 1] and ratios [segments] are on the GPU; out may be null.
MEGALITE_ENTRY(int64_t, lamb_apply_, float* param, const float* update, void* out, const float* ratios,
               const int64_t* offsets, int64_t segments, int64_t out_type, double lr, void* stream) {
  using namespace megalite;
  if (segments == 0) return 0;
  const auto launch = [&](auto* to) {
    launch_apply(param, update, to, ratios, offsets, segments, lr, static_cast<cudaStream_t>(stream));
  };
  if (out == nullptr) {
    launch(static_cast<NoOut*>(nullptr));
  } else {
    by_type(out_type, [&](auto o) { launch(static_cast<decltype(o)*>(out)); });
  }
  return cudaGetLastError();
}
