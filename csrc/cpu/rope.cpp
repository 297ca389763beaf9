// Rotary embedding: heads at any stride, read and written in one pass. Contract: megalite/core/ops/rope.py.

#include <cstring>

#include "rows.h"

namespace megalite {
namespace {

struct Rotation {
  Heads from, to;
  const float* cos;
  const float* sin;
  int64_t batch, heads, width, half;
  float sign;  // of the angle: -1 rotates back
};

// Pointers are parameters because gcc honors __restrict__ only there.
template <typename T>
inline __attribute__((always_inline)) void rotate_here(T* __restrict__ first, T* __restrict__ second,
                                                       const float* __restrict__ cos, const float* __restrict__ sin,
                                                       float sign, int64_t half) {
  for (int64_t i = 0; i < half; ++i) {
    const float a = widen(first[i]), b = widen(second[i]), s = sign * sin[i];
    narrow(a * cos[i] - b * s, first[i]);
    narrow(b * cos[i] + a * s, second[i]);
  }
}

template <typename T>
inline __attribute__((always_inline)) void rotate(const T* __restrict__ from_first, const T* __restrict__ from_second,
                                                  T* __restrict__ first, T* __restrict__ second,
                                                  const float* __restrict__ cos, const float* __restrict__ sin,
                                                  float sign, int64_t half) {
  for (int64_t i = 0; i < half; ++i) {
    const float a = widen(from_first[i]), b = widen(from_second[i]), s = sign * sin[i];
    narrow(a * cos[i] - b * s, first[i]);
    narrow(b * cos[i] + a * s, second[i]);
  }
}

template <typename T>
inline __attribute__((always_inline)) void tokens(const Rotation& r, int64_t begin, int64_t end) {
  const bool here = r.from.data == r.to.data;
  for (int64_t token = begin; token < end; ++token) {
    const int64_t s = token / r.batch, b = token % r.batch;
    const float* cos = r.cos + s * r.half;
    const float* sin = r.sin + s * r.half;
    const T* from = static_cast<const T*>(r.from.data) + s * r.from.s + b * r.from.b;
    T* to = static_cast<T*>(r.to.data) + s * r.to.s + b * r.to.b;
    for (int64_t head = 0; head < r.heads; ++head, from += r.from.h, to += r.to.h) {
      if (here) {
        rotate_here(to, to + r.half, cos, sin, r.sign, r.half);
      } else {
        rotate(from, from + r.half, to, to + r.half, cos, sin, r.sign, r.half);
        std::memcpy(to + 2 * r.half, from + 2 * r.half, (r.width - 2 * r.half) * sizeof(T));
      }
    }
  }
}

// target_clones does not apply to templates, so there is one plain function per type.
MEGALITE_CLONES void tokens_f32(const Rotation& r, int64_t begin, int64_t end) { tokens<float>(r, begin, end); }
MEGALITE_CLONES void tokens_bf16(const Rotation& r, int64_t begin, int64_t end) { tokens<BF16>(r, begin, end); }

void run(const Rotation& r, int64_t seq, bool bf16, int64_t threads) {
  const auto kernel = bf16 ? tokens_bf16 : tokens_f32;
  for_rows(seq * r.batch, r.heads * r.width, threads, [&](int64_t begin, int64_t end) { kernel(r, begin, end); });
}

}  // namespace

void rope(const Heads& x, void* y, const float* cos, const float* sin, int64_t seq, int64_t batch, int64_t heads,
          int64_t width, int64_t half, int64_t sign, bool bf16, int64_t threads) {
  const Heads packed{y, batch * heads * width, heads * width, width};
  const Rotation r{x, x.data == y ? x : packed, cos, sin, batch, heads, width, half, static_cast<float>(sign)};
  run(r, seq, bf16, threads);
}

void rope_pack(const Heads& dq, const Heads& dk, const Heads& dv, void* out, const float* cos, const float* sin,
               int64_t seq, int64_t batch, int64_t num_heads, int64_t num_kv_heads, int64_t width, int64_t half,
               bool bf16, int64_t threads) {
  const int64_t heads = num_heads + 2 * num_kv_heads, size = bf16 ? sizeof(BF16) : sizeof(float);
  Heads to{out, batch * heads * width, heads * width, width};
  const auto skip = [&](int64_t count) { to.data = static_cast<char*>(to.data) + count * width * size; };
  run({dq, to, cos, sin, batch, num_heads, width, half, -1.0f}, seq, bf16, threads);
  skip(num_heads);
  run({dk, to, cos, sin, batch, num_kv_heads, width, half, -1.0f}, seq, bf16, threads);
  skip(num_kv_heads);
  // No rotation: the whole head is copied.
  run({dv, to, cos, sin, batch, num_kv_heads, width, 0, 1.0f}, seq, bf16, threads);
}

}  // namespace megalite
