// Checks of flat operands, before any pointer is taken.
#pragma once

#include <optional>

#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

namespace megalite {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

inline void check_flat(const Tensor& t, const char* name, int64_t numel) {
  STD_TORCH_CHECK(t.is_contiguous(), name, " must be contiguous");
  STD_TORCH_CHECK(t.numel() == numel, name, " has ", t.numel(), " elements, param has ", numel);
}

inline void check_flat_fp32(const Tensor& t, const char* name, int64_t numel) {
  check_flat(t, name, numel);
  STD_TORCH_CHECK(t.scalar_type() == ScalarType::Float, name, " must be fp32");
}

inline void check_multiplier(const std::optional<Tensor>& multiplier) {
  STD_TORCH_CHECK(
      !multiplier || (multiplier->numel() == 1 && multiplier->scalar_type() == ScalarType::Float),
      "grad_multiplier must be one fp32 number");
}

}  // namespace megalite
