"""OpenSeq2Seq's mixed precision: its optimizer wrapper, regularizers, and switch dtype="mixed".

A regularizer is evaluated on the float32 master. With weights of 1e-3 and a coefficient of 1e-5 the
product is below float16's smallest number for nine weights in ten.
"""

from collections.abc import Callable, Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer
from torch.utils.weak import WeakTensorKeyDictionary

from amp_mp.dtypes import LOW_PRECISION, check_choice
from amp_mp.model.convert import convert_network, prepare
from amp_mp.scaling.policies import NAMES, ScalePolicy, Static, check_scale
from amp_mp.wrappers.fp16_optimizer import FP16_Optimizer
from amp_mp.wrappers.masters import Masters

DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}
Regularizer = Callable[[Tensor], Any]

_recorded: MutableMapping[Tensor, list[Regularizer]] = WeakTensorKeyDictionary()


class l2_sum:  # noqa: N801 (used as a function)
    """lambda sum w^2; gradient 2 lambda w. ValueError for a negative coefficient lambda."""

    _share = 1.0

    def __init__(self, coefficient: float) -> None:
        if not coefficient >= 0:
            raise ValueError(f"coefficient must not be negative, found {coefficient!r}")
        self.coefficient = coefficient

    def __call__(self, weight: Tensor) -> Tensor:
        """The term of the loss."""
        return self._share * self.coefficient * weight.square().sum()


class l2_half(l2_sum):  # noqa: N801
    """lambda / 2 sum w^2, TensorFlow's l2_regularizer; gradient lambda w. Errors as l2_sum."""

    _share = 0.5


class l1(l2_sum):  # noqa: N801
    """lambda sum |w|; gradient lambda sign(w), 0 at 0. Errors as l2_sum."""

    def __call__(self, weight: Tensor) -> Tensor:
        """The term of the loss."""
        return self.coefficient * weight.abs().sum()


def mp_regularizer_wrapper(regularizer: Regularizer) -> Regularizer:
    """A regularizer that leaves low-precision weights to MixedPrecisionOptimizerWrapper.

    Returns f(w). For a float16 or bfloat16 parameter f records it, once, and returns None: the
    optimizer adds the gradient, computed on the master in float32. Else f(w) is regularizer(w).

    regularizer: l2_sum, l2_half, l1, or any differentiable function of one tensor to a tensor of
    one element.
    """

    def wrapped(weight: Tensor) -> Any:
        if weight.dtype not in LOW_PRECISION:
            return regularizer(weight)
        terms = _recorded.setdefault(weight, [])
        if regularizer not in terms:
            terms.append(regularizer)
        return None

    return wrapped


class MixedPrecisionOptimizerWrapper(FP16_Optimizer):
    """OpenSeq2Seq's wrapper of this name around a torch optimizer.

    As FP16_Optimizer, with the regularizers that mp_regularizer_wrapper has recorded: their
    gradients are computed on the masters and added to the unscaled ones, once per step.

    Args:
        optimizer: the optimizer to wrap.
        loss_scale: None for 1, a number for a static scale, which checks nothing; "Backoff",
            "LogMax" or a policy for a dynamic one.
        iter_size: how many calls of backward make a step. Each gradient is divided by it and added
            in float32; the scale stays until the step, and one overflow skips it.

    Raises TypeError and ValueError as FP16_Optimizer, or for an iter_size that is not 1 or more.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        loss_scale: float | str | ScalePolicy | None = None,
        *,
        iter_size: int = 1,
    ) -> None:
        if isinstance(iter_size, bool) or not isinstance(iter_size, int) or iter_size < 1:
            raise ValueError(f"iter_size must be a whole number from 1 on, found {iter_size!r}")
        super().__init__(optimizer, verbose=False, loss_scale=loss_scale)
        self.iter_size = iter_size
        self._calls = 0

    def backward(
        self, loss: Tensor, update_master_grads: bool = True, retain_graph: bool = False
    ) -> None:
        """As FP16_Optimizer's; with iter_size k this is one of k calls before a step."""
        if self.iter_size == 1:
            return super().backward(loss, update_master_grads, retain_graph)
        super().backward(loss / self.iter_size, update_master_grads, retain_graph)
        self._calls += 1
        return None

    def step(self, closure: Any = None) -> Any:
        """As FP16_Optimizer's. Raises RuntimeError in the middle of iter_size calls of backward."""
        if self._calls % self.iter_size:
            raise RuntimeError(
                f"step: {self._calls} of iter_size={self.iter_size} backward calls are made"
            )
        self._calls = 0
        return super().step(closure)

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """As FP16_Optimizer's; the next backward is the first of its iter_size."""
        self._calls = 0
        super().zero_grad(*args, **kwargs)

    def _make_masters(self, optimizer: Optimizer) -> Masters:
        """Regularizers need masters with gradients of their own, also in amp_mp's optimizers."""
        return Masters(optimizer)

    @torch.no_grad()
    def _complete_gradients(self, pairs: list[tuple[Tensor, Tensor]]) -> None:
        """Adds what was recorded of each parameter to its master's gradient, once per step."""
        for param, master in pairs:
            for regularizer in _recorded.get(param, ()):
                if (grad := master.grad) is None:
                    break
                with torch.enable_grad():
                    leaf = master.detach().requires_grad_()
                    (added,) = torch.autograd.grad(regularizer(leaf), leaf)
                # A sparse gradient becomes dense, because the term touches every weight.
                master.grad = (grad.to_dense() if grad.is_sparse else grad).add_(added)


def mixed_precision(
    model: nn.Module, optimizer: Optimizer, config: Mapping[str, Any], **options: Any
) -> tuple[nn.Module, Any]:
    """Sets a model and its optimizer up as a training script's configuration says.

        config = {"dtype": "mixed", "loss_scaling": "LogMax"}
        model, optimizer = amp.compat.mixed_precision(model, optimizer, config)

    Args:
        model: a float32 model.
        optimizer: over its parameters.
        config: other keys than these are ignored.
            dtype: "mixed" for low-precision weights and float32 masters; "float16" or "bfloat16"
                for low precision alone, without a wrapper; "float32", the default.
            loss_scaling: a number, "Backoff" or "LogMax"; with loss_scaling_params, a dict of that
                policy's arguments. Older: loss_scale, a number; automatic_loss_scaling, a name.
            low_precision: which one "mixed" means; default float16 on CUDA, bfloat16 on a CPU.
        options: passed on to MixedPrecisionOptimizerWrapper.

    Returns:
        The model, converted in place, and the optimizer to use, wrapped where dtype is "mixed".

    Raises:
        ValueError: naming the key: an unknown dtype or algorithm; a static and a dynamic scale at
            once; a dynamic one without "mixed"; an unknown loss_scaling_params key.
    """
    name = str(config.get("dtype", "float32")).removeprefix("torch.")
    policy = _policy(config)
    if name == "mixed":
        default = "float16" if any(p.is_cuda for p in model.parameters()) else "bfloat16"
        low = str(config.get("low_precision", default)).removeprefix("torch.")
        check_choice("low_precision", low, ("float16", "bfloat16"))
        wrapper = MixedPrecisionOptimizerWrapper
        return prepare(model, DTYPES[low]), wrapper(optimizer, policy, **options)
    if name not in DTYPES:
        raise ValueError(f'dtype must be "mixed", {", ".join(DTYPES)}; found {config["dtype"]!r}')
    if not isinstance(policy, Static):
        raise ValueError(f'automatic loss scaling needs dtype "mixed", found dtype {name!r}')
    return (model if name == "float32" else convert_network(model, DTYPES[name])), optimizer


def _policy(config: Mapping[str, Any]) -> ScalePolicy:
    """The loss scale that a configuration asks for; without one Static(1)."""
    keys = ("automatic_loss_scaling", "loss_scale", "loss_scaling")
    given = {key: config[key] for key in keys if config.get(key) is not None}
    if len(given) > 1:
        raise ValueError(f"config: {' and '.join(given)} were both given; choose one")
    key, value = next(iter(given.items()), ("loss_scale", 1.0))
    params = dict(config.get("loss_scaling_params") or {})
    if not isinstance(value, str):
        if params:
            raise ValueError("loss_scaling_params needs loss_scaling, the name of an algorithm")
        return Static(check_scale(value, key))
    algorithm = value.lower().strip()
    if algorithm not in NAMES or algorithm == "dynamic":  # which is FP16_Optimizer's own name
        raise ValueError(f'Unknown scaling algorithm: {value}; {key} takes "Backoff" or "LogMax"')
    try:
        return NAMES[algorithm](**params)
    except TypeError as error:
        raise ValueError(f"loss_scaling_params: {error}") from None
