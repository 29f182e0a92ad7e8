#include "torch/weights/wrapped_masters.h"

#include <ATen/core/grad_mode.h>

#include <algorithm>

#include "torch/bind.h"
#include "torch/ops.h"
#include "torch/python/objects.h"
#include "torch/weights/loans.h"

namespace amp_mp {
namespace {

// This process's parts.
Tensors locals_of(const Objects& masters) {
  Tensors found;
  for (const py::object& master : masters) found.push_back(local_of(master));
  return found;
}

// Calls `pass` with this process's parts of the parameters and of the masters, device by device.
template <class Pass>
void pass_over_pairs(const Objects& params, const Tensors& masters, const Pass& pass) {
  std::vector<std::pair<Tensors, Tensors>> devices;
  for (size_t i = 0; i < params.size(); ++i) {
    const at::Tensor& master = masters.at(i);
    const auto on_same = [&](const auto& each) {
      return each.second.front().device() == master.device();
    };
    auto found = std::find_if(devices.begin(), devices.end(), on_same);
    if (found == devices.end()) found = devices.emplace(found);
    found->first.push_back(local_of(params[i]));
    found->second.push_back(master);
  }
  const py::gil_scoped_release release;
  for (const auto& [low, own] : devices) pass(low, own);
}

void stamp_pairs(const Objects& params) {
  for (const py::object& param : params) weight_at(param)->stamp(tensor_of(param), local_of(param));
}

// Elements that do not round to their parameters' become these.
void remake_pairs(const Objects& params, const Tensors& masters) {
  pass_over_pairs(params, masters, [](const Tensors& low, const Tensors& own) {
    average_(own, Tensors(own.size()), low, own, /*decay=*/0);
  });
  stamp_pairs(params);
}

void round_pairs(const Objects& params, const Tensors& masters) {
  pass_over_pairs(params, masters, [](const Tensors& low, const Tensors& own) {
    copy_(low, own, std::nullopt, 1.0, /*saturate=*/true);
  });
  stamp_pairs(params);
}

}  // namespace

Objects first_masters(const Objects& params) {
  Objects found;
  for (const py::object& param : params)
    found.push_back(
        like(weight_at(param)->master_for(param_of(param), at::kFloat, /*stepping=*/false).detach(),
             param));
  return found;
}

void adopt_masters(const Objects& params, const Objects& masters) {
  for (size_t i = 0; i < params.size(); ++i)
    weight_at(params[i])->set_master(param_of(params[i]), local_of(masters.at(i)),
                                     /*in_groups=*/true);
  remake_pairs(params, locals_of(masters));
}

// After drop_masters nothing is left of others, and the masters go on.
void take_over_masters(const Objects& params, const Objects& masters) {
  const at::NoGradGuard no_grad;
  for (size_t i = 0; i < params.size(); ++i) {
    const WeightRecord record = weight_at(params[i]);
    const at::Tensor master = local_of(masters.at(i));
    if (record->master().is_same(master)) continue;
    const Param param = param_of(params[i]);
    if (record->master().defined())
      master.detach().copy_(record->master_for(param, at::kFloat, /*stepping=*/true));
    record->set_master(param, master, /*in_groups=*/true);
  }
}

void follow_masters(const Objects& params, const Objects& masters) {
  refuse_borrowed(py::cast(params), "a look at an optimizer's masters", /*reads=*/true);
  take_over_masters(params, masters);
  Objects rounded;
  Tensors own;
  for (size_t i = 0; i < params.size(); ++i) {
    if (weight_at(params[i])->is_master_written()) continue;
    rounded.push_back(params[i]);
    own.push_back(local_of(masters.at(i)));
  }
  remake_pairs(rounded, own);
}

void round_masters(const Objects& params, const Objects& masters) {
  round_pairs(params, locals_of(masters));
}

Objects written_masters(const py::iterable& params) {
  Objects found;
  for (const py::handle param : params) {
    const WeightRecord record = weight_of(param);
    if (record && record->is_master_written() && record->borrower() == Borrower::nobody)
      found.push_back(py::reinterpret_borrow<py::object>(param));
  }
  return found;
}

void round_written_masters(const py::iterable& params) {
  const Objects written = written_masters(params);
  if (written.empty()) return;
  Tensors masters;
  for (const py::object& param : written) masters.push_back(master_of(param));
  round_pairs(written, masters);
}

void bind_wrapped_masters(py::module_& m) {
  m.def("first_masters", &first_masters, py::arg("params"));
  for (const auto& [name, function] : {std::pair("adopt_masters", &adopt_masters),
                                       {"follow_masters", &follow_masters},
                                       {"round_masters", &round_masters},
                                       {"take_over_masters", &take_over_masters}})
    m.def(name, function, py::arg("params"), py::arg("masters"));
  m.def("written_masters", &written_masters, py::arg("params"));
  m.def("round_written_masters", &round_written_masters, py::arg("params"));
}

}  // namespace amp_mp
