"""Which products of a model have sizes that Tensor Cores do not take whole."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from amp_mp.text_table import aligned


class Product(NamedTuple):
    """A product [M, K] x [K, N], the layer that makes it, and which of the sizes are to be padded.

    `padding` has the sizes that are no multiples, by name, with what they should be.
    """

    name: str
    layer: str
    M: int
    K: int
    N: int
    padding: dict[str, int]


class ProductTable(list[Product]):
    """Products in the order in which they run."""

    def __str__(self) -> str:
        """A line each."""
        return aligned(
            ("module", "layer", "M", "K", "N", "pad"),
            (
                (*map(str, row[:5]), ", ".join(f"{k} to {v}" for k, v in row.padding.items()))
                for row in self
            ),
        )


def tensor_core_report(
    model: nn.Module, *inputs: Any, multiple: int = 8, **kwargs: Any
) -> ProductTable:
    """The matrix products of a model's Linear and Conv layers whose sizes are no multiples of 8.

    16-bit Tensor Cores multiply blocks of 8: other sizes are padded in time and memory, or leave
    the Tensor Cores unused (NVIDIA, Matrix Multiplication Background User's Guide). The forward
    products are listed; backward's have the same three sizes. Of a Linear, M counts the input's
    rows, K is in_features, N out_features. Of a Conv, M counts the output's positions in the batch,
    K is in_channels / groups times the kernel's size, N out_channels / groups; of a transposed one,
    M counts the input's positions and N has the kernel's size.

    Runs the model once, in evaluation mode and without gradients, and leaves it as it was.

    Args:
        model: any; other layers are not looked at.
        inputs: what to call it with, as kwargs.
        multiple: what the sizes should be multiples of, 8 for 16 bits.
        kwargs: see inputs.

    Returns:
        A list of the products with a size to pad, one row each even if it runs many times. It
        prints as a table.

    Raises:
        ValueError: multiple is not positive.
    """
    pad_to_multiple(0, multiple)  # which checks it
    found = ProductTable()
    names = {module: name for name, module in model.named_modules()}

    def look(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], out: Tensor) -> None:
        sizes = _sizes(module, args[0] if args else kwargs["input"], out)
        padded = {name: pad_to_multiple(size, multiple) for name, size in sizes.items()}
        wrong = {name: size for name, size in padded.items() if size != sizes[name]}
        row = Product(names[module], type(module).__name__, **sizes, padding=wrong)
        if wrong and row not in found:
            found.append(row)

    training = {module: module.training for module in names}
    hooks = [
        module.register_forward_hook(look, with_kwargs=True)
        for module in names
        if isinstance(module, nn.Linear | _ConvNd)
    ]
    try:
        with torch.no_grad():
            model.eval()(*inputs, **kwargs)
    finally:
        for hook in hooks:
            hook.remove()
        for module, mode in training.items():
            module.training = mode
    return found


def pad_to_multiple(size: int, multiple: int = 8) -> int:
    """The smallest multiple that is not below the size: the vocabulary or width to choose instead.

    Raises:
        ValueError: size is negative, or multiple not positive.
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
    assert isinstance(module, _ConvNd)
    kernel = math.prod(module.kernel_size)
    inner, outer = module.in_channels // module.groups, module.out_channels // module.groups
    if module.transposed:
        return {"M": given.numel() // module.in_channels, "K": inner, "N": outer * kernel}
    return {"M": out.numel() // module.out_channels, "K": inner * kernel, "N": outer}
