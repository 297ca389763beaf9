// Vector loads, dtype conversion and launch helpers of the flat kernels.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <type_traits>

#include "../common/adamw_math.h"
#include "entry.h"

namespace megalite {

constexpr int kThreads = 256;

// Element type of an output that is not requested.
struct NoOut {};

__device__ __forceinline__ float widen(float x) { return x; }
__device__ __forceinline__ float widen(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ __forceinline__ float widen(__half x) { return __half2float(x); }

template <typename T>
__device__ __forceinline__ T narrow(float x);
template <>
__device__ __forceinline__ float narrow<float>(float x) { return x; }
template <>
__device__ __forceinline__ __nv_bfloat16 narrow<__nv_bfloat16>(float x) { return __float2bfloat16_rn(x); }
template <>
__device__ __forceinline__ __half narrow<__half>(float x) { return __float2half_rn(x); }

// kVec elements moved as 128-bit words (or one word of their size, if that is less).
template <typename T, int kVec>
struct alignas(sizeof(T) * kVec < 16 ? sizeof(T) * kVec : 16) Vec {
  T at[kVec];
};

template <int kVec, typename T>
__device__ __forceinline__ Vec<T, kVec> load(const T* p) {
  return *reinterpret_cast<const Vec<T, kVec>*>(p);
}

template <int kVec, typename T>
__device__ __forceinline__ void store(T* p, const Vec<T, kVec>& v) {
  *reinterpret_cast<Vec<T, kVec>*>(p) = v;
}

inline bool aligned16(const void* p) { return reinterpret_cast<uintptr_t>(p) % 16 == 0; }

// Calls f(T{}) with the element type of a number: 0 fp32, 1 bf16, 2 fp16.
template <typename F>
void by_type(int64_t type, const F& f) {
  switch (type) {
    case 0: return f(float{});
    case 1: return f(__nv_bfloat16{});
    default: return f(__half{});
  }
}

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

}  // namespace megalite
