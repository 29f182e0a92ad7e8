#include "scheduler.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <numeric>
#include <string>
#include <string_view>
#include <thread>

constinit thread_local Index threadIdx{}, blockIdx{}, blockDim{}, gridDim{};

namespace cuda_on_cpu {
namespace {

constexpr int kMaxThreads = 1024;

thread_local Worker* running = nullptr;
SyncPoint launch_begin, launch_end;

}  // namespace

Turns::Turns(int count, unsigned salt) : sequence_(count) {
  const char* variable = getenv("CUDA_ON_CPU_ORDER");
  const std::string_view order = variable ? variable : "forward";
  std::iota(sequence_.begin(), sequence_.end(), 0);
  if (order == "forward") return;
  if (order == "reverse") {
    std::reverse(sequence_.begin(), sequence_.end());
    return;
  }
  unsigned seed = 0;
  const auto [end, error] = std::from_chars(order.begin(), order.end(), seed);
  if (error != std::errc() || end != order.end()) {
    fprintf(stderr, "cuda_on_cpu: CUDA_ON_CPU_ORDER is forward, reverse or a number, not %s\n",
            variable);
    _Exit(kFailureExit);
  }
  shuffled_ = true;
  random_.seed(seed * 7919 + salt);
}

const std::vector<int>& Turns::next_pass() {
  if (shuffled_) std::shuffle(sequence_.begin(), sequence_.end(), random_);
  return sequence_;
}

void Worker::make_threads(int count) {
  for (int t = int(threads_.size()); t < count; ++t) {
    const std::string name = "CUDA thread " + std::to_string(t);
    threads_.push_back({new Fiber(run_thread, this, name.c_str())});
  }
  block_.size = count;
  warps_.resize((count + 31) / 32);
  for (int first = 0; first < count; first += 32) {
    warps_[first / 32].lanes.first = first;
    warps_[first / 32].lanes.size = std::min(32, count - first);
  }
}

void Worker::run_blocks(const Launch& launch, int first, int stride) {
  if (first >= launch.blocks) return;
  // The thread locals of this thread (shared memory) lie where an earlier thread had its own.
  launch_begin.release();
  make_threads(launch.threads);
  launch_ = &launch;
  running = this;
  blockDim = {unsigned(launch.threads)};
  gridDim = {unsigned(launch.blocks)};
  Turns turns(launch.blocks, 0);
  const std::vector<int>& order = turns.next_pass();
  for (int i = first; i < launch.blocks; i += stride) run_block(order[i]);
  running = nullptr;
}

void Worker::run_block(int number) {
  blockIdx = {unsigned(number)};
  block_phase_ ^= 1;
  returned_ = 0;
  for (int t = 0; t < block_.size; ++t) threads_[t].state = State::kReady;
  Turns turns(block_.size, unsigned(number) + 1);
  while (returned_ < block_.size) {
    bool moved = false;
    for (int t : turns.next_pass()) {
      if (threads_[t].state != State::kReady) continue;
      resume(t);
      moved = true;
    }
    if (!moved) fail_stuck();
  }
}

void Worker::resume(int thread) {
  current_ = thread;
  threadIdx = {unsigned(thread)};
  threads_[thread].fiber->resume();
}

// What a fiber does all its life: a thread of one block after another, launch after launch.
void Worker::run_thread(void* worker) {
  Worker& self = *static_cast<Worker*>(worker);
  for (;;) {
    launch_begin.acquire();
    // The block before is over, and shared memory may be used again. What the other threads of
    // this block do is not behind us, nor what other blocks did outside this worker.
    self.block_end_[self.block_phase_ ^ 1].acquire();
    self.launch_->body(self.launch_->argument);
    self.block_end_[self.block_phase_].release();
    launch_end.release();
    ++self.returned_;
    Thread& thread = self.threads_[self.current_];
    thread.state = State::kReturned;
    thread.fiber->pause();
  }
}

unsigned Worker::meet(Meeting& group, bool orders_memory, const Location& at) {
  const unsigned phase = group.phase;
  Thread& thread = threads_[current_];
  if (group.arrived == 0) {
    group.place = at;
  } else if (!same_place(at, group.place)) {
    const std::string message = std::string(group.members) + " wait at different places: at " +
                                group.place.file_name() + ":" + std::to_string(group.place.line()) +
                                ", and";
    fail(message.c_str(), at);
  }
  if (orders_memory) group.order[phase].release();
  if (++group.arrived < group.size) {
    thread.state = State::kWaiting;
    thread.waits_at = at;
    thread.fiber->pause();
  } else {  // the last to arrive goes straight on; the others have their turns again
    group.arrived = 0;
    group.phase ^= 1;
    for (int t = group.first; t < group.first + group.size; ++t) threads_[t].state = State::kReady;
  }
  if (orders_memory) group.order[phase].acquire();
  return phase;
}

Worker& current_worker(const Location& at) {
  if (!running) fail("a device function outside a kernel", at);
  return *running;
}

bool is_valid(int64_t blocks, int threads) {
  return blocks > 0 && threads > 0 && threads <= kMaxThreads;
}

void run_grid(int64_t blocks, int threads, void (*body)(const void*), const void* argument) {
  // Kept from launch to launch, and never destroyed: their fibers are in the middle of a function.
  static auto& workers = *new std::array<Worker, 2>;
  static std::mutex one_launch_at_a_time;
  const std::lock_guard lock(one_launch_at_a_time);
  const Launch launch{int(blocks), threads, body, argument};
  ++counts.launches;
  launch_begin.release();
  if (under_tsan()) {
    // Neighbouring blocks run on fibers and shared memory of their own, so that nothing orders
    // them: TSan sees a race between blocks. On one worker the end of a block would hide it.
    std::thread even([&] { workers[0].run_blocks(launch, 0, 2); });
    std::thread odd([&] { workers[1].run_blocks(launch, 1, 2); });
    even.join();
    odd.join();
  } else {
    workers[0].run_blocks(launch, 0, 1);
  }
  launch_end.acquire();
}

}  // namespace cuda_on_cpu
