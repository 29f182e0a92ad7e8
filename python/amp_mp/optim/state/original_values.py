"""The float32 values that `prepare` rounds: kept beside each parameter until its master is made.

A parameter has an entry here from `prepare` until an optimizer takes it. The entry holds the
values, or nothing where there are none (the parameter is frozen, or was written since).
"""

from collections.abc import MutableMapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from amp_mp.dtypes import LOW_PRECISION, rounded
from amp_mp.optim.state.formats import get, new_rest, placed, put, split_name

FORMAT = "split32"
EXCEPTION_BYTES = 12  # an int64 index and a float32 value


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

    def belong_to(self, weight: Tensor) -> bool:
        """Whether they are still the weight's: nothing was written to it.

        The version counter sees all writes but those through `.data`, the checksum sees these. The
        checksum alone is not enough: DistributedDataParallel sends rank 0's rounded weights to all
        ranks; rank 0 alone would keep its values, and masters would differ between ranks.
        """
        first = self.tensors[0]
        if weight._version != self.version or weight.shape != first.shape:
            return False
        if weight.dtype not in LOW_PRECISION:
            return False
        if len(self.tensors) > 1:
            return checksum_of(weight) == self.checksum
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
_entries: MutableMapping[Tensor, OriginalValues | None] = WeakTensorKeyDictionary()


def keep_original(param: Tensor, values: Tensor) -> None:
    """Keeps the float32 values that a parameter's low-precision ones were rounded from.

    Nothing is kept for a parameter that does not require gradients, nor on the meta device.
    """
    weight = param.detach()
    keeps = param.requires_grad and not weight.is_meta
    _entries[param] = _encode(param._version, weight, values.detach()) if keeps else None


def awaits_original(param: Tensor) -> bool:
    """Whether the parameter was prepared and no optimizer has taken its values yet."""
    return param in _entries


def drop_original(param: Tensor, forget: bool = False) -> None:
    """Frees a parameter's values. forget: and keeps no others that are loaded later."""
    if forget:
        _entries.pop(param, None)
    elif param in _entries:
        _entries[param] = None


def entry_of(param: Tensor) -> OriginalValues | None:
    """A parameter's entry; its values are freed here if the parameter was written since."""
    entry = _entries.get(param)
    if entry is not None and not entry.belong_to(param.detach()):
        entry = _entries[param] = None
    return entry


def put_entry(param: Tensor, entry: OriginalValues | None) -> None:
    """Gives a copy of a parameter the entry that belongs to it."""
    if entry is not None:
        entry = OriginalValues(param._version, entry.checksum, entry.tensors)
    _entries[param] = entry


def original_of(param: Tensor) -> Tensor | None:
    """The float32 values that the parameter was rounded from, or None; a new tensor."""
    entry = entry_of(param)
    return None if entry is None else entry.decode(param.detach())


def take_original(param: Tensor) -> Tensor:
    """A new float32 master for a parameter, same shape, layout and device.

    It holds the original values if `prepare` kept them and the parameter was not written since.
    They are dropped here.
    """
    values = original_of(param)
    _entries.pop(param, None)
    return param.detach().to(torch.float32, copy=True) if values is None else values


def checksum_of(weight: Tensor) -> int:
    """The sum of a 16-bit tensor's elements as integers."""
    return int(weight.view(torch.int16).sum(dtype=torch.int64))


def _encode(version: int, weight: Tensor, values: Tensor) -> OriginalValues:
    """The values of `weight`, as short as they can be had again exactly."""
    if type(weight) is not Tensor or weight.device.type not in ("cpu", "cuda"):
        return OriginalValues(version, 0, (values,))
    native = split_name(FORMAT, weight.dtype)
    rest = new_rest(FORMAT, weight)
    put(values, torch.empty_like(weight), rest, native)
    wrong = get(weight, rest, native).view(torch.int32) != values.view(torch.int32)
    indices = wrong.flatten().nonzero().flatten()
    if EXCEPTION_BYTES * indices.numel() > 2 * weight.numel():
        return OriginalValues(version, 0, (values,))
    exceptions = values.flatten()[indices]
    return OriginalValues(version, checksum_of(weight), (rest, indices, exceptions))
