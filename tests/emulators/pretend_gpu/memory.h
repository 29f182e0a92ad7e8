#pragma once
// The device's memory: the host's, but every byte of it is poisoned before it is handed out and
// after it comes back, so that what was never written, or is gone, reads as NaN.
#include <c10/core/Allocator.h>

#include <memory>
#include <vector>

#include "runtime.h"

namespace pretend_gpu {

constexpr int kPoison = 0xFF;

c10::Allocator* allocator();

// The host's, pinned: torch's own, for copies that the caller does not wait for.
c10::Allocator* pinned_allocator();
bool is_pinned(const void* memory);

// Memory that is freed is handed out again at once to the stream that it was allocated on, as by
// torch's allocator, or goes back when its own stream has come so far. With this call neither
// happens before the given stream has come to where it was freed (torch's record_stream).
void also_used_on(const void* memory, cuda_on_cpu::StreamId stream);

// A recording and the memory that was handed out while it was made, kept for its replays. As with
// torch.cuda.CUDAGraph, memory from before has to be kept by the caller: what is freed while any
// graph lives stays poisoned, and is not handed out again.
class Graph {
 public:
  Graph();
  ~Graph();
  Graph(const Graph&) = delete;
  void begin();
  void end();
  void replay() const;  // raises c10::Error unless it was begun and ended
  size_t launches() const { return recording_->size(); }

 private:
  std::unique_ptr<cuda_on_cpu::Recording> recording_;
  std::vector<std::shared_ptr<void>> memory_;
  bool complete_ = false;
};

}  // namespace pretend_gpu
