// Statistics and in-place gradient of vocab-parallel cross-entropy. Contract: megalite/ops/cross_entropy.py.

#include <limits>

#include <torch/csrc/stable/library.h>

#include "exp.h"
#include "rows.h"

namespace megalite {
namespace {

constexpr int64_t kBlock = 2048;  // logits a block: they stay in the first cache between its maximum and its sum
constexpr float kNothing = -std::numeric_limits<float>::infinity();

// NaN is passed over: the sum has it anyway.
template <typename T>
inline __attribute__((always_inline)) float maximum(const T* __restrict__ x, int64_t n) {
  float lanes[kLanes];
  for (int lane = 0; lane < kLanes; ++lane) lanes[lane] = kNothing;
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    for (int lane = 0; lane < kLanes; ++lane) {
      const float value = widen(x[i + lane]);
      lanes[lane] = value > lanes[lane] ? value : lanes[lane];
    }
  }
  float most = kNothing;
  for (float lane : lanes) most = lane > most ? lane : most;
  for (; i < n; ++i) most = widen(x[i]) > most ? widen(x[i]) : most;
  return most;
}

struct Rows {
  void* logits;
  const int64_t* target;
  float* stats;
  const float* lse;
  const float* scale;
  int64_t stride, columns, width, vocab_start;
};

// Online softmax over blocks: what was summed is rescaled when the maximum grows. Blocks are added in double.
template <typename T>
inline __attribute__((always_inline)) void stats(const Rows& r, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; ++row) {
    const T* logits = static_cast<const T*>(r.logits) + row * r.stride;
    float most = kNothing;
    double total = 0;
    for (int64_t start = 0; start < r.columns; start += kBlock) {
      const T* x = logits + start;
      const int64_t n = std::min(kBlock, r.columns - start);
      const float block_most = maximum(x, n);
      if (block_most > most) {
        total *= exp_f32(most - block_most);
        most = block_most;
      }
      // Nothing but -inf so far: any finite reference gives exp(-inf) = 0.
      const float reference = most == kNothing ? 0.0f : most;
      total += sum_of(n, [x, reference](int64_t i) { return exp_f32(widen(x[i]) - reference); });
    }
    const int64_t local = r.target[row] - r.vocab_start;
    r.stats[3 * row] = most;
    r.stats[3 * row + 1] = static_cast<float>(total);
    r.stats[3 * row + 2] = 0 <= local && local < r.columns ? widen(logits[local]) : 0.0f;
  }
}

template <typename T>
inline __attribute__((always_inline)) void gradient_row(T* __restrict__ logits, float lse, float scale, int64_t n) {
  for (int64_t i = 0; i < n; ++i) narrow(exp_f32(widen(logits[i]) - lse) * scale, logits[i]);
}

template <typename T>
inline __attribute__((always_inline)) void gradient(const Rows& r, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; ++row) {
    T* logits = static_cast<T*>(r.logits) + row * r.stride;
    const float lse = r.lse[row], scale = r.scale[row];
    const int64_t local = r.target[row] - r.vocab_start;
    const bool ours = 0 <= local && local < r.columns;
    // Before it is overwritten: the one column is subtracted from ahead of rounding.
    const float at_target = ours ? exp_f32(widen(logits[local]) - lse) * scale - scale : 0.0f;
    gradient_row(logits, lse, scale, r.columns);
    if (ours) narrow(at_target, logits[local]);
    for (int64_t i = r.columns; i < r.width; ++i) narrow(0.0f, logits[i]);
  }
}

// target_clones does not apply to templates, hence a plain function per type.
MEGALITE_CLONES void stats_f32(const Rows& r, int64_t begin, int64_t end) { stats<float>(r, begin, end); }
MEGALITE_CLONES void stats_bf16(const Rows& r, int64_t begin, int64_t end) { stats<BF16>(r, begin, end); }
MEGALITE_CLONES void gradient_f32(const Rows& r, int64_t begin, int64_t end) { gradient<float>(r, begin, end); }
MEGALITE_CLONES void gradient_bf16(const Rows& r, int64_t begin, int64_t end) { gradient<BF16>(r, begin, end); }

void check(const Tensor& logits, const Tensor& target, int64_t valid) {
  STD_TORCH_CHECK(logits.dim() == 2 && (logits.stride(1) == 1 || logits.size(1) <= 1),
                  "logits must be rows of unit stride along the vocabulary");
  STD_TORCH_CHECK(target.numel() == logits.size(0) && target.scalar_type() == ScalarType::Long,
                  "target must be one int64 a row");
  STD_TORCH_CHECK(0 <= valid && valid <= logits.size(1), valid, " valid columns of ", logits.size(1));
}

Tensor cross_entropy_stats(Tensor logits, Tensor target, int64_t vocab_start, int64_t valid) {
  check(logits, target, valid);
  const int64_t rows = logits.size(0);
  const Tensor ids = packed(target);
  Tensor out = torch::stable::new_empty(logits, {rows, 3}, ScalarType::Float);
  // Only read.
  void* from = const_cast<void*>(logits.const_data_ptr());
  const Rows r{
      from, ids.const_data_ptr<int64_t>(), out.mutable_data_ptr<float>(), nullptr, nullptr, logits.stride(0), valid,
      logits.size(1), vocab_start,
  };
  const auto kernel = is_bf16(logits, "logits") ? stats_bf16 : stats_f32;
  for_rows(rows, valid, [&](int64_t begin, int64_t end) { kernel(r, begin, end); });
  return out;
}

void cross_entropy_grad_(Tensor logits, Tensor target, int64_t vocab_start, Tensor lse, Tensor scale, int64_t valid) {
  check(logits, target, valid);
  const int64_t rows = logits.size(0);
  STD_TORCH_CHECK(lse.numel() == rows && scale.numel() == rows, "lse and scale must be one number a row");
  const Tensor ids = packed(target), total = packed(lse), factor = packed(scale);
  const Rows r{
      logits.mutable_data_ptr(), ids.const_data_ptr<int64_t>(), nullptr, total.const_data_ptr<float>(),
      factor.const_data_ptr<float>(), logits.stride(0), valid, logits.size(1), vocab_start,
  };
  const auto kernel = is_bf16(logits, "logits") ? gradient_bf16 : gradient_f32;
  for_rows(rows, logits.size(1), [&](int64_t begin, int64_t end) { kernel(r, begin, end); });
}

}  // namespace
}  // namespace megalite

STABLE_TORCH_LIBRARY_IMPL(megalite, CPU, m) {
  m.impl("cross_entropy_stats", TORCH_BOX(&megalite::cross_entropy_stats));
  m.impl("cross_entropy_grad_", TORCH_BOX(&megalite::cross_entropy_grad_));
}
