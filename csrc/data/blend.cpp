// The order of samples in a blend of data sets: the module megalite.runtime.data._blend_rule. Contract: megalite/runtime/data/blend.py.

#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <cstdint>
#include <optional>

namespace py = pybind11;

namespace {

template <typename T>
using Array = py::array_t<T, py::array::c_style>;

// Chooses a data set for each position in [start, stop), and advances `taken` [sets] from start to stop. `choices`
// receives (set, number of samples taken from it before) for each position, or is null. Every product and difference is
// rounded separately (-ffp-contract=off): a fused multiply-add would break ties differently from the rule.
void follow(const double* weights, int64_t* taken, int64_t* choices, int64_t sets, int64_t start, int64_t stop) {
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

void run(const Array<double>& weights, Array<int64_t>& taken, std::optional<Array<int64_t>> choices, int64_t start,
         int64_t stop) {
  const int64_t sets = weights.size();
  if (sets == 0 || weights.ndim() != 1 || taken.ndim() != 1 || taken.size() != sets) {
    throw py::value_error("weights and taken must be of one length, 1 or more");
  }
  if (choices && (choices->ndim() != 2 || choices->shape(1) != 2 || choices->shape(0) < stop - start)) {
    throw py::value_error("choices must have two columns, and a row for each position");
  }
  const double* shares = weights.data();
  int64_t *counts = taken.mutable_data(), *to = choices ? choices->mutable_data() : nullptr;
  const py::gil_scoped_release released;
  follow(shares, counts, to, sets, start, stop);
}

}  // namespace

PYBIND11_MODULE(_blend_rule, m) {
  // Never converts: a copy would receive what is written to two of the arrays.
  m.def("run", run, py::arg("weights").noconvert(), py::arg("taken").noconvert(), py::arg("choices").noconvert(),
        py::arg("start"), py::arg("stop"));
}
