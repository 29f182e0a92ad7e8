#pragma once
// A list of tensors as a kernel argument. It is passed by value: it needs no copy to the device, no
// memory to keep alive, and a CUDA graph keeps it.
#include <new>
#include <type_traits>

#include "cuda/gpu.h"
#include "plan.h"

namespace amp_mp::cuda {

constexpr int kMostChunk = 1 << 16;                   // elements
constexpr int kArgumentBytes = kArgumentLimit - 128;  // of a table, room left for other arguments

// `Extra`: what else a kernel has to know of each tensor. `Bytes`: of the table, at most.
struct NoExtra {};

// Thread block b works on chunk b - first_chunk[t] of the last tensor t with first_chunk[t] <= b.
// An empty tensor has the same first_chunk as the next tensor and is never the last: it costs
// nothing and needs no test. A block takes one chunk instead of looping over several, because the
// hardware's scheduler balances blocks better.
template <int Pointers, class Extra = NoExtra, int Bytes = kArgumentBytes>
struct TensorTable {
  static constexpr int kLastBits = 17;  // of kMostChunk
  static constexpr bool kHasExtra = !std::is_empty_v<Extra>;
  static constexpr int kEntry = 8 * Pointers + (kHasExtra ? int(sizeof(Extra)) : 0) + 4 + 4;
  static constexpr int kCapacity = (Bytes - 56) / kEntry;

  void* data[Pointers][kCapacity];
  Extra extra[kHasExtra ? kCapacity : 1];
  int32_t first_chunk[kCapacity + 1];
  uint32_t tag_and_last[kCapacity];
  int32_t count;
  int32_t chunk;         // elements
  int64_t first_index;   // index of its first tensor in the call
  int64_t chunk_offset;  // index of its first chunk in the call

  void reset(int64_t index, int64_t chunks, int chunk_elements) {
    count = 0;
    chunk = chunk_elements;
    first_index = index;
    chunk_offset = chunks;
    first_chunk[0] = 0;
  }

  bool full() const { return count == kCapacity; }

  // tag: formats and flags.
  void add(int64_t elements, uint32_t tag) {
    const int64_t chunks = ceil_divide(elements, chunk);
    const auto last = uint32_t(elements - (chunks - 1) * chunk);
    tag_and_last[count] = last | tag << kLastBits;
    first_chunk[count + 1] = first_chunk[count] + int32_t(chunks);
    ++count;
  }

  int32_t blocks() const { return first_chunk[count]; }

  __device__ __forceinline__ uint32_t tag(int slot) const {
    return tag_and_last[slot] >> kLastBits;
  }
  // Elements of the last chunk; the others are whole.
  __device__ __forceinline__ int last(int slot) const {
    return int(tag_and_last[slot] & ((1u << kLastBits) - 1));
  }
};

// Memory for the calling thread's table. Not on the stack, for which it may be too large; all
// kernels share it, since a launch copies its arguments.
inline void* memory_of_table() {
  alignas(16) static thread_local unsigned char memory[kArgumentBytes];
  return memory;
}

template <class T>
T& table_of_thread() {
  static_assert(sizeof(T) <= kArgumentBytes && alignof(T) <= 16);
  return *new (memory_of_table()) T;
}

struct Chunk {
  int slot;
  int64_t begin;
  int size;
};

template <class T>
__device__ __forceinline__ Chunk find_chunk(const T& table) {
  int low = 0, high = table.count;
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    if (table.first_chunk[middle] <= int(blockIdx.x)) {
      low = middle;
    } else {
      high = middle;
    }
  }
  const int block = int(blockIdx.x);
  const bool is_last = block + 1 == table.first_chunk[low + 1];
  return {low, int64_t(block - table.first_chunk[low]) * table.chunk,
          is_last ? table.last(low) : table.chunk};
}

// Elements of a chunk for passes in which any number will do: small enough for several waves of
// blocks, so that an incomplete last wave costs little; large enough that starting the blocks costs
// little (after an overflow they do nothing else).
inline int chunk_elements(int64_t elements, int blocks_per_multiprocessor) {
  constexpr int kLeast = 4096, kWaves = 16;
  int device = 0, multiprocessors = 1;
  if (cudaGetDevice(&device) != cudaSuccess ||
      cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device) !=
          cudaSuccess) {
    cudaGetLastError();  // clears the error, or the next launch would report it
    return kLeast;
  }
  const int64_t blocks = int64_t(multiprocessors) * blocks_per_multiprocessor * kWaves;
  const int64_t chunk = ceil_divide(ceil_divide(elements, blocks), kLeast) * kLeast;
  return chunk < kLeast ? kLeast : chunk > kMostChunk ? kMostChunk : int(chunk);
}

template <class Item>
int64_t count_elements(const Item* items, int64_t count) {
  int64_t elements = 0;
  for (int64_t i = 0; i < count; ++i) elements += items[i].size;
  return elements;
}

// CUDA's words, with both versions where the driver is too old for the runtime in this library;
// null for success. The text lasts until the thread's next error.
const char* message(cudaError_t error);

}  // namespace amp_mp::cuda
