#pragma once
// Which stream of a device is the thread's current one.
#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include "streams.h"

namespace pretend_gpu {

cuda_on_cpu::StreamId id_of(const c10::Stream& stream);
cuda_on_cpu::StreamId current_stream(c10::DeviceIndex device);
c10::StreamId exchange_stream(c10::DeviceIndex device, c10::StreamId stream);

// Before an operator of torch: it runs at its call, behind what its stream has already.
void settle(const c10::Device& device);

}  // namespace pretend_gpu
