// to = from * multiplier between any two formats: unscaling in place, gradients to masters, masters
// to weights.
#include "cuda/packs.h"
#include "cuda/passes.h"
#include "cuda/table.h"

namespace amp_mp::cuda {
namespace {

using CopyTable = Table<2>;

constexpr int kThreads = 256;
constexpr int kChunk = 16384;

__global__ void __launch_bounds__(kThreads, 4)
    copy_kernel(const CopyTable __grid_constant__ table, const Verdict* __restrict__ verdict,
                double constant) {
  if (verdict && verdict->found_inf != 0) return;
  const float multiplier = float(verdict ? verdict->multiplier : constant);
  const Chunk chunk = find_chunk(table, kChunk);
  const uint32_t tag = table.tag[chunk.slot];
  const Span to = {table.data[0][chunk.slot], Format(tag & 0xFF)};
  const Span from = {table.data[1][chunk.slot], Format(tag >> 8 & 0xFF)};
  const bool clamp = (tag >> 16 & 1) != 0, wide = is_wide(to.data) && is_wide(from.data);
  for (int i = threadIdx.x * kPack; i < chunk.size; i += kThreads * kPack) {
    const int n = chunk.size - i < kPack ? chunk.size - i : kPack;
    const bool whole = wide && n == kPack;
    float x[kPack];
    load(x, from, chunk.begin + i, n, whole);
    for (int k = 0; k < kPack; ++k) x[k] = clamp ? saturate(x[k] * multiplier) : x[k] * multiplier;
    store(to, x, chunk.begin + i, n, whole);
  }
}

}  // namespace

const char* copy(const Transfer* transfers, int64_t count, const Verdict* verdict,
                 double multiplier, void* stream) {
  static thread_local CopyTable table;
  const auto queue = static_cast<cudaStream_t>(stream);
  for (int64_t i = 0; i < count;) {
    table.begin(i, 0);
    for (; i < count && !table.full(); ++i) {
      const Transfer& t = transfers[i];
      table.data[0][table.count] = t.to.data;
      table.data[1][table.count] = t.from.data;
      const bool clamp = t.saturate && t.to.format == Format::float16;
      table.tag[table.count] =
          uint32_t(t.to.format) | uint32_t(t.from.format) << 8 | uint32_t(clamp) << 16;
      table.add(t.size, kChunk);
    }
    if (table.blocks() == 0) continue;
    if (const char* error = message(
            launch(copy_kernel, table.blocks(), kThreads, queue, table, verdict, multiplier)))
      return error;
  }
  return nullptr;
}

}  // namespace amp_mp::cuda
