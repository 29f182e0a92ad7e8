#pragma once
// State dicts of an optimizer before anything of them is loaded: their parts, and their order.
#include "torch/python/objects.h"

namespace amp_mp {

// ValueError where a state dict has not what torch's has, for these param_groups: other parts,
// groups or numbers of parameters.
void check_parts(const py::dict& state_dict, const py::list& groups);

// A state dict with its groups and parameters in the order of these groups' param_names; as it is
// where one of the two has no names. ValueError naming a parameter that the file lacks, or has in a
// group with others.
py::dict by_names(const py::dict& state_dict, const py::list& groups);

// What is wrong with a number of a parameter's clock, by its entry's name: no number, no count of
// steps, no powers of betas. Empty where it can be.
std::string wrong_clock(const py::object& value, const std::string& name);

// The entry of a parameter's saved state that cannot be loaded, and what is wrong with it; None
// where all can. schema: the table of optim/state/schema.py; needed: what must be there.
py::object wrong_state(const py::object& schema, const py::tuple& needed, const py::object& given,
                       const py::object& param);

}  // namespace amp_mp
