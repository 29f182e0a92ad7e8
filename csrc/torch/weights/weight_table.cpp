// Finds a parameter's record. The key is the parameter. A plain parameter has a weak reference,
// which ends the record. A DTensor must have none, because torch then refuses to exchange the
// insides of two DTensors, as model.to() does: its module or its local tensor has the weak
// reference.
#include <unordered_map>

#include "torch/state/live_state.h"
#include "torch/weights/weight.h"
#include "torch/weights/weight_changes.h"

namespace amp_mp {
namespace {

struct Known {
  WeightRecord record;
  py::object end;                         // a weak reference whose callback drops this entry
  std::optional<WeakTensor> insides;      // of a released parameter, which has no weak reference
  py::object dtensor;                     // the DTensor, if its module has the weak reference
  const at::TensorImpl* local = nullptr;  // a DTensor's local tensor, if that has it
  std::weak_ptr<WeightChanges> changes;   // notes of the parameter's changes

  bool is_released() const { return !end; }
  // Whether this is the parameter, and not another one at its address, or one whose insides
  // torch.utils.swap_tensors or .to() of a DTensor has exchanged.
  bool is_of(py::handle param) const {
    if (is_released())
      return insides->_unsafe_get_target() == tensor_of(param).unsafeGetTensorImpl();
    return !local || local == param_of(param).local.unsafeGetTensorImpl();
  }
};

// Leaked, as `callback` below: at exit the interpreter may end before static objects do.
auto& known = *new std::unordered_map<PyObject*, Known>;
auto& ends = *new std::unordered_map<PyObject*, PyObject*>;  // keys of `known`, by their `end`

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
  if (found->second.is_of(param)) return &found->second;
  erase(param.ptr());
  return nullptr;
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
  const bool is_sharded = is_dtensor(param), is_owned = is_sharded && owner && !owner.is_none();
  const Known* found = found_known(param);
  if (found && !found->is_released() && (!is_owned || found->dtensor)) return found->record;
  // First what may raise: an entry must have an end.
  const py::object anchor = is_owned     ? py::reinterpret_borrow<py::object>(owner)
                            : is_sharded ? wrapped(local)
                                         : py::reinterpret_borrow<py::object>(param);
  py::object end = end_of(anchor, param.ptr());
  Known& entry = known[param.ptr()];
  if (!entry.record) entry.record = std::make_shared<Weight>();
  if (entry.end) ends.erase(entry.end.ptr());
  entry.end = std::move(end);
  entry.dtensor = is_owned ? py::reinterpret_borrow<py::object>(param) : py::object();
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
  std::erase_if(known, [](const auto& each) {
    return each.second.is_released() && each.second.insides->expired();
  });
  for (const py::object& param : params) {
    Known* const found = found_known(param);  // and no other one's at its address
    if (!found || found->is_released() || is_dtensor(param)) continue;
    found->insides = WeakTensor(tensor_of(param).getIntrusivePtr());
    ends.erase(found->end.ptr());
    found->end = {};
  }
}

}  // namespace amp_mp
