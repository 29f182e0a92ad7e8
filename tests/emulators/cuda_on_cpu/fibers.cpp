#include "fibers.h"

#include <sys/mman.h>

#include <cstdio>
#include <cstdlib>

#include "sanitizers.h"

namespace cuda_on_cpu {
namespace {

// Only touched pages take memory. 64 KB of guard are a whole number of pages everywhere, and too
// wide for a frame with a large local array to step over.
constexpr std::size_t kStackSize = 256 << 10, kGuardSize = 64 << 10;

// The fiber that enter() starts: a context cannot carry an argument to its first function.
thread_local Fiber* starting = nullptr;

char* make_stack() {
  void* memory = mmap(nullptr, kGuardSize + kStackSize, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  // Stacks grow down: one that overflows runs into the guard and stops there.
  if (memory == MAP_FAILED || mprotect(memory, kGuardSize, PROT_NONE) != 0) {
    perror("cuda_on_cpu: no memory for the stack of a thread");
    abort();
  }
  return static_cast<char*>(memory) + kGuardSize;
}

#ifdef CUDA_ON_CPU_UCONTEXT

void prepare(Context& context, char* stack, void (*entry)()) {
  getcontext(&context);
  context.uc_stack.ss_sp = stack;
  context.uc_stack.ss_size = kStackSize;
  makecontext(&context, entry, 0);
}

void switch_stacks(Context& from, Context& to) { swapcontext(&from, &to); }

#else

// Four to seven times as fast as swapcontext, which also saves the signal mask, by a system call.
// Saves what a called function must preserve, except the floating-point control words: kernels do
// not change those.
extern "C" void cuda_on_cpu_switch_stacks(Context* from, Context to);
asm(R"(
  .text
  .globl cuda_on_cpu_switch_stacks
  .hidden cuda_on_cpu_switch_stacks
  .type cuda_on_cpu_switch_stacks, @function
cuda_on_cpu_switch_stacks:
  push %rbp
  push %rbx
  push %r12
  push %r13
  push %r14
  push %r15
  mov %rsp, (%rdi)
  mov %rsi, %rsp
  pop %r15
  pop %r14
  pop %r13
  pop %r12
  pop %rbx
  pop %rbp
  ret
  .size cuda_on_cpu_switch_stacks, . - cuda_on_cpu_switch_stacks
)");

// Lays out what switch_stacks pops: six registers and the address to return to, then a null return
// address for `entry` where stack traces end. `entry` finds the stack aligned as after a call.
void prepare(Context& context, char* stack, void (*entry)()) {
  void** top = reinterpret_cast<void**>(stack + kStackSize) - 2;
  *top = reinterpret_cast<void*>(entry);
  context = top - 6;
}

void switch_stacks(Context& from, Context& to) { cuda_on_cpu_switch_stacks(&from, to); }

#endif

// Both sides of a switch, for whichever sanitizer the program has.
void before_switch(void** own_fake_stack, const void* next_stack, std::size_t size, void* fiber) {
  if (__sanitizer_start_switch_fiber) {
    __sanitizer_start_switch_fiber(own_fake_stack, next_stack, size);
  }
  // Flag 1: the switch orders no memory. With 0, every thread would happen after the one that ran
  // before it, and TSan would never report a race between them.
  if (__tsan_switch_to_fiber) __tsan_switch_to_fiber(fiber, 1);
}

void after_switch(void* own_fake_stack, const void** left_stack, std::size_t* left_size) {
  if (__sanitizer_finish_switch_fiber) {
    __sanitizer_finish_switch_fiber(own_fake_stack, left_stack, left_size);
  }
}

}  // namespace

Fiber::Fiber(void (*body)(void*), void* argument, const char* name)
    : body_(body), argument_(argument), stack_(make_stack()) {
  prepare(own_, stack_, enter);
  if (__tsan_create_fiber) tsan_own_ = __tsan_create_fiber(0);
  if (__tsan_set_fiber_name) __tsan_set_fiber_name(tsan_own_, name);
}

void Fiber::enter() {
  Fiber& self = *starting;
  after_switch(nullptr, &self.caller_stack_, &self.caller_stack_size_);
  self.body_(self.argument_);
  abort();  // the body never returns: below this frame there is nothing to return to
}

void Fiber::resume() {
  starting = this;
  if (__tsan_get_current_fiber) tsan_caller_ = __tsan_get_current_fiber();
  before_switch(&caller_fake_stack_, stack_, kStackSize, tsan_own_);
  switch_stacks(caller_, own_);
  after_switch(caller_fake_stack_, nullptr, nullptr);
}

void Fiber::pause() {
  before_switch(&own_fake_stack_, caller_stack_, caller_stack_size_, tsan_caller_);
  switch_stacks(own_, caller_);
  after_switch(own_fake_stack_, &caller_stack_, &caller_stack_size_);
}

}  // namespace cuda_on_cpu
