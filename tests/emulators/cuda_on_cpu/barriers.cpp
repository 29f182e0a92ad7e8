// What kernels call: barriers, shuffles, votes and fences; and what is said when they misuse them.
#include <cstdio>
#include <cstdlib>

#include "scheduler.h"

namespace cuda_on_cpu {
namespace {

// Shuffles and votes of part of a warp are left out on purpose: what the other lanes do meanwhile
// is easy to get wrong, and no kernel here needs them.
Warp& whole_warp(Worker& worker, unsigned mask, const Location& at) {
  Warp& warp = worker.warp();
  if (mask != ~0u && mask != warp.present()) fail("a mask that is not the whole warp", at);
  return warp;
}

void print_group(const Thread& thread, int first, int last) {
  fprintf(stderr, first == last ? "  thread %d" : "  threads %d to %d", first, last);
  if (thread.state == State::kReturned) {
    fprintf(stderr, " returned\n");
  } else {
    fprintf(stderr, " at %s:%u\n", thread.waits_at.file_name(), thread.waits_at.line());
  }
}

bool waits_alike(const Thread& a, const Thread& b) {
  return a.state == b.state && (a.state == State::kReturned || same_place(a.waits_at, b.waits_at));
}

SyncPoint fences;

}  // namespace

unsigned lane() { return unsigned(current_worker(Location::current()).current()) % 32; }

void sync_block(const Location& at) {
  Worker& worker = current_worker(at);
  if (worker.returned() > 0) fail("__syncthreads after a thread of the block has returned", at);
  worker.meet(worker.block(), true, at);
}

void sync_warp(unsigned mask, const Location& at) {
  Worker& worker = current_worker(at);
  worker.meet(whole_warp(worker, mask, at).lanes, true, at);
}

uint64_t shuffle(uint64_t value, unsigned source, int width, unsigned mask, const Location& at) {
  Worker& worker = current_worker(at);
  Warp& warp = whole_warp(worker, mask, at);
  if (width < 1 || width > 32 || (width & (width - 1)) != 0) {
    fail("a shuffle whose width is not a power of two up to 32", at);
  }
  const unsigned own = lane(), last = own | unsigned(width - 1);
  warp.values[warp.lanes.phase][own] = value;
  const unsigned phase = worker.meet(warp.lanes, false, at);
  if (source > last) return value;  // PTX's rule: groups before the own one can be read
  if (source >= unsigned(warp.lanes.size)) fail("a shuffle from a lane that does not exist", at);
  return warp.values[phase][source];
}

unsigned ballot(bool vote, unsigned mask, const Location& at) {
  Worker& worker = current_worker(at);
  Warp& warp = whole_warp(worker, mask, at);
  warp.values[warp.lanes.phase][lane()] = vote;
  const unsigned phase = worker.meet(warp.lanes, false, at);
  unsigned votes = 0;
  for (int i = 0; i < warp.lanes.size; ++i) votes |= unsigned(warp.values[phase][i]) << i;
  return votes;
}

// For TSan a fence comes after every earlier fence, of any thread. That is more order than CUDA
// gives, where an atomic must link the two: a race between fences without one goes unseen.
void fence() {
  fences.release();
  fences.acquire();
}

void fail(const char* message, const Location& at) {
  fprintf(stderr, "cuda_on_cpu: %s at %s:%u, block %u, thread %u\n", message, at.file_name(),
          at.line(), blockIdx.x, threadIdx.x);
  _Exit(kFailureExit);  // not exit(): the other fibers are in the middle of their functions
}

void Worker::fail_stuck() const {
  fprintf(stderr, "cuda_on_cpu: block %u is stuck: its threads wait for each other\n", blockIdx.x);
  int groups = 0;
  for (int first = 0, last = 0; first < block_.size && groups < 8; first = last + 1, ++groups) {
    last = first;
    while (last + 1 < block_.size && waits_alike(threads_[first], threads_[last + 1])) ++last;
    print_group(threads_[first], first, last);
  }
  _Exit(kFailureExit);
}

}  // namespace cuda_on_cpu
