#pragma once
// Tensors of the CPU over the memory of the pretend GPU's, made for one call of a CPU kernel.
#include <ATen/core/Tensor.h>

#include <utility>
#include <vector>

namespace pretend_gpu {

class Aliases {
 public:
  // The same alias for the same tensor, and one storage for tensors that share theirs.
  at::Tensor of(const at::Tensor& t);

  // Whether a result of the CPU kernel lies in memory of an argument.
  bool contain(const at::Tensor& result) const;

  // What a result of the CPU kernel is on the device: the tensor it is an alias of, a view of one,
  // or else a new tensor.
  at::Tensor back(const at::Tensor& result, at::Device device) const;

  // Gives the tensors whose aliases the kernel has resized their new sizes and contents.
  void write_back() const;

 private:
  c10::Storage storage_of(const at::Tensor& t);

  struct Pair {
    at::Tensor original, alias;
  };
  std::vector<Pair> pairs_;
  std::vector<std::pair<c10::StorageImpl*, c10::Storage>> storages_;
};

}  // namespace pretend_gpu
