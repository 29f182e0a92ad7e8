#pragma once
// One parameter's state: made where it is missing, brought to where the parameter is, refused where
// it does not belong to the parameter. Everything here needs the GIL.
#include "torch/state/arrays.h"
#include "torch/state/host_memory.h"
#include "torch/state/low_bits.h"
#include "torch/state/members.h"

namespace amp_mp {

// How a parameter's state holds one of a rule's states; of DTensors the parts on this process.
struct HeldState {
  const StoredFormat* stored;  // null: the tensor under the plain name has a dtype of no format
  at::Tensor data, scales;     // scales: undefined without groups
};
std::optional<HeldState> held_state(const KeptState& kept, py::handle state);

bool is_held(const KeptState& kept, py::handle state);

// Whether a state has the shape that it needs beside a parameter.
bool has_shape_of(at::IntArrayRef sizes, at::IntArrayRef param, bool of_rows);

// Raises unless a step can update each of the parameters; ValueError for state of another shape or
// placing, held twice, or lost after steps.
void check_members(const std::vector<Member>& members);

// Brings the state to the parameter's present dtype, layout and device, and to the formats and the
// place that the group names. A master is dropped where the dtype has changed; other values stay.
void follow(const Member& member);

// Makes what is missing of the state besides its clock. show_master then notes the master.
// goes_on: as set_master.
void init_state(const Member& member, bool goes_on = false);

// The format in which a state is stored for this parameter, as the kernels name it.
Format format_of(const KeptState& kept, const Member& member);

// Float32 masters of low-precision parameters. What makes the parameter a master: a float32 master
// or remainders; undefined for neither.
at::Tensor master_beside(const at::Tensor& weight, py::handle state);
// The parameter's master in float32, a new tensor of its layout; undefined where it has none.
at::Tensor master_values(const at::Tensor& weight, py::handle state);
// Gives the parameter a master of the format, holding `values` if they are defined. Without them an
// existing master is kept, or converted, or made of the weight's low bits; "none" drops it. The
// parameter becomes the rounded values. goes_on: the optimizer had a master that others have
// replaced, and goes on with their bits also where the weight was written since.
void set_master(const std::string& format, py::handle param, py::handle state, at::Tensor values,
                bool goes_on = false);
// Stores values beside the weight that was rounded from them, which stays as it is.
void store_beside(const at::Tensor& values, const ArrayTensors& master);
// Drops a master that others have replaced (LowBits); whether there was one.
bool drop_replaced(const Bits& bits, py::handle state);
// Makes masters anew that others have replaced, for what is to show or copy an optimizer's states.
void renew_masters(const py::list& groups, const py::dict& states);
// Notes the master that a state has as the parameter's low bits. is_copy: of an optimizer that was
// copied or unpickled; bits that came with the parameter are newer.
void show_master(py::handle param, py::handle state, bool is_copy = false);
// Brings its master to the parameter's present dtype, layout and device.
void follow_master(py::handle param, const at::Tensor& weight, py::handle state);

// The clocks of parameters, float64 [4] (core/rules/base.h). One is rebuilt where the state's three
// entries do not lie side by side in memory (after loading, copying or an assignment), or where a
// file of torch's lacks some. New ones on a CUDA device are rows of one tensor.
Tensors clocks_of(const std::vector<Member>& members);

// Room on the host for what `follow` and `init_state` will have there; nothing has changed if it
// raises.
HostRoom room_for(const std::vector<Member>& members);
// Whether the group has a parameter's arrays on the host, those that are not small.
bool offloads(py::handle group, const at::Tensor& local);
// Moves a state's arrays to where the group has them.
void settle(py::handle group, const at::Tensor& local, py::handle state);

bool is_low_precision(const at::Tensor& t);

}  // namespace amp_mp
