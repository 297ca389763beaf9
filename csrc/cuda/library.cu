// The CUDA library: one translation unit, since torch's headers are parsed once per architecture and unit.

#include "adamw.cuh"
#include "lamb.cuh"
#include "norms.cuh"

STABLE_TORCH_LIBRARY_IMPL(megalite, CUDA, m) {
  m.impl("adamw_", TORCH_BOX(&megalite::adamw));
  m.impl("l2_norm", TORCH_BOX(&megalite::l2_norm));
  m.impl("segment_norms", TORCH_BOX(&megalite::segment_norms));
  m.impl("lamb_direction_", TORCH_BOX(&megalite::lamb_direction));
  m.impl("lamb_apply_", TORCH_BOX(&megalite::lamb_apply));
}
