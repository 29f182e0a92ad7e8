#pragma once
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

namespace pretend_gpu {

// Runs any operator's CPU kernel on the device's memory.
void run_on_the_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack);

}  // namespace pretend_gpu
