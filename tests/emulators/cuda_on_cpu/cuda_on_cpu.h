#pragma once
// Stands in for <cuda_runtime.h> when a .cu file is compiled by g++, so that tests can run the
// kernels on the CPU under AddressSanitizer, UBSan and ThreadSanitizer. Test-only.
//
// A CUDA thread is a fiber; blocks run one after another (two at a time under TSan). What a GPU
// leaves to chance is an error here: a barrier that not every thread of the block reaches, a warp
// operation that not every lane of the warp reaches, a shuffle from a lane that does not exist.
// CUDA_ON_CPU_ORDER=forward|reverse|<seed> sets the order in which blocks and threads run; a
// correct kernel gives the same bits in every order.
//
// Not covered: uninitialised shared memory (zero, or what the block before left, instead of
// garbage), launch limits other than those in launch(), blocks that wait for other blocks (they
// hang), dynamic shared memory, a second dimension, and everything about the GPU's arithmetic and
// speed.
#include <atomic>
#include <cmath>
#include <concepts>
#include <cstdint>
#include <cstring>
#include <source_location>
#include <tuple>
#include <type_traits>

#include "runtime.h"

// __noinline__ must stay undefined: libstdc++ uses it as the name of an attribute.
#define __global__
#define __device__
#define __host__
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)

// Written after the type: `const Table __grid_constant__ table`. As a reference the table is not
// copied; defined as nothing, every thread of every block would copy it (up to 32 KB) to its stack.
#define __grid_constant__ &

// The two blocks that run at a time under TSan need shared memory of their own. Everywhere else
// one block runs at a time, and plain statics are better: ASan puts red zones around globals but
// not around thread locals, nor around statics of functions with vague linkage. So functions with
// shared memory belong in an anonymous namespace (build.py refuses an ASan build otherwise).
#ifdef __SANITIZE_THREAD__
#define __shared__ static thread_local
#else
#define __shared__ static
#endif

// may_alias: kernels read and write arrays of other types through uint4*.
struct __attribute__((may_alias, aligned(16))) uint4 {
  unsigned x, y, z, w;
};
struct __attribute__((may_alias, aligned(8))) uint2 {
  unsigned x, y;
};
struct Index {
  unsigned x;
};

// constinit: without it every use of threadIdx would call a function that initialises it first.
extern constinit thread_local Index threadIdx, blockIdx, blockDim, gridDim;

namespace cuda_on_cpu {

using Location = std::source_location;

#ifdef CUDA_ON_CPU_ARGUMENTS  // as before CUDA 12.1
constexpr int kArgumentLimit = CUDA_ON_CPU_ARGUMENTS;
#else
constexpr int kArgumentLimit = 32764;  // bytes of a kernel's arguments
#endif

bool is_valid(int64_t blocks, int threads);
void run_grid(int64_t blocks, int threads, void (*body)(const void*), const void* argument);
void sync_block(const Location& at);
void sync_warp(unsigned mask, const Location& at);
// What the lane `source` handed in, or `value` where that lane lies behind the caller's group.
uint64_t shuffle(uint64_t value, unsigned source, int width, unsigned mask, const Location& at);
unsigned ballot(bool vote, unsigned mask, const Location& at);
void fence();
unsigned lane();
[[noreturn]] void fail(const char* message, const Location& at);

inline void assume(bool holds, const Location& at = Location::current()) {
  if (!holds) fail("an assumption that does not hold", at);
}

// Runs the whole grid before it returns. Under a capture it is recorded, and where streams are
// delayed it is queued, with the arguments as they are now.
template <class... Parameters, class... Arguments>
cudaError_t launch(void (*kernel)(Parameters...), int64_t blocks, int threads, cudaStream_t stream,
                   const Arguments&... arguments) {
  constexpr size_t kBytes = (sizeof(Parameters) + ... + 0);
  static_assert(kBytes <= kArgumentLimit, "CUDA's limit for kernel parameters");
  counts.argument_bytes += kBytes;
  if (!is_valid(blocks, threads)) {
    noted(cudaErrorInvalidConfiguration);
    return cudaGetLastError();
  }
  const auto run = [=](const auto& call) {
    run_grid(blocks, threads, [](const void* c) { (*static_cast<decltype(&call)>(c))(); }, &call);
  };
  if (runs_at_once()) {
    run([&] { kernel(arguments...); });
  } else {
    const std::tuple<std::remove_cvref_t<Parameters>...> kept(arguments...);
    submit(stream, [=] { run([&] { std::apply(kernel, kept); }); });
  }
  return cudaGetLastError();  // an earlier call's too, as the library asks after a launch
}

template <class T, class... Types>
concept OneOf = (std::same_as<T, Types> || ...);

template <class T>
T shuffle_value(T value, unsigned source, int width, unsigned mask, const Location& at) {
  static_assert(sizeof(T) <= 8 && std::is_trivially_copyable_v<T>);
  uint64_t bits = 0;
  memcpy(&bits, &value, sizeof value);
  bits = shuffle(bits, source, width, mask, at);
  memcpy(&value, &bits, sizeof value);
  return value;
}

}  // namespace cuda_on_cpu

// Each operation knows where it is called from: that tells different barriers apart, and a failure
// names them.
#define CUDA_ON_CPU_HERE const cuda_on_cpu::Location& at = cuda_on_cpu::Location::current()

inline void __syncthreads(CUDA_ON_CPU_HERE) { cuda_on_cpu::sync_block(at); }
inline void __syncwarp(unsigned mask = ~0u, CUDA_ON_CPU_HERE) { cuda_on_cpu::sync_warp(mask, at); }
inline void __threadfence() { cuda_on_cpu::fence(); }
inline void __threadfence_system() { cuda_on_cpu::fence(); }

template <class T>
T __shfl_sync(unsigned mask, T value, int from, int width = 32, CUDA_ON_CPU_HERE) {
  const unsigned group = cuda_on_cpu::lane() & ~unsigned(width - 1);
  return cuda_on_cpu::shuffle_value(value, group | (from & (width - 1)), width, mask, at);
}
template <class T>
T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32, CUDA_ON_CPU_HERE) {
  return cuda_on_cpu::shuffle_value(value, cuda_on_cpu::lane() + delta, width, mask, at);
}
template <class T>
T __shfl_xor_sync(unsigned mask, T value, int bits, int width = 32, CUDA_ON_CPU_HERE) {
  return cuda_on_cpu::shuffle_value(value, cuda_on_cpu::lane() ^ bits, width, mask, at);
}
inline unsigned __byte_perm(unsigned a, unsigned b, unsigned selector) {
  const uint64_t bytes = a | uint64_t(b) << 32;
  unsigned result = 0;
  for (int i = 0; i < 4; ++i)
    result |= (unsigned(bytes >> (8 * (selector >> (4 * i) & 7))) & 0xFFu) << (8 * i);
  return result;
}
inline unsigned __ballot_sync(unsigned mask, int predicate, CUDA_ON_CPU_HERE) {
  return cuda_on_cpu::ballot(predicate != 0, mask, at);
}
inline int __any_sync(unsigned mask, int predicate, CUDA_ON_CPU_HERE) {
  return cuda_on_cpu::ballot(predicate != 0, mask, at) != 0;
}
#undef CUDA_ON_CPU_HERE

inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __popcll(unsigned long long x) { return __builtin_popcountll(x); }

// Relaxed, as on the device: an atomic orders no other memory, and TSan holds kernels to that.
// CUDA's own list of types, so that what compiles here compiles there (uint64_t does not).
template <cuda_on_cpu::OneOf<int, unsigned, unsigned long long, float, double> T>
T atomicAdd(T* address, std::type_identity_t<T> value) {
  return std::atomic_ref<T>(*address).fetch_add(value, std::memory_order_relaxed);
}
template <cuda_on_cpu::OneOf<int, unsigned, long long, unsigned long long> T>
T atomicMax(T* address, std::type_identity_t<T> value) {
  std::atomic_ref<T> target(*address);
  T old = target.load(std::memory_order_relaxed);
  while (old < value && !target.compare_exchange_weak(old, value, std::memory_order_relaxed)) {
  }
  return old;
}
