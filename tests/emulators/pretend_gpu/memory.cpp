#include "memory.h"

#include <c10/util/Exception.h>

#include <cstdlib>
#include <cstring>
#include <mutex>
#include <set>
#include <unordered_map>
#include <utility>

#include "current_stream.h"
#include "ledger.h"

namespace pretend_gpu {
namespace {

using Block = std::shared_ptr<void>;

constexpr size_t kAlignment = 512;  // as of cudaMalloc

// Never destroyed: tensors may be freed at the very end of the process.
std::mutex& mutex = *new std::mutex;
std::vector<Block>* of_capture = nullptr;              // where a capture keeps what is handed out
std::vector<void*>& graves = *new std::vector<void*>;  // freed while a graph lives
int graphs = 0;
// On which streams memory is used besides its own (torch's record_stream).
using Users = std::unordered_map<const void*, std::set<cuda_on_cpu::StreamId>>;
Users& users = *new Users;

void bury(void* memory, size_t bytes) {
  memset(memory, kPoison, bytes);
  const std::lock_guard<std::mutex> lock(mutex);
  if (graphs > 0) {
    graves.push_back(memory);
  } else {
    free(memory);
  }
}

// On its stream, since kernels that were queued before may still use it.
void release(void* memory, size_t bytes, cuda_on_cpu::StreamId stream) {
  std::set<cuda_on_cpu::StreamId> others;
  {
    const std::lock_guard<std::mutex> lock(mutex);
    if (const auto found = users.extract(memory)) others = found.mapped();
  }
  for (const cuda_on_cpu::StreamId other : others)
    cuda_on_cpu::wait_for(stream, cuda_on_cpu::mark(other));
  cuda_on_cpu::queue(stream, [=] { bury(memory, bytes); });
}

Block make_block(size_t bytes, cuda_on_cpu::StreamId stream) {
  // Sizes are exact but for the alignment: what a kernel writes behind the end lands in poison.
  void* memory = aligned_alloc(kAlignment, (bytes + kAlignment - 1) / kAlignment * kAlignment);
  TORCH_CHECK(memory, "pretend GPU: out of memory (", bytes, " bytes)");
  memset(memory, kPoison, bytes);
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

void also_used_on(const void* memory, cuda_on_cpu::StreamId stream) {
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
