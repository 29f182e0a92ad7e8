#pragma once
// The table that gives each operator a policy, inside torch's own autocast: kernels are registered
// by operator name under the AutocastCPU and AutocastCUDA dispatch keys. They are called while
// autocast is on, in whichever way the operator is called (torch., Tensor., F., a module, C++).
//
// Registering changes the dispatcher's tables without any lock: do it before worker threads start.
// Changing the policy of a registered operator is an atomic store.
#include <map>
#include <string>
#include <vector>

namespace amp_mp::casting {

// With every policy, what an operator writes into decides: the other arguments are cast to its
// dtype (in place, and out=).
enum class OpPolicy : int {
  stock,                   // what torch's own autocast does
  unchanged,               // no casts, as an operator on no list
  low_precision,           // to the autocast dtype
  float32,                 // low-precision arguments to float32
  widest,                  // to the widest dtype among the arguments
  set_output_dtype,        // arguments as they are, `dtype=` float32 unless given
  banned,                  // raises if an argument is low precision
  bfloat16_only,           // to the autocast dtype if that is bfloat16, else to float32
  low_precision_if_large,  // matrix products on a CPU: in float32 where that is faster (product.h)
};

// The policies' names, in the order of the enum.
const std::vector<std::string>& policy_names();

// A list of op_lists.h ("apex", "apex cpu", "torch cpu", "torch cuda"): for each group the policy
// and the operators, with their namespace.
std::vector<std::pair<std::string, std::vector<std::string>>> op_list(const std::string& name);

// Sets an operator's policy; registers a kernel for the operator if it has none yet. `device` is
// "cpu" or "cuda", `op` a name such as "aten::mm" or "aten::pow.Tensor_Scalar". Returns the policy
// that the operator had, or an empty string if the running torch has no such operator (the lists
// are written for several versions of torch).
std::string set_policy(const std::string& device, const std::string& op, const std::string& policy);

// All registered operators, and their policies.
std::map<std::string, std::string> policies(const std::string& device);

// Removes all registered kernels: the dispatch tables are as before. Not thread-safe.
void uninstall();

}  // namespace amp_mp::casting
