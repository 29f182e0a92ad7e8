"""Which products of a model have sizes that Tensor Cores have to pad."""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from amp_mp.text_table import aligned


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
        pads = (", ".join(f"{size} to {to}" for size, to in row.padding.items()) for row in self)
        rows = [(*row[:5], pad) for row, pad in zip(self, pads, strict=True)]
        return aligned(("module", "layer", "M", "K", "N", "pad"), rows)


def tensor_core_report(
    model: nn.Module, *inputs: Any, multiple: int = 8, **kwargs: Any
) -> ProductTable:
    """The matrix products of a model's Linear and Conv layers whose sizes are no multiples of 8.

    16-bit Tensor Cores multiply blocks of 8: other sizes are padded, which costs time and memory,
    or do not use the Tensor Cores (NVIDIA, Matrix Multiplication Background User's Guide). The
    forward products are listed; backward's have the same three sizes. For a Linear, M is the number
    of input rows, K in_features, N out_features. For a Conv, M is the number of output positions in
    the batch, K the kernel's size times in_channels / groups, N out_channels / groups. For a
    transposed Conv, M counts input positions and N, instead of K, has the kernel's size as factor.

    Runs the model once, in evaluation mode and without gradients, and leaves it as it was.

    Args:
        model: any module; layers other than Linear and Conv are ignored.
        inputs, kwargs: the arguments to call it with.
        multiple: what the sizes should be multiples of, or ValueError if it is not positive;
            default: 8, for 16-bit dtypes.

    Returns:
        The products with a size to pad, each once even if it ran several times.
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

    modes = {module: module.training for module in names}
    layers = [module for module in names if isinstance(module, nn.Linear | _ConvNd)]
    hooks = [layer.register_forward_hook(look, with_kwargs=True) for layer in layers]
    try:
        with torch.no_grad():
            model.eval()(*inputs, **kwargs)
    finally:
        for hook in hooks:
            hook.remove()
        for module, mode in modes.items():
            module.training = mode
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
    """M, K and N of the product that a Linear or Conv module computes from one tensor."""
    if isinstance(module, nn.Linear):
        K, N = module.in_features, module.out_features
        return {"M": math.prod(given.shape[:-1]), "K": K, "N": N}
    assert isinstance(module, _ConvNd)
    kernel = math.prod(module.kernel_size)
    inner, outer = module.in_channels // module.groups, module.out_channels // module.groups
    if module.transposed:
        return {"M": given.numel() // module.in_channels, "K": inner, "N": outer * kernel}
    return {"M": out.numel() // module.out_channels, "K": inner * kernel, "N": outer}
