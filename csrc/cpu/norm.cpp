// RMSNorm with optional residual addition, forward and backward, a row at a time while it is in cache.
// Contract: megalite/core/ops/rmsnorm.py. There is none for LayerNorm: torch's own kernel is faster.

#include <cmath>

#include "rows.h"

namespace megalite {
namespace {

struct Forward {
  const void* x;
  const void* residual;
  const float* weight;
  void* y;
  void* total;
  float* rstd;
  int64_t width;
  float eps;
};

template <typename T, bool kAdd>
inline __attribute__((always_inline)) void forward(const Forward& f, int64_t begin, int64_t end) {
  const int64_t n = f.width;
  const float eps = f.eps, count = static_cast<float>(n);
  const float* __restrict__ weight = f.weight;
  for (int64_t row = begin; row < end; ++row) {
    const T* x = static_cast<const T*>(f.x) + row * n;
    T* __restrict__ y = static_cast<T*>(f.y) + row * n;
    if constexpr (kAdd) {
      const T* __restrict__ residual = static_cast<const T*>(f.residual) + row * n;
      T* __restrict__ total = static_cast<T*>(f.total) + row * n;
      // The rounded sum is normalized, because backward reads that one.
      for (int64_t i = 0; i < n; ++i) narrow(widen(x[i]) + widen(residual[i]), total[i]);
      x = total;
    }
    const float mean_square = sum_of(n, [x](int64_t i) { return widen(x[i]) * widen(x[i]); }) / count;
    const float rstd = 1.0f / std::sqrt(mean_square + eps);
    f.rstd[row] = rstd;
    for (int64_t i = 0; i < n; ++i) narrow(widen(x[i]) * rstd * weight[i], y[i]);
  }
}

struct Backward {
  const void* dy;
  const void* dtotal;
  const void* x;
  const float* weight;
  const float* rstd;
  void* dx;
  float* dweight;  // [blocks, width], initially zero
  int64_t rows, width, block_rows;
};

// A block of rows shares one row of dweight: the order of sums depends on the shape only, not on the threads.
template <typename T, bool kAdd>
inline __attribute__((always_inline)) void backward(const Backward& b, int64_t begin, int64_t end) {
  const int64_t n = b.width;
  const float count = static_cast<float>(n);
  const float* __restrict__ weight = b.weight;
  for (int64_t block = begin; block < end; ++block) {
    float* __restrict__ dweight = b.dweight + block * n;
    for (int64_t row = block * b.block_rows; row < std::min(b.rows, (block + 1) * b.block_rows); ++row) {
      const T* __restrict__ dy = static_cast<const T*>(b.dy) + row * n;
      const T* __restrict__ x = static_cast<const T*>(b.x) + row * n;
      T* __restrict__ dx = static_cast<T*>(b.dx) + row * n;
      const float rstd = b.rstd[row];
      const float projection = sum_of(n, [&](int64_t i) {
        const float normed = widen(x[i]) * rstd, out = widen(dy[i]);
        dweight[i] += out * normed;
        return out * weight[i] * normed;
      }) / count;
      const auto gradient = [=](int64_t i) {
        return (widen(dy[i]) * weight[i] - widen(x[i]) * rstd * projection) * rstd;
      };
      if constexpr (kAdd) {
        const T* __restrict__ dtotal = static_cast<const T*>(b.dtotal) + row * n;
        for (int64_t i = 0; i < n; ++i) narrow(gradient(i) + widen(dtotal[i]), dx[i]);
      } else {
        for (int64_t i = 0; i < n; ++i) narrow(gradient(i), dx[i]);
      }
    }
  }
}

// target_clones does not apply to templates, so there is one plain function per combination.
#define MEGALITE_NORM(suffix, T, add)                                                     \
  MEGALITE_CLONES void forward_##suffix(const Forward& f, int64_t begin, int64_t end) {   \
    forward<T, add>(f, begin, end);                                                       \
  }                                                                                       \
  MEGALITE_CLONES void backward_##suffix(const Backward& b, int64_t begin, int64_t end) { \
    backward<T, add>(b, begin, end);                                                      \
  }
MEGALITE_NORM(f32, float, false)
MEGALITE_NORM(add_f32, float, true)
MEGALITE_NORM(bf16, BF16, false)
MEGALITE_NORM(add_bf16, BF16, true)
#undef MEGALITE_NORM

// Adds up the rows of [blocks, width] into `out`, which has the weight's type.
void sum_blocks(std::vector<float>& blocks, int64_t width, void* out, bool bf16) {
  float* sum = blocks.data();
  for (size_t at = width; at < blocks.size(); at += width) {
    for (int64_t i = 0; i < width; ++i) sum[i] += sum[at + i];
  }
  if (bf16) {
    for (int64_t i = 0; i < width; ++i) narrow(sum[i], static_cast<BF16*>(out)[i]);
  } else {
    std::copy_n(sum, width, static_cast<float*>(out));
  }
}

}  // namespace

void norm(const void* x, const void* residual, const void* weight, void* y, void* total, float* rstd, int64_t rows,
          int64_t width, bool bf16, bool bf16_weight, double eps, int64_t threads) {
  const Wide wide_weight(weight, width, bf16_weight);
  const Forward f{x, residual, wide_weight.data(), y, total, rstd, width, static_cast<float>(eps)};
  const bool add = residual != nullptr;
  const auto kernel = bf16 ? (add ? forward_add_bf16 : forward_bf16) : (add ? forward_add_f32 : forward_f32);
  for_rows(rows, width, threads, [&](int64_t begin, int64_t end) { kernel(f, begin, end); });
}

void norm_backward(const void* dy, const void* dtotal, const void* x, const void* weight, const float* rstd, void* dx,
                   void* dweight, int64_t rows, int64_t width, bool bf16, bool bf16_weight, int64_t threads) {
  const Wide wide_weight(weight, width, bf16_weight);
  // At most 64 blocks, each of at least 16 rows.
  const int64_t block_rows = std::max<int64_t>(16, (rows + 63) / 64);
  const int64_t blocks = std::max<int64_t>(1, (rows + block_rows - 1) / block_rows);
  std::vector<float> sums(blocks * width);
  const Backward b{dy, dtotal, x, wide_weight.data(), rstd, dx, sums.data(), rows, width, block_rows};
  const bool add = dtotal != nullptr;
  const auto kernel = bf16 ? (add ? backward_add_bf16 : backward_bf16) : (add ? backward_add_f32 : backward_f32);
  for_rows(blocks, block_rows * width, threads, [&](int64_t begin, int64_t end) { kernel(b, begin, end); });
  sum_blocks(sums, width, dweight, bf16_weight);
}

}  // namespace megalite
