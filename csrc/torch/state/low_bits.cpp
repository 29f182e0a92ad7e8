#include "torch/state/low_bits.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/nextafter.h>
#include <ATen/ops/where.h>

#include <algorithm>
#include <limits>
#include <unordered_map>

#include "torch/bind.h"
#include "torch/device.h"
#include "torch/state/live_state.h"
#include "torch/state/weight_changes.h"

namespace amp_mp {
namespace {

constexpr int64_t kExceptionBytes = 12;  // an int64 index and a float32 value
constexpr double kLargestHalf = 65504;

// The sum of a 16-bit tensor's elements as integers; `by_place` also by their places.
int64_t checksum_of(const at::Tensor& weight, bool by_place) {
  const at::Tensor bits = weight.view(at::kShort);
  if (!by_place) return bits.sum(at::kLong).item<int64_t>();
  uint64_t total = 0;
  for (int64_t dim = 0; dim < std::max<int64_t>(bits.dim(), 1); ++dim) {
    std::vector<int64_t> others;
    for (int64_t d = 0; d < bits.dim(); ++d)
      if (d != dim) others.push_back(d);
    const at::Tensor sums =
        others.empty() ? bits.to(at::kLong) : bits.sum(others, false, at::kLong);
    const at::Tensor places = at::arange(sums.numel(), sums.options()) * 2 + 1;
    total = 31 * total + uint64_t((sums.flatten() * places).sum().item<int64_t>());
  }
  return int64_t(total);
}

bool rounds_to(const at::Tensor& values, const at::Tensor& weight) {
  if (values.sizes() != weight.sizes()) return false;
  const bool is_half = weight.scalar_type() == at::kHalf;
  const double limit = is_half ? kLargestHalf : std::numeric_limits<double>::infinity();
  const at::Tensor wanted =
      values.clamp(-limit, limit).to(weight.scalar_type()).to(weight.device());
  const at::Tensor both_nan = wanted.isnan().logical_and(weight.isnan());
  return wanted.eq(weight).logical_or(both_nan).all().item<bool>();
}

// The values as a float32 master beside this weight. A split rounds a value half way between two
// weights to the other one: such a value becomes the float32 number beside it, or the master would
// not round to the weight.
at::Tensor as_master(const at::Tensor& values, const at::Tensor& weight) {
  const at::Tensor own = at::empty_like(weight);
  const at::Tensor made = at::empty_like(values);
  store_values(values, *master_in(own, made));
  const at::Tensor other = own.view(at::kShort).ne(weight.view(at::kShort));
  const at::Tensor here = weight.to(at::kFloat), half = own.to(at::kFloat).add(here).mul(0.5);
  return at::where(other, at::nextafter(half, here), values);
}

bool is_beside(const at::Tensor& second, const at::Tensor& weight) {
  return second.device() == weight.device() && same_layout(second, weight) &&
         master_in(weight, second);
}

at::Tensor weight_of(py::handle param) { return local_of(param).detach(); }

// Flat indices and values of the elements in which `found` differs; none if float32 takes less
// memory.
std::optional<std::pair<at::Tensor, at::Tensor>> exceptions(const at::Tensor& values,
                                                            const at::Tensor& found) {
  const at::Tensor wrong = found.view(at::kInt).ne(values.view(at::kInt));
  const at::Tensor indices = wrong.flatten().nonzero().flatten();
  if (kExceptionBytes * indices.numel() > 2 * values.numel()) return std::nullopt;
  return std::pair(indices, values.flatten().index_select(0, indices));
}

// A parameter's entry in the table, whose key is the parameter. A plain parameter has a weak
// reference, which ends the entry. A DTensor must have none, because torch then refuses to exchange
// the insides of two DTensors, as model.to() does: its module or its local tensor has the weak
// reference.
struct Weight {
  Bits bits;
  py::object end;                         // a weak reference whose callback drops this entry
  py::object dtensor;                     // the DTensor, if its module has the weak reference
  const at::TensorImpl* local = nullptr;  // a DTensor's local tensor, if that has it
  std::weak_ptr<WeightChanges> changes;   // notes of the parameter's changes
};

// Leaked, as `callback` below: at exit the interpreter may end before static objects do.
auto& weights = *new std::unordered_map<PyObject*, Weight>;
auto& ends = *new std::unordered_map<PyObject*, PyObject*>;  // keys of `weights`, by their `end`

void erase(PyObject* key) {
  auto node = weights.extract(key);
  if (!node.empty()) ends.erase(node.mapped().end.ptr());
}

py::object end_of(py::handle anchor, PyObject* key) {
  static const auto& callback = *new py::cpp_function([](py::handle end) {
    const auto found = ends.find(end.ptr());
    if (found == ends.end()) return;
    weights.at(found->second).bits->end();
    erase(found->second);
  });
  const py::object end = owned(PyWeakref_NewRef(anchor.ptr(), callback.ptr()));
  ends[end.ptr()] = key;
  return end;
}

}  // namespace

// Null if the table has no such parameter.
static Weight* found_weight(py::handle param) {
  const auto found = weights.find(param.ptr());
  if (found == weights.end()) return nullptr;
  Weight& weight = found->second;
  if (!weight.local || weight.local == local_of(param).unsafeGetTensorImpl()) return &weight;
  erase(param.ptr());  // another DTensor was at this address, or it had another local tensor
  return nullptr;
}

Bits low_bits_of(py::handle param) {
  const Weight* found = found_weight(param);
  return found ? found->bits : nullptr;
}

std::shared_ptr<WeightChanges> changes_of(py::handle param) {
  const Weight* found = found_weight(param);
  return found ? found->changes.lock() : nullptr;
}

std::weak_ptr<WeightChanges>& place_of_changes(py::handle param, py::handle owner) {
  make_low_bits(param, owner);
  return found_weight(param)->changes;
}

Bits make_low_bits(py::handle param, py::handle owner) {
  if (Bits found = low_bits_of(param)) return found;
  const at::Tensor local = local_of(param);
  Weight made;
  made.bits = std::make_shared<LowBits>();
  if (!is_dtensor(param)) {
    made.end = end_of(param, param.ptr());
  } else if (owner && !owner.is_none()) {
    made.end = end_of(owner, param.ptr());
    made.dtensor = py::reinterpret_borrow<py::object>(param);
  } else {
    made.end = end_of(wrapped(local), param.ptr());
    made.local = local.unsafeGetTensorImpl();
  }
  return weights.emplace(param.ptr(), std::move(made)).first->second.bits;
}

void let_go(py::handle param) {
  const Bits bits = low_bits_of(param);
  if (bits && !is_dtensor(param) && (bits->is_taken() || !bits->second().defined()))
    erase(param.ptr());
}

bool LowBits::has_replaced(const at::Tensor& second) const {
  return std::any_of(replaced_.begin(), replaced_.end(), [&](const auto& each) {
    return each._unsafe_get_target() == second.unsafeGetTensorImpl();
  });
}

bool LowBits::has_replaced_any() const {
  return std::any_of(replaced_.begin(), replaced_.end(),
                     [](const auto& each) { return !each.expired(); });
}

bool LowBits::fits(const at::Tensor& weight) const {
  return second_.defined() && dtype_ == weight.scalar_type() && second_.sizes() == weight.sizes();
}

bool LowBits::is_still(py::handle param) const {
  const at::Tensor weight = local_of(param);
  if (!fits(weight)) return false;
  const bool by_place = is_dtensor(param);
  if (!kept_) return param_.still(tensor_of(param)) && weight_.not_advanced(weight);
  // The counter sees all writes but those through `.data`, the checksum sees these. It alone is not
  // enough: DistributedDataParallel sends rank 0's rounded weights to all ranks; rank 0 alone would
  // keep its values, and masters would differ between ranks. Nothing sends shards, so for them a
  // checksum that also sees the elements' places is enough.
  if (!by_place && !param_.still(weight)) return false;
  const at::NoGradGuard no_grad;
  if (second_.scalar_type() == at::kFloat) return rounds_to(second_, weight);
  return checksum_of(weight, by_place) == kept_->checksum;
}

at::Tensor LowBits::decoded(const at::Tensor& weight, bool exactly) const {
  const at::NoGradGuard no_grad;
  used_on_current_stream(second_);
  const bool is_float32 = second_.scalar_type() == at::kFloat;
  if (!is_rounded() || (exactly && kept_ && is_float32))
    return copy_as(second_.detach(), at::kFloat, weight);
  const std::optional<ArrayTensors> master = master_in(weight, placed(second_.detach(), weight));
  TORCH_CHECK(master, "amp_mp: remainders (", describe(second_), ") of ", describe(weight));
  at::Tensor found = amp_mp::values_of(*master);
  if (!exactly || !kept_ || kept_->indices.numel() == 0) return found;
  const at::Device device = weight.device();
  used_on_current_stream(kept_->indices);
  used_on_current_stream(kept_->values);
  const at::Tensor corrected =
      found.flatten().index_copy(0, kept_->indices.to(device), kept_->values.to(device));
  return found.copy_(corrected.view(found.sizes()));
}

at::Tensor LowBits::values(py::handle param, bool goes_on) const {
  const at::Tensor weight = weight_of(param);
  if (!fits(weight)) return {};
  const bool still = is_still(param);
  // If a script has written the master in param_groups, it counts, whatever the weight is.
  return still || !is_rounded() || (goes_on && was_taken()) ? decoded(weight, still) : at::Tensor();
}

at::Tensor LowBits::second_as(const MasterEntry& entry, py::handle param) const {
  const at::Tensor weight = weight_of(param);
  if (!second_.defined() || second_.scalar_type() != entry.dtype || !is_rounded() ||
      !is_still(param))
    return {};
  if (!is_beside(second_, weight)) return {};
  return second_.requires_grad() ? second_.detach() : second_;
}

at::Tensor first_master(py::handle param) {
  static const MasterEntry& float32 = *master_entry("float32", at::kFloat);
  const at::Tensor weight = weight_of(param);
  const Bits bits = low_bits_of(param);
  at::Tensor found = bits ? bits->second_as(float32, param) : at::Tensor();
  if (found.defined()) return found;
  if (bits) found = bits->values(param);
  return found.defined() ? as_master(found, weight) : copy_as(weight, at::kFloat, weight);
}

at::Tensor LowBits::rest(py::handle param, bool goes_on) const {
  const bool is_all = is_taken() && !kept_ && fits(local_of(param));
  return is_all && (goes_on || is_still(param)) ? second_.detach() : values(param, goes_on);
}

void LowBits::keep(py::handle param, const at::Tensor& given) {
  const at::NoGradGuard no_grad;
  const at::Tensor weight = weight_of(param);
  TORCH_CHECK_TYPE(is_low_precision(weight), "amp_mp: the weight (", describe(weight),
                   ") must be float16 or bfloat16");
  TORCH_CHECK_VALUE(given.sizes() == weight.sizes(), "amp_mp: values (", describe(given),
                    ") must be of the weight's shape (", describe(weight), ")");
  const at::Tensor values = placed(given, weight);
  TORCH_CHECK_TYPE(values.scalar_type() == at::kFloat, "amp_mp: values (", describe(values),
                   ") must be float32");
  const bool before = was_taken();
  kept_.reset();
  if (is_taken() && fits(weight)) {
    if (is_beside(second_, weight) && keep_in_place(values, param)) return;
    write_replaced(values, weight);
  }
  keep_anew(values, param, before);
}

// Writes the values into the tensor that a state shows, if its format can hold them. The weight
// becomes what the format rounds to; half way between two weights it may be the other one.
bool LowBits::keep_in_place(const at::Tensor& values, py::handle param) {
  const at::Tensor weight = weight_of(param);
  used_on_current_stream(second_);
  if (second_.scalar_type() == at::kFloat) {
    second_.copy_(values);
    stamp(tensor_of(param), weight);
    return true;
  }
  ArrayTensors made = *master_in(weight, second_);
  made.data = at::empty_like(weight);
  made.rest = at::empty_like(second_);
  store_values(values, made);
  const auto few = exceptions(values, values_of(made));
  if (!few) return false;
  weight.view(at::kShort).copy_(made.data.view(at::kShort));
  second_.copy_(made.rest);
  stamp(tensor_of(param), weight);
  kept_ = std::make_unique<Kept>(checksum_of(weight, is_dtensor(param)), few->first, few->second);
  return true;
}

void LowBits::keep_anew(const at::Tensor& values, py::handle param, bool was_taken) {
  const at::Tensor weight = weight_of(param);
  const bool native = (weight.is_cpu() || weight.is_cuda()) && !is_subclass(weight);
  if (native && weight.numel() > 0) {
    const at::Tensor rest = at::empty_like(weight, weight.options().dtype(at::kShort));
    const ArrayTensors made = *master_in(weight, rest);
    store_beside(values, made);
    if (const auto few = exceptions(values, values_of(made))) {
      show(rest, param);
      kept_ =
          std::make_unique<Kept>(checksum_of(weight, is_dtensor(param)), few->first, few->second);
    }
  }
  if (!kept_) {
    show(values, param);
    kept_ = std::make_unique<Kept>();
  }
  kept_->was_taken = was_taken;
  is_taken_ = false;
}

// Writes the values also into replaced tensors that states still show, until their next step.
void LowBits::write_replaced(const at::Tensor& values, const at::Tensor& weight) {
  std::vector<at::Tensor> all = {second_};
  for (const auto& each : replaced_)
    if (auto alive = each.lock()) all.emplace_back(std::move(alive));
  for (const at::Tensor& each : all) {
    if (!is_beside(each, weight)) continue;
    used_on_current_stream(each);
    if (each.scalar_type() == at::kFloat)
      at::Tensor(each).copy_(values);
    else
      store_beside(values, *master_in(weight, each));
  }
}

void LowBits::show(const at::Tensor& second, py::handle param, bool apart) {
  if (is_taken() && shows(second)) return;
  if (is_taken() && second_.use_count() > 1) note_replaced(second_);
  // A replaced tensor may come back, in another optimizer's state.
  std::erase_if(replaced_, [&](const auto& each) {
    return each._unsafe_get_target() == second.unsafeGetTensorImpl();
  });
  used_on_current_stream(second_);  // maybe from another stream, and dropped here
  second_ = second;
  const at::Tensor weight = local_of(param);
  dtype_ = weight.scalar_type();
  is_taken_ = true;
  is_apart_ = apart;
  stepped(tensor_of(param), weight);
}

void LowBits::note_replaced(const at::Tensor& second) {
  std::erase_if(replaced_, [](const auto& each) { return each.expired(); });
  replaced_.emplace_back(second.getIntrusivePtr());
}

void LowBits::stepped(const at::Tensor& param, const at::Tensor& weight) {
  kept_.reset();
  stamp(param, weight);
}

void LowBits::stamp(const at::Tensor& param, const at::Tensor& weight) {
  param_ = VersionStamp(param);
  weight_ = VersionStamp(weight);
  if (is_apart_) master_ = Stamp(second_);
}

Tensors LowBits::tensors() const {
  if (!second_.defined()) return {};
  if (!kept_ || !kept_->indices.defined()) return {second_};
  return {second_, kept_->indices, kept_->values};
}

py::object LowBits::entry() const {
  for (const MasterEntry& each : master_entries())
    if (each.dtype == second_.scalar_type() && each.weight.value_or(dtype_) == dtype_)
      return each.entry;
  return py::none();
}

void LowBits::end() {
  is_lost_ = second_.defined();
  drop();
}

void LowBits::drop() {
  second_.reset();
  kept_.reset();
  replaced_.clear();
  is_taken_ = is_apart_ = false;
}

std::optional<LowBits::State> LowBits::state(py::handle param) const {
  const bool still = is_still(param);
  if (!fits(local_of(param)) || (kept_ && !still && !is_taken_)) return std::nullopt;
  // The tensor that a state shows itself, so that deepcopy and pickle make one copy for both.
  const at::Tensor second = second_.requires_grad() ? second_.detach() : second_;
  if (!kept_ || !still) return State(second, {}, {}, {}, still);
  if (!kept_->indices.defined()) return State(second_, {}, {}, kept_->checksum, true);
  return State(second_, kept_->indices, kept_->values, kept_->checksum, true);
}

void LowBits::set_state(py::handle param, const State& state) {
  const auto& [second, indices, values, checksum, is_still] = state;
  show(second, param);
  stamp(tensor_of(param), local_of(param));
  is_taken_ = !checksum;
  if (checksum)
    kept_ = std::make_unique<Kept>(*checksum, indices.value_or(at::Tensor()),
                                   values.value_or(at::Tensor()));
  if (!is_still) param_ = VersionStamp();
}

void bind_low_bits(py::module_& m) {
  py::class_<Stamp>(m, "Stamp")
      .def(py::init<const at::Tensor&>(), py::arg("tensor"))
      .def("still", &Stamp::still, py::arg("tensor"));
  const auto optional = [](at::Tensor t) {
    return t.defined() ? std::optional(std::move(t)) : std::nullopt;
  };
  py::class_<LowBits, Bits>(m, "LowBits")
      .def_property("is_prepared", &LowBits::is_prepared, &LowBits::set_prepared)
      .def_property_readonly("is_lost", &LowBits::is_lost)
      .def_property_readonly("is_taken", &LowBits::is_taken)
      .def_property_readonly("is_rounded", &LowBits::is_rounded)
      .def_property_readonly("tensors", &LowBits::tensors)
      .def_property_readonly("entry", &LowBits::entry)
      .def("keep", &LowBits::keep, py::arg("param"), py::arg("values"))
      .def(
          "values",
          [=](const LowBits& b, py::handle param, bool goes_on) {
            return optional(b.values(param, goes_on));
          },
          py::arg("param"), py::arg("goes_on") = false)
      .def("is_still", &LowBits::is_still, py::arg("param"))
      .def(
          "show",
          [](LowBits& b, py::handle master, py::handle param) {
            b.show(local_of(master), param, /*apart=*/true);
          },
          py::arg("master"), py::arg("param"))
      .def(
          "shows", [](const LowBits& b, py::handle master) { return b.shows(local_of(master)); },
          py::arg("master"))
      .def(
          "stamp", [](LowBits& b, py::handle param) { b.stamp(tensor_of(param), local_of(param)); },
          py::arg("param"))
      .def("drop", &LowBits::drop)
      .def("state", &LowBits::state, py::arg("param"))
      .def("set_state", &LowBits::set_state, py::arg("param"), py::arg("state"));
  m.def("low_bits_of", &low_bits_of, py::arg("param"));
  m.def("make_low_bits", &make_low_bits, py::arg("param"), py::arg("owner") = py::none());
  m.def("let_go", &let_go, py::arg("param"));
  m.def("first_master", &first_master, py::arg("param"));
  m.def(
      "rests_of",
      [=](const std::vector<py::object>& params, bool goes_on) {
        std::vector<std::optional<at::Tensor>> found;
        for (const py::object& param : params) {
          const Bits bits = low_bits_of(param);
          found.push_back(bits ? optional(bits->rest(param, goes_on)) : std::nullopt);
        }
        return found;
      },
      py::arg("params"), py::arg("goes_on"));
}

}  // namespace amp_mp
