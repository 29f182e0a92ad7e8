#pragma once
// The op-policy table inside torch's own autocast: boxed kernels, registered by operator name under
// the AutocastCPU and AutocastCUDA dispatch keys. Whichever way an operator is called (torch.,
// Tensor., F., a module, C++), it comes by here while autocast is on, and only then.
//
// Registering writes the dispatcher's tables, which nothing synchronises with calls in flight: do
// it before worker threads start. Changing the policy of a registered operator is an atomic store.
#include <string>
#include <vector>

namespace amp_mp::casting {

enum class OpPolicy : int {
  stock,                   // what torch's autocast does with it
  unchanged,               // no casts, as if it were on no list
  low_precision,           // to the autocast dtype
  float32,                 // low precision to float32
  widest,                  // to the widest dtype among the arguments
  set_output_dtype,        // arguments as they are, `dtype=` float32 unless given
  banned,                  // refuses low-precision arguments
  bfloat16_only,           // to the autocast dtype if that is bfloat16, else to float32
  low_precision_if_large,  // matrix products on a CPU: in float32 where that is faster (product.h)
};

// The policies' names, in the order of the enum.
const std::vector<std::string>& policy_names();

struct Row {
  std::string op, policy;
};

// Sets an operator's policy, registering our kernel for it first if need be. `device` is "cpu" or
// "cuda", `op` a name such as "aten::mm" or "aten::pow.Tensor_Scalar". Returns the policy it had,
// or an empty string where the running torch has no such operator (lists are written for several
// versions).
std::string set_policy(const std::string& device, const std::string& op, const std::string& policy);

// The operators that have our kernel, by name.
std::vector<Row> policies(const std::string& device);

// Takes every kernel of ours out again: the dispatch tables are as before. Single-threaded use.
void uninstall();

// Reports casts while on: all of them to a list that take_log() empties, or those that are
// computed, not found in the cache, to stderr.
enum class Trace : int { off, print, record };
void set_trace(Trace trace);

struct Cast {
  std::string op, argument, from, to;
  bool cached;  // nothing was computed
};
std::vector<Cast> take_log();

}  // namespace amp_mp::casting
