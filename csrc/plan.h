#pragma once
// Plain structs that csrc/torch fills and the CPU and CUDA code reads. No torch, no CUDA.
#include <cstdint>

#include "core/average.h"
#include "core/changes.h"
#include "core/decide.h"
#include "core/formats.h"
#include "core/groups.h"
#include "core/random.h"
#include "core/reduce.h"
#include "core/rule_info.h"
#include "core/scale.h"
#include "core/splits.h"

namespace amp_mp {

// A pointer to numbers stored in one format: dense, aligned to the element type, possibly empty.
struct Array {
  void* data;
  Format format;
  // The second array of a format of two: remainders, weights beside float32 masters, or scales.
  void* second = nullptr;
};

constexpr int kGroupedStates = 2;  // the first states of a rule may be stored in groups

// One parameter in an apply pass. All arrays have `size` elements in the same order.
struct Slot {
  int64_t size;
  Array grad;    // still multiplied by the loss scale
  Array master;  // what the rule updates: the weight, or a format of two arrays (core/splits.h)
  Array copy;    // low-precision copy of a float32 weight, to be written; null for none
  Array state[kMaxStates];  // as many as the rule has; a direction is the last of them
  Clock* clock;
  int32_t group;          // index of its Hyper
  uint32_t tensor_index;  // for random bits: which tensor this is
  Origin origin;          // for random bits: where its elements are in the whole tensor
  int64_t row;            // its row in NormInputs::grads, ::weights and ::gathered
  Changes changes;        // of the weight; mostly none
  // Where a pass on a CPU leaves the sum of the weights that it stores, with the coefficients of
  // core/changes.h; null for nothing.
  uint64_t* sum = nullptr;
};

// One pair in a copy pass: to = from * multiplier. In an averaging pass `to` is the average and
// `from` its next value; nothing is random, and what is float16 saturates.
struct Transfer {
  int64_t size;
  Array to, from;
  bool saturate;        // clamp to +-65504 where `to` is float16
  RandomStream random;  // for a stochastic `to`
  Origin origin = {};
};

// One pair in a comparing pass: notes in `changes` which weights are others than before. Without
// `before` (null) no bit is set, and all of the weights are added to the sum.
struct Comparison {
  int64_t size;
  Array before, after;  // of one format: float32, float16 or bfloat16
  Changes changes;
};

// A watched tensor in a look pass, which adds up all of it. Bits are counted in chunks of
// kLookChunk elements.
constexpr int kLookChunk = 1 << 14;
struct Look {
  uint64_t sum, noted;  // of the weights as they are, and as the notes have it
  uint64_t bits;
};
struct Watched {
  int64_t size;
  Array weights;    // float32, float16 or bfloat16
  Changes changes;  // without a sum (null) nothing is noted
  Look* found;
};

// The same tensor in a gather pass: where its bits are set, as positions in the whole tensor, and
// the weights there. `ends` has how many bits each chunk and those before it have, and in front of
// the tensor's first chunk how many all earlier tensors have.
struct Gathering {
  int64_t size;
  Array weights;
  Changes changes;
  const int64_t* ends;
  void* positions;  // int32, or int64 if `wide`
  uint16_t* values;
  Origin origin;
  bool wide;

  AMP_MP_BOTH int64_t begin_of(int64_t chunk) const { return ends[chunk - 1] - ends[-1]; }
};

// Values on their way into a tensor of `limit` elements of `width` bytes.
struct Scattering {
  int64_t size;           // how many
  const void* positions;  // int32, or int64 if `wide`
  const void* values;
  void* to;
  int64_t limit;
  int width;  // 1, 2, 4 or 8
  bool wide;
};

// A matrix in low precision: element (i, j) is at data + i * row + j * column.
struct Matrix {
  const void* data;
  int64_t row, column;
};

// One matrix product: to = alpha * (a @ b) + beta * c, summed in float32 and rounded once. All have
// one format, float16 or bfloat16. b's rows or columns are dense; c may be absent (null).
struct Product {
  Format format;
  int64_t rows, columns, depth;  // of a: rows x depth; of b: depth x columns
  Matrix a, b, c, to;
  float alpha, beta;
};

// Lines in low precision, float16 or bfloat16, and the same numbers in float32 with the lines
// beside each other: number j of line i is at low + i * line + j and wide + j * lines_beside + i.
struct Transposed {
  Format format;
  int64_t lines, length;
  void* low;
  int64_t line;
  float* wide;
  int64_t lines_beside;
};

// A layer norm of rows of `width` elements: y = (x - mean) * scale * weight + bias, where scale is
// 1 / sqrt(variance + eps). Its gradients read mean and scale. An RMS norm has no mean (null) and
// no bias, and its variance is the mean of squares.
struct Norm {
  int64_t width;
  Array x, y, weight, bias;  // weight and bias may be absent (null)
  float *mean, *scale;       // of each row
  double eps;
  Array dy = {}, dx = {};  // dx may be absent
};

// One tensor in a measure pass.
struct Reading {
  int64_t size;
  Array data;
};

// The norms a rule may need. grads, weights: Statistics of every gradient and master, one row for
// each Slot::row. The other members are scratch for rules that need the norm of their update. Each
// number of UpdateSums is the sum_squares of Statistics: first `update` of all slots, then `along`,
// then `weight`; update_spans has them of every span, `updates` of every slot. On CUDA a total is
// behind these, and there is what cuda/passes.h's SpanSums needs.
//
// A slot may be a shard, and other processes may hold the rest. Then grads and weights are those of
// whole tensors already, and `gather`, which a pass calls once `updates` are there, makes whole
// rows of them; on CUDA it only queues work.
//
// A pass of a rule with directions calls make_updates once these are stored, which turns them into
// updates in place.
struct NormInputs {
  const Statistics *grads = nullptr, *weights = nullptr;
  const Statistics* (*gather)(void* context) = nullptr;
  void* context = nullptr;
  const Statistics* gathered = nullptr;  // what `gather` has returned: three for each Slot::row
  void (*make_updates)(void* context) = nullptr;
  void* directions = nullptr;  // the context of make_updates
  Statistics *update_spans = nullptr, *updates = nullptr;
  int64_t* first_span = nullptr;
  unsigned* ticket = nullptr;
};

// What a CUDA device writes to host memory after each decision. The device counts its decisions
// itself, because replays of a CUDA graph run without the host.
constexpr int kStepReports = 8;
struct StepReport {
  uint64_t seal;  // number of the decision, from 1; 0 while the device is writing the report
  Verdict verdict;
  double next_scale;           // new loss scale, 0 if the decision did not update it
  uint64_t skipped_in_a_row;   // decisions to skip the step, up to and with this one
  uint64_t overflows, spikes;  // all such decisions so far
};
struct StepCounts {
  uint64_t decided, skipped_in_a_row, overflows, spikes;
  double next_scale;  // as in StepReport, of the step whose report has not been written yet
};
struct StepReportBuffer {
  StepReport* reports = nullptr;  // kStepReports of them, in host memory; null for none
  StepCounts* counts = nullptr;   // in device memory
};

// How to update a loss scale: a policy's state (core/scale.h) or, if `policy` is null, the two
// numbers of torch.amp.GradScaler. Inputs and outputs may be the same memory.
struct ScaleUpdate {
  const double* policy = nullptr;
  double* policy_out = nullptr;
  int32_t policy_size = 0;
  const float* scale = nullptr;
  float* scale_out = nullptr;  // with a policy: null, or float copy of its scale
  const int32_t* tracker = nullptr;
  int32_t* tracker_out = nullptr;
  double growth_factor = 0, backoff_factor = 0;
  int64_t growth_interval = 0;
};

// Returns the new scale, 0 if there is none to update. max_abs: largest finite unscaled |g|.
AMP_MP_BOTH double update_loss_scale(const ScaleUpdate& u, bool found_inf, double max_abs) {
  if (u.policy) {
    for (int i = 0; i < u.policy_size; ++i) u.policy_out[i] = u.policy[i];
    update_scale_state(u.policy_out, found_inf, max_abs);
    const float scale = float(u.policy_out[1]);  // losses are multiplied with a float
    if (u.scale_out) *u.scale_out = scale;
    return scale;
  }
  if (!u.scale) return 0;
  const TorchScale next = TorchScale{*u.scale, *u.tracker}.after(
      found_inf, u.growth_factor, u.backoff_factor, u.growth_interval);
  *u.scale_out = next.scale;
  *u.tracker_out = next.growth_tracker;
  return next.scale;
}

// What `decide` needs besides Statistics. Pointers may be null.
struct Criteria {
  const float *scale = nullptr, *found_inf = nullptr;
  double max_norm = 0;
  NormLimit limit;
  ScaleUpdate scale_update;
  StepReportBuffer report_buffer;
};

constexpr int64_t ceil_divide(int64_t a, int64_t b) { return (a + b - 1) / b; }

}  // namespace amp_mp
