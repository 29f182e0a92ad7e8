// Finds a parameter's record. The key is the parameter. A plain parameter has a weak reference,
// which ends the record. torch refuses to exchange the insides of tensors that have one, as
// model.to() does with those of DTensors, and, with
// torch.__future__.set_swap_module_params_on_conversion(True), of all parameters. There the module
// of the parameter has the weak reference, or a DTensor's local tensor.
#include <unordered_map>

#include "torch/state/live_state.h"
#include "torch/weights/weight.h"
#include "torch/weights/weight_changes.h"

namespace amp_mp {
namespace {

struct Known {
  WeightRecord record;
  py::object end;    // a weak reference whose callback drops this entry; none if released
  py::object param;  // the parameter, if it has no weak reference, nor its local tensor
  const at::TensorImpl* insides = nullptr;  // of `param`, if plain; exchanged by swap_tensors
  const at::TensorImpl* local = nullptr;    // a DTensor's local tensor, if that has the reference
  std::weak_ptr<WeightChanges> changes;     // notes of the parameter's changes

  bool is_released() const { return !end; }
  // Whether this is the parameter, and not a DTensor of other insides.
  bool is_of(py::handle given) const {
    return !local || local == param_of(given).local.unsafeGetTensorImpl();
  }
};

// Leaked, as `callback` below: at exit the interpreter may end before static objects do.
auto& known = *new std::unordered_map<PyObject*, Known>;
auto& ends = *new std::unordered_map<PyObject*, PyObject*>;  // keys of `known`, by their `end`
auto& released = *new std::vector<PyObject*>;                // keys of `known`

void erase(PyObject* key) {
  auto node = known.extract(key);
  if (!node.empty() && node.mapped().end) ends.erase(node.mapped().end.ptr());
}

py::object end_of(py::handle anchor, PyObject* key) {
  static const auto& callback = *new py::cpp_function([](py::handle end) {
    const auto found = ends.find(end.ptr());
    if (found == ends.end()) return;
    known.at(found->second).record->end();
    erase(found->second);
  });
  const py::object end = owned(PyWeakref_NewRef(anchor.ptr(), callback.ptr()));
  ends[end.ptr()] = key;
  return end;
}

// Null if the table has no such parameter.
Known* found_known(py::handle param) {
  const auto found = known.find(param.ptr());
  if (found == known.end()) return nullptr;
  Known& entry = found->second;
  if (!entry.is_of(param)) {
    erase(param.ptr());
    return nullptr;
  }
  const at::TensorImpl* const insides =
      entry.insides ? tensor_of(param).unsafeGetTensorImpl() : nullptr;
  if (std::exchange(entry.insides, insides) != insides) entry.record->exchange();
  return &entry;
}

// Ends the records of released parameters that nobody else has. They cannot tell by themselves.
void end_released() {
  std::vector<py::object> over;  // whose destructors may come back here
  std::erase_if(released, [&](PyObject* key) {
    const auto found = known.find(key);
    if (found == known.end() || !found->second.is_released()) return true;
    if (Py_REFCNT(key) > 1) return false;
    over.push_back(std::move(found->second.param));
    known.erase(found);
    return true;
  });
}

bool swaps_insides() {
  static const auto& asks = *new py::object(
      py::module_::import("torch.__future__").attr("get_swap_module_params_on_conversion"));
  return py::cast<bool>(asks());
}

}  // namespace

WeightRecord weight_of(py::handle param) {
  const Known* found = found_known(param);
  return found ? found->record : nullptr;
}

at::Tensor master_of(py::handle param) {
  const WeightRecord record = weight_of(param);
  return record ? record->master() : at::Tensor();
}

std::shared_ptr<WeightChanges> changes_of(py::handle param) {
  const Known* found = found_known(param);
  return found ? found->changes.lock() : nullptr;
}

std::weak_ptr<WeightChanges>& place_of_changes(py::handle param, py::handle owner) {
  weight_at(param, owner);
  return found_known(param)->changes;
}

WeightRecord weight_at(py::handle param, py::handle owner) {
  const at::Tensor& local = param_of(param).local;
  const bool is_sharded = is_dtensor(param), has_owner = owner && !owner.is_none();
  const Known* found = found_known(param);
  const bool is_held = found && !found->is_released();
  if (is_held && (!has_owner || found->param)) return found->record;
  const bool is_owned = has_owner && (is_sharded || swaps_insides());
  if (is_held && !is_owned) return found->record;
  if (!found) end_released();
  // First what may raise: an entry must have an end.
  const py::object anchor = is_owned     ? py::reinterpret_borrow<py::object>(owner)
                            : is_sharded ? wrapped(local)
                                         : py::reinterpret_borrow<py::object>(param);
  py::object end = end_of(anchor, param.ptr());
  Known& entry = known[param.ptr()];
  if (!entry.record) entry.record = std::make_shared<Weight>();
  if (entry.end) ends.erase(entry.end.ptr());
  entry.end = std::move(end);
  entry.param = is_owned ? py::reinterpret_borrow<py::object>(param) : py::object();
  entry.insides = is_owned && !is_sharded ? local.unsafeGetTensorImpl() : nullptr;
  entry.local = is_sharded && !is_owned ? local.unsafeGetTensorImpl() : nullptr;
  return entry.record;
}

void drop_unused_weights(const std::vector<py::object>& params) {
  for (const py::object& param : params) {
    const Known* const found = found_known(param);
    if (found && !found->record->is_used() && found->changes.expired()) erase(param.ptr());
  }
}

void release_weights(const std::vector<py::object>& params) {
  end_released();
  for (const py::object& param : params) {
    Known* const found = found_known(param);
    if (!found || found->param || is_dtensor(param)) continue;
    found->param = param;
    found->insides = tensor_of(param).unsafeGetTensorImpl();
    ends.erase(found->end.ptr());
    found->end = {};
    released.push_back(param.ptr());
  }
}

}  // namespace amp_mp
