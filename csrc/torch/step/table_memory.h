#pragma once
// The device memory of a CUDA step's table (cuda/passes.h, StepTable), kept from one step to the
// next: a step uploads what has changed.
#include <functional>
#include <vector>

#include "torch/device.h"

namespace amp_mp {

class TableMemory {
 public:
  // A table as one step uses it, and what has to live until that step is queued.
  struct Held {
    cuda::StepTable table;
    at::Tensor memory;
    std::vector<char> mirror;
  };
  // Uploads what differs from the table's mirror, unless it only asks; returns whether anything
  // differs.
  using Write = std::function<bool(const cuda::StepTable& table, bool only_asks)>;

  // The table for a step on the device's current stream. rows and groups are the same in each call.
  Held prepare(int64_t rows, int64_t groups, const at::Device& device, const Write& write);
  // The same for a short plan.
  static Held prepare_short(const at::Device& device);

 private:
  cuda::StepTable table() { return {data_of<char>(memory_), mirror_.data(), rows_, groups_}; }

  int64_t rows_ = 0, groups_ = 0;
  at::Tensor memory_;  // undefined until a step needs it
  std::vector<char> mirror_;
  void* stream_ = nullptr;         // on which memory_ was made
  bool is_read_by_graph_ = false;  // then memory_ is never written again
};

}  // namespace amp_mp
