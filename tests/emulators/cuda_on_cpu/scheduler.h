#pragma once
// How a block's threads take turns and wait for each other.
#include <random>
#include <vector>

#include "cuda_on_cpu.h"
#include "fibers.h"
#include "sanitizers.h"

namespace cuda_on_cpu {

// One launch<<<...>>>: `body(argument)` is the kernel with its arguments.
struct Launch {
  int blocks, threads;
  void (*body)(const void*);
  const void* argument;
};

// The order in which blocks, or the threads of a block, take their turns.
class Turns {
 public:
  Turns(int count, unsigned salt);      // as CUDA_ON_CPU_ORDER asks; `salt` tells blocks apart
  const std::vector<int>& next_pass();  // every index once; with a seed, a new order every pass

 private:
  std::vector<int> sequence_;
  bool shuffled_ = false;
  std::minstd_rand random_;
};

enum class State { kReady, kWaiting, kReturned };

struct Thread {
  Fiber* fiber = nullptr;
  State state = State::kReturned;
  Location waits_at{};
};

// A group of threads [first, first + size) that wait for each other: a block or a warp.
struct Meeting {
  const char* members;  // for messages
  int first = 0, size = 0;
  int arrived = 0;
  Location place{};  // where the first to arrive waits
  // Everything a meeting needs exists twice and alternates: a fast thread arrives at the next
  // meeting while a slow one has yet to leave this one. With a single SyncPoint the slow thread
  // would acquire what the fast one did since, and TSan would miss races between them.
  unsigned phase = 0;
  SyncPoint order[2]{};
};

struct Warp {
  Meeting lanes{"lanes of a warp"};
  uint64_t values[2][32];  // handed in by each lane, for shuffles and votes

  unsigned present() const { return lanes.size == 32 ? ~0u : (1u << lanes.size) - 1; }
};

// The column tells two barriers of one line apart. Equal names may have two addresses: a header's,
// in two objects.
inline bool same_place(const Location& a, const Location& b) {
  return a.line() == b.line() && a.column() == b.column() &&
         (a.file_name() == b.file_name() || strcmp(a.file_name(), b.file_name()) == 0);
}

// Runs one block at a time, on one operating-system thread.
class Worker {
 public:
  // Runs every `stride`-th block of the launch, from `first` on.
  void run_blocks(const Launch& launch, int first, int stride);

  // Called by the running thread. Pauses it until the whole group has arrived at `at`; returns the
  // phase of this meeting. A barrier orders memory, a shuffle does not: as in CUDA.
  unsigned meet(Meeting& group, bool orders_memory, const Location& at);

  Meeting& block() { return block_; }
  Warp& warp() { return warps_[current_ / 32]; }
  int current() const { return current_; }
  int returned() const { return returned_; }

 private:
  void make_threads(int count);
  void run_block(int number);
  void resume(int thread);
  static void run_thread(void* worker);
  [[noreturn]] void fail_stuck() const;

  std::vector<Thread> threads_;  // as many as the largest block so far had
  std::vector<Warp> warps_;
  Meeting block_{"threads of a block"};
  int current_ = 0, returned_ = 0;
  const Launch* launch_ = nullptr;
  // The end of a block, alternating like Meeting::order and for the same reason.
  unsigned block_phase_ = 0;
  SyncPoint block_end_[2]{};
};

// The worker that runs the calling thread; fails outside a kernel.
Worker& current_worker(const Location& at);

// Prints the message with the place and the CUDA thread, and ends the process with kFailureExit.
constexpr int kFailureExit = 67;

}  // namespace cuda_on_cpu
