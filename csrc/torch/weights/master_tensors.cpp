#include "torch/weights/master_tensors.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/nextafter.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/where.h>

namespace amp_mp {
namespace {

// split24's remainders with the low half of each byte 0, two in a byte.
at::Tensor packed(const at::Tensor& remainders) {
  const at::Tensor pairs = remainders.contiguous().view(at::kByte).view({-1, kPacked});
  return pairs.select(1, 0)
      .bitwise_right_shift(4)
      .bitwise_or_(pairs.select(1, 1))
      .view(master_shape(remainders, at::kByte));
}

// split32's remainders to the nearest of split20 beside the same weights, as split24's. A remainder
// that would round to the next weight becomes the last one beside this.
at::Tensor rounded_to_nibbles(const at::Tensor& remainders) {
  return remainders.bitwise_right_shift(11)
      .add_(1)
      .bitwise_right_shift_(1)
      .clamp_max_(7)
      .mul_(16)
      .to(at::kChar);
}

}  // namespace

std::vector<int64_t> master_shape(const at::Tensor& weight, at::ScalarType dtype) {
  const std::vector<int64_t> sizes = weight.sizes().vec();
  return dtype == at::kByte ? grouped_shape(sizes, sizes, kPacked, /*row_major=*/true) : sizes;
}

at::Tensor unpacked(const at::Tensor& packed, at::IntArrayRef sizes) {
  return at::stack({packed.bitwise_left_shift(4), packed.bitwise_and(0xF0)}, -1)
      .view(at::kChar)
      .view(sizes);
}

bool is_beside(const at::Tensor& master, const at::Tensor& weight) {
  if (master.device() != weight.device() || !master_in(weight, master)) return false;
  if (!is_packed(master)) return same_layout(master, weight);
  return is_of_size(master, weight) && master.is_contiguous() && weight.is_contiguous();
}

at::Tensor placed_master(const at::Tensor& master, const at::Tensor& weight) {
  if (!is_packed(master)) return placed(master, weight);
  const at::Tensor here = master.to(weight.device()).contiguous();
  return weight.is_contiguous() ? here : placed(unpacked(here, weight.sizes()), weight);
}

at::Tensor chosen(const at::Tensor& mask, const at::Tensor& made, const at::Tensor& old) {
  if (!is_packed(made)) return at::where(mask, made, old);
  const at::IntArrayRef sizes = mask.sizes();
  return packed(at::where(mask, unpacked(made, sizes), unpacked(old, sizes)));
}

std::pair<const MasterEntry*, at::Tensor> master_part(const MasterEntry& entry, py::handle value,
                                                      py::handle param) {
  const at::Tensor local = local_of(param);
  if (!is_packed(entry)) return {&entry, copy_as(part_of(value, param), entry.dtype, local)};
  const bool fits = has_groups(kPackedMaster, param) &&
                    is_of_size(tensor_of(value), tensor_of(param)) &&
                    package().is_placed_as(value, param);
  if (fits) {
    const at::Tensor own = local_of(value).detach();
    return {&entry, own.to(local.device(), at::kByte, false, /*copy=*/true).contiguous()};
  }
  const at::Tensor whole = unpacked(whole_of(value).contiguous(), tensor_of(param).sizes());
  return {master_entry("split24", at::kBFloat16),
          copy_as(part_of(wrapped(whole), param), at::kChar, local)};
}

at::Tensor master_values(const at::Tensor& weight, const at::Tensor& master) {
  const at::NoGradGuard no_grad;
  const at::Tensor here = placed_master(master, weight);
  const std::optional<ArrayTensors> both = master_in(weight.detach(), here);
  TORCH_CHECK_VALUE(both, "amp_mp: the master (", describe(here), ") does not go with the weight (",
                    describe(weight), ")");
  return values_of(*both);
}

namespace {

// Where a split has rounded to the next weight, away from zero or (below a power of two, which a
// remainder beside float16 reaches) towards it, the remainder becomes the last one on that side.
template <class Remainder>
void correct(const at::Tensor& own, const at::Tensor& weight, int largest, const at::Tensor& made) {
  const auto *there = static_cast<const int16_t*>(own.const_data_ptr()),
             *here = static_cast<const int16_t*>(weight.const_data_ptr());
  auto* remainder = static_cast<Remainder*>(made.mutable_data_ptr());
  for (int64_t i = 0, n = weight.numel(); i < n; ++i) {
    const auto above = int16_t(there[i] - here[i]);
    if (above != 0) remainder[i] = Remainder(above == 1 ? largest : above == -1 ? -largest - 1 : 0);
  }
}

}  // namespace

// A split rounds a value half way between two weights away from zero (split24 after rounding to 24
// bits), `prepare` to nearest even. A master that rounds to the other weight would not count.
at::Tensor made_beside(const ArrayTensors& from, const at::Tensor& weight, at::ScalarType dtype,
                       bool writes) {
  const at::NoGradGuard no_grad;
  if (dtype == at::kByte)
    return packed(rounded_to_nibbles(made_beside(from, weight, at::kShort, writes)));
  const at::Tensor own = writes ? weight : at::empty_like(weight);
  const at::Tensor made = at::empty_like(weight, weight.options().dtype(dtype));
  copy_array(from, *master_in(own, made));
  const bool is_alone = from.data.is_same(weight) && !from.second.defined();
  if (writes || is_alone) return made;
  if (dtype == at::kFloat) {
    const at::Tensor other = own.view(at::kShort).ne(weight.view(at::kShort));
    const at::Tensor here = weight.to(at::kFloat), half = own.to(at::kFloat).add(here).mul(0.5);
    const at::Tensor& values = from.format == Format::float32 ? from.data : made;
    return at::where(other, at::nextafter(half, here), values);
  }
  const int largest = dtype == at::kChar ? 127 : 32767;
  if (weight.is_cpu()) {  // torch's operators would take longer than all else of a small tensor
    if (dtype == at::kChar)
      correct<int8_t>(own, weight, largest, made);
    else
      correct<int16_t>(own, weight, largest, made);
    return made;
  }
  const at::Tensor above = own.view(at::kShort).sub(weight.view(at::kShort));
  return made
      .masked_fill_(above.ne(0), 0)  // in place: torch's copy would be row-major
      .masked_fill_(above.eq(1), largest)
      .masked_fill_(above.eq(-1), -largest - 1);
}

}  // namespace amp_mp
