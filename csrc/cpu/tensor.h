// A torch tensor as the kernels see it. It is read through the table of C functions that torch attaches to its Python
// class (DLPack's exchange API, torch 2.10), in about 20 ns per tensor. No header of torch is included, so one binary
// serves every version of torch.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <string>
#include <utility>

namespace megalite {

namespace py = pybind11;

// DLPack 1.x: https://github.com/dmlc/dlpack/blob/main/include/dlpack/dlpack.h
struct DLType {
  uint8_t code, bits;
  uint16_t lanes;
  bool operator==(const DLType&) const = default;
};
constexpr DLType kF32{2, 32, 1}, kBF16{4, 16, 1}, kI64{0, 64, 1};

struct DLTensor {
  void* data;
  int32_t device_type, device_id;
  int32_t ndim;
  DLType type;
  int64_t* shape;
  int64_t* strides;  // in elements
  uint64_t byte_offset;
};

struct DLExchange {
  uint32_t major, minor;
  void* older;
  void* allocate;
  void* export_owned;
  void* import_owned;
  int (*view)(void* object, DLTensor* to);  // borrowed, not owned; -1 with a Python error set
  void* stream;
};

// torch's Python functions that are called here, looked up once, when the module is imported.
struct Torch {
  const DLExchange* exchange;
  PyObject* type;                                   // torch.Tensor
  PyObject *empty_like, *num_threads;               // functions
  PyObject *new_empty, *contiguous, *copy_, *add_;  // names of methods
  PyObject *float32, *dtype;                        // a dtype, and the keyword names of a call with a dtype

  Torch();
};
inline Torch* torch = nullptr;

// `kwnames`: names of the keyword arguments, which come last. A Python exception is rethrown.
template <typename... Args>
py::object call_method(PyObject* name, PyObject* kwnames, Args... args) {
  PyObject* const given[] = {args...};
  const size_t named = kwnames == nullptr ? 0 : PyTuple_GET_SIZE(kwnames);
  PyObject* result = PyObject_VectorcallMethod(name, given, sizeof...(args) - named, kwnames);
  if (result == nullptr) throw py::error_already_set();
  return py::reinterpret_steal<py::object>(result);
}

class Tensor {
 public:
  Tensor() = default;
  explicit Tensor(py::object object) : object_(std::move(object)) {
    if (torch->exchange->view(object_.ptr(), &view_) != 0) throw py::error_already_set();
  }

  // False if this is not a tensor.
  bool read(py::handle object) {
    object_ = py::reinterpret_borrow<py::object>(object);
    if (torch->exchange->view(object.ptr(), &view_) == 0) return true;
    PyErr_Clear();
    if (PyObject_IsInstance(object.ptr(), torch->type) != 1) return false;
    throw py::value_error("operands must be dense tensors on the CPU, not " + type_and_device());
  }

  const py::object& object() const { return object_; }
  template <typename T = void>
  T* data() const {
    return reinterpret_cast<T*>(static_cast<char*>(view_.data) + view_.byte_offset);
  }
  int64_t dims() const { return view_.ndim; }
  int64_t size(int64_t dim) const { return view_.shape[dim]; }
  int64_t stride(int64_t dim) const { return view_.strides[dim]; }
  bool is(DLType type) const { return view_.type == type; }
  bool bf16() const { return is(kBF16); }
  bool same_type(const Tensor& other) const { return is(other.view_.type); }
  DLType type() const { return view_.type; }
  bool on_cpu() const { return view_.device_type == 1; }

  int64_t numel() const {
    int64_t product = 1;
    for (int dim = 0; dim < view_.ndim; ++dim) product *= view_.shape[dim];
    return product;
  }

  bool is_contiguous() const {
    int64_t expected = 1;
    bool packed = true;
    for (int dim = view_.ndim - 1; dim >= 0; --dim) {
      if (view_.shape[dim] == 0) return true;
      packed = packed && (view_.shape[dim] == 1 || view_.strides[dim] == expected);
      expected *= view_.shape[dim];
    }
    return packed;
  }

  // This tensor if it is contiguous, else a contiguous copy.
  Tensor contiguous() const {
    return is_contiguous() ? *this : Tensor(call_method(torch->contiguous, nullptr, object_.ptr()));
  }

  // A new tensor of the same shape and type for the result; this tensor is contiguous.
  Tensor empty_like() const {
    PyObject* result = PyObject_CallOneArg(torch->empty_like, object_.ptr());
    if (result == nullptr) throw py::error_already_set();
    return Tensor(py::reinterpret_steal<py::object>(result));
  }

  Tensor new_empty(const py::tuple& shape) const {
    return Tensor(call_method(torch->new_empty, nullptr, object_.ptr(), shape.ptr()));
  }

  Tensor new_empty_fp32(const py::tuple& shape) const {
    return Tensor(call_method(torch->new_empty, torch->dtype, object_.ptr(), shape.ptr(), torch->float32));
  }

  // For messages: "[2, 3]", "torch.float32 on cpu".
  std::string shape() const { return py::str(py::list(object_.attr("shape"))); }
  std::string type_and_device() const {
    return std::string(py::str(object_.attr("dtype"))) + " on " + std::string(py::str(object_.attr("device")));
  }

 private:
  py::object object_;
  DLTensor view_{};
};

}  // namespace megalite

namespace pybind11::detail {

template <>
struct type_caster<megalite::Tensor> {
  PYBIND11_TYPE_CASTER(megalite::Tensor, const_name("torch.Tensor"));
  bool load(handle from, bool) { return value.read(from); }
  static handle cast(const megalite::Tensor& tensor, return_value_policy, handle) {
    return tensor.object().inc_ref();
  }
};

}  // namespace pybind11::detail
