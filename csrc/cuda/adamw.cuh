// Flat AdamW: unscale, clip, update and low-precision write in one pass. Contract: megalite/core/ops/adamw.py.

#pragma once

#include "common.cuh"

namespace megalite {
namespace {

// Each thread updates kVec consecutive elements; the last one may have fewer.
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
void launch_adamw(float* p, const Grad* g, float* m, float* v, Out* o, const float* multiplier,
                  const AdamWScalars& scalars, int64_t n, cudaStream_t stream) {
  // 8 two-byte gradients or 4 four-byte ones make a 128-bit load.
  constexpr int kVec = 16 / sizeof(Grad);
  if (aligned16(p) && aligned16(m) && aligned16(v) && aligned16(g) && aligned16(o)) {
    const auto blocks = static_cast<unsigned>(ceil_div(n, int64_t{kThreads} * kVec));
    adamw_kernel<Grad, Out, kVec><<<blocks, kThreads, 0, stream>>>(p, g, m, v, o, multiplier, scalars, n);
  } else {
    const auto blocks = static_cast<unsigned>(ceil_div(n, kThreads));
    adamw_kernel<Grad, Out, 1><<<blocks, kThreads, 0, stream>>>(p, g, m, v, o, multiplier, scalars, n);
  }
}

}  // namespace
}  // namespace megalite

// out and multiplier may be null.
MEGALITE_ENTRY(int64_t, adamw_, float* param, const void* grad, float* exp_avg, float* exp_avg_sq, void* out,
               const float* multiplier, int64_t n, int64_t grad_type, int64_t out_type, double lr, double beta1,
               double beta2, double eps, double weight_decay, int64_t step, void* stream) {
  using namespace megalite;
  if (n == 0) return 0;
  const AdamWScalars scalars(lr, beta1, beta2, eps, weight_decay, step);
  by_type(grad_type, [&](auto g) {
    const auto launch = [&](auto* to) {
      launch_adamw(param, static_cast<const decltype(g)*>(grad), exp_avg, exp_avg_sq, to, multiplier, scalars, n,
                   static_cast<cudaStream_t>(stream));
    };
    if (out == nullptr) return launch(static_cast<NoOut*>(nullptr));
    by_type(out_type, [&](auto o) { launch(static_cast<decltype(o)*>(out)); });
  });
  return cudaGetLastError();
}
