#include "memory.h"

#include <c10/util/Exception.h>

#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <set>
#include <unordered_map>
#include <utility>

#include "current_stream.h"
#include "ledger.h"

namespace pretend_gpu {
namespace {

using Block = std::shared_ptr<void>;
using cuda_on_cpu::StreamId;

constexpr size_t kAlignment = 512;  // as of cudaMalloc

// Never destroyed: tensors may be freed at the very end of the process.
std::mutex& mutex = *new std::mutex;
std::vector<Block>* of_capture = nullptr;              // where a capture keeps what is handed out
std::vector<void*>& graves = *new std::vector<void*>;  // freed while a graph lives
int graphs = 0;
// On which streams memory is used besides its own (torch's record_stream).
using Users = std::unordered_map<const void*, std::set<StreamId>>;
Users& users = *new Users;
// What its stream hands out again, by size, the last first, though the stream may not have come to
// the place where it was freed: work of the same stream does not mind, any other has to be
// recorded.
using Spare = std::map<std::pair<StreamId, size_t>, std::vector<void*>>;
Spare& spare = *new Spare;

void bury(void* memory, size_t bytes) {
  memset(memory, kPoison, bytes);
  const std::lock_guard<std::mutex> lock(mutex);
  if (graphs > 0) {
    graves.push_back(memory);
  } else {
    free(memory);
  }
}

void release(void* memory, size_t bytes, StreamId stream) {
  std::set<StreamId> others;
  bool is_spare = false;
  {
    const std::lock_guard<std::mutex> lock(mutex);
    if (const auto found = users.extract(memory)) others = found.mapped();
    others.erase(stream);
    is_spare = cuda_on_cpu::is_delayed() && others.empty() && graphs == 0;
  }
  if (is_spare) {
    cuda_on_cpu::queue(stream, [=] { memset(memory, kPoison, bytes); });
    const std::lock_guard<std::mutex> lock(mutex);
    spare[{stream, bytes}].push_back(memory);
    return;
  }
  if (others.empty()) return cuda_on_cpu::queue(stream, [=] { bury(memory, bytes); });
  // It is gone when all its streams have come so far; none of them waits for another because of it.
  const StreamId aside = cuda_on_cpu::nameless_stream(stream.device);
  others.insert(stream);
  for (const StreamId other : others) cuda_on_cpu::wait_for(aside, cuda_on_cpu::mark(other));
  cuda_on_cpu::queue(aside, [=] { bury(memory, bytes); });
}

// Memory that the stream has freed, null where there is none of the size. A capture has its own.
void* taken_again(size_t bytes, StreamId stream) {
  const std::lock_guard<std::mutex> lock(mutex);
  const auto found = spare.find({stream, bytes});
  if (of_capture || found == spare.end() || found->second.empty()) return nullptr;
  void* memory = found->second.back();
  found->second.pop_back();
  return memory;
}

Block make_block(size_t wanted, StreamId stream) {
  // Sizes are exact but for the alignment: what a kernel writes behind the end lands in poison.
  const size_t bytes = (wanted + kAlignment - 1) / kAlignment * kAlignment;
  void* memory = taken_again(bytes, stream);
  if (!memory) {
    memory = aligned_alloc(kAlignment, bytes);
    TORCH_CHECK(memory, "pretend GPU: out of memory (", bytes, " bytes)");
    memset(memory, kPoison, bytes);
  }
  return Block(memory, [=](void* m) { release(m, bytes, stream); });
}

struct Allocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    int device = 0;
    cudaGetDevice(&device);
    const c10::Device place(c10::kCUDA, c10::DeviceIndex(device));
    if (bytes == 0) return {nullptr, nullptr, &free_block, place};
    Block block = make_block(bytes, current_stream(place.index()));
    void* memory = block.get();
    {
      const std::lock_guard<std::mutex> lock(mutex);
      if (of_capture) of_capture->push_back(block);
    }
    return {memory, new Block(std::move(block)), &free_block, place};
  }

  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }

  void copy_data(void* to, const void* from, size_t bytes) const override {
    note_operator("memcpy");
    cuda_on_cpu::finish_all();
    memcpy(to, from, bytes);
  }

  static void free_block(void* block) { delete static_cast<Block*>(block); }
};

}  // namespace

c10::Allocator* allocator() {
  static auto* const only = new Allocator;
  return only;
}

namespace {

std::set<const void*>& pinned = *new std::set<const void*>;  // where each begins

struct PinnedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    void* memory = aligned_alloc(kAlignment, (bytes / kAlignment + 1) * kAlignment);
    TORCH_CHECK(memory, "pretend GPU: out of memory (", bytes, " bytes)");
    const std::lock_guard<std::mutex> lock(mutex);
    pinned.insert(memory);
    return {memory, memory, &free_pinned, c10::Device(c10::kCPU)};
  }

  c10::DeleterFnPtr raw_deleter() const override { return &free_pinned; }

  void copy_data(void* to, const void* from, size_t bytes) const override {
    memcpy(to, from, bytes);
  }

  static void free_pinned(void* memory) {
    const std::lock_guard<std::mutex> lock(mutex);
    pinned.erase(memory);
    free(memory);
  }
};

}  // namespace

c10::Allocator* pinned_allocator() {
  static auto* const only = new PinnedAllocator;
  return only;
}

bool is_pinned(const void* memory) {
  const std::lock_guard<std::mutex> lock(mutex);
  return pinned.contains(memory);
}

void also_used_on(const void* memory, StreamId stream) {
  const std::lock_guard<std::mutex> lock(mutex);
  users[memory].insert(stream);
}

REGISTER_ALLOCATOR(c10::kCUDA, allocator())

Graph::Graph() : recording_(new cuda_on_cpu::Recording) {
  const std::lock_guard<std::mutex> lock(mutex);
  ++graphs;
}

Graph::~Graph() {
  if (cuda_on_cpu::under_way() == recording_.get()) end();
  cuda_on_cpu::finish_all();  // a replay may be queued
  memory_.clear();
  const std::lock_guard<std::mutex> lock(mutex);
  if (--graphs > 0) return;
  for (void* memory : graves) free(memory);
  graves.clear();
}

void Graph::begin() {
  TORCH_CHECK(recording_->size() == 0 && !complete_, "pretend GPU: this graph is recorded already");
  recording_->begin();
  const std::lock_guard<std::mutex> lock(mutex);
  of_capture = &memory_;
}

void Graph::end() {
  recording_->end();
  complete_ = true;
  const std::lock_guard<std::mutex> lock(mutex);
  of_capture = nullptr;
}

void Graph::replay() const {
  TORCH_CHECK(complete_, "pretend GPU: this graph has not been captured");
  TORCH_CHECK(!cuda_on_cpu::under_way(), "pretend GPU: a replay within a capture");
  int device = 0;
  cudaGetDevice(&device);
  const intptr_t stream = current_stream(c10::DeviceIndex(device)).handle;
  recording_->replay(reinterpret_cast<cudaStream_t>(stream));
}

}  // namespace pretend_gpu
