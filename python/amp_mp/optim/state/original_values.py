"""The float32 values that `prepare` rounds: kept beside each parameter until its master is made.

A parameter has an entry here from `prepare` until an optimizer takes it. The entry holds the
values, or nothing where there are none (the parameter is frozen, or was written since). Of a
DTensor everything here is about the shard on this process: values are those of its local tensor.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from amp_mp import _C
from amp_mp.dtypes import LOW_PRECISION, rounded
from amp_mp.optim.state.formats import get, new_rest, placed, put, split_name
from amp_mp.optim.state.parameter_entries import ParameterEntries
from amp_mp.sharding.shards import is_dtensor, local_of

FORMAT = "split32"
EXCEPTION_BYTES = 12  # an int64 index and a float32 value
SHARD = -1  # the version of a DTensor's values: model.to() changes its counters


@dataclass
class OriginalValues:
    """A parameter's float32 values, stored as what the low-precision weight lacks.

    version, checksum: of the weight that the values were rounded to. tensors: the remainders, int16
    in the weight's shape, then the flat indices and the float32 values of those elements that
    weight and remainder do not give exactly (bfloat16: ties that round down, 4 in a million;
    float16: below 2^-16 and above 65504). Where this would take more than float32, and for tensors
    that the native code does not read, it is the float32 tensor alone.
    """

    version: int
    checksum: int
    tensors: tuple[Tensor, ...]

    def belong_to(self, weight: Tensor, version: int) -> bool:
        """Whether they are still the weight's: nothing was written to it.

        weight: as `_weight` gives it, and its version.

        The version counter sees all writes but those through `.data`, the checksum sees these. The
        checksum alone is not enough: DistributedDataParallel sends rank 0's rounded weights to all
        ranks; rank 0 alone would keep its values, and masters would differ between ranks. Nothing
        sends shards, so for them a checksum that also sees the elements' places is enough.
        """
        first = self.tensors[0]
        if version != self.version or weight.shape != first.shape:
            return False
        if weight.dtype not in LOW_PRECISION:
            return False
        if len(self.tensors) > 1:
            return checksum_of(weight, version) == self.checksum
        wanted = rounded(first, weight.dtype).to(weight.device)
        return bool(((wanted == weight) | (wanted.isnan() & weight.isnan())).all())

    def decode(self, weight: Tensor) -> Tensor:
        """The float32 values, a new tensor with the weight's shape, layout and device."""
        first = self.tensors[0]
        if len(self.tensors) == 1:
            return torch.empty_like(weight, dtype=torch.float32).copy_(first)
        rest = placed(first, weight)
        found = get(weight, rest, split_name(FORMAT, weight.dtype))
        indices, values = (t.to(weight.device) for t in self.tensors[1:])
        if indices.numel():
            flat = found.flatten().index_copy_(0, indices, values)
            found.copy_(flat.view(found.shape))
        return found


# None: there are no values, but a float32 state dict that is loaded would bring some.
_entries: ParameterEntries[OriginalValues] = ParameterEntries()


def keep_original(param: Tensor, values: Tensor, owner: nn.Module | None = None) -> None:
    """Keeps the float32 values that a parameter's low-precision ones were rounded from.

    values: beside a DTensor a DTensor placed as it is, or the part on this process. owner: the
    parameter's module; a DTensor needs it the first time. Nothing is kept for a parameter that does
    not require gradients, nor on the meta device.
    """
    weight, version = _weight(param)
    keeps = param.requires_grad and not weight.is_meta
    entry = _encode(version, weight, local_of(values).detach()) if keeps else None
    _entries.put(param, entry, owner)


def awaits_original(param: Tensor) -> bool:
    """Whether the parameter was prepared and no optimizer has taken its values yet."""
    return param in _entries


def drop_original(param: Tensor, forget: bool = False) -> None:
    """Frees a parameter's values. forget: and keeps no others that are loaded later."""
    if forget:
        _entries.pop(param)
    elif param in _entries:
        _entries.put(param, None)


def entry_of(param: Tensor) -> OriginalValues | None:
    """A parameter's entry; its values are freed here if the parameter was written since."""
    entry = _entries.get(param)
    if entry is not None and not entry.belong_to(*_weight(param)):
        entry = None
        _entries.put(param, None)
    return entry


def put_entry(param: Tensor, entry: OriginalValues | None, owner: nn.Module | None = None) -> None:
    """Gives a copy of a parameter the entry that belongs to it; owner: as for keep_original."""
    if entry is not None:
        entry = OriginalValues(_weight(param)[1], entry.checksum, entry.tensors)
    _entries.put(param, entry, owner)


def original_of(param: Tensor) -> Tensor | None:
    """The float32 values that the parameter was rounded from, or None; a new tensor.

    Of a DTensor those of the shard on this process, as a plain tensor.
    """
    entry = entry_of(param)
    if entry is None:
        return None
    _C.used_on_current_stream(entry.tensors)  # those of `prepare`, which are dropped afterwards
    return entry.decode(_weight(param)[0])


def take_original(param: Tensor) -> Tensor:
    """A new float32 master for a parameter, same shape, layout and device.

    It holds the original values if `prepare` kept them and the parameter was not written since.
    They are dropped here. Of a DTensor it is a plain tensor: the master of the local tensor.
    Raises RuntimeError where they were lost: see refuse_lost.
    """
    refuse_lost(param)
    values = original_of(param)
    _entries.pop(param)
    return _weight(param)[0].to(torch.float32, copy=True) if values is None else values


def refuse_lost(param: Tensor) -> None:
    """Raises RuntimeError for a DTensor whose values were lost when its model was sharded.

    fully_shard and parallelize_module make new Parameters, without what `prepare` had kept beside
    the old ones. A state dict that is loaded before brings values, and nothing is lost.
    """
    if is_dtensor(param) and param not in _entries and (name := _entries.owner_of_lost(param)):
        raise RuntimeError(
            f"{name}, a DTensor of shape {tuple(param.shape)}, was prepared before it was sharded; "
            "sharding made a new Parameter, and the float32 values kept beside the old one are "
            "lost. Shard the float32 model first, then call amp_mp.prepare. (Or load a state dict "
            "after sharding, or convert with amp_mp.convert_network, which keeps no float32 "
            "values.)"
        )


def follow_sharding(module: nn.Module, names: Iterable[str]) -> None:
    """Makes DTensors that sharding put in place of prepared parameters wait for loaded values."""
    for name in set(names).intersection(_entries.replaced_in(module)):
        param = module._parameters[name]
        assert param is not None
        _entries.put(param, None, module)


def mark_owner(module: nn.Module, params: Mapping[str, Tensor]) -> None:
    """Notes a prepared module's parameters, so that they are known after sharding."""
    _entries.mark(module, params)


def checksum_of(weight: Tensor, version: int) -> int:
    """The sum of a 16-bit tensor's elements as integers; of a shard also by their places."""
    bits = weight.view(torch.int16)
    if version != SHARD:
        return int(bits.sum(dtype=torch.int64))
    total = 0
    for dim in range(max(bits.dim(), 1)):
        others = [d for d in range(bits.dim()) if d != dim]
        sums = bits.sum(others, dtype=torch.int64) if others else bits.to(torch.int64)
        places = 2 * torch.arange(sums.numel(), device=bits.device) + 1
        total = 31 * total + int((sums.flatten() * places).sum())
    return total


def _weight(param: Tensor) -> tuple[Tensor, int]:
    """The parameter's memory on this process, and the version of it."""
    if is_dtensor(param):
        return local_of(param).detach(), SHARD
    return param.detach(), param._version


def _encode(version: int, weight: Tensor, values: Tensor) -> OriginalValues:
    """The values of `weight`, as short as they can be had again exactly."""
    native_device = weight.device.type in ("cpu", "cuda")
    if type(weight) is not Tensor or not native_device or not weight.numel():
        return OriginalValues(version, 0, (values,))
    native = split_name(FORMAT, weight.dtype)
    rest = new_rest(FORMAT, weight)
    put(values, torch.empty_like(weight), rest, native)
    wrong = get(weight, rest, native).view(torch.int32) != values.view(torch.int32)
    indices = wrong.flatten().nonzero().flatten()
    if EXCEPTION_BYTES * indices.numel() > 2 * weight.numel():
        return OriginalValues(version, 0, (values,))
    exceptions = values.flatten()[indices]
    return OriginalValues(version, checksum_of(weight, version), (rest, indices, exceptions))
