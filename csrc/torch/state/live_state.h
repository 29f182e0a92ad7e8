#pragma once
// One parameter's state: makes what is missing, moves it to where the parameter is, refuses state
// that does not belong to the parameter. Everything here needs the GIL.
#include "torch/state/arrays.h"
#include "torch/state/host_memory.h"
#include "torch/state/low_bits.h"
#include "torch/state/members.h"

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
// placement, in two entries, or lost after steps.
void check_members(const std::vector<Member>& members);

// Converts the state to the parameter's present dtype, layout and device, and to the formats and
// the place that the group names. Drops a master of another dtype; keeps other values.
void follow(const Member& member);

// Makes all that the state lacks, but for its clock. Call show_master afterwards. goes_on: as in
// set_master.
void init_state(const Member& member, bool goes_on = false);

// The format in which a state is stored for this parameter, as the kernels name it.
Format format_of(const KeptState& kept, const Member& member);

// The tensor beside a low-precision parameter that makes it a master: a float32 master or
// remainders; undefined if there is neither.
at::Tensor master_beside(const at::Tensor& weight, py::handle state);
// The parameter's master in float32, a new tensor of its layout; undefined if it has none.
at::Tensor master_values(const at::Tensor& weight, py::handle state);
// Gives the parameter a master of the format, holding `values` if they are defined. Without them an
// existing master is kept, or converted, or made of the weight's low bits; "none" drops it. The
// parameter becomes the rounded values. goes_on: another optimizer has replaced this one's master;
// take its bits, even if the weight was written after it.
void set_master(const std::string& format, py::handle param, py::handle state, at::Tensor values,
                bool goes_on = false);
// Stores values beside the weight that was rounded from them; the weight does not change.
void store_beside(const at::Tensor& values, const ArrayTensors& master);
// Drops a master that another optimizer has replaced (LowBits); returns whether there was one.
bool drop_replaced(const Bits& bits, py::handle state);
// Makes new masters for those that others have replaced: call it before an optimizer's states are
// shown or copied.
void renew_masters(const py::list& groups, const py::dict& states);
// Makes the state's master the parameter's low bits. is_copy: the optimizer was copied or
// unpickled, and bits that came with the parameter are newer.
void show_master(py::handle param, py::handle state, bool is_copy = false);
// Converts its master to the parameter's present dtype, layout and device.
void follow_master(py::handle param, const at::Tensor& weight, py::handle state);

// The clocks of parameters, float64 [4] (core/rules/base.h). Makes a new one if the state's entries
// do not lie in one piece of memory (after loading, copying or an assignment), or one is missing,
// as in torch's files. New ones on a CUDA device are rows of one tensor.
Tensors clocks_of(const std::vector<Member>& members);

// Room on the host for all that `follow` and `init_state` will put there. If it raises, nothing has
// changed.
HostRoom room_for(const std::vector<Member>& members);
// Whether the group offloads a parameter's arrays to the host, but for small ones.
bool offloads(py::handle group, const at::Tensor& local);
// Moves a state's arrays to the host or back, as the group says.
void settle(py::handle group, const at::Tensor& local, py::handle state);

bool is_low_precision(const at::Tensor& t);

}  // namespace amp_mp
