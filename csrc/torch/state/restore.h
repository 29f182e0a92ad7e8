#pragma once
// States of a file that are stored as the optimizer stores them: checked and copied as they are.
// What does not fit is Python's (optim/state/loading.py), which converts or names it.
#include "torch/state/members.h"

namespace amp_mp {

// Copies of the states that a state dict has just as the optimizer stores them, by the parameters'
// places in the optimizer: bytes as 16-bit integers, and the clock in one piece
// (core/rules/base.h), as the step keeps it. Such a state has the entries of its group's rule and
// formats and no others, each a plain contiguous tensor of its dtype and shape on the parameter's
// device, with a clock that can be, and its parameter is plain and contiguous. States with groups
// of elements are left out.
py::dict copies_as_stored(const py::list& rules, const py::list& groups,
                          const py::dict& state_dict);

}  // namespace amp_mp
