#pragma once
// The passes on a GPU, for csrc/torch to call. `slots`, `readings`, `transfers`, `hypers` and the
// structs are host memory; every pointer inside them is device memory. `stream` is a cudaStream_t.
// Each function queues work and returns at once: null, or CUDA's error message. A build without
// nvcc has absent.cpp in place of all .cu files, so that csrc/torch is the same for both.
#include "plan.h"

namespace amp_mp {
struct Float8;  // core/float8.h
}

namespace amp_mp::cuda {

// Whether these are the kernels, or what absent.cpp has in their place.
bool is_built();

// Sums of spans that measuring has written, and that no kernel has added up to sums of tensors yet.
struct SpanSums {
  Statistics* spans = nullptr;    // of all tensors; null if there is nothing to add
  int64_t* first_span = nullptr;  // count + 1: index of each tensor's first span
  unsigned* ticket = nullptr;     // counts finished thread blocks; 0 after measuring
  Statistics* tensors = nullptr;  // output, count + 1, the last is the total; null for no list
  int64_t count = 0;              // number of tensors
};

const char* measure(const Reading* readings, const SpanSums& sums, void* stream);
const char* combine(const SpanSums& sums, void* stream);

// total may be null.
const char* decide(const Statistics* total, const Criteria& inputs, Verdict* verdict, void* stream);

// With a verdict its multiplier is used and an overflow copies nothing; without one, `multiplier`.
const char* copy(const Transfer* transfers, int64_t count, const Verdict* verdict,
                 double multiplier, void* stream);

// Moves each average towards its next value, which may be stored in any format of a master.
const char* average(const Transfer* transfers, int64_t count, double decay, void* stream);

// Notes which weights are others than before.
const char* compare(const Comparison* comparisons, int64_t count, void* stream);

// As on the CPU (cpu/passes.h). counts, ends and bad are device memory; look adds to what is in
// `found`, check_positions to what is in `bad`.
const char* look(const Watched* watched, int64_t count, int32_t* counts, void* stream);
const char* gather(const Gathering* gatherings, int64_t count, void* stream);
const char* check_positions(const Scattering* scatterings, int64_t count, int32_t* bad,
                            void* stream);
const char* scatter(const Scattering* scatterings, int64_t count, void* stream);
// Weights as float8; f.blocks() is below 2^31, or of MXFP8 below 2^39.
const char* float8(const Float8& f, void* stream);

// The slots of a step and the numbers of their param_groups.
struct StepPlan {
  const Slot* slots;
  int64_t count;
  const Hyper* hypers;
  int chunk;             // elements of a thread block of apply: chunk_of
  bool has_update_sums;  // the rule has an update_sums pass
};

int chunk_of(const Slot* slots, int64_t count);

// Device memory that holds a plan in a form for kernels (cuda/step_table.h), and the same bytes as
// the host knows them: `mirror` has those that `memory` has once the work queued so far is done,
// and kUnknown where nothing is known. A short plan travels as arguments: its table has kShortRows
// rows, no groups and no mirror.
constexpr unsigned char kUnknown = 0xFF;  // no entry has such bytes
struct StepTable {
  char* memory = nullptr;
  char* mirror = nullptr;
  int64_t rows = 0, groups = 0;  // Slot::row and Slot::group are below
};
constexpr int kShortRows = 8;
bool is_short(const StepPlan& plan);
int64_t table_bytes(int64_t rows, int64_t groups);

// Uploads what differs from the mirror, and changes the mirror; of a plan that is not short, before
// apply. `differs`: whether anything did. With only_asks nothing is changed or queued.
const char* write_table(const StepPlan& plan, const StepTable& table, bool only_asks, bool& differs,
                        void* stream);

// A step: adds up `grads` and `weights`, decides from the total of `grads` (or, if `inputs` is
// null, uses `verdict` as it is), then ticks each slot's clock and updates it, unless the verdict
// says overflow. `slot_rules` is device memory of rule.bytes for each row of the table. norms: as
// on the CPU; `gather` is called after an overflow too, with updates of zero.
const char* apply(const RuleInfo& rule, const StepPlan& plan, const StepTable& table,
                  const Criteria* inputs, Verdict* verdict, const SpanSums& grads,
                  const SpanSums& weights, void* slot_rules, const NormInputs& norms, void* stream);

// The kernel that apply launches first: all that has to be known before tensors are touched.
// updates_measured: called again after `update_sums`, because only the updates' norms are new.
// reports: apply will not write the report.
const char* decide_step(const RuleInfo& rule, const StepPlan& plan, const StepTable& table,
                        const Criteria* inputs, Verdict* verdict, const SpanSums& grads,
                        const SpanSums& weights, void* slot_rules, const NormInputs& norms,
                        bool updates_measured, bool reports, void* stream);

// Updates a loss scale outside a step. max_abs may be null for policies that do not use it.
const char* update_scale(const ScaleUpdate& update, const double* found_inf, const double* max_abs,
                         const StepReportBuffer& report_buffer, void* stream);

// The CUDA runtime's functions that are needed besides launches.
const char* is_capturing(void* stream, bool& capturing);
const char* synchronize(void* stream);
// Pinned host memory that devices read and write. Freeing waits for the current device.
const char* allocate_on_host(size_t bytes, void*& memory);
const char* free_on_host(void* memory);
bool addresses_host(int device);
// A small piece of such memory, never freed.
const char* allocate_for_both(size_t bytes, void*& piece);

}  // namespace amp_mp::cuda
