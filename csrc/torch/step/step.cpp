// Checks tensors, turns them into plan.h's structs and runs the step on their device.
#include <ATen/Parallel.h>
#include <ATen/ops/stack.h>

#include <utility>

#include "cpu/passes.h"
#include "torch/step/directions.h"
#include "torch/step/norm_scratch.h"

namespace amp_mp {
namespace {

template <class T>
T* one_number(const std::optional<at::Tensor>& t, const at::Device& device, const char* argument) {
  TORCH_CHECK_VALUE(t.has_value(), "amp_mp: ", argument, " is None; a tensor is needed");
  check_writable(*t, {argument});
  check_one_number(*t, device, c10::CppTypeToScalarType<T>::value, argument);
  return t->mutable_data_ptr<T>();
}

// Checks the tensors of a scale update.
ScaleUpdate scale_update_of(const ScaleUpdateTensors& tensors, const at::Device& device) {
  ScaleUpdate u;
  if (tensors.policy.has_value()) {
    const at::Tensor &from = *tensors.policy, &to = tensors.policy_out.value_or(from);
    check_device(from, device, {"policy"});
    check_device(to, device, {"policy_out"});
    u.policy_size = int32_t(from.numel());
    u.policy = check_doubles<double>(from, "policy", 2);
    u.policy_out = check_doubles<double>(to, "policy_out", u.policy_size);
    if (device.is_cpu()) {
      const double kind = u.policy[0];
      const int size = kind >= 0 && kind < 64 ? scale_state_size(kind) : 0;  // a NaN is no int
      TORCH_CHECK_VALUE(size == u.policy_size && size > 0, "amp_mp: policy ", kind, " has ", size,
                        " numbers, found ", u.policy_size);
    }
    if (tensors.scale_out) u.scale_out = one_number<float>(tensors.scale_out, device, "scale_out");
    return u;
  }
  u.scale = one_number<float>(tensors.scale, device, "scale");
  u.scale_out = one_number<float>(tensors.scale_out, device, "scale_out");
  u.tracker = one_number<int32_t>(tensors.tracker, device, "tracker");
  u.tracker_out = one_number<int32_t>(tensors.tracker_out, device, "tracker_out");
  u.growth_factor = tensors.growth_factor;
  u.backoff_factor = tensors.backoff_factor;
  u.growth_interval = tensors.growth_interval;
  return u;
}

Criteria criteria_of(const CriteriaTensors& tensors, const at::Device& device) {
  Criteria d;
  d.scale = optional_float(tensors.scale, device, "scale");
  d.found_inf = optional_float(tensors.found_inf, device, "found_inf");
  d.max_norm = tensors.max_norm;
  d.limit = tensors.limit;
  if (tensors.history) {
    check_device(*tensors.history, device, {"history"});
    d.limit.history = check_doubles<NormHistory>(*tensors.history, "history", 4);
  }
  if (tensors.scale_update) d.scale_update = scale_update_of(*tensors.scale_update, device);
  if (tensors.reports) d.report_buffer = tensors.reports->buffer();
  return d;
}

Verdict decide_on_cpu(const Statistics* total, const Criteria& d) {
  const Verdict v = decide(total, d.scale, d.found_inf, d.max_norm, d.limit);
  update_loss_scale(d.scale_update, v.skip == kOverflow, v.max_abs);
  return v;
}

// Where a step on the device reads a number that is a tensor; null where it is on the CPU and read
// now. `kept` keeps alive what the step reads.
const void* read_at(const at::Tensor& given, const char* name, const at::Device& device,
                    double& number, bool& is_double, Tensors& kept) {
  if (!given.defined()) return nullptr;
  check_plain(given, {name});
  TORCH_CHECK_VALUE(given.numel() == 1 && !given.is_complex(), "amp_mp: ", name,
                    " must be one number, found ", describe(given));
  const at::ScalarType dtype = given.scalar_type();
  const bool is_read_there = dtype == at::kFloat || dtype == at::kDouble;
  TORCH_CHECK_VALUE(!is_capturing(device) || (given.device() == device && is_read_there),
                    "amp_mp: ", name, " (", describe(given), ") is not on ", device,
                    " in float32 or float64, and replays of a captured step look nowhere else; "
                    "put it there");
  if (given.is_cpu()) {
    number = given.item<double>();
    return nullptr;
  }
  is_double = dtype != at::kFloat;  // any other dtype becomes float64
  kept.push_back(given.to(device, is_double ? at::kDouble : at::kFloat));
  return kept.back().const_data_ptr();
}

// The param_groups' numbers for a step on the device.
std::vector<Hyper> hypers_of(const std::vector<HyperTensors>& hyper_tensors,
                             const at::Device& device, Tensors& kept) {
  std::vector<Hyper> hypers;
  for (const HyperTensors& n : hyper_tensors) {
    Hyper& h = hypers.emplace_back(n.hyper);
    h.lr_at = read_at(n.lr, "lr", device, h.lr, h.lr_is_double, kept);
    h.weight_decay_at = read_at(n.weight_decay, "weight_decay", device, h.weight_decay,
                                h.weight_decay_is_double, kept);
  }
  return hypers;
}

// The table that a step on a CUDA device reads its slots from.
TableMemory::Held table_of(Slots& slots, const cuda::StepPlan& plan) {
  if (is_short(plan)) return TableMemory::prepare_short(slots.device());
  const TableMemory::Write write = [&](const cuda::StepTable& table, bool only_asks) {
    bool differs = false;
    on(slots.device(), [] {}, AMP_MP_CUDA(write_table(plan, table, only_asks, differs, stream)));
    return differs;
  };
  return slots.table_memory().prepare(slots.size(), slots.groups(), slots.device(), write);
}

}  // namespace

at::Tensor new_verdict(const at::Device& device) {
  constexpr int64_t kNumbers = sizeof(Verdict) / sizeof(double);
  return at::empty({kNumbers}, at::TensorOptions().dtype(at::kDouble).device(device));
}

at::Tensor decide_on(const at::Device& device, const Tensors& totals,
                     const CriteriaTensors& inputs) {
  at::Tensor rows = totals.size() == 1 ? totals[0] : at::Tensor();
  if (totals.size() > 1) {  // parameters on several devices have one norm and one verdict
    Tensors last;
    for (const at::Tensor& t : totals) last.push_back(t.select(0, t.size(0) - 1).to(device));
    const at::Tensor all = at::stack(last);
    const auto column = [&](int64_t i) { return all.select(1, i); };
    rows = at::stack({column(0).sum(), column(1).max(), column(2).sum()});
  }
  const Statistics* total = nullptr;
  if (rows.defined()) {
    check_device(rows, device, {"statistics"});
    total = check_doubles<Statistics>(rows, "statistics", 3) + rows.numel() / 3 - 1;
  }
  const at::Tensor verdict = new_verdict(device);
  Verdict* const out = data_of<Verdict>(verdict);
  const Criteria d = criteria_of(inputs, device);
  on(device, [&] { *out = decide_on_cpu(total, d); }, AMP_MP_CUDA(decide(total, d, out, stream)));
  if (inputs.reports) inputs.reports->count_decision();
  return verdict;
}

void apply_(const RuleInfo& rule, Slots& slots, const std::vector<HyperTensors>& hyper_tensors,
            at::Tensor& verdict, const ApplyInputs& given) {
  const auto& [decides, known, measures, weights, sum_updates, make_updates, normalise] = given;
  Measurement* found = known;
  TORCH_CHECK_VALUE(!rule.needs_norms || measures || (found && found->count() >= slots.size()),
                    "amp_mp: this rule looks at the gradients' norms; pass slots.measure()");
  const at::Device device = verdict.device();
  if (found) found->use();
  if (weights) weights->use();
  if (found) check_device(found->rows_so_far(), device, {"measured"});
  if (weights) check_device(weights->rows_so_far(), device, {"weights"});
  TORCH_CHECK_VALUE(!weights || weights->count() >= slots.size(), "amp_mp: weights has ",
                    weights ? weights->count() : 0, " rows and a total, the slots are ",
                    slots.size(), "; pass rows as slots.measure_weights() has them");
  Verdict* v = verdict_of(verdict, device);
  Tensors kept;
  std::vector<Reading> readings;
  const std::vector<Slot>& chosen = slots.plan(kept, measures ? &readings : nullptr);
  // The decision is queued before the callbacks, and counts even if one of them raises.
  StepReports* reports = decides ? decides->reports.get() : nullptr;
  const auto count_decision = [&reports] {
    if (reports) std::exchange(reports, nullptr)->count_decision();
  };
  const auto counting = [&](const ApplyInputs::Change& callback) -> ApplyInputs::Change {
    if (!callback || !reports) return callback;
    return [&callback, &count_decision](const at::Tensor& given) {
      count_decision();
      return callback(given);
    };
  };
  ApplyInputs counted;
  counted.sum_updates = counting(sum_updates);
  counted.make_updates = counting(make_updates);
  counted.normalise = normalise;
  StoredDirections directions(rule, slots, chosen, counted, verdict);
  const std::vector<Slot>& plan = directions.plan;
  check_device(verdict, slots.device(), {"verdict"});
  const std::vector<Hyper> hypers = hypers_of(hyper_tensors, device, kept);
  const Criteria inputs = decides ? criteria_of(*decides, device) : Criteria{};
  std::optional<Measurement> own;
  if (measures) found = &own.emplace(readings, device);
  const auto count = int64_t(plan.size());
  // On a CUDA device each rule is in its slot's row.
  const at::Tensor rules = scratch(slots.size() * int64_t(rule.bytes), device);
  Statistics* rows = found ? found->of_tensors() : nullptr;
  NormScratch norms(rule, slots, plan, rows, weights, counted.sum_updates, device);
  directions.add_to(norms.inputs);
  bool written = true;
  on(
      device,
      [&] {
        if (decides) *v = decide_on_cpu(rows ? rows + found->count() : nullptr, inputs);
        written = v->skip == 0;
        if (!written) return norms.skip();
        cpu::apply(rule, plan.data(), count, hypers.data(), v->multiplier, data_of<char>(rules),
                   norms.inputs, at::get_num_threads());
      },
      [&](void* stream) {
        const cuda::StepPlan queued = {plan.data(), count, hypers.data(),
                                       cuda::chunk_of(plan.data(), count), rule.needs_update_norm};
        const TableMemory::Held held = table_of(slots, queued);
        return cuda::apply(rule, queued, held.table, decides ? &inputs : nullptr, v,
                           found ? found->span_sums() : cuda::SpanSums{},
                           norms.weights ? norms.weights->span_sums() : cuda::SpanSums{},
                           data_of<char>(rules), norms.inputs, stream);
      });
  count_decision();
  if (found) found->mark_added();
  if (norms.weights) norms.weights->mark_added();
  if (decides) bump_version(verdict);
  slots.finish(written);
}

void update_scale_(const ScaleUpdateTensors& tensors, const at::Tensor& found_inf,
                   const std::optional<at::Tensor>& max_abs, StepReports* reports) {
  const at::Device device = found_inf.device();
  const ScaleUpdate update = scale_update_of(tensors, device);
  const auto one_double = [&](const at::Tensor& t, const char* argument) {
    check_device(t, device, {argument});
    return check_doubles<double>(t, argument, 1);
  };
  const double* found = one_double(found_inf, "found_inf");
  const double* largest = max_abs.has_value() ? one_double(*max_abs, "max_abs") : nullptr;
  [[maybe_unused]] const StepReportBuffer buffer = reports ? reports->buffer() : StepReportBuffer{};
  on(
      device, [&] { update_loss_scale(update, *found != 0, largest ? *largest : 0); },
      AMP_MP_CUDA(update_scale(update, found, largest, buffer, stream)));
  if (reports) reports->count_decision();
  if (tensors.policy) bump_version(tensors.policy_out.value_or(*tensors.policy));
  if (tensors.scale_out) bump_version(*tensors.scale_out);
}

}  // namespace amp_mp
