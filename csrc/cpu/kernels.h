// The CPU kernels: callers check shapes, types and devices (bindings.cpp). `bf16`: elements are bf16, otherwise fp32.
#pragma once

#include <cstdint>

namespace megalite {

// residual (with total) may be null.
void norm(const void* x, const void* residual, const void* weight, void* y, void* total, float* rstd, int64_t rows,
          int64_t width, bool bf16, bool bf16_weight, double eps, int64_t threads);

// dtotal may be null.
void norm_backward(const void* dy, const void* dtotal, const void* x, const void* weight, const float* rstd, void* dx,
                   void* dweight, int64_t rows, int64_t width, bool bf16, bool bf16_weight, int64_t threads);

// `width` is the width of one half.
void glu(const void* gate_up, void* out, int64_t rows, int64_t width, int64_t kind, bool bf16, int64_t threads);

void glu_backward(const void* dy, const void* gate_up, void* grad, int64_t rows, int64_t width, int64_t kind,
                  bool bf16, int64_t threads);

// Heads [seq, batch, heads, width], contiguous along the width; strides are in elements.
struct Heads {
  void* data;
  int64_t s, b, h;
};

// Rotates the heads of x into y, which is contiguous; in place if x and y are the same. cos and sin are [seq, half];
// sign -1 rotates back.
void rope(const Heads& x, void* y, const float* cos, const float* sin, int64_t seq, int64_t batch, int64_t heads,
          int64_t width, int64_t half, int64_t sign, bool bf16, int64_t threads);

// Rotates dq and dk back and packs them with dv into out [seq, batch, num_heads + 2 num_kv_heads, width].
void rope_pack(const Heads& dq, const Heads& dk, const Heads& dv, void* out, const float* cos, const float* sin,
               int64_t seq, int64_t batch, int64_t num_heads, int64_t num_kv_heads, int64_t width, int64_t half,
               bool bf16, int64_t threads);

// Rows lie `stride` elements apart; only their first `valid` columns count, the rest is padding.
void cross_entropy_stats(const void* logits, const int64_t* target, float* stats, int64_t rows, int64_t stride,
                         int64_t valid, int64_t vocab_start, bool bf16, int64_t threads);

void cross_entropy_grad_(void* logits, const int64_t* target, const float* lse, const float* scale, int64_t rows,
                         int64_t stride, int64_t valid, int64_t width, int64_t vocab_start, bool bf16,
                         int64_t threads);

// out and multiplier may be null.
void adamw_(float* param, const void* grad, float* exp_avg, float* exp_avg_sq, void* out, const float* multiplier,
            int64_t n, bool bf16_grad, bool bf16_out, double lr, double beta1, double beta2, double eps,
            double weight_decay, int64_t step, int64_t threads);

void l2_norm(const void* x, float* norm, int64_t n, bool bf16, int64_t threads);

}  // namespace megalite
