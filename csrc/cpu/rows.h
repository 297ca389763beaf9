// Helpers of the row kernels: sums in a fixed order, and rows divided among threads.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "convert.h"
#include "kernels.h"
#include "parallel.h"

namespace megalite {

constexpr int kLanes = 64;  // four registers of AVX-512: enough independent sums to hide an addition's latency

// Pairwise, in the same order for every instruction set.
inline __attribute__((always_inline)) float sum_lanes(float* lanes) {
  for (int lane = 0; lane < 32; ++lane) lanes[lane] += lanes[lane + 32];
  for (int lane = 0; lane < 16; ++lane) lanes[lane] += lanes[lane + 16];
  for (int lane = 0; lane < 8; ++lane) lanes[lane] += lanes[lane + 8];
  for (int lane = 0; lane < 4; ++lane) lanes[lane] += lanes[lane + 4];
  return (lanes[0] + lanes[2]) + (lanes[1] + lanes[3]);
}

// Sum of term(i) for i < n: lane i mod 64 adds it; the last n mod 64 terms are added one by one.
template <typename Term>
inline __attribute__((always_inline)) float sum_of(int64_t n, const Term& term) {
  float lanes[kLanes] = {};
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    for (int lane = 0; lane < kLanes; ++lane) lanes[lane] += term(i + lane);
  }
  float rest = 0.0f;
  for (; i < n; ++i) rest += term(i);
  return sum_lanes(lanes) + rest;
}

// A short vector converted to fp32.
class Wide {
 public:
  Wide(const void* from, int64_t n, bool bf16) : source_(static_cast<const float*>(from)) {
    if (!bf16) return;
    wide_.resize(n);
    for (int64_t i = 0; i < n; ++i) wide_[i] = widen(static_cast<const BF16*>(from)[i]);
    source_ = wide_.data();
  }
  const float* data() const { return source_; }

 private:
  const float* source_;
  std::vector<float> wide_;
};

// Calls run(begin, end) for ranges of rows of `width` elements.
template <typename Run>
inline void for_rows(int64_t rows, int64_t width, int64_t threads, const Run& run) {
  parallel_for(rows, std::max<int64_t>(1, (1 << 15) / std::max<int64_t>(1, width)), threads, run);
}

}  // namespace megalite
