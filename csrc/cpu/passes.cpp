#include "cpu/passes.h"

#include "cpu/kernels.h"

namespace amp_mp::cpu {
namespace {

// Below this many elements a second thread costs more than it saves.
constexpr int64_t kSerialElements = 32768;
constexpr int64_t kAhead = 2;      // tensors
constexpr int64_t kUnit = kBlock;  // ranges begin at multiples of it

// Calls f(i, begin, end) for consecutive ranges that cover all items, items[i].size elements each,
// an equal share of elements a thread. Ranges begin at multiples of `unit` inside an item.
template <class Item, class F>
void for_each_range(const Item* items, int64_t count, int64_t unit, int threads, const F& f) {
  int64_t units = 0, elements = 0;
  for (int64_t i = 0; i < count; ++i) {
    units += ceil_divide(items[i].size, unit);
    elements += items[i].size;
  }
  if (elements < kSerialElements) threads = 1;
  if (threads > units) threads = units > 0 ? int(units) : 1;
  const auto share = [&](int t) {
    int64_t first = units * t / threads, last = units * (t + 1) / threads;
    for (int64_t i = 0; i < count && last > 0; ++i) {
      const int64_t n = ceil_divide(items[i].size, unit);
      if (first < n) {
        const int64_t begin = (first > 0 ? first : 0) * unit, end = last * unit;
        f(i, begin, end < items[i].size ? end : items[i].size);
      }
      first -= n;
      last -= n;
    }
  };
  if (threads <= 1) return share(0);
#ifdef _OPENMP  // the tests' builds are without; setup.py's never is
#pragma omp parallel for num_threads(threads) schedule(static, 1)
#endif
  for (int t = 0; t < threads; ++t) share(t);
}

// A model's small tensors lie scattered, too short for the processor to guess the next one's
// address: its first elements are asked for while this one is updated. (Over large tensors hints
// cost speed.)
void prefetch(const Slot& slot) {
  constexpr int64_t kElements = 256;
  const int64_t elements = slot.size < kElements ? slot.size : kElements;
  const auto lines = [&](const void* data, int64_t width) {
    for (int64_t i = 0; data && i < elements * width; i += 64)
      __builtin_prefetch(static_cast<const char*>(data) + i, 1);
  };
  const auto array = [&](const Array& a) {
    lines(a.data, width_of(a.format));
    if (is_split(a.format)) lines(a.rest, rest_width_of(a.format));
  };
  array(slot.grad);
  array(slot.weight);
  array(slot.master);
  for (const Array& state : slot.state) array(state);
}

// f(i, begin, end) gives the statistics of a span; `tensors` gets each item's and the total.
template <class Item, class F>
void sum_spans(const Item* items, int64_t count, Statistics* spans, Statistics* tensors,
               int threads, const F& f) {
  // Where an item's spans begin, in its own row until the row gets its result.
  int64_t first = 0;
  for (int64_t i = 0; i < count; ++i) {
    tensors[i].sum_squares = double(first);
    first += ceil_divide(items[i].size, kSpan);
  }
  for_each_range(items, count, kSpan, threads, [&](int64_t i, int64_t begin, int64_t end) {
    Statistics* out = spans + int64_t(tensors[i].sum_squares) + begin / kSpan;
    for (; begin < end; begin += kSpan)
      *out++ = f(i, begin, end < begin + kSpan ? end : begin + kSpan);
  });
  for (int64_t i = 0; i < count; ++i) {
    const Statistics* own = spans + int64_t(tensors[i].sum_squares);
    tensors[i] = combine(own, ceil_divide(items[i].size, kSpan));
  }
  tensors[count] = combine(tensors, count);
}

template <class Rule>
struct Loop;  // the apply loop of a rule, out of the table
#define AMP_MP_LOOP(Rule, op)                   \
  template <>                                   \
  struct Loop<Rule> {                           \
    static auto get() { return kernels()->op; } \
  };
AMP_MP_FOR_EACH_RULE(AMP_MP_LOOP)

}  // namespace

int64_t count_spans(const Reading* readings, int64_t count) {
  int64_t spans = 0;
  for (int64_t i = 0; i < count; ++i) spans += ceil_divide(readings[i].size, kSpan);
  return spans;
}

void measure(const Reading* readings, int64_t count, Statistics* spans, Statistics* tensors,
             int threads) {
  const auto loop = kernels()->measure;
  sum_spans(readings, count, spans, tensors, threads,
            [&](int64_t i, int64_t begin, int64_t end) { return loop(readings[i], begin, end); });
}

void copy(const Transfer* transfers, int64_t count, double multiplier, int threads) {
  const auto loop = kernels()->copy;
  for_each_range(transfers, count, kUnit, threads, [&](int64_t i, int64_t begin, int64_t end) {
    loop(transfers[i], begin, end, float(multiplier));
  });
}

namespace {

// Of the gradient as the rule sees it, and of the weights.
Norms norms_of(const NormInputs& inputs, int64_t row, double multiplier) {
  Norms norms = {};
  if (inputs.grads) norms.grad = sqrt(inputs.grads[row].sum_squares) * multiplier;
  if (inputs.weights) norms.weight = sqrt(inputs.weights[row].sum_squares);
  return norms;
}

}  // namespace

template <class Rule>
void apply(const Slot* slots, int64_t count, const Hyper* hypers, double multiplier, Rule* rules,
           const NormInputs& inputs, int threads) {
  const auto factor = [&](const Slot& slot) {
    return float(hypers[slot.group].maximize ? -multiplier : multiplier);
  };
  const auto seed = [&](const Slot& slot) { return hypers[slot.group].seed; };
  for (int64_t i = 0; i < count; ++i) {
    const Hyper& hyper = hypers[slots[i].group];
    slots[i].clock->tick(hyper);
    rules[i] = make_rule<Rule>(hyper, *slots[i].clock, norms_of(inputs, slots[i].row, multiplier));
  }
  const Loops<Rule> loops = Loop<Rule>::get();
  if constexpr (needs_update_norm<Rule>) {
    sum_spans(slots, count, inputs.update_spans, inputs.updates, threads,
              [&](int64_t i, int64_t begin, int64_t end) {
                const Slot& s = slots[i];
                return loops.moments(s, begin, end, rules[i], factor(s), seed(s));
              });
    for (int64_t i = 0; i < count; ++i) {
      Norms norms = norms_of(inputs, slots[i].row, multiplier);
      norms.update = sqrt(inputs.updates[i].sum_squares);
      rules[i] = make_rule<Rule>(hypers[slots[i].group], *slots[i].clock, norms);
    }
  }
  for_each_range(slots, count, kUnit, threads, [&](int64_t i, int64_t begin, int64_t end) {
    if (i + kAhead < count) prefetch(slots[i + kAhead]);
    loops.apply(slots[i], begin, end, rules[i], factor(slots[i]), seed(slots[i]));
  });
}

#define AMP_MP_INSTANTIATE(Rule, op)                                                              \
  template void apply<Rule>(const Slot*, int64_t, const Hyper*, double, Rule*, const NormInputs&, \
                            int);
AMP_MP_FOR_EACH_RULE(AMP_MP_INSTANTIATE)

}  // namespace amp_mp::cpu
