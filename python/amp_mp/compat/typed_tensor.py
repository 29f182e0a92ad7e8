"""A tensor and its gradient, each readable in any floating-point type: NVCaffe's blob."""

from collections.abc import Sequence
from operator import attrgetter
from typing import Any, Self

import torch
from torch import Tensor

from amp_mp.dtypes import rounded

DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
INTEGERS = (torch.int32, torch.uint32, torch.int64, torch.uint64)  # NVCaffe: INT and UINT, 32 bits


def _shown(path: str, doc: str) -> Any:
    return property(attrgetter(path), doc=doc)


class TypedTensor:
    """Data and gradient of one shape, each with its own type, converted when read and cached.

    Reading in another type converts once and keeps what was written. Asking for a writable array
    in a type makes it the only valid one; the others keep their memory for the next conversion.

        weight = amp.compat.TypedTensor((3, 4), torch.float32, grad_dtype=torch.float16)
        y = x @ weight.data(torch.float16).T  # cached until the next update
        weight.mutable_grad(torch.float16).copy_(gradient)
        weight.update()  # in float32

    Every conversion starts from the type that was written last (NVCaffe's from the one read last).
    Data saturates at +-65504 on its way to float16; a gradient becomes inf, or its overflow would
    go unseen. What was never written is zero. Write into what mutable_data and mutable_grad return
    before the next read. Integers are read and written in their own type only, and not updated.

    Args:
        shape: data and gradient have it.
        dtype: the master's: the type of updates, and of data() without a type. float64, float32,
            float16, bfloat16, int32, uint32, int64 or uint64.
        grad_dtype: the type of grad() without a type; default: dtype.
        device: where all arrays are. Each is allocated when it is first read or written.

    Raises TypeError for other dtypes, here and in methods, for a conversion to or from integers and
    an update() of or by integers; ValueError for a negative size in shape.
    """

    def __init__(
        self,
        shape: Sequence[int],
        dtype: torch.dtype = torch.float32,
        grad_dtype: torch.dtype | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        self.shape = torch.Size(shape)
        if any(size < 0 for size in self.shape):
            raise ValueError(f"shape must not have negative sizes, found {tuple(shape)}")
        self.dtype, self.grad_dtype = dtype, dtype if grad_dtype is None else grad_dtype
        self.device = torch.device(device)
        self._data = _Arrays(self.shape, self.device, dtype, saturate=True)
        self._grad = _Arrays(self.shape, self.device, self.grad_dtype, saturate=False)

    @classmethod
    def from_tensor(cls, tensor: Tensor, grad_dtype: torch.dtype | None = None) -> Self:
        """One whose master is a copy of the tensor: its shape, dtype, device and values."""
        made = cls(tensor.shape, tensor.dtype, grad_dtype, tensor.device)
        made.mutable_data().copy_(tensor.detach())
        return made

    def data(self, dtype: torch.dtype | None = None) -> Tensor:
        """The data in a type, to read: the same array until the data is written."""
        return self._data.read(dtype)

    def mutable_data(self, dtype: torch.dtype | None = None) -> Tensor:
        """The data in a type, to write; no other type is valid from now on."""
        return self._data.write(dtype)

    def grad(self, dtype: torch.dtype | None = None) -> Tensor:
        """The gradient in a type, to read."""
        return self._grad.read(dtype)

    def mutable_grad(self, dtype: torch.dtype | None = None) -> Tensor:
        """The gradient in a type, to write."""
        return self._grad.write(dtype)

    @torch.no_grad()
    def update(self) -> None:
        """Data -= gradient in the master's type; NVCaffe's subtracts in the type read last.

        TypeError if either has integers; nothing is changed.
        """
        for name, dtype in (("data", self.dtype), ("gradient", self.grad_dtype)):
            if dtype in INTEGERS:
                raise TypeError(
                    f"update: the {name} is {dtype}, and integers have no arithmetic here; write "
                    "what mutable_data() returns instead"
                )
        grad = self.grad(self.dtype)
        self.mutable_data(self.dtype).sub_(grad)

    @property
    def nbytes(self) -> int:
        """The memory of data and gradient in bytes: all arrays there are, valid or not."""
        return sum(a.nbytes for part in (self._data, self._grad) for a in part.arrays.values())

    current_dtype = _shown("_data.current", "The type last asked for; at first the master's.")
    valid_dtypes = _shown("_data.valid", "Types in which the data needs no conversion.")
    current_grad_dtype = _shown("_grad.current", "The type in which it was last asked for.")
    valid_grad_dtypes = _shown("_grad.valid", "Types in which the gradient needs no conversion.")

    def __repr__(self) -> str:
        return (
            f"TypedTensor({tuple(self.shape)}, dtype={self.dtype}, grad_dtype={self.grad_dtype}, "
            f"device={str(self.device)!r})"
        )


def _checked(dtype: torch.dtype) -> torch.dtype:
    if dtype not in DTYPES + INTEGERS:
        listed = ", ".join(map(str, DTYPES + INTEGERS))
        raise TypeError(f"dtype must be one of {listed}, found {dtype}")
    return dtype


class _Arrays:
    """One value in several types. default: the type that is meant by None."""

    def __init__(
        self, shape: torch.Size, device: torch.device, default: torch.dtype, saturate: bool
    ) -> None:
        self.shape = shape
        self.device = device
        self.default = default
        self.saturate = saturate
        self.current = _checked(default)
        self.valid: frozenset[torch.dtype] = frozenset()
        self._written: torch.dtype | None = None  # the valid one that the others are made from
        self.arrays: dict[torch.dtype, Tensor] = {}

    @torch.no_grad()
    def read(self, dtype: torch.dtype | None) -> Tensor:
        dtype = _checked(dtype or self.default)
        if dtype != self.default and (dtype in INTEGERS or self.default in INTEGERS):
            raise TypeError(
                f"dtype: {dtype} of a TypedTensor of {self.default} would be a conversion, and "
                f"integers have no arithmetic here; convert a copy, such as .to({dtype})"
            )
        if dtype not in self.arrays:
            self.arrays[dtype] = torch.zeros(self.shape, dtype=dtype, device=self.device)
        array = self.arrays[dtype]
        if self._written is not None and dtype not in self.valid:
            source = self.arrays[self._written]
            array.copy_(rounded(source.float(), dtype) if self.saturate else source)
        self.valid |= {dtype}
        self.current = dtype
        return array

    def write(self, dtype: torch.dtype | None) -> Tensor:
        array = self.read(dtype)
        self._written = array.dtype
        self.valid = frozenset({array.dtype})
        return array
