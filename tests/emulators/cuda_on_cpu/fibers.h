#pragma once
// Functions that can pause in the middle and go on later, each on a stack of its own.
#include <cstddef>

#if !defined(__x86_64__) && !defined(CUDA_ON_CPU_UCONTEXT)
#define CUDA_ON_CPU_UCONTEXT
#endif
#ifdef CUDA_ON_CPU_UCONTEXT
#include <ucontext.h>
#endif

namespace cuda_on_cpu {

// What is needed to go on with a stack that was left.
#ifdef CUDA_ON_CPU_UCONTEXT
using Context = ucontext_t;
#else
using Context = void*;  // its stack pointer; the registers that a call must keep lie on the stack
#endif

// Never destroyed: fibers wait for the next launch (making one costs far more than running it),
// and end with the process.
class Fiber {
 public:
  // `body` starts with the first resume() and never returns. `name` is for TSan's reports.
  Fiber(void (*body)(void*), void* argument, const char* name);
  Fiber(const Fiber&) = delete;

  void resume();  // called from outside: runs the fiber until it pauses
  void pause();   // called by the fiber: returns to what resumed it, on any thread

 private:
  static void enter();

  void (*body_)(void*);
  void* argument_;
  char* stack_;
  Context own_{}, caller_{};
  // For the sanitizers. The caller may be another operating-system thread at every resume().
  void* own_fake_stack_ = nullptr;
  void* caller_fake_stack_ = nullptr;
  const void* caller_stack_ = nullptr;
  std::size_t caller_stack_size_ = 0;
  void* tsan_own_ = nullptr;
  void* tsan_caller_ = nullptr;
};

}  // namespace cuda_on_cpu
