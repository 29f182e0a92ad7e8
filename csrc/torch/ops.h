#pragma once
// Operations on lists of tensors, for the Python package. Every check, the device guard, the CUDA
// stream and the version counters are in csrc/torch; the loops are in csrc/cpu and csrc/cuda.
#include <optional>

#include "torch/step/measurement.h"
#include "torch/step/slots.h"

namespace amp_mp {

// Statistics of each tensor and of all: float64 [n + 1, 3] on the tensors' device, rows sum of
// squares, largest finite |x|, number of non-finite elements; the last row is the total. An
// undefined tensor counts as empty. The tensors share a device; any layout (tensors that are not
// dense are copied first).
at::Tensor measure(const Tensors& tensors);

// The same for the slots' gradients; on CUDA the spans may not be added up yet.
Measurement measure(const Slots& slots);

// The result of measure, [n + 1, 3], for tensors whose rows, float64 [n, 3], are known.
at::Tensor combine(const at::Tensor& rows);

// to[i] = from[i] * multiplier, rounded to to[i]'s dtype; saturate clamps float16 results to
// +-65504. With a verdict its multiplier is used, and nothing is written on overflow. to[i] may be
// from[i].
void copy_(const Tensors& to, const Tensors& from, const std::optional<at::Tensor>& verdict,
           double multiplier, bool saturate);

// Moves averages towards their next values: to[i] += (1 - decay) * (from[i] - to[i]), in float32. A
// number may be a weight and its master (a float32 tensor or remainders), which is undefined for
// the others. `from` may have another dtype, layout and device than `to`. decay 0 copies.
void average_(const Tensors& to, const Tensors& to_masters, const Tensors& from,
              const Tensors& from_masters, double decay);

}  // namespace amp_mp
