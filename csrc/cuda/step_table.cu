// Brings a step's table to the device. Its bytes travel as arguments of a kernel: no copy that the
// driver has to stage, no memory to keep alive, and a CUDA graph keeps them.
#include <cstring>

#include "cuda/step_arguments.h"

namespace amp_mp::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kPieceBytes = kArgumentBytes / 16 * 16, kSmallPieceBytes = 1024;

template <int Bytes>
struct Piece {
  uint4 data[Bytes / 16];
};

template <int Bytes>
__global__ void __launch_bounds__(kThreads)
    upload_kernel(const Piece<Bytes> __grid_constant__ piece, uint4* __restrict__ to, int count) {
  const int i = int(blockIdx.x) * kThreads + int(threadIdx.x);
  if (i < count) to[i] = piece.data[i];
}

// Compares what is put with the mirror, in the order of addresses, and uploads what differs. Bytes
// between two that differ travel with them where one launch then has both.
class Writer {
 public:
  Writer(const StepTable& table, bool only_asks, void* stream)
      : table_(table), only_asks_(only_asks), stream_(static_cast<cudaStream_t>(stream)) {}

  void put(int64_t at, const void* bytes, int64_t size) {
    char* known = table_.mirror + at;
    if (!std::memcmp(known, bytes, size_t(size))) return;
    differs_ = true;
    if (only_asks_) return;
    const int64_t begin = at / 16 * 16, end = ceil_divide(at + size, 16) * 16;
    if (begin_ < end_ && end - begin_ > kPieceBytes) flush();
    std::memcpy(known, bytes, size_t(size));
    if (begin_ == end_) begin_ = begin;
    end_ = end;
  }

  // Call it last. Null, or CUDA's error message.
  const char* finish(bool& differs) {
    flush();
    differs = differs_;
    return error_;
  }

 private:
  void flush() {
    if (begin_ == end_) return;
    if (!error_)
      error_ =
          end_ - begin_ <= kSmallPieceBytes ? upload<kSmallPieceBytes>() : upload<kPieceBytes>();
    begin_ = end_ = 0;
  }

  template <int Bytes>
  const char* upload() const {
    auto& piece = table_of_thread<Piece<Bytes>>();
    const int64_t bytes = end_ - begin_;
    std::memcpy(piece.data, table_.mirror + begin_, size_t(bytes));
    const auto count = int(bytes / 16);
    return message(launch(upload_kernel<Bytes>, ceil_divide(count, kThreads), kThreads, stream_,
                          piece, reinterpret_cast<uint4*>(table_.memory + begin_), count));
  }

  const StepTable& table_;
  const bool only_asks_;
  const cudaStream_t stream_;
  int64_t begin_ = 0, end_ = 0;  // what differs and is not uploaded yet
  bool differs_ = false;
  const char* error_ = nullptr;
};

}  // namespace

SlotEntry entry_of(const Slot& s) {
  const Array second = is_split(s.master.format) ? Array{s.master.second, Format::float32} : s.copy;
  const Array* const state = s.state;
  const Array arrays[] = {s.grad, second, s.master, state[0], state[1], state[2]};
  uint32_t tag = 0;
  for (int a = 0; a < kState0 + kMaxStates; ++a)
    tag |= uint32_t(arrays[a].format) << (a * kFormatBits);
  if (s.changes.format == Format::float16) tag |= kComparedAsFloat16;
  return {s.master.data,   second.data,   state[0].data,  state[0].second, state[1].data,
          state[1].second, state[2].data, s.clock,        s.size,          tag,
          s.tensor_index,  s.group,       int32_t(s.row), s.origin.first,  Rows::of(s.origin),
          s.changes.sum};
}

bool is_short(const StepPlan& plan) {
  return plan.count == 0 ||
         (plan.count <= kShortRows &&
          plan.slots[plan.count - 1].group - plan.slots[0].group < ShortPlan::kGroups);
}

int64_t table_bytes(int64_t rows, int64_t groups) { return TableLayout(rows, groups).bytes; }

const char* write_table(const StepPlan& plan, const StepTable& table, bool only_asks, bool& differs,
                        void* stream) {
  const TableLayout layout(table.rows, table.groups);
  Writer writer(table, only_asks, stream);
  for (int64_t t = 0; t < plan.count; ++t) {
    const Slot& slot = plan.slots[t];
    const SlotEntry entry = entry_of(slot);
    writer.put(layout.entries + slot.row * int64_t(sizeof entry), &entry, sizeof entry);
  }
  for (int64_t g = 0; g < table.groups; ++g) {
    Hyper hyper = plan.hypers[g];
    if (rates_travel(table.groups)) hyper.lr = 0;
    writer.put(layout.hypers + g * int64_t(sizeof hyper), &hyper, sizeof hyper);
  }
  const auto put_starts = [&](int64_t chunk, int64_t from) {
    for_each_start(plan, chunk, [&](int64_t t, const Start& start) {
      writer.put(from + t * int64_t(sizeof start), &start, sizeof start);
    });
  };
  put_starts(plan.chunk, layout.starts);
  if (plan.has_update_sums) put_starts(kSpan, layout.spans);
  if (!grads_travel(table.groups, plan.count))
    for (int64_t t = 0; t < plan.count; ++t)
      writer.put(layout.grads + t * int64_t(sizeof(void*)), &plan.slots[t].grad.data,
                 sizeof(void*));
  return writer.finish(differs);
}

}  // namespace amp_mp::cuda
