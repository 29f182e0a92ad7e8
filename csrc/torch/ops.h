#pragma once
// The operations behind the Python package: tensors in, plan out. Every check, the device guard,
// the stream and the version counters are here; what runs is in csrc/cpu and csrc/cuda.
#include <memory>
#include <optional>

#include "torch/measurement.h"
#include "torch/reports.h"
#include "torch/slots.h"

namespace amp_mp {

// Statistics of each tensor and of all: float64 [n + 1, 3] on the tensors' device, rows sum of
// squares, largest finite |x|, number of non-finite elements; the last row is the total. An
// undefined tensor counts as empty. The tensors share a device; any layout (what is not dense is
// copied first).
at::Tensor measure(const Tensors& tensors);

// The same of the slots' gradients, maybe still in parts.
Measurement measure(const Slots& slots);

// What measure gives for tensors whose rows, float64 [n, 3], are known already: [n + 1, 3].
at::Tensor combine(const at::Tensor& rows);

// How a loss scale moves on (plan.h, NextScale): a policy's float64 state to another, whose scale a
// float32 scale_out follows if there is one; or torch's float32 scale and int32 growth tracker to
// others. Out tensors may be the in tensors; all are on one device.
struct ScaleMove {
  std::optional<at::Tensor> policy, policy_out, scale, scale_out, tracker, tracker_out;
  double growth_factor, backoff_factor;
  int64_t growth_interval;
};

// On which terms a step is decided: core/decide.h's arguments but for the statistics, float32
// tensors of one element on the verdict's device, how the scale is to move on, and who is to hear
// of it.
struct Terms {
  std::optional<at::Tensor> scale, found_inf;
  double max_norm = 0;
  std::shared_ptr<ScaleMove> next;
  std::shared_ptr<Reports> reports;
};

// Fills `verdict`, float64 [5] (core/decide.h, Verdict). statistics: of measure; its last row
// counts.
void decide_(at::Tensor& verdict, const Terms& terms, const std::optional<at::Tensor>& statistics);

// to[i] = from[i] * multiplier, rounded to to[i]'s dtype; saturate clamps float16 results to
// +-65504. With a verdict its multiplier counts, and nothing is written on overflow. to[i] may be
// from[i].
void copy_(const Tensors& to, const Tensors& from, const std::optional<at::Tensor>& verdict,
           double multiplier, bool saturate);

// The numbers of one param_group. lr, where it is a tensor of one float32 or float64 number: read
// when the step runs if it is on the step's device, else now.
struct Numbers {
  Hyper hyper;
  at::Tensor lr;
};

// One step of a rule on every parameter that has a gradient; nothing is written on overflow. With
// terms the verdict is made, else it is given. found: measure(slots), for the rules that look at
// norms and for terms that do. Under capture by a CUDA graph every parameter that wants a gradient
// has to have one.
template <class Rule>
void apply_(Slots& slots, const std::vector<Numbers>& numbers, at::Tensor& verdict,
            Measurement* found, const Terms* terms);

// x, float32, as the format stores it: `data`, and `rest` for a format of two arrays, are filled.
// Random bits are those of tensor `number` at `step`.
void encode_(const at::Tensor& x, const at::Tensor& data, const std::optional<at::Tensor>& rest,
             Format format, uint64_t seed, int64_t step, int64_t number);

// The opposite: float32 numbers of data's shape.
at::Tensor decode(const at::Tensor& data, const std::optional<at::Tensor>& rest, Format format);

// Moves a scale after a step. found_inf: float64 of one element; max_abs: the same, for the
// policies that look at it; both on the scale's device.
void move_scale_(const ScaleMove& next, const at::Tensor& found_inf,
                 const std::optional<at::Tensor>& max_abs, Reports* reports);

// Whether the CUDA kernels are in this build.
bool has_cuda();

}  // namespace amp_mp
