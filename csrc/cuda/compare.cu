// The comparing pass: notes which weights are others than before, for what writes weights itself.
#include "cuda/changes.h"
#include "cuda/passes.h"
#include "cuda/tensor_table.h"

namespace amp_mp::cuda {
namespace {

using CompareTable = TensorTable<3>;  // before, after, Changes::sum

constexpr int kThreads = 256;
constexpr int kBlocks = 4;  // per multiprocessor

__global__ void __launch_bounds__(kThreads, kBlocks)
    compare_kernel(const CompareTable __grid_constant__ table) {
  const Chunk chunk = find_chunk(table);
  const uint32_t tag = table.tag(chunk.slot);
  const Format format = Format(tag & 31), compared_as = Format(tag >> 5 & 31);
  const Array before = {table.data[0][chunk.slot], format},
              after = {table.data[1][chunk.slot], format};
  const bool has_before = before.data != nullptr,
             wide = is_wide(before.data) && is_wide(after.data);
  const Changes changes = {static_cast<uint64_t*>(table.data[2][chunk.slot])};
  uint32_t added = 0;
  for (int base = 0; base < chunk.size; base += kThreads * kPack) {  // as often in all threads
    const int i = base + int(threadIdx.x) * kPack, n = chunk.size - i;
    const bool whole = wide && has_eight(n);
    const int64_t at = chunk.begin + i;
    Numbers old = {};
    if (has_before) old = Numbers::read(before, compared_as, at, n, whole);
    added += compare(old, Numbers::read(after, compared_as, at, n, whole),
                     has_before ? changes.bits() : nullptr, at);
  }
  add_to_sum(changes.sum, added);
}

}  // namespace

const char* compare(const Comparison* comparisons, int64_t count, void* stream) {
  auto& table = table_of_thread<CompareTable>();
  const auto queue = static_cast<cudaStream_t>(stream);
  const int chunk = chunk_elements(count_elements(comparisons, count), kBlocks);
  for (int64_t i = 0; i < count;) {
    table.reset(i, 0, chunk);
    for (; i < count && !table.full(); ++i) {
      const Comparison& c = comparisons[i];
      table.data[0][table.count] = c.before.data;
      table.data[1][table.count] = c.after.data;
      table.data[2][table.count] = c.changes.sum;
      table.add(c.size, uint32_t(c.after.format) | uint32_t(c.changes.format) << 5);
    }
    if (table.blocks() == 0) continue;
    if (const char* error = message(launch(compare_kernel, table.blocks(), kThreads, queue, table)))
      return error;
  }
  return nullptr;
}

}  // namespace amp_mp::cuda
