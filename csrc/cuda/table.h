#pragma once
// A list of tensors as a kernel argument. Passed by value: no copy to the device, no lifetime to
// keep, and a CUDA graph bakes it in. CUDA 12.1 and later take 32,764 bytes of arguments from sm_70
// on.
#include "cuda/gpu.h"
#include "plan.h"

namespace amp_mp::cuda {

constexpr int kArgumentBytes = 32764 - 128;  // what a table and its `Extra` bytes may take together

// Block b works on chunk b - first_chunk[t] of the last tensor t with first_chunk[t] <= b. An empty
// tensor shares its number with the next one and is never the last: it costs nothing and needs no
// test.
// `Place` is what else a kernel has to know of a tensor.
struct Nowhere {};

template <int Pointers, int Extra = 0, class Place = Nowhere>
struct Table {
  static constexpr int kEntry = 8 + 8 * Pointers + int(sizeof(Place)) + 4 + 4;
  static constexpr int kCapacity = (kArgumentBytes - Extra - 48) / kEntry;

  int64_t size[kCapacity];
  void* data[Pointers][kCapacity];
  Place place[kCapacity];
  int32_t first_chunk[kCapacity + 1];
  uint32_t tag[kCapacity];  // formats and flags
  int32_t count;
  int64_t first_index;   // of its first tensor among all of the call
  int64_t chunk_offset;  // of its first chunk among all of the call

  void begin(int64_t index, int64_t chunks) {
    count = 0;
    first_index = index;
    chunk_offset = chunks;
    first_chunk[0] = 0;
  }

  bool full() const { return count == kCapacity; }

  void add(int64_t elements, int chunk_elements) {
    size[count] = elements;
    first_chunk[count + 1] = first_chunk[count] + int32_t(ceil_divide(elements, chunk_elements));
    ++count;
  }

  int32_t blocks() const { return first_chunk[count]; }
};

struct Chunk {
  int slot;
  int64_t begin;
  int size;
};

template <class T>
__device__ __forceinline__ Chunk find_chunk(const T& table, int chunk_elements) {
  int low = 0, high = table.count;
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    if (table.first_chunk[middle] <= int(blockIdx.x)) {
      low = middle;
    } else {
      high = middle;
    }
  }
  const int64_t begin = int64_t(int(blockIdx.x) - table.first_chunk[low]) * chunk_elements;
  const int64_t left = table.size[low] - begin;
  return {low, begin, int(left < chunk_elements ? left : chunk_elements)};
}

inline const char* message(cudaError_t error) {
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

}  // namespace amp_mp::cuda
