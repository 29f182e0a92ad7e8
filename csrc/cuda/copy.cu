// The copy pass: to = from * multiplier between any two formats. It unscales gradients in place,
// copies gradients to masters and masters to weights.
#include "cuda/access.h"
#include "cuda/passes.h"
#include "cuda/transfer_table.h"

namespace amp_mp::cuda {
namespace {

using CopyTable = TransferTable<RandomStream>;

constexpr int kThreads = 256;
constexpr int kBlocks = 4;  // per multiprocessor

__global__ void __launch_bounds__(kThreads, kBlocks)
    copy_kernel(const CopyTable __grid_constant__ table, const Verdict* __restrict__ verdict,
                double constant, int64_t first, const Rows rows) {
  if (verdict && verdict->skip != 0) return;
  const float multiplier = float(verdict ? verdict->multiplier : constant);
  const Chunk chunk = find_chunk(table);
  const Array to = to_of(table, chunk.slot), from = from_of(table, chunk.slot);
  const bool clamp = (table.tag(chunk.slot) >> 10 & 1) != 0, draws = is_stochastic(to.format);
  bool wide = true;
  for (int a = 0; a < 3; ++a) wide = wide && is_wide(table.data[a][chunk.slot]);
  wide = wide && (!is_split(from.format) || is_wide(from.second));
  for (int base = 0; base < chunk.size; base += kThreads * kPack) {  // as often in all threads
    const int i = base + int(threadIdx.x) * kPack, n = chunk.size - i;
    const bool whole = wide && has_eight(n);
    const int64_t at = chunk.begin + i;
    // First, while few registers are in use.
    const uint64_t random =
        draws ? random_bytes(table.extra[chunk.slot], first, rows, at) : uint64_t(0);
    float x[kPack] = {};
    load<kAnyFormat>(x, from, at, n, whole);
    for (int k = 0; k < kPack; ++k) x[k] = clamp ? saturate(x[k] * multiplier) : x[k] * multiplier;
    store<kAnyFormat>(to, x, at, n, whole, random);
  }
}

}  // namespace

const char* copy(const Transfer* transfers, int64_t count, const Verdict* verdict,
                 double multiplier, void* stream) {
  auto& table = table_of_thread<CopyTable>();
  const auto queue = static_cast<cudaStream_t>(stream);
  const int chunk = chunk_elements(count_elements(transfers, count), kBlocks);
  for (int64_t i = 0; i < count;) {
    table.reset(i, 0, chunk);
    const Origin origin = transfers[i].origin;  // of all in a launch
    for (; i < count && !table.full() && transfers[i].origin == origin; ++i) {
      const Transfer& t = transfers[i];
      table.extra[table.count] = t.random;
      add_transfer(table, t, t.saturate && t.to.format == Format::float16);
    }
    if (table.blocks() == 0) continue;
    if (const char* error = message(launch(copy_kernel, table.blocks(), kThreads, queue, table,
                                           verdict, multiplier, origin.first, Rows::of(origin))))
      return error;
  }
  return nullptr;
}

}  // namespace amp_mp::cuda
