// Order of a blend of data sets. Contract: megalite/data/blend.py, which loads this with ctypes: no torch, no Python.

#include <algorithm>
#include <cstdint>

// Choices of positions [start, stop); brings `taken` from start to stop. Both of length `sets`; `choices` takes
// (set, samples taken of it before) for each position, or is null. Products and differences are rounded one by one
// (-ffp-contract=off): a fused multiply-add would break ties otherwise than the rule.
extern "C" __attribute__((visibility("default"))) void megalite_blend_run(const double* weights, int64_t* taken,
                                                                          int64_t* choices, int64_t sets,
                                                                          int64_t start, int64_t stop) {
  for (int64_t i = start; i < stop; ++i) {
    const double t = static_cast<double>(std::max<int64_t>(i, 1));
    int64_t chosen = 0;
    double most = weights[0] * t - static_cast<double>(taken[0]);
    for (int64_t j = 1; j < sets; ++j) {
      const double lacking = weights[j] * t - static_cast<double>(taken[j]);
      if (lacking > most) {
        most = lacking;
        chosen = j;
      }
    }
    if (choices != nullptr) {
      *choices++ = chosen;
      *choices++ = taken[chosen];
    }
    ++taken[chosen];
  }
}
