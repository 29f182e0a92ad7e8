// Tables of the native code that the Python package reads instead of repeating them.
#include <utility>

#include "torch/bind.h"
#include "torch/checks.h"

namespace amp_mp {
namespace {

// One format as a dict; _C.pyi describes the keys.
py::dict format_entry(Format format) {
  const FormatInfo& info = kFormats[int(format)];
  py::list kinds;
  for (const auto& [property, kind] :
       {std::pair(kForGrad, "grad"), std::pair(kForMaster, "master"),
        std::pair(kForMoment, "moment"), std::pair(kForSquare, "square")})
    if (info.is(property)) kinds.append(kind);
  py::dict entry;
  entry["name"] = info.name;
  entry["width"] = info.width;
  entry["dtype"] = py::cast(dtype_of(format));
  entry["second_width"] = info.second_width;
  entry["second_dtype"] = info.second_width > 0 ? py::cast(second_dtype_of(format)) : py::none();
  entry["group"] = info.group;
  entry["stochastic"] = info.is(kRandom);
  entry["split"] = info.is(kSplit);
  entry["kinds"] = py::tuple(kinds);
  return entry;
}

}  // namespace

void bind_tables(py::module_& m) {
  m.def("formats", [] {
    py::list entries;
    for (int f = 0; f < kFormatCount; ++f) entries.append(format_entry(Format(f)));
    return entries;
  });
  m.def("scale_kinds", [] {
    py::dict kinds;
// kFields: "scale, target"
#define AMP_MP_SCALE(Struct, name) \
  kinds[#name] = py::tuple(py::str(Struct::kFields).attr("split")(", "));
    AMP_MP_FOR_EACH_SCALE(AMP_MP_SCALE)
#undef AMP_MP_SCALE
    return kinds;
  });
}

}  // namespace amp_mp
