#pragma once
// States of a file that are stored as the optimizer stores them: checked and copied as they are.
// What does not fit is Python's (optim/state/loading.py), which converts or names it.
#include "torch/step/objects.h"

namespace amp_mp {

// `form`: what a parameter's saved state has, by entry: (dtype in a state dict, what it is:
// "param", of the parameter's shape; "bytes", with one more dimension of 2; or
// "number" or "numbers", one or two of the clock).

// Whether a saved state has these entries and no others, each a plain contiguous tensor of its
// dtype and shape on the parameter's device, with a clock that can be, and the parameter is plain
// and contiguous. step: the name of the clock's first entry.
bool has_form(const py::dict& saved, const py::dict& form, const py::object& param,
              const py::str& step);

// A copy of a state that has the form: bytes as 16-bit integers, and the clock in one piece
// (core/rules/base.h), as the step keeps it. step: the name of its first number's entry.
py::dict copy_of_form(const py::dict& saved, const py::dict& form, const py::str& step);

}  // namespace amp_mp
