#pragma once
// The transfers of a copy or averaging pass as a kernel argument.
#include "cuda/tensor_table.h"

namespace amp_mp::cuda {

// Pointers to the data of `to` and of `from`, then to their second arrays. The tag holds the two
// formats, 5 bits each, and flags above them.
template <class Extra = NoExtra>
using TransferTable = TensorTable<4, Extra>;

template <class Table>
__device__ __forceinline__ Array to_of(const Table& table, int slot) {
  return {table.data[0][slot], Format(table.tag(slot) & 31), table.data[2][slot]};
}

template <class Table>
__device__ __forceinline__ Array from_of(const Table& table, int slot) {
  return {table.data[1][slot], Format(table.tag(slot) >> 5 & 31), table.data[3][slot]};
}

template <class Table>
void add_transfer(Table& table, const Transfer& t, uint32_t flags = 0) {
  table.data[0][table.count] = t.to.data;
  table.data[1][table.count] = t.from.data;
  table.data[2][table.count] = t.to.second;
  table.data[3][table.count] = t.from.second;
  table.add(t.size, uint32_t(t.to.format) | uint32_t(t.from.format) << 5 | flags << 10);
}

}  // namespace amp_mp::cuda
