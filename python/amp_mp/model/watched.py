"""One tensor that amp.Changes watches, and the names of a model's tensors."""

from math import prod
from typing import NamedTuple

import torch
from torch import Tensor, nn

from amp_mp import _C
from amp_mp.dtypes import LOW_PRECISION, NATIVE
from amp_mp.module_names import plain_name, plain_names
from amp_mp.sharding.shards import Origin, is_dtensor, local_of, origin_of, why_unusable

IN_ITS_PART = Origin()


class ChangedWeights(NamedTuple):
    """Weights of one parameter that have changed: where, and what they are now.

    positions: int32, or int64 where the tensor has 2^31 elements or more; ascending; counted in the
    row-major order of the parameter's shape, whatever its layout. values: as many, in the
    parameter's dtype, or in that of `Changes` for a float32 parameter. Both are contiguous copies,
    where the parameter is.
    """

    positions: Tensor
    values: Tensor


class Names(NamedTuple):
    """A model's parameters, and its persistent buffers if these are wanted.

    tensors: by the first of its names, each with its module. first: every name in the order of
    state_dict(), with the first name of the same tensor. All as the plain model has them.
    """

    tensors: dict[str, tuple[nn.Module, Tensor]]
    first: dict[str, str]

    @classmethod
    def of(cls, model: nn.Module, buffers: bool) -> "Names":
        """Those of a model. buffers: whether its persistent buffers are among them."""
        plain = plain_names(model)
        tensors: dict[str, tuple[nn.Module, Tensor]] = {}
        first, seen = dict[str, str](), dict[int, str]()
        for prefix, module in model.named_modules(remove_duplicate=False):
            own: dict[str, Tensor | None] = {**module._parameters}
            if buffers:
                left_out = module._non_persistent_buffers_set
                own |= {n: each for n, each in module._buffers.items() if n not in left_out}
            for name, tensor in own.items():
                if tensor is not None:
                    full = plain_name(plain, f"{prefix}.{name}")
                    first[full] = seen.setdefault(id(tensor), full)
                    tensors.setdefault(first[full], (module, tensor))
        return cls(tensors, first)


class Watched:
    """A parameter or buffer: its notes, where its changes can be told apart, and its sum."""

    def __init__(
        self, name: str, owner: nn.Module, tensor: Tensor, dtype: torch.dtype | None
    ) -> None:
        if local_of(tensor).is_meta:
            raise ValueError(f"{name} is on the meta device and has no weights yet")
        if why := why_unusable(tensor):
            raise ValueError(f"{name} {why}")
        self.name, self.tensor, self.is_all = name, tensor, False
        self.is_sharded = is_dtensor(tensor)
        self.shape, self.kind = tensor.shape, tensor.dtype
        self.dtype = tensor.dtype if tensor.dtype in LOW_PRECISION else dtype
        self.dtype = self.dtype if tensor.dtype in NATIVE else None
        self.notes: _C.WeightChanges | None = None
        self.copy: Tensor | None = None  # of a buffer, which no step writes
        # At the last look: the sum of the weights, and how many count as changed; all of them where
        # something else than a step has written it, or all of it is wanted.
        self.now = self.count = 0
        self.has_all_changed = False
        self.then = 0  # the sum that is expected where there are no notes
        if self.dtype is None:
            return
        self.notes = _C.WeightChanges(tensor, self.dtype)
        if isinstance(tensor, nn.Parameter):
            _C.watch(tensor, owner, self.notes)
        else:
            self.copy = self.local().clone()

    def local(self) -> Tensor:
        """The part on this process; of a buffer, contiguous."""
        local = (local_of(self.tensor) if self.is_sharded else self.tensor).detach()
        return local if isinstance(self.tensor, nn.Parameter) else local.contiguous()

    def fits(self, tensor: Tensor) -> bool:
        """Whether it watches this tensor as it is now; then its notes are on the same device."""
        if self.shape != tensor.shape or self.kind != tensor.dtype:
            return False
        if not isinstance(tensor, nn.Parameter):
            self.tensor = tensor  # modules put new buffers in the place of old ones
        elif self.tensor is not tensor:
            return False
        if self.notes is None:
            return True
        known = self.copy is not None or _C.changes_of(tensor) is self.notes
        return known and self.notes.follow(tensor)

    def note_copy(self) -> None:
        """Notes where a buffer differs from its copy, and makes them equal."""
        if self.copy is not None and self.notes is not None and self.dtype is not None:
            now = self.local()
            self.copy = self.copy.to(now.device)
            _C.compare([now], [self.copy], [self.notes.memory], [self.dtype])
            self.copy.copy_(now)

    def numbers(self, local: Tensor) -> Tensor:
        """What a look reads of its part: weights, or bytes, as float16, of what has no notes."""
        if self.notes is not None:
            return local
        raw = local.contiguous().flatten().view(torch.uint8)
        return (raw.to(torch.int16) if raw.numel() % 2 else raw).view(torch.float16)

    def looked_at(self, local: Tensor, now: int, noted: int, bits: int) -> None:
        """Takes what a look at its part has found."""
        self.now = now
        expected = self.then if self.notes is None else noted
        self.has_all_changed = self.is_all or now != expected
        self.count = local.numel() if self.has_all_changed else bits

    def counting(self, local: Tensor, global_positions: bool) -> tuple[Origin, bool]:
        """Where its positions begin to count, and whether they are int64."""
        if not global_positions:
            return IN_ITS_PART, local.numel() >= 2**31
        return origin_of(self.tensor), prod(self.shape) >= 2**31

    def all_changed(self, global_positions: bool) -> ChangedWeights:
        """Every weight."""
        local = self.local()
        (first, length, stride), is_wide = self.counting(local, global_positions)
        dtype = torch.int64 if is_wide else torch.int32
        positions = torch.arange(local.numel(), dtype=dtype, device=local.device)
        if length:
            positions += positions // length * (stride - length)
        values = local.to(self.given_dtype, copy=True, memory_format=torch.contiguous_format)
        return ChangedWeights(positions.add_(first), values.flatten())

    def nothing(self) -> ChangedWeights:
        """No weight, in the dtypes of those that change."""
        positions = torch.empty(0, dtype=torch.int32, device=self.local().device)
        return ChangedWeights(positions, positions.new_empty(0, dtype=self.given_dtype))

    @property
    def given_dtype(self) -> torch.dtype:
        """The dtype of its values."""
        return self.dtype or self.kind

    def in_rows(self, changed: ChangedWeights) -> ChangedWeights:
        """Places in memory as positions in row-major order, ascending, and their values."""
        local = self.local()
        places, values = changed
        strides, sizes = local.stride(), local.shape
        rows = torch.zeros_like(places)
        for dim in sorted(range(local.dim()), key=lambda dim: (strides[dim], sizes[dim])):
            rows += places % sizes[dim] * prod(sizes[dim + 1 :])
            places = places // sizes[dim]
        rows, by_rows = rows.sort()
        return ChangedWeights(rows, values.index_select(0, by_rows))
