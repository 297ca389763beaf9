// The module megalite.core.parts.kernels._cpu_kernels: checks operands, creates results, calls the kernels. Contracts: megalite/core/ops/.
//
// Each function has the signature of its schema in megalite/core/parts/kernels/native.py, but returns None for a result that was
// not requested. All raise ValueError for operands that do not fit, and release the GIL while their kernel runs.

#include <pybind11/stl.h>

#include <optional>

#include "kernels.h"
#include "parallel.h"
#include "tensor.h"

namespace megalite {

Torch::Torch() {
  const auto module = py::module_::import("torch");
  const py::object tensor = module.attr("Tensor");
  const py::object capsule = py::getattr(tensor, "__dlpack_c_exchange_api__", py::none());
  exchange = capsule.is_none() ? nullptr : py::capsule(capsule).get_pointer<const DLExchange>();
  if (exchange == nullptr || exchange->major != 1) {
    throw py::import_error("this torch does not offer version 1 of DLPack's exchange API");
  }
  const auto kept = [](py::object object) { return object.release().ptr(); };
  type = kept(tensor);
  empty_like = kept(module.attr("empty_like"));
  num_threads = kept(module.attr("get_num_threads"));
  float32 = kept(module.attr("float32"));
  dtype = kept(py::make_tuple("dtype"));
  new_empty = PyUnicode_InternFromString("new_empty");
  contiguous = PyUnicode_InternFromString("contiguous");
  copy_ = PyUnicode_InternFromString("copy_");
  add_ = PyUnicode_InternFromString("add_");
}

namespace python {
namespace {

using Optional = std::optional<Tensor>;

int64_t num_threads() {
  const auto count = py::reinterpret_steal<py::object>(PyObject_CallNoArgs(torch->num_threads));
  if (!count) throw py::error_already_set();
  return PyLong_AsLongLong(count.ptr());
}

// Runs a kernel, whose last argument is the number of threads, without the GIL.
template <typename... Params, typename... Args>
void run(void (*kernel)(Params...), Args&&... args) {
  const int64_t threads = num_threads();
  const py::gil_scoped_release released;
  kernel(std::forward<Args>(args)..., threads);
}

template <typename... Parts>
[[noreturn]] void refuse(const Parts&... parts) {
  const auto text = [](const auto& part) {
    if constexpr (std::is_integral_v<std::decay_t<decltype(part)>>) {
      return std::to_string(part);
    } else {
      return std::string(part);
    }
  };
  throw py::value_error((text(parts) + ...));
}

std::string name_of(DLType type) {
  return type == kF32 ? "torch.float32" : type == kBF16 ? "torch.bfloat16" : "torch.int64";
}

bool is_bf16(const Tensor& t, const char* name) {
  if (!(t.is(kF32) || t.is(kBF16)) || !t.on_cpu()) {
    refuse(name, " must be fp32 or bf16 on the CPU, not ", t.type_and_device());
  }
  return t.bf16();
}

void check(const Tensor& t, const char* name, int64_t numel, DLType type) {
  if (t.numel() != numel || !t.is(type) || !t.on_cpu()) {
    refuse(name, " has ", t.numel(), " elements of ", t.type_and_device(), ", must have ", numel, " of ",
           name_of(type), " on the CPU");
  }
}

// The operand if it is contiguous, else a contiguous copy.
Tensor packed(const Tensor& t, const char* name, int64_t numel, DLType type) {
  check(t, name, numel, type);
  return t.contiguous();
}

// An operand that is written to, or too large to copy: its memory is used as it is.
const Tensor& flat(const Tensor& t, const char* name, int64_t numel, DLType type) {
  if (!t.is_contiguous()) refuse(name, " must be contiguous");
  check(t, name, numel, type);
  return t;
}

template <typename T = void>
T* address(const Optional& t) {
  return t ? t->data<T>() : nullptr;
}

py::object object(const Optional& t) { return t ? t->object() : py::none(); }

struct Rows {
  int64_t count, width;
};

// Zero rows if the width is zero.
Rows rows_of(const Tensor& t, const char* name) {
  if (t.dims() == 0) refuse(name, " must have a dimension");
  const int64_t width = t.size(t.dims() - 1);
  return {width ? t.numel() / width : 0, width};
}

py::tuple norm(const Tensor& given, const Optional& residual, const Tensor& weight, const Optional& bias, double eps) {
  if (bias) refuse("LayerNorm has no C++ kernel");
  const bool bf16 = is_bf16(given, "x"), bf16_weight = is_bf16(weight, "weight");
  const auto [rows, width] = rows_of(given, "x");
  const Tensor x = given.contiguous(), scale = packed(weight, "weight", width, weight.type());
  Optional added, total;
  if (residual) {
    added = packed(*residual, "residual", x.numel(), x.type());
    total = x.empty_like();
  }
  const Tensor y = x.empty_like(), rstd = x.new_empty_fp32(py::make_tuple(rows));
  run(megalite::norm, x.data(), address(added), scale.data(), y.data(), address(total), rstd.data<float>(), rows, width,
      bf16, bf16_weight, eps);
  return py::make_tuple(y.object(), object(total), py::none(), rstd.object());
}

Tensor norm_backward(const Tensor& dy, const Optional& dtotal, const Tensor& given, const Tensor& weight,
                     const Optional& mean, const Tensor& rstd, const Tensor& dweight, const Optional& dbias,
                     bool add_weight, bool add_bias) {
  if (dbias) refuse("LayerNorm has no C++ kernel");
  const bool bf16 = is_bf16(given, "x"), bf16_weight = is_bf16(weight, "weight");
  const auto [rows, width] = rows_of(given, "x");
  const Tensor x = given.contiguous(), out = packed(dy, "dy", x.numel(), x.type());
  const Tensor scale = packed(weight, "weight", width, weight.type()), root = packed(rstd, "rstd", rows, kF32);
  Optional added;
  if (dtotal) added = packed(*dtotal, "dtotal", x.numel(), x.type());
  const bool direct = dweight.same_type(weight) && !add_weight;
  const Tensor dx = x.empty_like(), sum = direct ? flat(dweight, "dweight", width, weight.type()) : scale.empty_like();
  run(megalite::norm_backward, out.data(), address(added), x.data(), scale.data(), root.data<float>(), dx.data(),
      sum.data(), rows, width, bf16, bf16_weight);
  if (!direct) {
    call_method(add_weight ? torch->add_ : torch->copy_, nullptr, dweight.object().ptr(), sum.object().ptr());
  }
  return dx;
}

// Number of rows, and the width of one half.
Rows halves(const Tensor& gate_up, int64_t kind) {
  const auto [rows, width] = rows_of(gate_up, "gate_up");
  if (width % 2 || kind < 0 || kind > 2) {
    refuse("gate_up of width ", width, " and activation ", kind, ": must have two halves, and be 0, 1 or 2");
  }
  return {rows, width / 2};
}

Tensor glu(const Tensor& given, int64_t kind) {
  const bool bf16 = is_bf16(given, "gate_up");
  const auto [rows, width] = halves(given, kind);
  const Tensor gate_up = given.contiguous();
  py::tuple shape(gate_up.dims());
  for (int64_t dim = 0; dim < gate_up.dims(); ++dim) {
    shape[dim] = dim + 1 < gate_up.dims() ? gate_up.size(dim) : width;
  }
  const Tensor out = gate_up.new_empty(shape);
  run(megalite::glu, gate_up.data(), out.data(), rows, width, kind, bf16);
  return out;
}

Tensor glu_backward(const Tensor& dy, const Tensor& given, int64_t kind) {
  const bool bf16 = is_bf16(given, "gate_up");
  const auto [rows, width] = halves(given, kind);
  const Tensor gate_up = given.contiguous(), out = packed(dy, "dy", rows * width, gate_up.type());
  const Tensor grad = gate_up.empty_like();
  run(megalite::glu_backward, out.data(), gate_up.data(), grad.data(), rows, width, kind, bf16);
  return grad;
}

void check_heads(const Tensor& t, const char* name) {
  if (t.dims() != 4) refuse(name, " must be [positions, batch, heads, width], not ", t.shape());
}

Heads heads_of(const Tensor& t) { return {t.data(), t.stride(0), t.stride(1), t.stride(2)}; }

Tensor unit_stride(const Tensor& heads, const char* name) {
  check_heads(heads, name);
  return heads.stride(3) == 1 ? heads : Tensor(call_method(torch->contiguous, nullptr, heads.object().ptr()));
}

struct Tables {
  Tensor cos, sin;
  int64_t half;
};

Tables tables(const Tensor& cos, const Tensor& sin, int64_t seq, int64_t width) {
  if (cos.dims() != 2 || cos.size(0) != seq || 2 * cos.size(1) > width) {
    refuse("tables ", cos.shape(), " do not fit ", seq, " positions of width ", width);
  }
  const int64_t numel = cos.numel();
  return {packed(cos, "cos", numel, kF32), packed(sin, "sin", numel, kF32), cos.size(1)};
}

void rope_(const Tensor& qkv, const Tensor& cos, const Tensor& sin, int64_t num_rotated) {
  const bool bf16 = is_bf16(qkv, "qkv");
  check_heads(qkv, "qkv");
  if (qkv.stride(3) != 1 || num_rotated < 0 || num_rotated > qkv.size(2)) {
    refuse("qkv must have unit stride, not ", qkv.stride(3), ", and ", num_rotated, " heads or more, not ",
           qkv.size(2));
  }
  const Tables t = tables(cos, sin, qkv.size(0), qkv.size(3));
  run(megalite::rope, heads_of(qkv), qkv.data(), t.cos.data<float>(), t.sin.data<float>(), qkv.size(0), qkv.size(1),
      num_rotated, qkv.size(3), t.half, 1, bf16);
}

Tensor rope(const Tensor& given, const Tensor& cos, const Tensor& sin, bool inverse) {
  const bool bf16 = is_bf16(given, "x");
  const Tensor x = unit_stride(given, "x");
  const int64_t seq = x.size(0), batch = x.size(1), heads = x.size(2), width = x.size(3);
  const Tables t = tables(cos, sin, seq, width);
  const Tensor y = x.new_empty(py::make_tuple(seq, batch, heads, width));
  run(megalite::rope, heads_of(x), y.data(), t.cos.data<float>(), t.sin.data<float>(), seq, batch, heads, width, t.half,
      inverse ? -1 : 1, bf16);
  return y;
}

Tensor rope_pack(const Tensor& dq, const Tensor& dk, const Tensor& dv, const Tensor& cos, const Tensor& sin) {
  const bool bf16 = is_bf16(dq, "dq");
  const Tensor q = unit_stride(dq, "dq"), k = unit_stride(dk, "dk"), v = unit_stride(dv, "dv");
  const int64_t seq = q.size(0), batch = q.size(1), num_heads = q.size(2), num_kv_heads = k.size(2), width = q.size(3);
  for (const Tensor* t : {&k, &v}) {
    if (t->size(0) != seq || t->size(1) != batch || t->size(2) != num_kv_heads || t->size(3) != width ||
        !t->same_type(q) || !t->on_cpu()) {
      refuse("dq ", q.shape(), ", dk ", k.shape(), " and dv ", v.shape(), " do not fit together");
    }
  }
  const Tables t = tables(cos, sin, seq, width);
  const Tensor out = q.new_empty(py::make_tuple(seq, batch, num_heads + 2 * num_kv_heads, width));
  run(megalite::rope_pack, heads_of(q), heads_of(k), heads_of(v), out.data(), t.cos.data<float>(), t.sin.data<float>(),
      seq, batch, num_heads, num_kv_heads, width, t.half, bf16);
  return out;
}

bool check_logits(const Tensor& logits, int64_t valid) {
  const bool bf16 = is_bf16(logits, "logits");
  if (logits.dims() != 2) refuse("logits must be [rows, columns], not ", logits.shape());
  const int64_t width = logits.size(1), unit = logits.stride(1);
  if ((unit != 1 && width > 1) || valid < 0 || valid > width) {
    refuse("logits must be rows of unit stride, not ", unit, ", and valid columns 0 to ", width, ", not ", valid);
  }
  return bf16;
}

Tensor cross_entropy_stats(const Tensor& logits, const Tensor& target, int64_t vocab_start, int64_t valid) {
  const bool bf16 = check_logits(logits, valid);
  const int64_t rows = logits.size(0);
  const Tensor ids = packed(target, "target", rows, kI64);
  const Tensor stats = logits.new_empty_fp32(py::make_tuple(rows, 3));
  run(megalite::cross_entropy_stats, logits.data(), ids.data<int64_t>(), stats.data<float>(), rows, logits.stride(0),
      valid, vocab_start, bf16);
  return stats;
}

void cross_entropy_grad_(const Tensor& logits, const Tensor& target, int64_t vocab_start, const Tensor& lse,
                         const Tensor& scale, int64_t valid) {
  const bool bf16 = check_logits(logits, valid);
  const int64_t rows = logits.size(0);
  const Tensor ids = packed(target, "target", rows, kI64);
  const Tensor logs = packed(lse, "lse", rows, kF32), factors = packed(scale, "scale", rows, kF32);
  run(megalite::cross_entropy_grad_, logits.data(), ids.data<int64_t>(), logs.data<float>(), factors.data<float>(),
      rows, logits.stride(0), valid, logits.size(1), vocab_start, bf16);
}

void adamw_(const Tensor& param, const Tensor& grad, const Tensor& exp_avg, const Tensor& exp_avg_sq,
            const Optional& out_param, const Optional& grad_multiplier, double lr, double beta1, double beta2,
            double eps, double weight_decay, int64_t step) {
  const int64_t n = param.numel();
  flat(param, "param", n, kF32);
  flat(grad, "grad", n, grad.type());
  flat(exp_avg, "exp_avg", n, kF32);
  flat(exp_avg_sq, "exp_avg_sq", n, kF32);
  if (out_param) flat(*out_param, "out_param", n, out_param->type());
  if (grad_multiplier) flat(*grad_multiplier, "grad_multiplier", 1, kF32);
  run(megalite::adamw_, param.data<float>(), grad.data(), exp_avg.data<float>(), exp_avg_sq.data<float>(),
      address(out_param), address<const float>(grad_multiplier), n, is_bf16(grad, "grad"),
      out_param && is_bf16(*out_param, "out_param"), lr, beta1, beta2, eps, weight_decay, step);
}

Tensor l2_norm(const Tensor& values) {
  const bool bf16 = is_bf16(values, "flat");
  const int64_t n = values.numel();
  flat(values, "flat", n, values.type());
  const Tensor norm = values.new_empty_fp32(py::tuple());
  run(megalite::l2_norm, values.data(), norm.data<float>(), n, bf16);
  return norm;
}

}  // namespace
}  // namespace python
}  // namespace megalite

PYBIND11_MODULE(_cpu_kernels, m) {
  using namespace megalite;
  using py::arg;
  torch = new Torch;  // for as long as the process lives
  m.def("norm", python::norm, arg("x"), arg("residual"), arg("weight"), arg("bias"), arg("eps"));
  m.def("norm_backward", python::norm_backward, arg("dy"), arg("dtotal"), arg("x"), arg("weight"), arg("mean"),
        arg("rstd"), arg("dweight"), arg("dbias"), arg("add_weight"), arg("add_bias"));
  m.def("glu", python::glu, arg("gate_up"), arg("kind"));
  m.def("glu_backward", python::glu_backward, arg("dy"), arg("gate_up"), arg("kind"));
  m.def("rope_", python::rope_, arg("qkv"), arg("cos"), arg("sin"), arg("num_rotated"));
  m.def("rope", python::rope, arg("x"), arg("cos"), arg("sin"), arg("inverse"));
  m.def("rope_pack", python::rope_pack, arg("dq"), arg("dk"), arg("dv"), arg("cos"), arg("sin"));
  m.def("cross_entropy_stats", python::cross_entropy_stats, arg("logits"), arg("target"), arg("vocab_start"),
        arg("valid"));
  m.def("cross_entropy_grad_", python::cross_entropy_grad_, arg("logits"), arg("target"), arg("vocab_start"),
        arg("lse"), arg("scale"), arg("valid"));
  m.def("adamw_", python::adamw_, arg("param"), arg("grad"), arg("exp_avg"), arg("exp_avg_sq"), arg("out_param"),
        arg("grad_multiplier"), arg("lr"), arg("beta1"), arg("beta2"), arg("eps"), arg("weight_decay"), arg("step"));
  m.def("l2_norm", python::l2_norm, arg("flat"));
  // Addresses of the functions of torch's OpenMP runtime.
  m.def("use_threads", [](uintptr_t parallel, uintptr_t thread_num, uintptr_t num_threads) {
    runtime = {reinterpret_cast<decltype(Runtime::parallel)>(parallel),
               reinterpret_cast<decltype(Runtime::thread_num)>(thread_num),
               reinterpret_cast<decltype(Runtime::num_threads)>(num_threads)};
  });
}
