#pragma once
// One parameter's state: makes what is missing, moves it to where the parameter is, refuses state
// that does not belong to the parameter. Everything here needs the GIL.
#include "torch/state/arrays.h"
#include "torch/state/host_memory.h"
#include "torch/state/members.h"
#include "torch/weights/weight.h"

namespace amp_mp {

// The tensors that hold one of a rule's states; for DTensors the parts on this process.
struct HeldState {
  const StoredFormat* stored;  // null: the tensor under the plain name has a dtype of no format
  at::Tensor data, scales;     // scales: undefined without groups
};
std::optional<HeldState> held_state(const KeptState& kept, py::handle state);

bool is_held(const KeptState& kept, py::handle state);

// Whether a state has the shape that it needs beside a parameter.
bool has_shape_of(at::IntArrayRef sizes, at::IntArrayRef param, bool of_rows);

// Raises unless a step can update each of the parameters; ValueError for state of another shape or
// placement, in two entries, or lost after steps, and for a parameter whose dtype has no masters in
// the group's format.
void check_members(const std::vector<Member>& members);
// TypeError, by name, for a parameter of a new param_group that no step can update; ValueError as
// above.
void refuse_params(py::handle group, int64_t number);

// Converts the state to the parameter's present dtype, layout and device, and to the formats and
// the place that the group names; keeps the values.
void follow(const Member& member);

// The format of the weight's master that the group asks for; null if the weight gets none.
const MasterEntry* wanted_master(const Member& member);

// Makes all that the state lacks, but for its clock, and the weight's master in the group's format.
// stepping: whether the optimizer had state for the weight before (weights/weight.h). Returns the
// record if the weight has a master.
WeightRecord init_state(const Member& member, bool stepping);

// The format in which a state is stored for this parameter, as the kernels name it.
Format format_of(const KeptState& kept, const Member& member);

// The clocks of parameters, float64 [4] (core/rules/base.h). Makes a new one if the state's entries
// do not lie in one piece of memory (after loading, copying or an assignment), or one is missing,
// as in torch's files. New ones on a CUDA device are rows of one tensor.
Tensors clocks_of(const std::vector<Member>& members);

// Room on the host for all that `follow` and `init_state` will put there. If it raises, nothing has
// changed.
HostRoom room_for(const std::vector<Member>& members);
// Whether the group offloads a parameter's arrays to the host, but for small ones.
bool offloads(py::handle group, const at::Tensor& local);
// Moves a state's arrays to the host or back, as the group says. settled: one of them, itself if it
// is there already.
void settle(py::handle group, const at::Tensor& local, py::handle state);
at::Tensor settled(py::handle group, const at::Tensor& local, const at::Tensor& array);

}  // namespace amp_mp
