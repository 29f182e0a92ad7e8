#include "torch/weights/master_tensors.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/nextafter.h>
#include <ATen/ops/where.h>

namespace amp_mp {

bool is_beside(const at::Tensor& master, const at::Tensor& weight) {
  return master.device() == weight.device() && same_layout(master, weight) &&
         master_in(weight, master);
}

at::Tensor master_values(const at::Tensor& weight, const at::Tensor& master) {
  const at::NoGradGuard no_grad;
  const at::Tensor here = placed(master, weight);
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
  return made.masked_fill(above.ne(0), 0)
      .masked_fill_(above.eq(1), largest)
      .masked_fill_(above.eq(-1), -largest - 1);
}

}  // namespace amp_mp
