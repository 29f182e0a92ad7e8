#pragma once
// What the shim tells the sanitizers about its fibers.
//
// The functions are weak: the shim is compiled without sanitizers and finds at run time which of
// them the program brings along, so one object serves every build. It must stay so compiled: code
// that runs between two fibers may not itself be instrumented.
#include <cstddef>

extern "C" {
// AddressSanitizer: must know the bounds of the stack it is on. `finish` reports those it left.
[[gnu::weak]] void __sanitizer_start_switch_fiber(void** own_fake_stack, const void* next_stack,
                                                  std::size_t next_size);
[[gnu::weak]] void __sanitizer_finish_switch_fiber(void* own_fake_stack, const void** left_stack,
                                                   std::size_t* left_size);
// ThreadSanitizer: a fiber is a thread to it.
[[gnu::weak]] void* __tsan_create_fiber(unsigned flags);
[[gnu::weak]] void* __tsan_get_current_fiber();
[[gnu::weak]] void __tsan_set_fiber_name(void* fiber, const char* name);
[[gnu::weak]] void __tsan_switch_to_fiber(void* fiber, unsigned flags);
[[gnu::weak]] void __tsan_acquire(void* address);
[[gnu::weak]] void __tsan_release(void* address);
}

namespace cuda_on_cpu {

inline bool under_tsan() { return __tsan_create_fiber != nullptr; }

// Orders memory for TSan: everything before a release() happens before what follows a later
// acquire(). Nothing else orders the fibers, so TSan reports a race between two CUDA threads
// whatever order they happened to run in.
class alignas(8) SyncPoint {
 public:
  void release() {
    if (__tsan_release) __tsan_release(this);
  }
  void acquire() {
    if (__tsan_acquire) __tsan_acquire(this);
  }

 private:
  char address_ = 0;
};

}  // namespace cuda_on_cpu
