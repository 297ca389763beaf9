// Rotary embedding: heads at any stride, read and written in one pass. Contract: megalite/ops/rope.py.

#include <cstring>

#include <torch/csrc/stable/library.h>

#include "rows.h"

namespace megalite {
namespace {

// Heads [S, B, heads, width] of unit stride along the width.
struct Heads {
  char* data;
  int64_t s, b, h;  // strides in elements

  Heads(const void* start, const Tensor& t)
      : data(static_cast<char*>(const_cast<void*>(start))), s(t.stride(0)), b(t.stride(1)), h(t.stride(2)) {}
};

struct Rotation {
  Heads from, to;
  const float* cos;
  const float* sin;
  int64_t batch, heads, width, half;
  float sign;  // of the angle: -1 turns back
};

// Pointers as parameters: gcc takes __restrict__ seriously in these alone.
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
    const T* from = reinterpret_cast<const T*>(r.from.data) + s * r.from.s + b * r.from.b;
    T* to = reinterpret_cast<T*>(r.to.data) + s * r.to.s + b * r.to.b;
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

// target_clones does not apply to templates, hence a plain function per type.
MEGALITE_CLONES void tokens_f32(const Rotation& r, int64_t begin, int64_t end) { tokens<float>(r, begin, end); }
MEGALITE_CLONES void tokens_bf16(const Rotation& r, int64_t begin, int64_t end) { tokens<BF16>(r, begin, end); }

// Rotate `heads` heads of [S, B, ., D].
void run(const Tensor& shape, const Heads& from, const Heads& to, int64_t heads, const Tensor& cos, const Tensor& sin,
         float sign) {
  const int64_t seq = shape.size(0), batch = shape.size(1), width = shape.size(3), half = cos.size(-1);
  STD_TORCH_CHECK(cos.dim() == 2 && sin.numel() == cos.numel() && cos.size(0) == seq && 2 * half <= width,
                  "tables do not fit");
  const Tensor c = packed(cos), s = packed(sin);
  const Rotation r{from, to, c.const_data_ptr<float>(), s.const_data_ptr<float>(), batch, heads, width, half, sign};
  const auto kernel = is_bf16(shape, "heads") ? tokens_bf16 : tokens_f32;
  for_rows(seq * batch, heads * width, [&](int64_t begin, int64_t end) { kernel(r, begin, end); });
}

Tensor unit_stride(const Tensor& t) {
  STD_TORCH_CHECK(t.dim() == 4, "heads must be [S, B, heads, D]");
  return t.stride(3) == 1 ? t : torch::stable::contiguous(t);
}

void rope_(Tensor qkv, Tensor cos, Tensor sin, int64_t num_rotated) {
  STD_TORCH_CHECK(qkv.dim() == 4 && (qkv.stride(3) == 1 || qkv.size(3) == 1), "qkv must have unit stride");
  STD_TORCH_CHECK(num_rotated <= qkv.size(2), "more heads to rotate than there are");
  const Heads heads(qkv.mutable_data_ptr(), qkv);
  run(qkv, heads, heads, num_rotated, cos, sin, 1.0f);
}

Tensor rope(Tensor x, Tensor cos, Tensor sin, bool inverse) {
  const Tensor from = unit_stride(x);
  Tensor y = torch::stable::new_empty(x, x.sizes());
  run(x, {from.const_data_ptr(), from}, {y.mutable_data_ptr(), y}, x.size(2), cos, sin, inverse ? -1.0f : 1.0f);
  return y;
}

Tensor rope_pack(Tensor dq, Tensor dk, Tensor dv, Tensor cos, Tensor sin) {
  const Tensor q = unit_stride(dq), k = unit_stride(dk), v = unit_stride(dv);
  const int64_t width = dq.size(3), num_heads = dq.size(2), num_kv_heads = dk.size(2);
  for (const Tensor* t : {&dk, &dv}) {
    STD_TORCH_CHECK(t->size(0) == dq.size(0) && t->size(1) == dq.size(1) && t->size(2) == num_kv_heads &&
                        t->size(3) == width && t->scalar_type() == dq.scalar_type(),
                    "dq, dk and dv do not fit");
  }
  Tensor out = torch::stable::new_empty(dq, {dq.size(0), dq.size(1), num_heads + 2 * num_kv_heads, width});
  Heads to(out.mutable_data_ptr(), out);
  run(dq, {q.const_data_ptr(), q}, to, num_heads, cos, sin, -1.0f);
  to.data += num_heads * width * static_cast<int64_t>(dq.element_size());
  run(dk, {k.const_data_ptr(), k}, to, num_kv_heads, cos, sin, -1.0f);
  to.data += num_kv_heads * width * static_cast<int64_t>(dq.element_size());
  // No rotation at all: what is left to copy is the whole head.
  const Tensor none = torch::stable::new_empty(cos, {dq.size(0), 0});
  run(dv, {v.const_data_ptr(), v}, to, num_kv_heads, none, none, 1.0f);
  return out;
}

}  // namespace
}  // namespace megalite

STABLE_TORCH_LIBRARY_IMPL(megalite, CPU, m) {
  m.impl("rope_", TORCH_BOX(&megalite::rope_));
  m.impl("rope", TORCH_BOX(&megalite::rope));
  m.impl("rope_pack", TORCH_BOX(&megalite::rope_pack));
}
