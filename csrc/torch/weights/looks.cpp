// Finding what has changed in watched tensors and putting it elsewhere: the passes of
// core/changes.h over tensors of one device.
#include <ATen/Parallel.h>
#include <ATen/ops/_foreach_copy.h>
#include <ATen/ops/_foreach_zero.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/cumsum.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <array>
#include <numeric>
#include <tuple>
#include <utility>

#include "cpu/passes.h"
#include "torch/bind.h"
#include "torch/device.h"
#include "torch/weights/weight_changes.h"

namespace amp_mp {
namespace {

using Notes = std::vector<std::shared_ptr<WeightChanges>>;     // null for what no step notes
using Taken = std::vector<std::pair<at::Tensor, at::Tensor>>;  // positions and values

// How positions of a tensor count: its origin in the whole one, and whether they are int64.
struct Counting {
  Origin origin;
  bool wide;
};

// What one look at tensors has found. It waits for their device once, and keeps none of them.
class Looked {
 public:
  static constexpr int64_t kNumbers = sizeof(Look) / sizeof(int64_t);

  // weights[i] belongs to notes[i], which are on its device; what has none is in float16, which
  // may be its bytes. counting: of each, if `gather` will be called; a CPU gathers at once, so that
  // each weight is read only once.
  Looked(const Tensors& weights, Notes notes, std::vector<Counting> counting)
      : notes_(std::move(notes)), counting_(std::move(counting)) {
    TORCH_CHECK_VALUE(!weights.empty() && weights.size() == notes_.size() &&
                          (counting_.empty() || weights.size() == counting_.size()),
                      "amp_mp: a look needs weights, and as many notes");
    const at::Device device = weights[0].device();
    const auto options = at::TensorOptions().device(device);
    int64_t chunks = 0;
    for (const at::Tensor& weight : weights) {
      first_chunks_.push_back(chunks);
      chunks += ceil_divide(weight.numel(), kLookChunk);
    }
    const auto count = int64_t(weights.size());
    found_ = at::zeros({count, kNumbers}, options.dtype(at::kLong));
    // The first number is 0: before a chunk end those before it.
    const at::Tensor counts = at::zeros({1 + chunks}, options.dtype(at::kInt));
    std::vector<Watched> watched;
    for (size_t i = 0; i < weights.size(); ++i)
      watched.push_back({weights[i].numel(), array_of(weights[i], {"weights", int64_t(i)}),
                         changes_of(i, weights[i]), data_of<Look>(found_) + i});
    on(
        device,
        [&] {
          const int threads = at::get_num_threads();
          cpu::count_bits(watched.data(), count, data_of<int32_t>(counts) + 1, threads);
          ends_ = at::cumsum(counts, 0, at::kLong);
          found_on_host_ = found_;
          for (size_t i = 0; i < notes_.size(); ++i) count_on_cpu(i, watched[i]);
          std::vector<size_t> all(counting_.size());
          std::iota(all.begin(), all.end(), size_t(0));
          const std::vector<Gathering> gatherings = prepare(all, weights);
          cpu::look(watched.data(), counting_.empty() ? nullptr : gatherings.data(), count,
                    threads);
        },
        AMP_MP_CUDA(look(watched.data(), count, data_of<int32_t>(counts) + 1, stream)));
    if (device.is_cpu()) return;
    ends_ = at::cumsum(counts, 0, at::kLong);
    found_on_host_ = found_.cpu();
  }

  // Of each tensor: its sum now, the sum that the notes have, how many bits are set.
  std::vector<std::array<int64_t, kNumbers>> found() const {
    std::vector<std::array<int64_t, kNumbers>> found;
    for (size_t i = 0; i < notes_.size(); ++i) {
      const Look& look = on_host(i);
      found.push_back({int64_t(look.sum), int64_t(look.noted), int64_t(look.bits)});
    }
    return found;
  }

  // Positions and values of the tensors `which`, where bits are set, in the order of their memory.
  // weights: these, as they were looked at. Once.
  Taken gather(const std::vector<size_t>& which, const Tensors& weights) {
    TORCH_CHECK_VALUE(!counting_.empty() && weights.size() == which.size(),
                      "amp_mp: this look was not to gather, or not so many");
    if (which.empty()) return {};
    if (!found_.is_cpu()) {
      const std::vector<Gathering> all = prepare(which, weights);
      on(found_.device(), [] {}, AMP_MP_CUDA(gather(all.data(), int64_t(all.size()), stream)));
      return std::exchange(taken_, {});
    }
    Taken found;
    for (const size_t i : which) found.push_back(taken_.at(i));
    taken_.clear();
    return found;
  }

  // Whether no step has noted a change since. Waits for the device.
  bool is_current() const {
    Tensors heads;
    std::vector<int64_t> noted;
    for (size_t i = 0; i < notes_.size(); ++i) {
      if (!notes_[i]) continue;
      heads.push_back(notes_[i]->memory().narrow(0, 0, 1).to(found_.device()));
      noted.push_back(int64_t(on_host(i).noted));
    }
    if (heads.empty()) return true;
    const at::Tensor now = at::cat(heads).cpu();
    return std::equal(noted.begin(), noted.end(), now.const_data_ptr<int64_t>());
  }

  // The notes begin anew with the weights that were looked at.
  void clear() const {
    Tensors memory, heads, sums;
    for (size_t i = 0; i < notes_.size(); ++i) {
      if (!notes_[i]) continue;
      memory.push_back(notes_[i]->memory());
      heads.push_back(memory.back().narrow(0, 0, 1));
      sums.push_back(found_.select(0, int64_t(i)).narrow(0, 0, 1));
    }
    if (memory.empty()) return;
    at::_foreach_zero_(memory);
    at::_foreach_copy_(heads, sums);
  }

 private:
  const Look& on_host(size_t i) const {
    return reinterpret_cast<const Look*>(found_on_host_.const_data_ptr<int64_t>())[i];
  }

  Changes changes_of(size_t i, const at::Tensor& weight) const {
    check_device(weight, found_.device(), {"weights", int64_t(i)});
    if (!notes_[i]) return {nullptr, Format::float16};
    check_device(notes_[i]->memory(), found_.device(), {"notes", int64_t(i)});
    used_on_current_stream(notes_[i]->memory());
    return notes_[i]->changes();
  }

  // What a kernel finds beside the sum.
  void count_on_cpu(size_t i, const Watched& watched) {
    const auto* end = ends_.const_data_ptr<int64_t>() + first_chunks_[i];
    watched.found->bits = uint64_t(end[ceil_divide(watched.size, kLookChunk)] - end[0]);
    watched.found->noted = watched.changes.sum ? *watched.changes.sum : 0;
  }

  // Room in `taken_` for the changes of the tensors `which`, if these have notes.
  std::vector<Gathering> prepare(const std::vector<size_t>& which, const Tensors& weights) {
    const auto options = at::TensorOptions().device(found_.device());
    std::vector<Gathering> gatherings;
    for (size_t k = 0; k < which.size(); ++k) {
      const size_t i = which[k];
      auto& [positions, values] = taken_.emplace_back();
      Gathering& g = gatherings.emplace_back();
      if (!notes_.at(i)) continue;
      const auto bits = int64_t(on_host(i).bits);
      positions = at::empty({bits}, options.dtype(counting_[i].wide ? at::kLong : at::kInt));
      values = at::empty({bits}, options.dtype(notes_[i]->dtype()));
      g = {weights[k].numel(),           array_of(weights[k], {"weights", int64_t(k)}),
           changes_of(i, weights[k]),    ends_.const_data_ptr<int64_t>() + 1 + first_chunks_[i],
           positions.mutable_data_ptr(), data_of<uint16_t>(values),
           counting_[i].origin,          counting_[i].wide};
    }
    return gatherings;
  }

  Notes notes_;
  std::vector<Counting> counting_;
  std::vector<int64_t> first_chunks_;
  at::Tensor found_, ends_, found_on_host_;  // Look of each; of each chunk, where its bits end
  Taken taken_;
};

// How positions and values go into tensors of one device.
struct Writes {
  at::Device device;
  std::vector<size_t> indices;
  std::vector<Scattering> all;
};

std::vector<Writes> writes_of(const Tensors& targets, const Tensors& positions,
                              const Tensors& values) {
  std::vector<Writes> found;
  for (size_t i = 0; i < targets.size(); ++i) {
    const auto index = int64_t(i);
    const at::Tensor &to = targets[i], &at = positions.at(i), &from = values.at(i);
    for (const auto& [tensor, name] :
         {std::pair(&to, "targets"), std::pair(&at, "positions"), std::pair(&from, "values")}) {
      check_plain(*tensor, {name, index});
      check_device(*tensor, to.device(), {name, index});
      TORCH_CHECK_VALUE(tensor->is_contiguous(), "amp_mp: ", name, "[", i, "] is not contiguous");
    }
    check_dtype(from, to.scalar_type(), {"values", index});
    TORCH_CHECK_VALUE(at.scalar_type() == at::kInt || at.scalar_type() == at::kLong,
                      "amp_mp: positions[", i, "] must be int32 or int64, found ", describe(at));
    TORCH_CHECK_VALUE(at.numel() == from.numel(), "amp_mp: positions[", i, "] has ", at.numel(),
                      " elements, and values[", i, "] ", from.numel());
    auto own = std::find_if(found.begin(), found.end(),
                            [&](const Writes& w) { return w.device == to.device(); });
    if (own == found.end()) own = found.insert(found.end(), {to.device(), {}, {}});
    own->indices.push_back(i);
    own->all.push_back({at.numel(), at.const_data_ptr(), from.const_data_ptr(),
                        to.mutable_data_ptr(), to.numel(), int(to.element_size()),
                        at.scalar_type() == at::kLong});
  }
  return found;
}

// Writes the values, unless a position lies outside of its tensor. Returns how many do, for each.
std::vector<int32_t> scatter(const Tensors& targets, const Tensors& positions,
                             const Tensors& values) {
  const std::vector<Writes> writes = writes_of(targets, positions, values);
  std::vector<int32_t> outside(targets.size());
  for (const auto& [device, indices, all] : writes) {
    const auto count = int64_t(all.size());
    const at::Tensor bad = at::zeros({count}, at::TensorOptions().dtype(at::kInt).device(device));
    on(
        device,
        [&] {
          cpu::check_positions(all.data(), count, data_of<int32_t>(bad), at::get_num_threads());
        },
        AMP_MP_CUDA(check_positions(all.data(), count, data_of<int32_t>(bad), stream)));
    const at::Tensor on_host = bad.cpu();
    for (size_t k = 0; k < indices.size(); ++k)
      outside[indices[k]] = on_host.const_data_ptr<int32_t>()[k];
  }
  if (std::any_of(outside.begin(), outside.end(), [](int32_t n) { return n != 0; })) return outside;
  for (const auto& [device, indices, all] : writes) {
    const auto count = int64_t(all.size());
    on(
        device, [&] { cpu::scatter(all.data(), count, at::get_num_threads()); },
        AMP_MP_CUDA(scatter(all.data(), count, stream)));
  }
  for (const at::Tensor& to : targets) bump_version(to);
  return outside;
}

}  // namespace

void bind_looks(py::module_& m) {
  using Release = py::call_guard<py::gil_scoped_release>;
  py::class_<Looked>(m, "Looked")
      .def(py::init([](const Tensors& weights, Notes notes,
                       const std::vector<std::pair<std::tuple<int64_t, int64_t, int64_t>, bool>>&
                           counting) {
             std::vector<Counting> each;
             for (const auto& [origin, wide] : counting) {
               const auto [first, row_length, row_stride] = origin;
               each.push_back({{first, row_length, row_stride}, wide});
             }
             return Looked(weights, std::move(notes), std::move(each));
           }),
           py::arg("weights"), py::arg("notes"), py::arg("counting"), Release())
      .def_property_readonly("found", &Looked::found)
      .def("gather", &Looked::gather, py::arg("which"), py::arg("weights"), Release())
      .def("is_current", &Looked::is_current, Release())
      .def("clear", &Looked::clear, Release());
  m.def("scatter", &scatter, py::arg("targets"), py::arg("positions"), py::arg("values"),
        Release());
}

}  // namespace amp_mp
