"""Which products of a model have sizes that Tensor Cores have to pad."""

import math
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from amp_mp.text_table import aligned
from amp_mp.torch_private import ConvNd


class Product(NamedTuple):
    """A product [M, K] x [K, N], and the module and the type of the layer that computes it.

    `padding`: by name, each of M, K and N that is not a multiple, with the next multiple.
    """

    name: str
    layer: str
    M: int
    K: int
    N: int
    padding: dict[str, int]


class ProductTable(list[Product]):
    """Products in the order in which they ran; prints as a table."""

    def __str__(self) -> str:
        rows = [(*row[:5], ", ".join(f"{k} to {to}" for k, to in row[5].items())) for row in self]
        return aligned(("module", "layer", "M", "K", "N", "pad"), rows)


def tensor_core_report(
    model: nn.Module, *inputs: Any, multiple: int = 8, **kwargs: Any
) -> ProductTable:
    """The matrix products of a model's Linear and Conv layers whose sizes are no multiples of 8.

    16-bit Tensor Cores multiply blocks of 8: other sizes are padded, which costs time and memory,
    or do not use the Tensor Cores (NVIDIA, Matrix Multiplication Background User's Guide). The
    forward products are listed, each once; backward's have the same three sizes. For a Linear, M is
    the number of input rows, K in_features, N out_features. For a Conv, M is the number of output
    positions in the batch, K the kernel's size times in_channels / groups, N out_channels / groups;
    for a transposed Conv, M counts input positions, and the kernel's size is in N instead of K.

    Runs the model once, in evaluation mode and without gradients, and leaves it as it was.

    model: any module; layers other than Linear and Conv are ignored. inputs, kwargs: the arguments
    to call it with. multiple: what the sizes should be multiples of, or ValueError if it is not
    positive; default: 8, for 16-bit dtypes.
    """
    pad_to_multiple(0, multiple)  # raises for a wrong multiple before the model runs
    found = ProductTable()
    names = {module: name for name, module in model.named_modules()}

    def look(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], out: Tensor) -> None:
        sizes = _sizes(module, args[0] if args else kwargs["input"], out)
        padded = {name: pad_to_multiple(size, multiple) for name, size in sizes.items()}
        wrong = {name: size for name, size in padded.items() if size != sizes[name]}
        row = Product(names[module], type(module).__name__, **sizes, padding=wrong)
        if wrong and row not in found:
            found.append(row)

    with ExitStack() as undo, torch.no_grad():
        for module in names:
            undo.callback(setattr, module, "training", module.training)
            if isinstance(module, nn.Linear | ConvNd):
                undo.callback(module.register_forward_hook(look, with_kwargs=True).remove)
        model.eval()(*inputs, **kwargs)
    return found


def pad_to_multiple(size: int, multiple: int = 8) -> int:
    """The smallest multiple that is at least the size: the vocabulary or width to choose instead.

    Raises ValueError if size is negative or multiple is not positive.
    """
    if size < 0:
        raise ValueError(f"size must not be negative, found {size}")
    if multiple < 1:
        raise ValueError(f"multiple must be positive, found {multiple}")
    return -(-size // multiple) * multiple


def _sizes(module: nn.Module, given: Tensor, out: Tensor) -> dict[str, int]:
    if isinstance(module, nn.Linear):
        rows = math.prod(given.shape[:-1])
        return {"M": rows, "K": module.in_features, "N": module.out_features}
    assert isinstance(module, ConvNd)
    kernel = math.prod(module.kernel_size)
    inner, outer = module.in_channels // module.groups, module.out_channels // module.groups
    if module.transposed:
        return {"M": given.numel() // module.in_channels, "K": inner, "N": outer * kernel}
    return {"M": out.numel() // module.out_channels, "K": inner * kernel, "N": outer}
