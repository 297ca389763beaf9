// L2 norms of segments of a flat buffer, in two stages whose order depends on the lengths alone (deterministic).
// Contracts: megalite/ops/l2_norm.py, megalite/ops/lamb.py.

#pragma once

#include "common.cuh"

namespace megalite {
namespace {

constexpr int kFlatBlocks = 1024;    // a whole buffer: several blocks for each multiprocessor of any card
constexpr int kSegmentBlocks = 128;  // one segment of many
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
  return value;  // right in thread 0
}

// Block (i, segment) writes partials[segment * gridDim.x + i]. offsets null: one segment [0, n).
template <typename T, int kVec>
__global__ void __launch_bounds__(kStage1Threads) sum_squares_kernel(const T* __restrict__ flat,
                                                                     const int64_t* __restrict__ offsets, int64_t n,
                                                                     double* __restrict__ partials) {
  const int64_t begin = offsets ? offsets[blockIdx.y] : 0;
  const int64_t end = offsets ? offsets[blockIdx.y + 1] : n;
  // Vector loads start at the first multiple of kVec; the ragged edges go element by element.
  const int64_t vec_begin = min((begin + kVec - 1) / kVec * kVec, end);
  const int64_t vec_end = max(end / kVec * kVec, vec_begin);
  const int64_t thread = static_cast<int64_t>(blockIdx.x) * kStage1Threads + threadIdx.x;
  const int64_t stride = static_cast<int64_t>(gridDim.x) * kStage1Threads;
  float sums[kVec] = {};
#pragma unroll 2  // two 128-bit loads in flight a thread; 4 spill on sm_120
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

// One block a segment.
__global__ void __launch_bounds__(kThreads) finish_kernel(const double* __restrict__ partials, int count,
                                                          float* __restrict__ norms) {
  double total = 0;
  for (int i = threadIdx.x; i < count; i += kThreads) total += partials[static_cast<int64_t>(blockIdx.x) * count + i];
  total = block_sum(total);
  if (threadIdx.x == 0) norms[blockIdx.x] = static_cast<float>(sqrt(total));
}

void launch_norms(const Tensor& flat, const int64_t* offsets, int64_t segments, int blocks, float* norms) {
  STD_TORCH_CHECK(flat.is_contiguous(), "flat must be contiguous");
  STD_TORCH_CHECK(segments <= 65535, "at most 65535 segments, got ", segments);
  const Tensor partials = torch::stable::new_empty(flat, {segments * blocks}, ScalarType::Double);
  double* sums = partials.mutable_data_ptr<double>();
  const cudaStream_t stream = current_stream(flat);
  const dim3 grid(blocks, static_cast<unsigned>(segments));
  by_dtype(flat.scalar_type(), "flat", [&](auto element) {
    using T = decltype(element);
    constexpr int kVec = 16 / sizeof(T);
    const T* x = static_cast<const T*>(flat.const_data_ptr());
    if (aligned16(x)) {
      sum_squares_kernel<T, kVec><<<grid, kStage1Threads, 0, stream>>>(x, offsets, flat.numel(), sums);
    } else {
      sum_squares_kernel<T, 1><<<grid, kStage1Threads, 0, stream>>>(x, offsets, flat.numel(), sums);
    }
  });
  STD_CUDA_KERNEL_LAUNCH_CHECK();
  finish_kernel<<<static_cast<unsigned>(segments), kThreads, 0, stream>>>(sums, blocks, norms);
  STD_CUDA_KERNEL_LAUNCH_CHECK();
}

Tensor l2_norm(Tensor flat) {
  const torch::stable::accelerator::DeviceGuard guard(flat.get_device_index());
  Tensor norm = torch::stable::new_empty(flat, {}, ScalarType::Float);
  launch_norms(flat, nullptr, 1, kFlatBlocks, norm.mutable_data_ptr<float>());
  return norm;
}

Tensor segment_norms(Tensor flat, Tensor offsets) {
  STD_TORCH_CHECK(offsets.scalar_type() == ScalarType::Long && offsets.is_cuda(), "offsets must be int64 on the GPU");
  const torch::stable::accelerator::DeviceGuard guard(flat.get_device_index());
  const int64_t segments = offsets.numel() - 1;
  Tensor norms = torch::stable::new_empty(flat, {segments}, ScalarType::Float);
  if (segments > 0) {
    launch_norms(flat, offsets.const_data_ptr<int64_t>(), segments, kSegmentBlocks, norms.mutable_data_ptr<float>());
  }
  return norms;
}

}  // namespace
}  // namespace megalite
