#pragma once
// Operators of torch that run as late as kernels do, on streams that are delayed: elementwise ones,
// sums, products, what joins tensors, and the fused AdamW. The others run at their call, behind
// what their stream has already.
#include <ATen/core/dispatch/Dispatcher.h>

#include <functional>
#include <optional>
#include <vector>

namespace pretend_gpu {

using Stack = torch::jit::Stack;

// Every tensor within a value, lists entered: f(tensor) takes its place.
void map_tensors(c10::IValue& value, const std::function<at::Tensor(const at::Tensor&)>& f);

// The operator's CPU kernel, on tensors of the CPU.
void run_on_host(const c10::OperatorHandle& op, Stack* stack);
// The same, for results that exist: they are copied to `targets`, undefined where that is needless.
void run_into(const c10::OperatorHandle& op, Stack stack, const std::vector<at::Tensor>& targets);

// Where the operator can be late, and streams are delayed: queues it on the current stream of the
// device, and returns its results, which are not written yet. Raises what the operator raises for
// sizes and dtypes that do not fit.
std::optional<Stack> run_late(const c10::OperatorHandle& op, const Stack& arguments,
                              const at::Device& device);

}  // namespace pretend_gpu
