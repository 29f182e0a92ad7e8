// What Python sees of products in float32: the choice of each dtype, and what it is made by.
#include <map>

#include "torch/bind.h"
#include "torch/products/products.h"

namespace amp_mp::products {
namespace {

using Times = std::map<std::string, std::map<std::string, double>>;  // by shape and way

Times measured_times(at::ScalarType low) {
  const auto [few_rows, square, tall, batch] = measure(low);
  Times times;
  const Shape* shape = kShapes;
  for (const auto& [native, loops, converted] : {few_rows, square, tall, batch})
    times[(shape++)->name] = {{"native", native}, {"loops", loops}, {"converted", converted}};
  return times;
}

Measured measured_of(const Times& times) {
  const auto of = [&](size_t shape) {
    const auto& own = times.at(kShapes[shape].name);
    return Seconds{own.at("native"), own.at("loops"), own.at("converted")};
  };
  return {of(0), of(1), of(2), of(3)};
}

}  // namespace

void bind(py::module_& m) {
  auto p = m.def_submodule("products");
  py::dict work;  // multiplications of each shape
  for (const auto& [name, batches, m, n, k] : kShapes) work[name] = batches * m * n * k;
  py::setattr(p, "work", work);
  const py::dict chosen;
  py::setattr(p, "chosen", chosen);
  p.def(
      "choose",
      [chosen](at::ScalarType low, const std::string& products, const Times& times) {
        choose(low, products, measured_of(times));
        chosen[py::cast(low)] = py::make_tuple(products, times);
      },
      py::arg("dtype"), py::arg("products"), py::arg("seconds"));
  p.def("choice", &choice, py::arg("dtype"));
  p.def("ways", &ways, py::arg("dtype"));
  p.def("measure", &measured_times, py::arg("dtype"), py::call_guard<py::gil_scoped_release>());
  p.def("fuse_norms", &fuse_norms);
}

}  // namespace amp_mp::products
