// What the row kernels share: operands as rows, sums in a fixed order, rows over threads.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

#include "convert.h"

namespace megalite {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

constexpr int kLanes = 64;  // four registers of AVX-512: enough independent sums to hide an addition's latency

// Pairwise, in one order whatever the instruction set.
inline __attribute__((always_inline)) float sum_lanes(float* lanes) {
  for (int lane = 0; lane < 32; ++lane) lanes[lane] += lanes[lane + 32];
  for (int lane = 0; lane < 16; ++lane) lanes[lane] += lanes[lane + 16];
  for (int lane = 0; lane < 8; ++lane) lanes[lane] += lanes[lane + 8];
  for (int lane = 0; lane < 4; ++lane) lanes[lane] += lanes[lane + 4];
  return (lanes[0] + lanes[2]) + (lanes[1] + lanes[3]);
}

// sum of term(i), i < n: lane i mod 64 takes it, but for the last n mod 64, which are added one after the other.
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

inline bool is_bf16(const Tensor& t, const char* name) {
  const ScalarType type = t.scalar_type();
  STD_TORCH_CHECK(type == ScalarType::BFloat16 || type == ScalarType::Float, name, " must be fp32 or bf16 on CPU");
  return type == ScalarType::BFloat16;
}

// `t` itself, or a contiguous copy; shape and type must be those of `like`.
inline Tensor matching(const Tensor& t, const Tensor& like, const char* name) {
  STD_TORCH_CHECK(t.numel() == like.numel() && t.scalar_type() == like.scalar_type(), name, " does not fit");
  return t.is_contiguous() ? t : torch::stable::contiguous(t);
}

inline Tensor packed(const Tensor& t) { return t.is_contiguous() ? t : torch::stable::contiguous(t); }

// A short vector as fp32, whatever it is kept in.
class Wide {
 public:
  Wide(const Tensor& t, int64_t n, const char* name) : source_(packed(t)) {
    STD_TORCH_CHECK(t.numel() == n, name, " has ", t.numel(), " elements, the rows have ", n);
    if (is_bf16(t, name)) {
      const BF16* from = static_cast<const BF16*>(source_.const_data_ptr());
      wide_.resize(n);
      for (int64_t i = 0; i < n; ++i) wide_[i] = widen(from[i]);
    }
  }
  const float* data() const {
    return wide_.empty() ? static_cast<const float*>(source_.const_data_ptr()) : wide_.data();
  }

 private:
  Tensor source_;
  std::vector<float> wide_;
};

// run(begin, end) over rows of `width` elements; nobody's result may depend on where the cuts are.
template <typename Run>
inline void for_rows(int64_t rows, int64_t width, const Run& run) {
  torch::stable::parallel_for(0, rows, std::max<int64_t>(1, (1 << 15) / std::max<int64_t>(1, width)), run);
}

}  // namespace megalite
