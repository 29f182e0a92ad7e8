#include "current_stream.h"

#include <array>
#include <utility>

namespace pretend_gpu {
namespace {

thread_local std::array<c10::StreamId, 2> stream_of =
    {};  // of each device; 0 is the default stream

}  // namespace

cuda_on_cpu::StreamId id_of(const c10::Stream& stream) {
  return {stream.device_index(), intptr_t(stream.id())};
}

cuda_on_cpu::StreamId current_stream(c10::DeviceIndex device) {
  return {device, intptr_t(stream_of.at(size_t(device)))};
}

c10::StreamId exchange_stream(c10::DeviceIndex device, c10::StreamId stream) {
  return std::exchange(stream_of.at(size_t(device)), stream);
}

void settle(const c10::Device& device) {
  if (cuda_on_cpu::is_delayed()) cuda_on_cpu::finish(current_stream(device.index()));
}

}  // namespace pretend_gpu
