// Proves the shim. Without an argument: correct kernels against plain loops. With the name of a
// fault (selftest_faults.cu): a kernel that is wrong in that way.
// Exits with 0 if nothing was noticed, with 1 if a value is wrong, with 2 for an unknown name.
#include <cstdio>
#include <memory>
#include <vector>

#include "cuda_on_cpu.h"

int run_fault(const char* name);
int test_capture();

namespace {

using cuda_on_cpu::launch;

int failures = 0;

void expect(bool condition, const char* what, int detail) {
  if (condition) return;
  printf("wrong: %s (%d)\n", what, detail);
  ++failures;
}

// ---- Block sums: shared memory, shuffles, barriers, 16-byte loads, a table as a parameter.

struct Table {
  const float* data;
  int size, per_block;
  char filling[32000];
};

__device__ __forceinline__ float sum_of_block(float mine) {
  __shared__ float of_warp[32];
  for (int d = 16; d > 0; d /= 2) mine += __shfl_down_sync(~0u, mine, d);
  if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = mine;
  __syncthreads();
  float sum = 0;
  for (unsigned w = 0; w < blockDim.x / 32; ++w) sum += of_warp[w];
  __syncthreads();  // of_warp may be used again
  return sum;
}

__global__ void __launch_bounds__(1024)
    sum_kernel(const Table __grid_constant__ table, float* sums, float* doubled_sums) {
  const int begin = blockIdx.x * table.per_block;
  const int end = begin + table.per_block < table.size ? begin + table.per_block : table.size;
  float mine = 0;
  for (int i = begin + 4 * threadIdx.x; i < end; i += 4 * blockDim.x) {
    if (i + 4 <= end) {
      const float4 x = *reinterpret_cast<const float4*>(table.data + i);
      mine += x.x + x.y + x.z + x.w;
    } else {
      for (int k = i; k < end; ++k) mine += table.data[k];
    }
  }
  const float sum = sum_of_block(mine), doubled = sum_of_block(2 * mine);
  if (threadIdx.x == 0) sums[blockIdx.x] = sum;
  if (threadIdx.x == blockDim.x - 1) doubled_sums[blockIdx.x] = doubled;
}

void test_sums(int threads) {
  constexpr int kBlocks = 5, kPerBlock = 4400, kSize = kBlocks * kPerBlock - 1001;
  // On the heap and of exactly this size: ASan sees the first byte past the end.
  const std::unique_ptr<float[]> data(new float[kSize]);
  for (int i = 0; i < kSize; ++i) data[i] = float(i * 37 % 101 - 50);  // sums are exact
  std::vector<float> sums(kBlocks), doubled(kBlocks);
  const Table table{data.get(), kSize, kPerBlock, {}};
  launch(sum_kernel, kBlocks, threads, nullptr, table, sums.data(), doubled.data());
  for (int b = 0; b < kBlocks; ++b) {
    float want = 0;
    for (int i = b * kPerBlock; i < (b + 1) * kPerBlock && i < kSize; ++i) want += data[i];
    expect(sums[b] == want, "sum of block", b);
    expect(doubled[b] == 2 * want, "doubled sum of block", b);
  }
}

// ---- Warp operations, one row of results each.

enum { kFrom, kFromInEight, kDown, kDownInEight, kXor, kXorInEight, kBallot, kAny, kNeighbour };

__global__ void warp_kernel(int (*results)[64]) {
  __shared__ int shared[64];
  const int thread = threadIdx.x, value = 1000 + thread;
  results[kFrom][thread] = __shfl_sync(~0u, value, 7);
  results[kFromInEight][thread] = __shfl_sync(~0u, value, 3, 8);
  results[kDown][thread] = __shfl_down_sync(~0u, value, 5);
  results[kDownInEight][thread] = __shfl_down_sync(~0u, value, 5, 8);
  results[kXor][thread] = __shfl_xor_sync(~0u, value, 21);
  results[kXorInEight][thread] = __shfl_xor_sync(~0u, value, 9, 8);
  results[kBallot][thread] = int(__ballot_sync(~0u, thread % 3 == 0));
  results[kAny][thread] = __any_sync(~0u, thread == 40);
  shared[thread] = value;
  __syncwarp();
  results[kNeighbour][thread] = shared[thread ^ 1];
}

void test_warps() {
  int results[kNeighbour + 1][64];
  launch(warp_kernel, 1, 64, nullptr, &results[0]);
  for (int t = 0; t < 64; ++t) {
    const int lane = t % 32, warp = t - lane, value = 1000 + t;
    unsigned ballot = 0;
    for (int i = 0; i < 32; ++i) ballot |= unsigned((warp + i) % 3 == 0) << i;
    expect(results[kFrom][t] == 1000 + warp + 7, "shfl", t);
    expect(results[kFromInEight][t] == 1000 + t / 8 * 8 + 3, "shfl, width 8", t);
    expect(results[kDown][t] == value + (lane + 5 < 32 ? 5 : 0), "shfl_down", t);
    expect(results[kDownInEight][t] == value + (t % 8 + 5 < 8 ? 5 : 0), "shfl_down, width 8", t);
    expect(results[kXor][t] == 1000 + (t ^ 21), "shfl_xor", t);
    // A lane of a later group cannot be read, one of an earlier group can.
    const int xor_in_eight = (t ^ 9) / 8 > t / 8 ? value : 1000 + (t ^ 9);
    expect(results[kXorInEight][t] == xor_in_eight, "shfl_xor, width 8", t);
    expect(results[kBallot][t] == int(ballot), "ballot", t);
    expect(results[kAny][t] == (warp == 32), "any", t);
    expect(results[kNeighbour][t] == 1000 + (t ^ 1), "shared memory after syncwarp", t);
  }
}

// ---- Atomics and fences: the last block to finish adds up what all blocks have written.

struct Totals {
  unsigned finished = 0;
  int count = 0, largest = -1;
  float sum = 0;
  double of_blocks = 0;
};

__global__ void last_block_kernel(double* of_block, Totals* totals) {
  __shared__ bool last;
  const int id = int(blockIdx.x * blockDim.x + threadIdx.x);
  atomicAdd(&totals->count, 1);
  atomicAdd(&totals->sum, 0.5f);
  atomicMax(&totals->largest, id);
  if (threadIdx.x == 0) {
    of_block[blockIdx.x] = blockIdx.x + 1;
    __threadfence();
    last = atomicAdd(&totals->finished, 1u) == gridDim.x - 1;
    __threadfence();
  }
  __syncthreads();
  if (last && threadIdx.x == 33) {
    for (unsigned b = 0; b < gridDim.x; ++b) totals->of_blocks += of_block[b];
  }
}

void test_atomics() {
  double of_block[7] = {};
  Totals totals;
  launch(last_block_kernel, 7, 64, nullptr, &of_block[0], &totals);
  expect(totals.count == 448, "atomicAdd of int", totals.count);
  expect(totals.sum == 224, "atomicAdd of float", int(totals.sum));
  expect(totals.largest == 447, "atomicMax", totals.largest);
  expect(totals.of_blocks == 28, "total of the last block", int(totals.of_blocks));
}

// ---- Launches: indices, a warp that is not full, configurations CUDA refuses.

__global__ void index_kernel(int* visits) {
  const unsigned lane = threadIdx.x % 32;
  const bool pair = __shfl_xor_sync(~0u, lane, 1) == (lane ^ 1);
  visits[blockIdx.x * blockDim.x + threadIdx.x] += pair ? 1 : 100;
}

void test_launches() {
  int visits[12 * 40] = {};
  expect(launch(index_kernel, 12, 40, nullptr, &visits[0]) == cudaSuccess, "launch", 0);
  for (int i = 0; i < 12 * 40; ++i) expect(visits[i] == 1, "visits of thread", i);
  for (int count : {0, 1025}) {
    const cudaError_t error = launch(index_kernel, 1, count, nullptr, &visits[0]);
    expect(error == cudaErrorInvalidConfiguration, cudaGetErrorString(error), count);
  }
  expect(cudaGetLastError() == cudaSuccess, "last error", 0);
}

}  // namespace

int main(int argc, char** argv) {
  if (argc > 1) return run_fault(argv[1]);
  for (int threads : {32, 256, 1024, 32}) test_sums(threads);
  test_warps();
  test_atomics();
  test_launches();
  const int unmet = test_capture();
  expect(unmet == 0, "expectation of the capture", unmet);
  return failures != 0;
}
