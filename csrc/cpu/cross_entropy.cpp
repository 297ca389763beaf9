// Statistics and in-place gradient of vocab-parallel cross-entropy. Contract: megalite/core/ops/cross_entropy.py.

#include <limits>

#include "exp.h"
#include "rows.h"

namespace megalite {
namespace {

constexpr int64_t kBlock = 2048;  // logits per block: they stay in L1 between its maximum and its sum
constexpr float kNothing = -std::numeric_limits<float>::infinity();

// NaN is skipped here: it reaches the sum anyway.
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

// Online softmax over blocks: the running sum is rescaled when the maximum grows. Sums of blocks are added in double.
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
      // Only -inf so far: any finite reference gives exp(-inf) = 0.
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
    // Read before it is overwritten: 1 is subtracted from the target column before rounding.
    const float at_target = ours ? exp_f32(widen(logits[local]) - lse) * scale - scale : 0.0f;
    gradient_row(logits, lse, scale, r.columns);
    if (ours) narrow(at_target, logits[local]);
    for (int64_t i = r.columns; i < r.width; ++i) narrow(0.0f, logits[i]);
  }
}

// target_clones does not apply to templates, so there is one plain function per type.
MEGALITE_CLONES void stats_f32(const Rows& r, int64_t begin, int64_t end) { stats<float>(r, begin, end); }
MEGALITE_CLONES void stats_bf16(const Rows& r, int64_t begin, int64_t end) { stats<BF16>(r, begin, end); }
MEGALITE_CLONES void gradient_f32(const Rows& r, int64_t begin, int64_t end) { gradient<float>(r, begin, end); }
MEGALITE_CLONES void gradient_bf16(const Rows& r, int64_t begin, int64_t end) { gradient<BF16>(r, begin, end); }

}  // namespace

void cross_entropy_stats(const void* logits, const int64_t* target, float* stats, int64_t rows, int64_t stride,
                         int64_t valid, int64_t vocab_start, bool bf16, int64_t threads) {
  // Read only.
  const Rows r{const_cast<void*>(logits), target, stats, nullptr, nullptr, stride, valid, valid, vocab_start};
  const auto kernel = bf16 ? stats_bf16 : stats_f32;
  for_rows(rows, valid, threads, [&](int64_t begin, int64_t end) { kernel(r, begin, end); });
}

void cross_entropy_grad_(void* logits, const int64_t* target, const float* lse, const float* scale, int64_t rows,
                         int64_t stride, int64_t valid, int64_t width, int64_t vocab_start, bool bf16,
                         int64_t threads) {
  const Rows r{logits, target, nullptr, lse, scale, stride, valid, width, vocab_start};
  const auto kernel = bf16 ? gradient_bf16 : gradient_f32;
  for_rows(rows, width, threads, [&](int64_t begin, int64_t end) { kernel(r, begin, end); });
}

}  // namespace megalite
