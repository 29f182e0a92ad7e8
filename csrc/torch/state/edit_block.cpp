#include "torch/state/edit_block.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty_like.h>
#include <c10/core/InferenceMode.h>

#include <unordered_map>

#include "torch/bind.h"
#include "torch/device.h"
#include "torch/ops.h"
#include "torch/weights/master_tensors.h"

namespace amp_mp {
namespace {

py::dict state_in(const py::dict& states, const py::object& param) {
  const py::handle found = item_of(states, param);
  return found ? py::reinterpret_borrow<py::dict>(found) : py::dict();
}

at::Tensor values_in(const py::object& edited) { return local_of(edited).detach(); }

}  // namespace

EditBlock::EditBlock(const Layouts& rules, const py::list& groups, const py::dict& states,
                     const Named& params)
    : states_(states) {
  TORCH_CHECK(!c10::InferenceMode::is_enabled(),
              "masters() inside of torch.inference_mode(), whose tensors have no version counters; "
              "use torch.no_grad()");
  std::unordered_map<PyObject*, size_t> places;  // of each parameter in edits_
  for (const auto& [name, param] : params) places.emplace(param.ptr(), SIZE_MAX);
  std::vector<Member> members = members_of(rules, groups, states, &places);
  for (size_t i = 0; i < members.size(); ++i) places[members[i].param.ptr()] = i;
  for (const auto& [name, param] : params) {
    if (!is_tensor(param))
      throw py::type_error(
          name + " must be one of the optimizer's parameters, found " + repr_of(param) +
          "; pass a parameter, or a list or dict of them: dict(model.named_parameters())");
    TORCH_CHECK_VALUE(places[param.ptr()] < members.size(), name, ", a tensor of shape ",
                      shape_text(tensor_of(param).sizes()),
                      ", is not one of this optimizer's parameters");
  }
  std::vector<py::object> borrowed;
  for (const Member& member : members) {
    const WeightRecord record = weight_of(member.param);
    TORCH_CHECK(!record || record->borrower() != Borrower::masters_block, member.label,
                " is in a block of masters() that has not ended; write it there");
    borrowed.push_back(member.param);
  }
  refuse_borrowed(py::cast(borrowed), "masters()");
  loan_ = std::make_unique<Loan>(borrowed, Borrower::masters_block);
  check_members(members);
  for (Member& member : members) {
    const MasterEntry* const entry = wanted_master(member);
    if (entry) take_entry(member.param, member.state);
    edits_.push_back({std::move(member), {}, entry, {}, {}, {}});
  }
  for (Edit& edit : edits_) {
    edit.weight = Seen(edit.member.local);
    edit.beside = Seen(master_of(edit.member.param));
    edit.before = Seen(read(edit));
    edit.values = like(edit.before.tensor, edit.member.param);
  }
  for (const auto& [name, param] : params) masters_.append(edits_[places[param.ptr()]].values);
}

bool EditBlock::has_state(const Edit& edit) const {
  return !state_in(states_, edit.member.param).empty();
}

at::Tensor EditBlock::read(const Edit& edit) const {
  const at::NoGradGuard no_grad;
  const py::object& param = edit.member.param;
  const at::Tensor weight = local_of(param).detach();
  if (edit.master) return float32_of(param, has_state(edit));
  return copy_as(weight, at::kFloat, weight);
}

at::Tensor EditBlock::changes(const Edit& edit) const {
  const at::Tensor before = read(edit);
  return values_in(edit.values).view(at::kInt).ne(before.view(at::kInt));
}

// On a CPU the bits say it. On a CUDA device the version counter does, so that the host does not
// wait; writes through `.data` are stored all the same, and no counter advances. If there is no
// state yet, the bits say it there too: state must not be made for nothing.
bool EditBlock::is_written(const Edit& edit, const at::Tensor& changed) const {
  if (changed.is_cpu()) return changed.any().item<bool>();
  if (!edit.before.is_still(local_of(edit.values))) return true;
  return needs_state(edit) && changed.any().item<bool>();
}

bool EditBlock::needs_state(const Edit& edit) const { return edit.master && !has_state(edit); }

void EditBlock::check(const Edit& edit) const {
  const at::Tensor local = local_of(edit.member.param);
  const std::string& label = edit.member.label;
  TORCH_CHECK(edit.weight.is_still(local) && edit.beside.is_still(master_of(edit.member.param)),
              label,
              " or its state was written inside of a block of masters(); write the master alone, "
              "or the parameter after the block; nothing was stored");
  const at::Tensor now = values_in(edit.values);
  TORCH_CHECK(now.scalar_type() == at::kFloat && now.sizes() == local.sizes() &&
                  now.device() == local.device(),
              "the master of ", label, " was float32 of shape ", shape_text(local.sizes()), " on ",
              local.device(), " and is now ", describe(now),
              "; write it in place; nothing was "
              "stored");
}

void EditBlock::store() {
  const at::NoGradGuard no_grad;
  for (const Edit& edit : edits_) check(edit);
  for (Edit& edit : edits_) {  // first: making state may raise, and nothing is stored yet
    if (!needs_state(edit) || !is_written(edit, changes(edit))) continue;
    const std::vector<Member> alone = {edit.member};
    refuse_new_state(alone);
    if (!item_of(states_, edit.member.param)) states_[edit.member.param] = edit.member.state;
    const HostRoom room = room_for(alone);
    clocks_of(alone);
    init_state(edit.member, /*stepping=*/false);
  }
  for (const Edit& edit : edits_) store(edit);
}

void EditBlock::store(const Edit& edit) const {
  const at::Tensor weight = edit.member.local.detach(), values = values_in(edit.values);
  const at::Tensor changed = changes(edit);
  const bool written = is_written(edit, changed);
  if (!written && (weight.is_cpu() || needs_state(edit))) return;
  used_on_current_stream(values);
  const auto put = [&](const at::Tensor& to, const at::Tensor& made) {
    at::Tensor uncounted = to.variable_data();
    uncounted.copy_(chosen(changed, made, uncounted));
    if (written) bump_version(to);
  };
  WeightRecord edited;
  if (!edit.master) {
    at::Tensor rounded = values;
    if (is_low_precision(weight))
      copy_({rounded = at::empty_like(weight)}, {values}, std::nullopt, 1.0, /*saturate=*/true);
    put(weight, rounded);
  } else {
    edited = weight_at(edit.member.param);
    const at::Tensor master =
        edited->master_for(edit.member.tensors(), edit.master->dtype, /*stepping=*/true);
    const at::Tensor rounded = at::empty_like(weight);
    const ArrayTensors written_values = {placed(values, weight), Format::float32, {}};
    const at::Tensor made =
        made_beside(written_values, rounded, master.scalar_type(), /*writes=*/true);
    put(weight, rounded);
    put(master, made);
  }
  const at::Tensor& param = tensor_of(edit.member.param);
  if (written && edit.member.is_dtensor) bump_version(param);  // its shard has advanced alone
  if (written && edited) edited->stepped(param, local_of(edit.member.param));
}

void bind_edit_block(py::module_& m) {
  py::class_<EditBlock, std::shared_ptr<EditBlock>>(m, "EditBlock")
      .def(py::init<const Layouts&, const py::list&, const py::dict&, const EditBlock::Named&>(),
           py::arg("rules"), py::arg("groups"), py::arg("states"), py::arg("params"))
      .def_property_readonly("masters", &EditBlock::masters)
      .def("borrow", [](EditBlock& block) { block.loan().borrow("masters()"); })
      .def("give_back", [](EditBlock& block) { block.loan().give_back(); })
      .def("store", py::overload_cast<>(&EditBlock::store));
}

}  // namespace amp_mp
