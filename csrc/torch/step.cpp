// Deciding and updating: the operations around a step's one pass.
#include <ATen/Parallel.h>

#include "cpu/passes.h"
#include "torch/ops.h"
#include "torch/scalars.h"

namespace amp_mp {
namespace {

template <class T>
T* one_number(const std::optional<at::Tensor>& t, const at::Device& device, const char* argument) {
  TORCH_CHECK_VALUE(t.has_value(), "amp_mp: ", argument, " is missing");
  check_writable(*t, {argument});
  check_one_number(*t, device, c10::CppTypeToScalarType<T>::value, argument);
  return t->mutable_data_ptr<T>();
}

// What a scale moves on from and to, checked.
NextScale next_of(const ScaleMove& move, const at::Device& device) {
  NextScale n;
  if (move.policy.has_value()) {
    const at::Tensor &from = *move.policy, &to = move.policy_out.value_or(from);
    check_device(from, device, {"policy"});
    check_device(to, device, {"policy_out"});
    n.policy_size = int32_t(from.numel());
    n.policy = check_doubles<double>(from, "policy", 2);
    n.policy_out = check_doubles<double>(to, "policy_out", n.policy_size);
    TORCH_CHECK_VALUE(!device.is_cpu() || policy_size(n.policy[0]) == n.policy_size,
                      "amp_mp: policy ", n.policy[0], " has ", policy_size(n.policy[0]),
                      " numbers, found ", n.policy_size);
    if (move.scale_out) n.scale_out = one_number<float>(move.scale_out, device, "scale_out");
    return n;
  }
  n.scale = one_number<float>(move.scale, device, "scale");
  n.scale_out = one_number<float>(move.scale_out, device, "scale_out");
  n.tracker = one_number<int32_t>(move.tracker, device, "tracker");
  n.tracker_out = one_number<int32_t>(move.tracker_out, device, "tracker_out");
  n.growth_factor = move.growth_factor;
  n.backoff_factor = move.backoff_factor;
  n.growth_interval = move.growth_interval;
  return n;
}

Decision decision_of(const Terms& terms, const at::Device& device) {
  Decision d;
  d.scale = optional_float(terms.scale, device, "scale");
  d.found_inf = optional_float(terms.found_inf, device, "found_inf");
  d.max_norm = terms.max_norm;
  if (terms.next) d.next = next_of(*terms.next, device);
  if (terms.reports) d.ring = terms.reports->ring_of_next();
  return d;
}

Verdict decide_here(const Statistics* total, const Decision& d) {
  const Verdict v = decide(total, d.scale, d.found_inf, d.max_norm);
  move_on(d.next, v.found_inf != 0, v.max_abs);
  return v;
}

// The groups' numbers as a step on the device reads them; `kept` are tensors that it needs.
std::vector<Hyper> hypers_of(const std::vector<Numbers>& numbers, const at::Device& device,
                             Tensors& kept) {
  std::vector<Hyper> hypers;
  for (const Numbers& n : numbers) {
    hypers.push_back(n.hyper);
    if (!n.lr.defined()) continue;
    Hyper& h = hypers.back();
    check_plain(n.lr, {"lr"});
    const at::ScalarType dtype = n.lr.scalar_type();
    TORCH_CHECK_VALUE(n.lr.numel() == 1 && (dtype == at::kFloat || dtype == at::kDouble),
                      "amp_mp: lr must be one number of dtype Float or Double, found ",
                      describe(n.lr));
    h.lr_is_double = dtype == at::kDouble;
    kept.push_back(n.lr.device().is_cuda() && n.lr.device() != device ? n.lr.to(device) : n.lr);
    h.lr_at = kept.back().const_data_ptr();
    if (!n.lr.device().is_cpu()) continue;
    TORCH_CHECK_VALUE(!is_capturing(device), "amp_mp: lr (", describe(n.lr),
                      ") is on the CPU, where ",
                      "replays of a captured step do not look; put it on ", device);
    read_rate(h);
    h.lr_at = nullptr;
  }
  return hypers;
}

}  // namespace

void decide_(at::Tensor& verdict, const Terms& terms, const std::optional<at::Tensor>& statistics) {
  const at::Device device = verdict.device();
  Verdict* out = verdict_of(verdict, device);
  const Statistics* total = nullptr;
  if (statistics.has_value()) {
    check_device(*statistics, device, {"statistics"});
    total = check_doubles<Statistics>(*statistics, "statistics", 3) + statistics->numel() / 3 - 1;
  }
  const Decision d = decision_of(terms, device);
  on(device, [&] { *out = decide_here(total, d); }, AMP_MP_CUDA(decide(total, d, out, stream)));
  bump_version(verdict);
}

template <class Rule>
void apply_(Slots& slots, const std::vector<Numbers>& numbers, at::Tensor& verdict,
            Measurement* found, const Terms* terms) {
  TORCH_CHECK_VALUE(slots.states() == Rule::kStates, "amp_mp: this rule keeps ", Rule::kStates,
                    " states a parameter, the slots have ", slots.states());
  TORCH_CHECK_VALUE(int64_t(numbers.size()) >= slots.groups(), "amp_mp: ", slots.groups(),
                    " groups, but ", numbers.size(), " sets of hyperparameters");
  TORCH_CHECK_VALUE(!needs_norms<Rule> || (found && found->count() >= slots.size()),
                    "amp_mp: this rule looks at the gradients' norms; pass slots.measure()");
  const at::Device device = verdict.device();
  if (found) check_device(found->rows_so_far(), device, {"measured"});
  Verdict* v = verdict_of(verdict, device);
  Tensors kept;
  const std::vector<Slot> plan = slots.plan(kept);
  if (!plan.empty()) check_device(verdict, slots.device(), {"verdict"});
  const auto count = int64_t(plan.size());
  const std::vector<Hyper> hypers = hypers_of(numbers, device, kept);
  const Decision decision = terms ? decision_of(*terms, device) : Decision{};
  const int64_t of_rules = count * int64_t(sizeof(Ready<Rule>));  // a CPU needs less
  const at::Tensor rules = scratch(of_rules, device);
  Statistics* rows = found ? found->of_tensors() : nullptr;
  Measured norms;
  std::optional<Measurement> weights;
  at::Tensor updates;
  if constexpr (needs_norms<Rule>) {
    weights.emplace(slots.weights(), device);
    norms.grads = rows;
    norms.weights = weights->of_tensors();
  }
  if constexpr (needs_update_norm<Rule>) {
    int64_t spans = 0;
    for (const Slot& slot : plan) spans += ceil_divide(slot.size, kSpan);
    const int64_t first_bytes = 8 * (count + 2), row_bytes = int64_t(sizeof(Statistics));
    updates = scratch(first_bytes + (count + 1 + spans) * row_bytes, device);
    char* memory = data_of<char>(updates);
    norms.ticket = reinterpret_cast<unsigned*>(memory);
    norms.first_span = reinterpret_cast<int64_t*>(memory) + 1;
    norms.updates = reinterpret_cast<Statistics*>(memory + first_bytes);
    norms.update_spans = norms.updates + count + 1;
  }
  bool written = true;
  on(
      device,
      [&] {
        if (terms) *v = decide_here(rows ? rows + found->count() : nullptr, decision);
        written = v->found_inf == 0;
        if (written)
          cpu::apply<Rule>(plan.data(), count, hypers.data(), v->multiplier, data_of<Rule>(rules),
                           norms, at::get_num_threads());
      },
      AMP_MP_CUDA(apply<Rule>(plan.data(), count, hypers.data(), terms ? &decision : nullptr, v,
                              found ? found->parts() : cuda::Parts{},
                              weights ? weights->parts() : cuda::Parts{},
                              data_of<Ready<Rule>>(rules), norms, stream)));
  if (found) found->parts_are_added();
  if (terms) bump_version(verdict);
  slots.finish(written);
}

#define AMP_MP_INSTANTIATE(Rule, op)                                                         \
  template void apply_<Rule>(Slots&, const std::vector<Numbers>&, at::Tensor&, Measurement*, \
                             const Terms*);
AMP_MP_FOR_EACH_RULE(AMP_MP_INSTANTIATE)

void move_scale_(const ScaleMove& next, const at::Tensor& found_inf,
                 const std::optional<at::Tensor>& max_abs, Reports* reports) {
  const at::Device device = found_inf.device();
  const NextScale n = next_of(next, device);
  const auto number = [&](const at::Tensor& t, const char* argument) {
    check_device(t, device, {argument});
    return check_doubles<double>(t, argument, 1);
  };
  const double* found = number(found_inf, "found_inf");
  const double* largest = max_abs.has_value() ? number(*max_abs, "max_abs") : nullptr;
  [[maybe_unused]] const Ring ring = reports ? reports->ring_of_next() : Ring{};
  on(
      device, [&] { move_on(n, *found != 0, largest ? *largest : 0); },
      AMP_MP_CUDA(move_scale(n, found, largest, ring, stream)));
  if (next.policy) bump_version(next.policy_out.value_or(*next.policy));
  if (next.scale_out) bump_version(*next.scale_out);
}

}  // namespace amp_mp
