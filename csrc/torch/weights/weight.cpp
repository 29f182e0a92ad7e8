#include "torch/weights/weight.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <limits>

#include "torch/device.h"
#include "torch/weights/master_tensors.h"
#include "torch/weights/weight_changes.h"

namespace amp_mp {
namespace {

constexpr int64_t kExceptionBytes = 12;  // an int64 index and a float32 value
constexpr double kLargestHalf = 65504;

// The sum of a low-precision weight (core/changes.h) in the order of the memory of `like`, a
// master. The host waits for it.
uint64_t sum_of(const at::Tensor& given, const at::Tensor& like) {
  const at::Tensor weight = is_packed(like)            ? given.contiguous()
                            : same_layout(given, like) ? given
                                                       : placed(given, like);
  const at::Tensor sum = at::zeros({1}, weight.options().dtype(at::kLong));
  compare({weight.detach()}, {std::nullopt}, {sum}, {weight.scalar_type()});
  return uint64_t(sum.item<int64_t>());
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

// As detach() makes it, in a third of the time.
at::Tensor detached(const at::Tensor& t) {
  c10::TensorImpl* const impl = t.unsafeGetTensorImpl();
  return at::Tensor(impl->shallow_copy_and_detach(impl->version_counter(), true));
}

ArrayTensors float32_array(const at::Tensor& t) { return {t, Format::float32, {}}; }

// As set_() of a storage without memory, in a third of the time.
void empty(const at::Tensor& t) {
  c10::TensorImpl* const impl = t.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(at::empty({0}, t.options()).storage());
  impl->set_storage_offset(0);
  impl->set_sizes_contiguous({0});
}

// Flat indices and values of the elements in which `found` differs; none if float32 takes less
// memory.
std::optional<std::pair<at::Tensor, at::Tensor>> exceptions(const at::Tensor& values,
                                                            const at::Tensor& found) {
  const at::Tensor wrong = found.view(at::kInt).ne(values.view(at::kInt));
  const at::Tensor indices = wrong.flatten().nonzero().flatten();
  if (kExceptionBytes * indices.numel() > 2 * values.numel()) return std::nullopt;
  return std::pair(indices, values.flatten().index_select(0, indices));
}

}  // namespace

// Reading.

bool Weight::fits(const at::Tensor& weight) const {
  return master_.defined() && dtype_ == weight.scalar_type() && is_of_size(master_, weight);
}

bool Weight::is_unwritten(const Param& param) const {
  const at::Tensor& weight = param.local;
  if (!fits(weight)) return false;
  // The sum sees all writes. It alone is not enough: DistributedDataParallel sends rank 0's rounded
  // weights to all ranks; rank 0 alone would keep its values, and masters would differ between
  // ranks. Nothing sends shards that are stored, nor weights with other insides.
  const bool counts = !is_exchanged_ && !(stored_ && param.is_sharded());
  if (counts && !(param_.still(param.whole) && local_.not_advanced(weight))) return false;
  const at::NoGradGuard no_grad;
  if (needs_sum()) return has_sum_ ? sum_of(weight, master_) == sum_ : counts;
  return (counts && !stored_) || rounds_to(master_, weight);
}

// The arrays that hold the weight's value: the master and the weight, float32 values, or the weight
// alone. exactly: with what `store` has kept besides.
ArrayTensors Weight::held(const Param& param, bool stepping, bool exactly) const {
  const at::NoGradGuard no_grad;
  const at::Tensor& weight = param.local;
  const bool fitting = fits(weight), goes_with = fitting && stepping && is_stepped_;
  const bool unwritten = fitting && (!goes_with || stored_) && is_unwritten(param);
  const bool written = fitting && is_master_written();
  if (!unwritten && !written && !goes_with)
    return {weight, weight.scalar_type() == at::kHalf ? Format::float16 : Format::bfloat16, {}};
  used_on_current_stream(master_);
  const at::Tensor master = placed_master(master_, weight);
  const bool is_stored = exactly && unwritten && stored_;
  if (written || (is_stored && !stored_->indices.defined())) return float32_array(master);
  const ArrayTensors both = *master_in(weight, master);
  if (!is_stored || stored_->indices.numel() == 0) return both;
  const at::Tensor values = values_of(both);
  const at::Device device = weight.device();
  used_on_current_stream(stored_->indices);
  used_on_current_stream(stored_->values);
  const at::Tensor corrected =
      values.flatten().index_copy(0, stored_->indices.to(device), stored_->values.to(device));
  return float32_array(values.copy_(corrected.view(values.sizes())));  // in the weight's layout
}

bool Weight::is_present(const ArrayTensors& found) const {
  return found.second.defined() && (found.data.is_same(master_) || found.second.is_same(master_));
}

at::Tensor Weight::values(const Param& param, bool stepping) const {
  const ArrayTensors found = held(param, stepping);
  if (found.second.defined()) return values_of(found);
  return found.format == Format::float32 ? found.data.detach().clone() : at::Tensor();
}

at::Tensor Weight::beside(const Param& param, bool stepping) const {
  const ArrayTensors found = held(param, stepping);
  if (is_present(found)) return master_.detach();
  const bool is_alone = !found.second.defined() && found.format != Format::float32;
  return is_alone ? at::Tensor() : made_beside(found, param.local, at::kFloat);
}

at::Tensor float32_of(py::handle object, bool stepping) {
  const Param param = param_of(object);
  const WeightRecord record = weight_of(object);
  const at::Tensor found = record ? record->values(param, stepping) : at::Tensor();
  return found.defined() ? found : param.local.detach().to(at::kFloat, false, /*copy=*/true);
}

// Writing.

void Weight::store(const Param& param, const at::Tensor& given, bool exactly) {
  const at::NoGradGuard no_grad;
  const at::Tensor& weight = param.local;
  TORCH_CHECK_TYPE(is_low_precision(weight), "amp_mp: the weight (", describe(weight),
                   ") must be float16 or bfloat16");
  TORCH_CHECK_VALUE(given.sizes() == weight.sizes(), "amp_mp: values (", describe(given),
                    ") must be of the weight's shape (", describe(weight), ")");
  const at::Tensor values = placed(given, weight);
  TORCH_CHECK_TYPE(values.scalar_type() == at::kFloat, "amp_mp: values (", describe(values),
                   ") must be float32");
  stored_.reset();
  has_sum_ = false;
  const bool in_place = is_stepped_ && fits(weight) && is_beside(master_, weight);
  if (!in_place || !store_in_place(param, values, exactly)) store_anew(param, values);
}

// The weight becomes what the master's format rounds to; half way between two weights it may be the
// other one.
bool Weight::store_in_place(const Param& param, const at::Tensor& values, bool exactly) {
  const at::Tensor weight = param.local.detach();
  const at::ScalarType dtype = master_.scalar_type();
  used_on_current_stream(master_);
  at::Tensor own = at::empty_like(weight);
  at::Tensor made = made_beside(float32_array(values), own, dtype, /*writes=*/true);
  at::Tensor found = master_values(own, made);
  const at::Tensor inexact = found.view(at::kInt).ne(values.view(at::kInt));
  if (exactly && inexact.any().item<bool>()) {  // there the weight stays what the value rounds to
    made = chosen(inexact, made_beside(float32_array(values), weight, dtype), made);
    own = at::where(inexact, weight, own);
    found = master_values(own, made);
  }
  const auto few = exceptions(values, found);
  if (!few && exactly) return false;
  weight.view(at::kShort).copy_(own.view(at::kShort));
  at::Tensor(master_).copy_(made);
  stepped(param.whole, weight);
  if (few && dtype != at::kFloat) set_stored(weight, few->first, few->second);
  return true;
}

void Weight::store_anew(const Param& param, const at::Tensor& values) {
  const at::Tensor weight = param.local.detach();
  const bool native = (weight.is_cpu() || weight.is_cuda()) && !is_subclass(weight);
  if (native && weight.numel() > 0) {
    const at::Tensor remainder = made_beside(float32_array(values), weight, at::kShort);
    if (const auto few = exceptions(values, master_values(weight, remainder))) {
      replace(remainder, weight.scalar_type());
      set_stored(weight, few->first, few->second);
    }
  }
  if (!stored_) {
    replace(values, weight.scalar_type());
    stored_ = std::make_unique<Stored>();
  }
  stamp(param.whole, param.local);
}

at::Tensor Weight::master_for(const Param& param, at::ScalarType dtype, bool stepping) {
  const at::Tensor& weight = param.local;
  if (stepping && is_stepped_ && master_.defined() && master_.scalar_type() == at::kFloat)
    dtype_ = weight.scalar_type();  // a float32 master goes with weights of both dtypes
  const bool same_format = master_.defined() && master_.scalar_type() == dtype;
  const ArrayTensors from = held(param, stepping, /*exactly=*/!same_format);
  const bool stays = same_format && from.second.defined();  // the same bytes, where the weight is
  const bool writes = fits(weight) && is_master_written();  // then the weight follows
  const at::Tensor made = stays ? dtype == at::kFloat ? from.data : from.second
                                : made_beside(from, weight, dtype, writes);
  if (!made.is_same(master_)) replace(made, weight.scalar_type());
  if (writes) bump_version(param.whole);
  if (!stays) stepped(param.whole, weight);
  is_stepped_ = true;
  return master_;
}

void Weight::set_master(const Param& param, const at::Tensor& master, bool in_groups) {
  if (!master_.is_same(master)) replace(master, param.local.scalar_type());
  is_stepped_ = true;
  is_in_groups_ = in_groups;
  stepped(param.whole, param.local);
}

// dtype: the weight's.
void Weight::replace(const at::Tensor& master, at::ScalarType dtype) {
  used_on_current_stream(master_);  // maybe from another stream, and dropped here
  if (const at::Tensor earlier = present_shown(); earlier.defined()) empty(earlier);
  shown_.reset();
  master_ = master;
  dtype_ = dtype;
  is_in_groups_ = false;
}

void Weight::stepped(const at::Tensor& param, const at::Tensor& local, bool has_sum) {
  stored_.reset();
  has_sum_ = has_sum;
  if (!has_sum && needs_sum() && local.is_cpu()) take_sum(local);
  stamp(param, local);
}

void Weight::stamp(const at::Tensor& param, const at::Tensor& local) {
  param_ = VersionStamp(param);
  local_ = VersionStamp(local);
  is_exchanged_ = false;
  if (is_in_groups_) written_ = Stamp(master_);
}

void Weight::set_stored(const at::Tensor& weight, at::Tensor indices, at::Tensor values) {
  stored_ = std::make_unique<Stored>(std::move(indices), std::move(values));
  if (!has_sum_) take_sum(weight);  // of a new master on a GPU
}

void Weight::take_sum(const at::Tensor& weight) {
  sum_ = sum_of(weight, master_);
  has_sum_ = true;
}

void Weight::drop() {
  used_on_current_stream(master_);
  master_.reset();
  stored_.reset();
  shown_.reset();
  is_stepped_ = is_in_groups_ = false;
}

// What states show, and copies.

at::Tensor Weight::present_shown() const {
  if (!shown_) return {};
  auto alive = shown_->lock();
  return alive ? at::Tensor(std::move(alive)) : at::Tensor();
}

at::Tensor Weight::shown() {
  at::Tensor found = present_shown();
  if (found.defined()) return found;
  found = detached(master_);
  shown_ = WeakTensor(found.getIntrusivePtr());
  return found;
}

void Weight::set_shown_master(const Param& param, const at::Tensor& shown) {
  set_master(param, detached(shown));
  shown_ = WeakTensor(shown.getIntrusivePtr());
}

bool Weight::shows(const at::Tensor& t) const {
  return shown_ && shown_->_unsafe_get_target() == t.unsafeGetTensorImpl();
}

Tensors Weight::tensors() const {
  if (!master_.defined()) return {};
  if (!stored_ || !stored_->indices.defined()) return {master_};
  return {master_, stored_->indices, stored_->values};
}

py::object Weight::entry() const {
  if (master_.defined())
    for (const MasterEntry& each : master_entries())
      if (each.dtype == master_.scalar_type() && each.weight.value_or(dtype_) == dtype_)
        return each.entry;
  return py::none();
}

void Weight::end() {
  is_lost_ = master_.defined();
  drop();
}

std::optional<Weight::State> Weight::state(const Param& param) const {
  const bool unwritten = is_unwritten(param);
  if (!fits(param.local) || (stored_ && !unwritten && !is_stepped_)) return std::nullopt;
  // The tensor that states show, so that deepcopy and pickle make one copy for both.
  const at::Tensor shown = present_shown(), master = shown.defined() ? shown : master_.detach();
  if (!stored_ || !unwritten) return State(master, {}, {}, {}, unwritten, is_stepped_);
  const auto& [indices, values] = *stored_;
  if (!indices.defined()) return State(master, {}, {}, 0, true, is_stepped_);
  return State(master, indices, values, 0, true, is_stepped_);
}

void Weight::set_state(const Param& param, const State& state) {
  const auto& [master, indices, values, is_stored, unwritten, is_stepped] = state;
  set_master(param, master);
  is_stepped_ = is_stepped;
  if (indices)
    set_stored(param.local, *indices, *values);
  else if (is_stored)
    stored_ = std::make_unique<Stored>();
  if (!unwritten) param_ = VersionStamp();
}

void take_entry(py::handle object, py::handle state) {
  const Param param = param_of(object);
  if (!is_low_precision(param.local)) return;
  for (const MasterEntry& each : master_entries()) {
    if (each.weight && *each.weight != param.local.scalar_type()) continue;
    const py::handle found = item_of(state, each.entry);
    if (!is_tensor(found)) continue;
    const at::Tensor& given = param_of(found).local;
    const WeightRecord record = weight_at(object);
    if (record->shows(given) || record->master().is_same(given)) continue;
    if (given.numel() == 0 && param.local.numel() > 0) continue;
    TORCH_CHECK_VALUE(given.scalar_type() == each.dtype && is_of_size(given, param.local),
                      "amp_mp: the master (", describe(given), ") does not go with the weight (",
                      describe(param.local), ")");
    // A tensor that the state alone holds becomes the one that is shown: no script misses it if it
    // becomes empty.
    const bool is_states = is_plain(found) && Py_REFCNT(found.ptr()) == 1;
    if (is_states && is_beside(given, param.local)) return record->set_shown_master(param, given);
    return record->set_master(param, placed_master(given, param.local));
  }
}

void put_entry(const WeightRecord& record, py::handle object, py::handle state) {
  const bool shows = record && is_low_precision(param_of(object).local);
  const py::object name = shows ? record->entry() : py::none();
  if (const py::handle found = item_of(state, name))
    if (is_tensor(found) && record->shows(param_of(found).local)) return;
  for (const MasterEntry& each : master_entries()) {
    const py::handle found = item_of(state, each.entry);
    if (!found) continue;
    // Its memory may be another stream's, whose allocator would reuse it while this stream reads.
    if (is_tensor(found)) used_on_current_stream(local_of(found));
    drop_item(state, each.entry);
  }
  if (name.is_none()) return;
  const at::Tensor shown = record->shown();
  set_item(state, name, like(shown, object, master_shape(tensor_of(object), shown.scalar_type())));
}

}  // namespace amp_mp
