// Longer than other files because the whole step is told in one place: gather, measure, decide,
// apply, report.
#include "torch/step/steps.h"

#include <ATen/ops/full.h>
#include <ATen/ops/stack.h>

#include <algorithm>

#include "torch/device.h"
#include "torch/ops.h"
#include "torch/python/functions.h"

namespace amp_mp {
namespace {

// A Python function of one tensor as one of the step's callbacks; `function` must outlive it. If an
// interrupt ends the function, it goes to `kept`, unless that is null, and the function runs again:
// the step has already written the momentum, and must be finished before the interrupt is raised.
std::function<at::Tensor(const at::Tensor&)> callback(const py::object& function, Interrupt* kept) {
  if (function.is_none()) return {};
  return [&function, kept](const at::Tensor& given) {
    const py::gil_scoped_acquire acquire;
    try {
      return py::cast<at::Tensor>(function(given));
    } catch (const py::error_already_set& error) {
      if (!kept || error.matches(PyExc_Exception)) throw;
      *kept = error;
    }
    return py::cast<at::Tensor>(function(given));
  };
}

// Whether a rule of any param_group needs norms, also of one without parameters on this process.
bool any_needs_norms(const Gathered& gathered) {
  return std::any_of(gathered.rules().begin(), gathered.rules().end(),
                     [](const Layout& each) { return each->rule->needs_norms; });
}

// The statistics of the gradients that `find_gradients` has found, on all processes.
std::shared_ptr<Measured> measured(const std::shared_ptr<Gathered>& gathered) {
  auto result = std::make_shared<Measured>();
  result->of = gathered;
  for (const auto& bucket : gathered->buckets()) {
    const py::gil_scoped_release release;
    result->found.push_back(std::make_shared<Measurement>(measure(bucket->slots())));
  }
  if (!gathered->collectives) return result;
  if (!any_needs_norms(*gathered)) {
    result->found = gathered->collectives->totals(result->found);
    return result;
  }
  for (const auto& bucket : gathered->buckets()) {
    const py::gil_scoped_release release;
    result->weights.push_back(
        std::make_shared<Measurement>(bucket->slots().weights(), bucket->device()));
  }
  std::tie(result->found, result->weights) =
      gathered->collectives->of_tensors(result->found, result->weights);
  return result;
}

}  // namespace

py::dict Measured::totals() const {
  py::dict found;
  for (size_t i = 0; i < this->found.size(); ++i) {
    const at::Tensor& rows = this->found[i]->rows();
    at::Tensor total = rows.select(0, rows.size(0) - 1);
    const py::object device = py::cast(this->found[i]->device());
    if (found.contains(device)) {  // a bucket of another rule: [sum of squares, largest |g|, count]
      const at::Tensor both = at::stack({py::cast<at::Tensor>(found[device]), total});
      total = both.sum(0);
      total.select(0, 1).copy_(both.select(1, 1).max());
    }
    found[device] = py::cast(total);
  }
  return found;
}

std::optional<at::Tensor> scalar_on(const at::Device& device, const py::object& number) {
  if (number.is_none()) return std::nullopt;
  if (!is_tensor(number))
    return at::full({}, py::cast<double>(number),
                    at::TensorOptions().dtype(at::kFloat).device(device));
  const at::Tensor& t = tensor_of(number);
  if (t.scalar_type() == at::kFloat && t.device() == device) return t;
  return t.detach().to(t.options().dtype(at::kFloat).device(device)).reshape({});
}

void apply_bucket(Bucket& bucket, const std::vector<HyperTensors>& hypers, at::Tensor& verdict,
                  ApplyInputs given, const py::object& sum_updates, Interrupt* kept) {
  // Leaked: replays of the graph read and write this pinned memory, and the graph, which the host
  // cannot see end, does not own it. Freed, it would be another tensor's in the middle of a replay.
  if (is_capturing(bucket.device()))
    for (const Member& member : bucket.members())
      for (const auto& [key, value] : py::reinterpret_borrow<py::dict>(member.state))
        if (is_tensor(value) && is_on_host(local_of(value)))
          new at::Tensor(local_of(value).detach());
  given.sum_updates = callback(sum_updates, kept);
  given.make_updates = callback(bucket.make_updates, kept);
  if (!bucket.row_norms().is_empty())
    given.normalise = [&](const auto&... now) { bucket.row_norms().normalise(now...); };
  const py::gil_scoped_release release;
  apply_(*bucket.layout()->rule, bucket.slots(), hypers, verdict, given);
}

// Call it before the optimizer lets go of tensors that a CUDA graph has captured: replays go on
// with these, and the host does not notice a replay.
void Steps::warn_of_graph() {
  if (std::exchange(captured_, false)) package().warn_of_graph();
}

void Steps::set_norm_history(const std::optional<std::array<double, 4>>& numbers) {
  warn_of_graph();
  log_.set_norm_history(numbers);
}

void Steps::forget() {
  warn_of_graph();
  log_.forget();
}

std::shared_ptr<Gathered> Steps::gather(const Layouts& rules, const py::list& groups,
                                        const py::dict& states, const GroupInfo& info) {
  warn_of_graph();
  return std::make_shared<Gathered>(rules, groups, states, info);
}

std::shared_ptr<Measured> Steps::measure(const std::shared_ptr<Gathered>& gathered) {
  gathered->find_gradients();
  const std::shared_ptr<Measured> found = measured(gathered);
  // No step may follow, and zero_grad must be able to free the gradients.
  for (const auto& bucket : gathered->buckets()) bucket->slots().drop_gradients();
  return found;
}

py::object Steps::step(const std::shared_ptr<Gathered>& gathered, const py::list& groups,
                       const StepInputs& given, bool checks, std::optional<double> own_norm,
                       const std::optional<NormLimit>& limit) {
  gathered->find_gradients();
  const auto& buckets = gathered->buckets();
  const auto& collectives = gathered->collectives;
  const bool one_bucket = buckets.size() == 1;
  const double max_norm = given.max_norm.value_or(0) != 0 ? *given.max_norm : own_norm.value_or(0);
  const bool measures = given.measure || checks || max_norm > 0 ||
                        std::any_of(gathered->rules().begin(), gathered->rules().end(),
                                    [](const Layout& each) { return each->rule->is_layerwise(); });
  std::shared_ptr<Measured> known = given.measured;
  // Scripts may have written masters since their norms were read.
  const bool stale = collectives && any_needs_norms(*gathered);
  if (!known || known->of != gathered || stale) {
    const bool alone = one_bucket && !collectives;
    known = alone || !measures ? nullptr : measured(gathered);
  }
  at::Device device = at::kCPU;
  if (!buckets.empty())
    device = buckets[0]->device();
  else if (known && !known->found.empty())  // a total of other processes
    device = known->found[0]->device();
  const bool one_device = std::all_of(buckets.begin(), buckets.end(),
                                      [&](const auto& each) { return each->device() == device; });
  // What may raise comes before the first bucket is stepped.
  std::vector<std::vector<HyperTensors>> hypers;
  for (const auto& bucket : buckets) hypers.push_back(bucket->hypers(groups));
  if (!one_bucket)
    for (const auto& bucket : buckets) bucket->slots().check_gradients();
  const bool scale_is_here = is_tensor(given.scale) && tensor_of(given.scale).device() == device;
  const bool updates_scale = given.scale_update && scale_is_here && one_device;
  CriteriaTensors inputs = {scalar_on(device, given.scale), scalar_on(device, given.found_inf),
                            max_norm, updates_scale ? given.scale_update : nullptr,
                            log_.reports_on(device)};
  inputs.limit = limit.value_or(NormLimit{});
  if (inputs.limit.window > 0) inputs.history = log_.history_on(device);
  at::Tensor verdict;
  if (one_bucket) {
    verdict = log_.verdict_on(device);
  } else {
    Tensors totals;
    for (size_t i = 0; known && i < known->found.size(); ++i)
      totals.push_back(known->found[i]->rows());
    verdict = decide_on(device, totals, inputs);
  }
  Interrupt interrupt;
  // With other processes the functions must not run again: they have collectives, and the others
  // would not take part a second time.
  Interrupt* const kept = collectives ? nullptr : &interrupt;
  for (size_t i = 0; i < buckets.size(); ++i) {
    Bucket& bucket = *buckets[i];
    at::Tensor local = one_device ? verdict : verdict.to(bucket.device());
    ApplyInputs step = {.decides = one_bucket ? &inputs : nullptr,
                        .found = known ? known->found[i].get() : nullptr};
    step.measures = one_bucket && measures && !step.found;
    if (known && !known->weights.empty()) step.weights = known->weights[i].get();
    const bool sums = collectives && bucket.layout()->rule->needs_update_norm;
    const py::object sum_updates = sums ? collectives->updates_of(int64_t(i)) : py::none();
    apply_bucket(bucket, hypers[i], local, std::move(step), sum_updates, kept);
  }
  int64_t moves = 0;
  for (const auto& bucket : buckets) moves += bucket->slots().moves();
  if (is_capturing(device)) {
    captured_ = true;
  } else if (moves != moves_) {
    warn_of_graph();
  }
  moves_ = moves;
  const bool seen = known ? !known->found.empty() : measures && one_bucket;
  log_.add(verdict, seen, updates_scale);
  if (interrupt) throw *interrupt;
  const bool may_skip = seen || !given.found_inf.is_none();
  return may_skip ? log_.skipped() : py::none();
}

}  // namespace amp_mp
