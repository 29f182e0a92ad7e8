#pragma once
// The functions of the Python package that native code calls, in rare cases: for DTensors, for
// parameters that it refuses, and for values that `prepare` has kept. amp_mp/python_functions.py
// binds them.
#include <torch/csrc/utils/pybind.h>

#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

namespace py = pybind11;

namespace amp_mp {

// One of them, with the types of its arguments and its result. Needs the GIL.
template <class Signature>
struct PythonFunction;

template <class Result, class... Arguments>
struct PythonFunction<Result(Arguments...)> {
  py::object function;
  PythonFunction(py::object passed) : function(std::move(passed)) {}
  PythonFunction(const py::kwargs& all, const char* name) : PythonFunction(py::object(all[name])) {}
  Result operator()(const Arguments&... arguments) const {
    return function(arguments...).template cast<Result>();
  }
};

struct PythonFunctions {
  py::kwargs all;
  // torch_private.py
  PythonFunction<bool()> has_sharded_modules{all, "has_sharded_modules"};
  // sharding/shards.py
  PythonFunction<bool(py::handle tensor)> is_dtensor{all, "is_dtensor"};
  PythonFunction<py::object(at::Tensor local, py::handle param,
                            std::optional<std::vector<int64_t>> shape)>
      like{all, "like"};
  PythonFunction<at::Tensor(py::handle value)> whole{all, "whole"};
  PythonFunction<at::Tensor(py::handle value, py::handle param)> part{all, "part"};
  PythonFunction<at::Tensor(at::Tensor value, py::handle param)> part_of_whole{all,
                                                                               "part_of_whole"};
  PythonFunction<bool(py::handle value, py::handle param)> is_placed_as{all, "is_placed_as"};
  PythonFunction<std::vector<int64_t>(py::handle tensor)> shards_of{all, "shards_of"};
  PythonFunction<std::tuple<int64_t, int64_t, int64_t>(py::handle tensor)> origin_of{all,
                                                                                     "origin_of"};
  PythonFunction<std::string(py::handle tensor)> why_foreign{all, "why_foreign"};
  // sharding/gradients.py
  PythonFunction<at::Tensor(py::handle param, std::string label)> local_gradient{all,
                                                                                 "local_gradient"};
  // optim/step/params.py
  PythonFunction<void(py::handle param, std::string label)> refuse_param{all, "refuse_param"};
  // optim/step/cuda_graphs.py
  PythonFunction<void()> warn_of_graph{all, "warn_of_graph"};
  // optim/state/kept_masters.py
  PythonFunction<void(py::handle param)> refuse_lost{all, "refuse_lost"};
};

// Those of this process; RuntimeError before they are bound.
const PythonFunctions& package();

}  // namespace amp_mp
