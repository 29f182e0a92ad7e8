#pragma once
// States of a file as an optimizer stores them: the one way to restore them, whatever their format
// and whichever library saved them.
#include "torch/state/saved_state.h"

namespace amp_mp {

// What each parameter of these param_groups keeps from now on, in new tensors and in the file's
// order; None where the file has nothing of it. wrong_state has nothing against the file's states.
// Each state is stored as its group says; a format that is the file's keeps its bits.
//
// states: those until now, by parameter; a file of torch's leaves them their masters. seed: of
// stochastic rounding, where the file's groups have none. undo: gets (weight, its values) of a
// parameter whose new master rounds otherwise, before it is changed. Parts of DTensors are gathered
// by Python, on all processes in the same order.
py::list restored(const SavedEntries& entries, const py::list& groups, const py::dict& states,
                  const py::dict& state_dict, const py::int_& seed, py::list undo);

}  // namespace amp_mp
