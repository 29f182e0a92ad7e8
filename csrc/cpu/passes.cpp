#include "cpu/passes.h"

#include <atomic>
#include <memory>
#include <new>

#include "cpu/kernels.h"

namespace amp_mp::cpu {
namespace {

// Below this many elements a second thread costs more than it saves.
constexpr int64_t kSerialElements = 32768;
constexpr int64_t kAhead = 2;  // how many tensors ahead `prefetch` looks

// Consecutive elements of one item. `unit` counts the units of the whole list before the range.
struct Range {
  int64_t item, begin, end, unit;
};

// Cuts all items, items[i].size elements each, into ranges and calls f for each range. Every thread
// gets an equal share of units of `unit` elements; ranges begin at multiples of `unit`.
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
    const int64_t start = units * t / threads, stop = units * (t + 1) / threads;
    int64_t before = 0;  // units of the items before item i
    for (int64_t i = 0; i < count && before < stop; ++i) {
      const int64_t n = ceil_divide(items[i].size, unit);
      if (start < before + n) {
        const int64_t first = start > before ? start - before : 0, end = (stop - before) * unit;
        f(Range{i, first * unit, end < items[i].size ? end : items[i].size, before + first});
      }
      before += n;
    }
  };
  if (threads <= 1) return share(0);
#ifdef _OPENMP  // the tests compile without OpenMP
#pragma omp parallel for num_threads(threads) schedule(static, 1)
#endif
  for (int t = 0; t < threads; ++t) share(t);
}

// Asks for the first elements of a slot while an earlier slot is updated. A model's small tensors
// lie scattered and are too short for the processor to guess the next address. (In large tensors
// hints would cost speed.)
void prefetch(const Slot& slot) {
  constexpr int64_t kElements = 256;
  const int64_t elements = slot.size < kElements ? slot.size : kElements;
  const auto lines = [&](const void* data, int64_t width) {
    for (int64_t i = 0; data && i < elements * width; i += 64)
      __builtin_prefetch(static_cast<const char*>(data) + i, 1);
  };
  const auto array = [&](const Array& a) {
    lines(a.data, width_of(a.format));
    lines(a.second, is_packed(a.format) ? 1 : second_width_of(a.format));
  };
  array(slot.grad);
  array(slot.master);
  array(slot.copy);
  for (const Array& state : slot.state) array(state);
}

// Calls f(item, begin, end, span) for every span; `span` counts those of the whole list.
template <class Item, class F>
void for_each_span(const Item* items, int64_t count, int threads, const F& f) {
  for_each_range(items, count, kSpan, threads, [&](Range r) {
    for (; r.begin < r.end; r.begin += kSpan)
      f(r.item, r.begin, r.end < r.begin + kSpan ? r.end : r.begin + kSpan, r.unit++);
  });
}

template <class Item>
int64_t count_spans_of(const Item* items, int64_t count) {
  int64_t spans = 0;
  for (int64_t i = 0; i < count; ++i) spans += ceil_divide(items[i].size, kSpan);
  return spans;
}

// Fills `tensors` with the sum of each item's spans.
template <class Item>
void add_spans(const Item* items, int64_t count, const Statistics* spans, Statistics* tensors) {
  for (int64_t i = 0; i < count; ++i) {
    const int64_t n = ceil_divide(items[i].size, kSpan);
    tensors[i] = combine(spans, n);
    spans += n;
  }
}

// Norms of the gradient as the rule sees it, and of the weights.
Norms norms_of(const NormInputs& inputs, int64_t row, double multiplier) {
  Norms norms = {};
  if (inputs.grads) norms.grad = sqrt(inputs.grads[row].sum_squares) * multiplier;
  if (inputs.weights) norms.weight = sqrt(inputs.weights[row].sum_squares);
  return norms;
}

// What a rule that needs its update's norm is made with. `sums`: its UpdateSums, each `stride`
// Statistics behind the one before.
Norms norms_of_update(const Statistics* sums, int64_t stride) {
  return {.grad = 0,
          .weight = sqrt(sums[2 * stride].sum_squares),
          .update = sqrt(sums[0].sum_squares),
          .along = sums[stride].sum_squares};
}

}  // namespace

float* workspace() {
  constexpr std::align_val_t kAligned{64};
  struct Free {
    void operator()(float* memory) const { operator delete[](memory, kAligned); }
  };
  thread_local const std::unique_ptr<float, Free> own(new (kAligned) float[kWorkspace]);
  return own.get();
}

int64_t count_spans(const Reading* readings, int64_t count) {
  return count_spans_of(readings, count);
}

void measure(const Reading* readings, int64_t count, Statistics* spans, Statistics* tensors,
             int threads) {
  const auto loop = kernels()->measure;
  for_each_span(readings, count, threads, [&](int64_t i, int64_t begin, int64_t end, int64_t span) {
    spans[span] = loop(readings[i], begin, end);
  });
  add_spans(readings, count, spans, tensors);
  tensors[count] = combine(tensors, count);
}

void copy(const Transfer* transfers, int64_t count, double multiplier, int threads) {
  const auto loop = kernels()->copy;
  for_each_range(transfers, count, kBlock, threads, [&](const Range& r) {
    loop(transfers[r.item], r.begin, r.end, float(multiplier));
  });
}

void average(const Transfer* transfers, int64_t count, double decay, int threads) {
  const auto loop = kernels()->average;
  for_each_range(transfers, count, kBlock, threads, [&](const Range& r) {
    loop(transfers[r.item], r.begin, r.end, Averaging::at(decay));
  });
}

void compare(const Comparison* comparisons, int64_t count, int threads) {
  const auto loop = kernels()->compare;
  for_each_range(comparisons, count, kBlock, threads,
                 [&](const Range& r) { loop(comparisons[r.item], r.begin, r.end); });
}

namespace {

// Calls f(item, begin, end, chunk) for every chunk; `chunk` counts those of the whole list before.
template <class F>
void for_each_chunk(const Watched* watched, int64_t count, int threads, const F& f) {
  for_each_range(watched, count, kLookChunk, threads, [&](Range r) {
    for (; r.begin < r.end; r.begin += kLookChunk)
      f(r.item, r.begin, r.end < r.begin + kLookChunk ? r.end : r.begin + kLookChunk, r.unit++);
  });
}

}  // namespace

void count_bits(const Watched* watched, int64_t count, int32_t* counts, int threads) {
  const auto loop = kernels()->count_bits;
  for_each_chunk(
      watched, count, threads, [&](int64_t i, int64_t begin, int64_t end, int64_t chunk) {
        counts[chunk] = watched[i].changes.sum ? int32_t(loop(watched[i].changes, begin, end)) : 0;
      });
}

void look(const Watched* watched, const Gathering* gatherings, int64_t count, int threads) {
  const Kernels& loops = *kernels();
  for (int64_t i = 0; i < count; ++i) watched[i].found->sum = 0;
  for_each_chunk(watched, count, threads, [&](int64_t i, int64_t begin, int64_t end, int64_t) {
    loops.look(watched[i], begin, end);
    if (!gatherings || !gatherings[i].positions) return;
    const Gathering& g = gatherings[i];
    const int64_t chunk = begin / kLookChunk, first = g.begin_of(chunk);
    if (const int64_t bits = g.begin_of(chunk + 1) - first)
      loops.gather(g, begin, end, first, bits);
  });
}

namespace {

// Calls f with the positions in their type.
template <class F>
void with_positions(const Scattering& s, const F& f) {
  if (s.wide)
    f(static_cast<const int64_t*>(s.positions));
  else
    f(static_cast<const int32_t*>(s.positions));
}

template <class Position, class Value>
void scatter_as(const Scattering& s, const Position* positions, const Range& r, Value) {
  const auto* values = static_cast<const Value*>(s.values);
  auto* to = static_cast<Value*>(s.to);
  for (int64_t i = r.begin; i < r.end; ++i) to[positions[i]] = values[i];
}

}  // namespace

void check_positions(const Scattering* scatterings, int64_t count, int32_t* bad, int threads) {
  for_each_range(scatterings, count, kBlock, threads, [&](const Range& r) {
    const Scattering& s = scatterings[r.item];
    int32_t outside = 0;
    with_positions(s, [&](const auto* positions) {
      for (int64_t i = r.begin; i < r.end; ++i)
        outside += uint64_t(positions[i]) >= uint64_t(s.limit);
    });
    std::atomic_ref(bad[r.item]).fetch_add(outside, std::memory_order_relaxed);
  });
}

void scatter(const Scattering* scatterings, int64_t count, int threads) {
  for_each_range(scatterings, count, kBlock, threads, [&](const Range& r) {
    const Scattering& s = scatterings[r.item];
    with_positions(s, [&](const auto* positions) {
      switch (s.width) {
        case 1: return scatter_as(s, positions, r, uint8_t());
        case 2: return scatter_as(s, positions, r, uint16_t());
        case 4: return scatter_as(s, positions, r, uint32_t());
        default: return scatter_as(s, positions, r, uint64_t());
      }
    });
  });
}

namespace {

// Ticks the clock of slot i. The slot before it is mostly of the same group and step: computing the
// powers again would be a tenth of a step of small tensors.
void tick(const Slot* slots, int64_t i, const Hyper& hyper) {
  Clock& clock = *slots[i].clock;
  const Clock* const before =
      i > 0 && slots[i - 1].group == slots[i].group ? slots[i - 1].clock : nullptr;
  if (before && before->step == clock.step + 1)
    clock = {before->step, before->beta1_power, before->beta2_power, clock.own};
  else
    clock.tick(hyper);
}

}  // namespace

void apply(const RuleInfo& rule, const Slot* slots, int64_t count, const Hyper* hypers,
           double multiplier, void* rules, const NormInputs& inputs, int threads) {
  const auto factor = [&](const Slot& slot) {
    return float(hypers[slot.group].maximize ? -multiplier : multiplier);
  };
  const auto seed = [&](const Slot& slot) { return hypers[slot.group].seed; };
  const auto made = [&](int64_t i) { return static_cast<char*>(rules) + size_t(i) * rule.bytes; };
  const auto make = [&](int64_t i, const Norms& norms) {
    rule.make(made(i), hypers[slots[i].group], *slots[i].clock, norms);
  };
  for (int64_t i = 0; i < count; ++i) {
    if (slots[i].sum) *slots[i].sum = 0;
    tick(slots, i, hypers[slots[i].group]);
    make(i, norms_of(inputs, slots[i].row, multiplier));
  }
  const Loops loops = loops_of(rule);
  if (rule.has_direction) {
    for_each_range(slots, count, kBlock, threads, [&](const Range& r) {
      const Slot& slot = slots[r.item];
      loops.directions(slot, r.begin, r.end, made(r.item), factor(slot), seed(slot));
    });
    if (inputs.make_updates) inputs.make_updates(inputs.directions);
  }
  if (rule.needs_update_norm) {
    const int64_t spans = count_spans_of(slots, count);
    for_each_span(slots, count, threads, [&](int64_t i, int64_t begin, int64_t end, int64_t span) {
      const Slot& s = slots[i];
      const UpdateSums sums = loops.update_sums(s, begin, end, made(i), factor(s), seed(s));
      Statistics* const to = inputs.update_spans + span;
      to[0] = {sums.update, 0, 0};
      to[spans] = {sums.along, 0, 0};
      to[2 * spans] = {sums.weight, 0, 0};
    });
    for (int k = 0; k < kUpdateSums; ++k)
      add_spans(slots, count, inputs.update_spans + k * spans, inputs.updates + k * count);
    const Statistics* gathered = inputs.gather ? inputs.gather(inputs.context) : nullptr;
    for (int64_t i = 0; i < count; ++i)
      make(i, gathered ? norms_of_update(gathered + kUpdateSums * slots[i].row, 1)
                       : norms_of_update(inputs.updates + i, count));
  }
  for_each_range(slots, count, kBlock, threads, [&](const Range& r) {
    const Slot& slot = slots[r.item];
    if (r.item + kAhead < count) prefetch(slots[r.item + kAhead]);
    loops.apply(slot, r.begin, r.end, made(r.item), factor(slot), seed(slot));
  });
}

}  // namespace amp_mp::cpu
