// L2 norm of a flat buffer on CPU; the order of sums depends on its length only. Contract: megalite/core/ops/l2_norm.py.

#include <algorithm>
#include <cmath>
#include <vector>

#include "convert.h"
#include "kernels.h"
#include "parallel.h"

namespace megalite {
namespace {

constexpr int64_t kBlock = 4096;  // elements per block: 64 additions per lane in fp32, then sums of blocks in double
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

}  // namespace

void l2_norm(const void* x, float* norm, int64_t n, bool bf16, int64_t threads) {
  std::vector<double> sums((n + kBlock - 1) / kBlock);
  const auto kernel = bf16 ? blocks_bf16 : blocks_f32;
  parallel_for(static_cast<int64_t>(sums.size()), 8, threads,
               [&](int64_t begin, int64_t end) { kernel(x, n, sums.data(), begin, end); });
  double total = 0;
  for (double sum : sums) total += sum;
  *norm = static_cast<float>(std::sqrt(total));
}

}  // namespace megalite
