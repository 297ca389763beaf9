// L2 norms of segments of a flat buffer, in two stages. Deterministic: the order of sums depends on the lengths only.
// Contracts: megalite/core/ops/l2_norm.py, megalite/core/ops/lamb.py.

#pragma once

#include "common.cuh"

namespace megalite {
namespace {

constexpr int kStage1Threads = 512;

__device__ __forceinline__ double block_sum(double value) {
  __shared__ double warps[32];
  for (int offset = 16; offset > 0; offset /= 2) value += __shfl_down_sync(0xffffffffu, value, offset);
  if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = value;
  __syncthreads();
  value = threadIdx.x < blockDim.x / 32 ? warps[threadIdx.x] : 0.0;
  if (threadIdx.x < 32) {
    for (int offset = 16; offset > 0; offset /= 2) value += __shfl_down_sync(0xffffffffu, value, offset);
  }
  return value;  // valid in thread 0 only
}

// Block (i, segment) writes partials[segment * gridDim.x + i]. Null offsets: one segment, [0, n).
template <typename T, int kVec>
__global__ void __launch_bounds__(kStage1Threads) sum_squares_kernel(const T* __restrict__ flat,
                                                                     const int64_t* __restrict__ offsets, int64_t n,
                                                                     double* __restrict__ partials) {
  const int64_t begin = offsets ? offsets[blockIdx.y] : 0;
  const int64_t end = offsets ? offsets[blockIdx.y + 1] : n;
  // Vector loads start at the first multiple of kVec; the ragged edges are read element by element.
  const int64_t vec_begin = min((begin + kVec - 1) / kVec * kVec, end);
  const int64_t vec_end = max(end / kVec * kVec, vec_begin);
  const int64_t thread = static_cast<int64_t>(blockIdx.x) * kStage1Threads + threadIdx.x;
  const int64_t stride = static_cast<int64_t>(gridDim.x) * kStage1Threads;
  float sums[kVec] = {};
#pragma unroll 2  // two 128-bit loads in flight per thread; four spill registers on sm_120
  for (int64_t i = vec_begin + thread * kVec; i < vec_end; i += stride * kVec) {
    const auto x = load<kVec>(flat + i);
#pragma unroll
    for (int j = 0; j < kVec; ++j) sums[j] += widen(x.at[j]) * widen(x.at[j]);
  }
  for (int64_t i = begin + thread; i < vec_begin; i += stride) sums[0] += widen(flat[i]) * widen(flat[i]);
  for (int64_t i = vec_end + thread; i < end; i += stride) sums[0] += widen(flat[i]) * widen(flat[i]);
  double total = 0;
#pragma unroll
  for (int j = 0; j < kVec; ++j) total += sums[j];
  total = block_sum(total);
  if (threadIdx.x == 0) partials[static_cast<int64_t>(blockIdx.y) * gridDim.x + blockIdx.x] = total;
}

// One block per segment.
__global__ void __launch_bounds__(kThreads) finish_kernel(const double* __restrict__ partials, int count,
                                                          float* __restrict__ norms) {
  double total = 0;
  for (int i = threadIdx.x; i < count; i += kThreads) total += partials[static_cast<int64_t>(blockIdx.x) * count + i];
  total = block_sum(total);
  if (threadIdx.x == 0) norms[blockIdx.x] = static_cast<float>(sqrt(total));
}

}  // namespace
}  // namespace megalite

// The L2 norm of each segment; `partials` holds `blocks` numbers for each. offsets are on the GPU; null: one, [0, n).
MEGALITE_ENTRY(int64_t, norms, const void* flat, const int64_t* offsets, double* partials, float* norms, int64_t n,
               int64_t segments, int64_t blocks, int64_t type, void* on_stream) {
  using namespace megalite;
  if (segments == 0) return 0;
  const auto stream = static_cast<cudaStream_t>(on_stream);
  const dim3 grid(static_cast<unsigned>(blocks), static_cast<unsigned>(segments));
  by_type(type, [&](auto element) {
    using T = decltype(element);
    constexpr int kVec = 16 / sizeof(T);
    const T* x = static_cast<const T*>(flat);
    if (aligned16(x)) {
      sum_squares_kernel<T, kVec><<<grid, kStage1Threads, 0, stream>>>(x, offsets, n, partials);
    } else {
      sum_squares_kernel<T, 1><<<grid, kStage1Threads, 0, stream>>>(x, offsets, n, partials);
    }
  });
  if (const cudaError_t failed = cudaGetLastError()) return failed;
  finish_kernel<<<static_cast<unsigned>(segments), kThreads, 0, stream>>>(partials, static_cast<int>(blocks), norms);
  return cudaGetLastError();
}
