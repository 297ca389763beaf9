// The CUDA library. Every entry point launches on the given stream of the current device and returns a cudaError_t.

#include "adamw.cuh"
#include "lamb.cuh"
#include "norms.cuh"

MEGALITE_ENTRY(const char*, error_string, int64_t error) { return cudaGetErrorString(static_cast<cudaError_t>(error)); }
