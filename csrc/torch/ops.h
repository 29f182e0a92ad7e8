#pragma once
// The operations behind the Python package: tensors in, plan out. Every check, the device guard,
// the stream and the version counters are here; what runs is in csrc/cpu and csrc/cuda.
#include <optional>

#include "torch/slots.h"

namespace amp_mp {

// Statistics of each tensor and of all: float64 [n + 1, 3] on the tensors' device, rows sum of
// squares, largest finite |x|, number of non-finite elements; the last row is the total. An
// undefined tensor counts as empty. The tensors share a device; any layout (what is not dense is
// copied first).
at::Tensor measure(const Tensors& tensors);

// The same of the slots' gradients.
at::Tensor measure(const Slots& slots);

// What measure gives for tensors whose rows, float64 [n, 3], are known already: [n + 1, 3].
at::Tensor combine(const at::Tensor& rows);

// Fills `verdict`, float64 [5] (core/decide.h, Verdict). statistics: of measure; scale, found_inf:
// float32 of one element. All on the verdict's device.
void decide_(at::Tensor& verdict, const std::optional<at::Tensor>& statistics,
             const std::optional<at::Tensor>& scale, const std::optional<at::Tensor>& found_inf,
             double max_norm);

// to[i] = from[i] * multiplier, rounded to to[i]'s dtype; saturate clamps float16 results to
// +-65504. With a verdict its multiplier counts, and nothing is written on overflow. to[i] may be
// from[i].
void copy_(const Tensors& to, const Tensors& from, const std::optional<at::Tensor>& verdict,
           double multiplier, bool saturate);

// One step of a rule on every parameter that has a gradient; nothing is written on overflow.
// statistics: measure(slots), for the rules that look at norms.
template <class Rule>
void apply_(Slots& slots, const std::vector<Hyper>& hypers, const at::Tensor& verdict,
            const std::optional<at::Tensor>& statistics);

// x, float32, as the format stores it: `data`, and `rest` for a format of two arrays, are filled.
// Random bits are those of tensor `number` at `step`.
void encode_(const at::Tensor& x, const at::Tensor& data, const std::optional<at::Tensor>& rest,
             Format format, uint64_t seed, int64_t step, int64_t number);

// The opposite: float32 numbers of data's shape.
at::Tensor decode(const at::Tensor& data, const std::optional<at::Tensor>& rest, Format format);

// Advances a loss-scale policy (core/scale.h). found_inf: float32 of one element, max_abs: float64
// of one element for the policies that look at it; both on the policy's device.
void update_scale_(at::Tensor& policy, const at::Tensor& found_inf,
                   const std::optional<at::Tensor>& max_abs);

// Whether the CUDA kernels are in this build.
bool has_cuda();

}  // namespace amp_mp
