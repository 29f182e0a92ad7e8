// The averaging pass: each average moves towards its next value. Both may be stored as masters are.
#include "cuda/access.h"
#include "cuda/passes.h"
#include "cuda/transfer_table.h"

namespace amp_mp::cuda {
namespace {

using AverageTable = TransferTable<>;

constexpr int kThreads = 256;
constexpr int kBlocks = 4;  // per multiprocessor
constexpr FormatSet kWritten = kMasterFormats & ~kRandomFormats,
                    kRead = kWritten | (kMasterFormats & kSplitFormats);

__global__ void __launch_bounds__(kThreads, kBlocks)
    average_kernel(const AverageTable __grid_constant__ table, const Averaging averaging) {
  const Chunk chunk = find_chunk(table);
  const Array to = to_of(table, chunk.slot), from = from_of(table, chunk.slot);
  bool wide = true;  // a missing array is wide
  for (int a = 0; a < 4; ++a) wide = wide && is_wide(table.data[a][chunk.slot]);
  for (int i = int(threadIdx.x) * kPack; i < chunk.size; i += kThreads * kPack) {
    const int n = chunk.size - i;
    const bool whole = wide && has_eight(n);
    const int64_t at = chunk.begin + i;
    Held<kWritten> held_average;
    Held<kRead> held_x;
    held_average.read(to, at, n, whole);
    held_x.read(from, at, n, whole);
    float average[kPack] = {}, x[kPack] = {};
    held_average.decode(to.format, average);
    held_x.decode(from.format, x);
    if (to.format == Format::float16_split32)
      for (int k = 0; k < kPack; ++k)
        average[k] = average_of_float16(average[k], int16_t(held_average.second.half(k)));
    for (int k = 0; k < kPack; ++k) average[k] = averaging(average[k], x[k]);
    store_history<kWritten>(to, average, at, n, whole);
  }
}

}  // namespace

const char* average(const Transfer* transfers, int64_t count, double decay, void* stream) {
  auto& table = table_of_thread<AverageTable>();
  const auto queue = static_cast<cudaStream_t>(stream);
  const int chunk = chunk_elements(count_elements(transfers, count), kBlocks);
  for (int64_t i = 0; i < count;) {
    table.reset(i, 0, chunk);
    for (; i < count && !table.full(); ++i) add_transfer(table, transfers[i]);
    if (table.blocks() == 0) continue;
    if (const char* error = message(
            launch(average_kernel, table.blocks(), kThreads, queue, table, Averaging::at(decay))))
      return error;
  }
  return nullptr;
}

}  // namespace amp_mp::cuda
