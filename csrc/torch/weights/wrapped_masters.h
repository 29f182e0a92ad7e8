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
// These are the masters of the parameters from now on, and are what was written behind the
// counters.
void adopt_masters(const Objects& params, const Objects& masters);
// Masters take over what other optimizers have made of their parameters since.
void take_over_masters(const Objects& params, const Objects& masters);
// The same; then those that do not round to their parameters become these, unless they were written
// themselves. RuntimeError for parameters that hold averages (loans.h).
void follow_masters(const Objects& params, const Objects& masters);
// Rounds the masters into the parameters; float16 saturates.
void round_masters(const Objects& params, const Objects& masters);
// Those of the parameters whose masters were written since they were rounded last; but no borrowed
// ones (loans.h).
Objects written_masters(const py::iterable& params);
// Rounds these masters.
void round_written_masters(const py::iterable& params);

}  // namespace amp_mp
