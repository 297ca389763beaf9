// The arithmetic of one AdamW element, shared by the CPU and CUDA kernels.
// Loshchilov and Hutter 2019, algorithm 2; contract: megalite/core/ops/adamw.py.
#pragma once

#include <cmath>
#include <cstdint>

#ifdef __CUDACC__
#define MEGALITE_INLINE __host__ __device__ __forceinline__
#else
#define MEGALITE_INLINE inline __attribute__((always_inline))
#endif

namespace megalite {

// Constants are computed once per launch on the host, in double; kernels use fp32.
struct AdamWScalars {
  float beta1, one_minus_beta1;
  float beta2, one_minus_beta2;
  float decay;                // 1 - lr * weight_decay
  float step_size;            // lr / (1 - beta1^step)
  float inv_sqrt_correction;  // 1 / sqrt(1 - beta2^step)
  float eps;

  AdamWScalars(double lr, double b1, double b2, double epsilon, double weight_decay, int64_t step)
      : beta1(static_cast<float>(b1)),
        one_minus_beta1(static_cast<float>(1.0 - b1)),
        beta2(static_cast<float>(b2)),
        one_minus_beta2(static_cast<float>(1.0 - b2)),
        decay(static_cast<float>(1.0 - lr * weight_decay)),
        step_size(static_cast<float>(lr / (1.0 - std::pow(b1, static_cast<double>(step))))),
        inv_sqrt_correction(static_cast<float>(1.0 / std::sqrt(1.0 - std::pow(b2, static_cast<double>(step))))),
        eps(static_cast<float>(epsilon)) {}
};

MEGALITE_INLINE void moments(float g, float& m, float& v, const AdamWScalars& s) {
  m = s.beta1 * m + s.one_minus_beta1 * g;
  v = s.beta2 * v + s.one_minus_beta2 * g * g;
}

MEGALITE_INLINE void adamw_element(float& p, float g, float& m, float& v, const AdamWScalars& s) {
  moments(g, m, v, s);
  p = s.decay * p - s.step_size * m / (sqrtf(v) * s.inv_sqrt_correction + s.eps);
}

}  // namespace megalite
