// What a build without nvcc has in place of the kernels: csrc/torch asks is_built before it calls
// any of them for a tensor on a device.
#include "cuda/passes.h"

namespace amp_mp::cuda {
namespace {
constexpr const char* kAbsent = "amp_mp was built without CUDA";
}

bool is_built() { return false; }
const char* measure(const Reading*, const SpanSums&, void*) { return kAbsent; }
const char* combine(const SpanSums&, void*) { return kAbsent; }
const char* decide(const Statistics*, const Criteria&, Verdict*, void*) { return kAbsent; }
const char* copy(const Transfer*, int64_t, const Verdict*, double, void*) { return kAbsent; }
const char* average(const Transfer*, int64_t, double, void*) { return kAbsent; }
const char* compare(const Comparison*, int64_t, void*) { return kAbsent; }
const char* look(const Watched*, int64_t, int32_t*, void*) { return kAbsent; }
const char* gather(const Gathering*, int64_t, void*) { return kAbsent; }
const char* check_positions(const Scattering*, int64_t, int32_t*, void*) { return kAbsent; }
const char* scatter(const Scattering*, int64_t, void*) { return kAbsent; }
const char* float8(const Float8&, void*) { return kAbsent; }
int chunk_of(const Slot*, int64_t) { return 1; }
bool is_short(const StepPlan&) { return true; }
int64_t table_bytes(int64_t, int64_t) { return 0; }
const char* write_table(const StepPlan&, const StepTable&, bool, bool&, void*) { return kAbsent; }
const char* update_scale(const ScaleUpdate&, const double*, const double*, const StepReportBuffer&,
                         void*) {
  return kAbsent;
}
const char* is_capturing(void*, bool&) { return nullptr; }  // nothing is
const char* synchronize(void*) { return kAbsent; }
const char* allocate_on_host(size_t, void*&) { return kAbsent; }
const char* free_on_host(void*) { return kAbsent; }
bool addresses_host(int) { return false; }
const char* allocate_for_both(size_t, void*&) { return kAbsent; }

const char* apply(const RuleInfo&, const StepPlan&, const StepTable&, const Criteria*, Verdict*,
                  const SpanSums&, const SpanSums&, void*, const NormInputs&, void*) {
  return kAbsent;
}

}  // namespace amp_mp::cuda
