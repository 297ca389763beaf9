// L2 norm of a flat buffer on CPU, in an order that depends on its length alone. Contract: megalite/ops/l2_norm.py.

#include <algorithm>
#include <cmath>
#include <vector>

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include "../common/checks.h"
#include "convert.h"

namespace megalite {
namespace {

constexpr int64_t kBlock = 4096;  // elements a block: 64 additions a lane, then doubles
constexpr int kLanes = 64;

template <typename T>
inline __attribute__((always_inline)) double block_sum(const T* x, int64_t n) {
  float lanes[kLanes] = {};
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    for (int lane = 0; lane < kLanes; ++lane) {
      const float value = widen(x[i + lane]);
      lanes[lane] += value * value;
    }
  }
  double total = 0;
  for (; i < n; ++i) total += static_cast<double>(widen(x[i])) * widen(x[i]);
  for (float lane : lanes) total += lane;
  return total;
}

template <typename T>
inline __attribute__((always_inline)) void blocks(const void* x, int64_t n, double* sums, int64_t begin, int64_t end) {
  for (int64_t block = begin; block < end; ++block) {
    sums[block] = block_sum(static_cast<const T*>(x) + block * kBlock, std::min(kBlock, n - block * kBlock));
  }
}

MEGALITE_CLONES void blocks_f32(const void* x, int64_t n, double* sums, int64_t begin, int64_t end) {
  blocks<float>(x, n, sums, begin, end);
}

MEGALITE_CLONES void blocks_bf16(const void* x, int64_t n, double* sums, int64_t begin, int64_t end) {
  blocks<BF16>(x, n, sums, begin, end);
}

Tensor l2_norm(Tensor flat) {
  STD_TORCH_CHECK(flat.is_contiguous(), "flat must be contiguous");
  const bool bf16 = flat.scalar_type() == ScalarType::BFloat16;
  STD_TORCH_CHECK(bf16 || flat.scalar_type() == ScalarType::Float, "flat must be fp32 or bf16 on CPU");
  const int64_t n = flat.numel();
  const void* x = flat.const_data_ptr();
  std::vector<double> sums((n + kBlock - 1) / kBlock);
  torch::stable::parallel_for(0, static_cast<int64_t>(sums.size()), 8, [&](int64_t begin, int64_t end) {
    (bf16 ? blocks_bf16 : blocks_f32)(x, n, sums.data(), begin, end);
  });
  double total = 0;
  for (double sum : sums) total += sum;
  Tensor norm = torch::stable::new_empty(flat, {}, ScalarType::Float);
  *norm.mutable_data_ptr<float>() = static_cast<float>(std::sqrt(total));
  return norm;
}

}  // namespace
}  // namespace megalite

STABLE_TORCH_LIBRARY_IMPL(megalite, CPU, m) { m.impl("l2_norm", TORCH_BOX(&megalite::l2_norm)); }
