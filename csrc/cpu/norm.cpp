// RMSNorm with optional residual addition, forward and backward, a row at a time while it is in cache.
// Contract: megalite/ops/rmsnorm.py. Schemas shared with the Triton kernels, which also serve LayerNorm: on CPU torch's
// own kernel is faster at that.

#include <cmath>
#include <optional>
#include <tuple>

#include <torch/csrc/stable/library.h>

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
      // What is normalised is the rounded sum, since that is what backward sees.
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
  float* dweight;  // [blocks, width], zero before
  int64_t rows, width, block_rows;
};

// A block of rows shares one row of dweight: the sums' order depends on the shape alone, not on the threads.
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

// target_clones does not apply to templates, hence a plain function per combination.
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

std::tuple<Tensor, Tensor, Tensor, Tensor> norm(Tensor x, std::optional<Tensor> residual, Tensor weight,
                                                std::optional<Tensor> bias, double eps) {
  STD_TORCH_CHECK(!bias, "LayerNorm has no C++ kernel");
  const bool bf16 = is_bf16(x, "x"), add = residual.has_value();
  const int64_t width = x.size(-1), rows = width ? x.numel() / width : 0;
  const Tensor from = packed(x), extra = add ? matching(*residual, x, "residual") : from;
  const Wide wide_weight(weight, width, "weight");
  Tensor y = torch::stable::new_empty(x, x.sizes());
  Tensor total = add ? torch::stable::new_empty(x, x.sizes()) : torch::stable::new_empty(x, {0});
  Tensor mean = torch::stable::new_empty(x, {0}, ScalarType::Float);
  Tensor rstd = torch::stable::new_empty(x, {rows}, ScalarType::Float);
  const Forward f{
      from.const_data_ptr(),
      extra.const_data_ptr(),
      wide_weight.data(),
      y.mutable_data_ptr(),
      total.mutable_data_ptr(),
      rstd.mutable_data_ptr<float>(),
      width,
      static_cast<float>(eps),
  };
  const auto kernel = bf16 ? (add ? forward_add_bf16 : forward_bf16) : (add ? forward_add_f32 : forward_f32);
  for_rows(rows, width, [&](int64_t begin, int64_t end) { kernel(f, begin, end); });
  return {y, total, mean, rstd};
}

// Sum of blocks [blocks, width], as a vector of the type of `like`.
Tensor sum_blocks(std::vector<float>& blocks, int64_t width, const Tensor& like) {
  float* sum = blocks.data();
  for (size_t at = width; at < blocks.size(); at += width) {
    for (int64_t i = 0; i < width; ++i) sum[i] += sum[at + i];
  }
  Tensor out = torch::stable::new_empty(like, {width});
  if (is_bf16(like, "weight")) {
    BF16* to = static_cast<BF16*>(out.mutable_data_ptr());
    for (int64_t i = 0; i < width; ++i) narrow(sum[i], to[i]);
  } else {
    std::copy_n(sum, width, out.mutable_data_ptr<float>());
  }
  return out;
}

std::tuple<Tensor, Tensor, Tensor> norm_backward(Tensor dy, std::optional<Tensor> dtotal, Tensor x, Tensor weight,
                                                 Tensor mean, Tensor rstd, bool rms) {
  STD_TORCH_CHECK(rms, "LayerNorm has no C++ kernel");
  const bool bf16 = is_bf16(x, "x"), add = dtotal.has_value();
  const int64_t width = x.size(-1), rows = width ? x.numel() / width : 0;
  STD_TORCH_CHECK(rstd.numel() == rows, "rstd does not fit");
  const Tensor from = packed(x), out = matching(dy, x, "dy"), extra = add ? matching(*dtotal, x, "dtotal") : out;
  const Wide wide_weight(weight, width, "weight");
  // At most 64 blocks, of at least 16 rows.
  const int64_t block_rows = std::max<int64_t>(16, (rows + 63) / 64);
  const int64_t blocks = std::max<int64_t>(1, (rows + block_rows - 1) / block_rows);
  std::vector<float> dweight(blocks * width);
  Tensor dx = torch::stable::new_empty(x, x.sizes());
  const Backward b{
      out.const_data_ptr(),
      extra.const_data_ptr(),
      from.const_data_ptr(),
      wide_weight.data(),
      rstd.const_data_ptr<float>(),
      dx.mutable_data_ptr(),
      dweight.data(),
      rows,
      width,
      block_rows,
  };
  const auto kernel = bf16 ? (add ? backward_add_bf16 : backward_bf16) : (add ? backward_add_f32 : backward_f32);
  for_rows(blocks, block_rows * width, [&](int64_t begin, int64_t end) { kernel(b, begin, end); });
  return {dx, sum_blocks(dweight, width, weight), torch::stable::new_empty(weight, {0})};
}

}  // namespace
}  // namespace megalite

STABLE_TORCH_LIBRARY_IMPL(megalite, CPU, m) {
  m.impl("norm", TORCH_BOX(&megalite::norm));
  m.impl("norm_backward", TORCH_BOX(&megalite::norm_backward));
}
