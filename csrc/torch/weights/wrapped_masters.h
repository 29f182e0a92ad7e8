#pragma once
// Float32 masters in param_groups, which a wrapper has put in the place of low-precision
// parameters: lists of these parameters and of their masters, in the same order. The weight's
// record knows the master, and whether the weight or the master was written since the one was
// rounded to the other.
#include <torch/csrc/utils/pybind.h>

#include <vector>

namespace py = pybind11;

namespace amp_mp {

using Objects = std::vector<py::object>;

// A float32 tensor for each parameter's master, placed as the parameter.
Objects first_masters(const Objects& params);
// These are the masters of the parameters from now on.
void adopt_masters(const Objects& params, const Objects& masters);
// Masters take over what other optimizers have made of their parameters. Those that do not round to
// their parameters become these, unless they were written themselves. RuntimeError for parameters
// that hold averages (loans.h).
void follow_masters(const Objects& params, const Objects& masters);
// Rounds the masters into the parameters; float16 saturates.
void round_masters(const Objects& params, const Objects& masters);
// Masters take over what other optimizers have made of their parameters; those that were written
// themselves are rounded into them, without a new stamp.
void round_written_masters(const Objects& params, const Objects& masters);
// The parameters are what their masters round to.
void stamp_masters(const Objects& params);

}  // namespace amp_mp
