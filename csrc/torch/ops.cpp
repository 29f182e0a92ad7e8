#include "torch/ops.h"

#include <ATen/Parallel.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/empty_like.h>

#include <algorithm>

#include "cpu/passes.h"
#include "torch/device.h"

namespace amp_mp {
namespace {

const float* optional_float(const std::optional<at::Tensor>& t, const at::Device& device,
                            const char* argument) {
  if (!t.has_value()) return nullptr;
  check_plain(*t, {argument});
  check_device(*t, device, {argument});
  check_dtype(*t, at::kFloat, {argument});
  TORCH_CHECK_VALUE(t->numel() == 1, "amp_mp: ", argument, " must have one element, found ",
                    describe(*t));
  return t->const_data_ptr<float>();
}

template <class T>
T* check_doubles(const at::Tensor& t, const char* argument, int64_t least) {
  check_writable(t, {argument});
  check_dtype(t, at::kDouble, {argument});
  TORCH_CHECK_VALUE(t.numel() >= least && t.is_contiguous(), "amp_mp: ", argument, " must hold ",
                    least, " contiguous numbers, found ", describe(t));
  return reinterpret_cast<T*>(t.mutable_data_ptr<double>());
}

Verdict* verdict_of(const at::Tensor& t, const at::Device& device) {
  check_device(t, device, {"verdict"});
  return check_doubles<Verdict>(t, "verdict", sizeof(Verdict) / sizeof(double));
}

}  // namespace

bool has_cuda() {
#ifdef AMP_MP_WITH_CUDA
  return true;
#else
  return false;
#endif
}

namespace {

at::Tensor measure(const std::vector<Reading>& readings, const at::Device& device) {
  const auto count = int64_t(readings.size());
  at::Tensor result =
      at::empty({count + 1, 3}, at::TensorOptions().dtype(at::kDouble).device(device));
  auto* rows = data_of<Statistics>(result);
  const int64_t spans = cpu::count_spans(readings.data(), count);
  const at::Tensor parts = scratch(spans * int64_t(sizeof(Statistics)), device);
  const at::Tensor first = scratch(device.is_cuda() ? (count + 1) * 8 : 0, device);
  on(
      device,
      [&] {
        cpu::measure(readings.data(), count, data_of<Statistics>(parts), rows,
                     at::get_num_threads());
      },
      AMP_MP_CUDA(measure(readings.data(), count, data_of<Statistics>(parts),
                          data_of<int64_t>(first), rows, stream)));
  return result;
}

at::Tensor measure(const Tensors& tensors, const std::vector<std::string>* names) {
  at::Device device(at::kCPU);
  for (const at::Tensor& t : tensors)
    if (t.defined()) {
      device = t.device();
      break;
    }
  std::vector<Reading> readings(tensors.size());
  Tensors kept;
  for (size_t i = 0; i < tensors.size(); ++i) {
    const at::Tensor* t = &tensors[i];
    if (!t->defined()) continue;
    const auto index = int64_t(i);
    const Label label =
        names ? Label{"the gradient", index, &(*names)[i]} : Label{"tensors", index};
    check_plain(*t, label);
    check_device(*t, device, label);
    if (!t->is_non_overlapping_and_dense()) {
      kept.push_back(t->contiguous());
      t = &kept.back();
    }
    readings[i] = {t->numel(), span_of(*t, label)};
  }
  return measure(readings, device);
}

}  // namespace

at::Tensor measure(const Tensors& tensors) { return measure(tensors, nullptr); }

at::Tensor measure(const Slots& slots) { return measure(slots.grads(), &slots.names()); }

at::Tensor combine(const at::Tensor& rows) {
  check_plain(rows, {"rows"});
  TORCH_CHECK_VALUE(rows.dim() == 2 && rows.size(1) == 3, "amp_mp: rows (", describe(rows),
                    ") must have shape [n, 3]");
  const auto* parts = check_doubles<Statistics>(rows, "rows", 0);
  const int64_t count = rows.size(0);
  const at::Device device = rows.device();
  at::Tensor result = at::empty({count + 1, 3}, rows.options());
  auto* out = data_of<Statistics>(result);
  // On CUDA every row counts as a tensor of one span.
  const at::Tensor first =
      device.is_cuda() ? at::arange(count + 1, rows.options().dtype(at::kLong)) : at::Tensor();
  on(
      device,
      [&] {
        std::copy(parts, parts + count, out);
        out[count] = amp_mp::combine(parts, count);
      },
      AMP_MP_CUDA(combine(parts, data_of<int64_t>(first), count, out, stream)));
  return result;
}

void decide_(at::Tensor& verdict, const std::optional<at::Tensor>& statistics,
             const std::optional<at::Tensor>& scale, const std::optional<at::Tensor>& found_inf,
             double max_norm) {
  const at::Device device = verdict.device();
  Verdict* out = verdict_of(verdict, device);
  const Statistics* total = nullptr;
  if (statistics.has_value()) {
    check_device(*statistics, device, {"statistics"});
    total = check_doubles<Statistics>(*statistics, "statistics", 3) + statistics->numel() / 3 - 1;
  }
  const float* s = optional_float(scale, device, "scale");
  const float* f = optional_float(found_inf, device, "found_inf");
  on(
      device, [&] { *out = decide(total, s, f, max_norm); },
      AMP_MP_CUDA(decide(total, s, f, max_norm, out, stream)));
  bump_version(verdict);
}

void copy_(const Tensors& to, const Tensors& from, const std::optional<at::Tensor>& verdict,
           double multiplier, bool saturate) {
  TORCH_CHECK_VALUE(to.size() == from.size(), "amp_mp: `to` has ", to.size(),
                    " tensors, `from` has ", from.size());
  if (to.empty()) return;
  TORCH_CHECK_TYPE(to[0].defined(), "amp_mp: to[0] is None; a tensor is needed");
  const at::Device device = to[0].device();
  std::vector<Transfer> transfers;
  std::vector<std::pair<at::Tensor, Label>> written;
  Tensors kept;
  for (size_t i = 0; i < to.size(); ++i) {
    const Label to_label{"to", int64_t(i)}, from_label{"from", int64_t(i)};
    check_writable(to[i], to_label);
    check_device(to[i], device, to_label);
    check_plain(from[i], from_label);
    check_device(from[i], device, from_label);
    if (from[i].sizes() != to[i].sizes()) check_same_layout(from[i], to[i], from_label, to_label);
    const at::Tensor* source = &from[i];
    if (!same_layout(*source, to[i]) || source->is_neg()) {
      kept.push_back(at::empty_like(to[i], source->options()).copy_(*source));
      source = &kept.back();
    }
    written.emplace_back(to[i], to_label);
    const bool in_place = to[i].numel() > 0 && source->const_data_ptr() == to[i].const_data_ptr();
    if (!in_place) written.emplace_back(*source, from_label);
    TORCH_CHECK_VALUE(!in_place || source->scalar_type() == to[i].scalar_type(),
                      "amp_mp: ", to_label.text(), " and ", from_label.text(),
                      " are the same memory with different dtypes");
    transfers.push_back({to[i].numel(),
                         {to[i].mutable_data_ptr(), check_format(to[i], to_label)},
                         span_of(*source, from_label),
                         saturate,
                         {}});
  }
  check_no_overlap(written);
  const Verdict* v = verdict.has_value() ? verdict_of(*verdict, device) : nullptr;
  const auto count = int64_t(transfers.size());
  on(
      device,
      [&] {
        if (v && v->found_inf != 0) return;
        cpu::copy(transfers.data(), count, v ? v->multiplier : multiplier, at::get_num_threads());
      },
      AMP_MP_CUDA(copy(transfers.data(), count, v, multiplier, stream)));
  for (const at::Tensor& t : to) bump_version(t);
}

template <class Rule>
void apply_(Slots& slots, const std::vector<Hyper>& hypers, const at::Tensor& verdict,
            const std::optional<at::Tensor>& statistics) {
  TORCH_CHECK_VALUE(slots.states() == Rule::kStates, "amp_mp: this rule keeps ", Rule::kStates,
                    " states a parameter, the slots have ", slots.states());
  TORCH_CHECK_VALUE(int64_t(hypers.size()) >= slots.groups(), "amp_mp: ", slots.groups(),
                    " groups, but ", hypers.size(), " sets of hyperparameters");
  TORCH_CHECK_VALUE(!needs_norms<Rule> || statistics.has_value(),
                    "amp_mp: this rule looks at the gradients' norms; pass slots.measure()");
  Tensors kept;
  const std::vector<Slot> plan = slots.plan(kept);
  if (plan.empty()) return;
  const at::Device device = slots.device();
  const Verdict* v = verdict_of(verdict, device);
  if (device.is_cpu() && v->found_inf != 0) return slots.finish(false);
  const auto count = int64_t(plan.size());
  const at::Tensor rules = scratch(count * int64_t(sizeof(Rule)), device);
  Measured norms;
  at::Tensor weights, spans, updates, first;
  if constexpr (needs_norms<Rule>) {
    check_device(*statistics, device, {"statistics"});
    norms.grads = check_doubles<Statistics>(*statistics, "statistics", 3 * (slots.size() + 1));
    weights = measure(slots.weights(), device);
    norms.weights = data_of<Statistics>(weights);
  }
  if constexpr (needs_update_norm<Rule>) {
    int64_t room = 0;
    for (const Slot& slot : plan) room += ceil_divide(slot.size, kSpan);
    spans = scratch(room * int64_t(sizeof(Statistics)), device);
    updates = scratch((count + 1) * int64_t(sizeof(Statistics)), device);
    first = scratch((count + 1) * int64_t(sizeof(int64_t)), device);
    norms.update_spans = data_of<Statistics>(spans);
    norms.updates = data_of<Statistics>(updates);
    norms.first_span = data_of<int64_t>(first);
  }
  on(
      device,
      [&] {
        cpu::apply<Rule>(plan.data(), count, hypers.data(), v->multiplier, data_of<Rule>(rules),
                         norms, at::get_num_threads());
      },
      AMP_MP_CUDA(
          apply<Rule>(plan.data(), count, hypers.data(), v, data_of<Rule>(rules), norms, stream)));
  slots.finish(true);
}

#define AMP_MP_INSTANTIATE(Rule, op)                                               \
  template void apply_<Rule>(Slots&, const std::vector<Hyper>&, const at::Tensor&, \
                             const std::optional<at::Tensor>&);
AMP_MP_FOR_EACH_RULE(AMP_MP_INSTANTIATE)

void update_scale_(at::Tensor& policy, const at::Tensor& found_inf,
                   const std::optional<at::Tensor>& max_abs) {
  const at::Device device = policy.device();
  auto* state = check_doubles<double>(policy, "policy", 2);
  const float* f = optional_float(found_inf, device, "found_inf");
  const double* m = nullptr;
  if (max_abs.has_value()) {
    check_device(*max_abs, device, {"max_abs"});
    m = check_doubles<double>(*max_abs, "max_abs", 1);
  }
  on(
      device,
      [&] {
        const int size = policy_size(state[0]);
        TORCH_CHECK_VALUE(policy.numel() == size, "amp_mp: policy ", state[0], " has ", size,
                          " numbers, found ", policy.numel());
        update_scale(state, *f != 0, m ? *m : 0);
      },
      AMP_MP_CUDA(update_scale(state, f, m, stream)));
  bump_version(policy);
}

}  // namespace amp_mp
