// What is kept between steps goes once the list "many" of benchmarks/gpu takes less than 1.03 times
// as long where each step uploads its whole table, as a captured one can.
#include "torch/step/table_memory.h"

namespace amp_mp {

TableMemory::Held TableMemory::prepare_short(const at::Device& device) {
  Held held;
  held.memory = scratch(cuda::table_bytes(cuda::kShortRows, 0), device);
  held.table = {data_of<char>(held.memory), nullptr, cuda::kShortRows, 0};
  return held;
}

TableMemory::Held TableMemory::prepare(int64_t rows, int64_t groups, const at::Device& device,
                                       const Write& write) {
  rows_ = rows;
  groups_ = groups;
  const int64_t bytes = cuda::table_bytes(rows, groups);
  const auto is_as_wanted = [&] { return memory_.defined() && !write(table(), true); };
  if (is_capturing(device)) {
    // Each replay repeats an upload that the graph has captured, after steps that the host cannot
    // know. So a graph reads a table that is right already, and nothing writes that table again; or
    // it fills a table of its own.
    Held held;
    if (is_as_wanted()) {
      // Leaked: replays read this memory, and the host cannot know when the last one has run.
      if (!is_read_by_graph_) new at::Tensor(memory_);
      is_read_by_graph_ = true;
      held.table = table();
      return held;
    }
    held.memory = scratch(bytes, device);
    held.mirror.assign(size_t(bytes), char(cuda::kUnknown));
    held.table = {data_of<char>(held.memory), held.mirror.data(), rows, groups};
    write(held.table, false);
    return held;
  }
  if (is_read_by_graph_ && !is_as_wanted()) memory_.reset();
  if (!memory_.defined()) {
    memory_ = scratch(bytes, device);
    mirror_.assign(size_t(bytes), char(cuda::kUnknown));
    stream_ = current_stream(device);
    is_read_by_graph_ = false;
  }
  if (stream_ != current_stream(device)) used_on_current_stream(memory_);
  // If an upload fails, the memory holds anything: memory_ stays undefined, and a step makes
  // another.
  at::Tensor memory = std::move(memory_);
  memory_.reset();
  const cuda::StepTable wanted = {data_of<char>(memory), mirror_.data(), rows, groups};
  if (!is_read_by_graph_) write(wanted, false);
  memory_ = std::move(memory);
  Held held;
  held.table = wanted;
  return held;
}

}  // namespace amp_mp
