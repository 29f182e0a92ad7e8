"""Regularizers evaluated on the float32 master, where weight times coefficient does not vanish.

With weights of 1e-3 and a coefficient of 1e-5 the product is below float16's smallest number for
nine weights in ten.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, MutableMapping
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from amp_mp.dtypes import LOW_PRECISION

Regularizer = Callable[[Tensor], Any]

_recorded: MutableMapping[Tensor, list[Regularizer]] = WeakTensorKeyDictionary()


class _BuiltIn(ABC):
    """A regularizer with a coefficient lambda and a derivative; ValueError for a negative one."""

    def __init__(self, coefficient: float) -> None:
        if not coefficient >= 0:
            raise ValueError(f"coefficient must not be negative, found {coefficient!r}")
        self.coefficient = coefficient

    @abstractmethod
    def _gradient(self, weight: Tensor) -> Tensor: ...


class l2_sum(_BuiltIn):  # noqa: N801 (used as a function)
    """lambda sum w^2; gradient 2 lambda w. ValueError for a negative coefficient lambda."""

    def __call__(self, weight: Tensor) -> Tensor:
        """The term of the loss."""
        return self.coefficient * weight.square().sum()

    def _gradient(self, weight: Tensor) -> Tensor:
        return (2 * self.coefficient) * weight


class l2_half(_BuiltIn):  # noqa: N801
    """lambda / 2 sum w^2, TensorFlow's l2_regularizer; gradient lambda w. Errors as l2_sum."""

    def __call__(self, weight: Tensor) -> Tensor:
        """The term of the loss."""
        return self.coefficient / 2 * weight.square().sum()

    def _gradient(self, weight: Tensor) -> Tensor:
        return self.coefficient * weight


class l1(_BuiltIn):  # noqa: N801
    """lambda sum |w|; gradient lambda sign(w), 0 at 0. Errors as l2_sum."""

    def __call__(self, weight: Tensor) -> Tensor:
        """The term of the loss."""
        return self.coefficient * weight.abs().sum()

    def _gradient(self, weight: Tensor) -> Tensor:
        return self.coefficient * weight.sign()


def mp_regularizer_wrapper(regularizer: Regularizer) -> Regularizer:
    """A regularizer that leaves low-precision weights to MixedPrecisionOptimizerWrapper.

    Returns f(w). For a float16 or bfloat16 parameter f records it, once, and returns None: the loss
    has no such term, and the optimizer adds the gradient, computed on the master in float32. For
    any other tensor f(w) is regularizer(w), and nothing is recorded.

    Args:
        regularizer: l2_sum, l2_half, l1, or any differentiable function of one tensor to a tensor
            of one element.
    """

    def wrapped(weight: Tensor) -> Any:
        if weight.dtype not in LOW_PRECISION:
            return regularizer(weight)
        terms = _recorded.setdefault(weight, [])
        if regularizer not in terms:
            terms.append(regularizer)
        return None

    return wrapped


@torch.no_grad()
def add_regularization(pairs: list[tuple[Tensor, Tensor]]) -> None:
    """Adds what was recorded of each parameter to its master's gradient, where there is one.

    pairs: parameters and masters. A sparse gradient becomes dense: the term touches every weight.
    """
    for param, master in pairs:
        for regularizer in _recorded.get(param, ()):
            if master.grad is not None:
                dense = master.grad.to_dense() if master.grad.is_sparse else master.grad
                master.grad = dense.add_(_gradient(regularizer, master.detach()))


def _gradient(regularizer: Any, weight: Tensor) -> Any:
    if isinstance(regularizer, _BuiltIn):
        return regularizer._gradient(weight)
    with torch.enable_grad():
        leaf = weight.detach().requires_grad_()
        return torch.autograd.grad(regularizer(leaf), leaf)[0]
