"""Watching a model's gradients as they come, weights' and activations'."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from amp_mp.diagnose.histogram import FORMATS, ExponentHistogram
from amp_mp.diagnose.report import GradientReport
from amp_mp.scaling.policies import check_scale


def watch(model: nn.Module, scaler: Any = None, every: int = 1) -> Watch:
    """Counts the binades of every gradient of a model until closed.

        with diagnose.watch(model, scaler) as seen:
            train(model)
        print(seen.report())

    Args:
        model: what is watched: the gradients of its parameters, after accumulation, and those of
            the outputs of its leaf modules (modules without children). What becomes trainable, or
            part of the model, later is not.
        scaler: what gradients are divided by before they are counted, whatever holds the loss
            scale: a number, a policy, a GradScaler (amp_mp's or torch's), an FP16_Optimizer, or a
            function that returns a number. Asked whenever a gradient comes. None: nothing.
        every: count a tensor's gradient every n-th time it comes. Counting one costs some passes
            over it, and on CUDA the host waits.

    Raises:
        TypeError: a scaler that is none of these.
        ValueError: `every` below 1, or a model without a parameter that requires a gradient.
    """
    return Watch(model, scaler, every)


class Watch:
    """What `watch` returns. Keeps counts only: no gradient outlives backward because of it.

    weights, activations: an ExponentHistogram of the unscaled gradients by name of the parameter or
    module. A module called several times, or with several outputs, has them all in one. Sparse
    gradients count by their stored values. left_out: names of gradients that cannot be counted
    (float64, tensor subclasses), and why.

    Made for eager code: around a compiled model put torch.compiler.set_stance("force_eager").
    Copies of the model made meanwhile carry hooks that do nothing once this is closed.
    """

    def __init__(self, model: nn.Module, scaler: Any = None, every: int = 1) -> None:
        """See `watch`."""
        if isinstance(every, bool) or not isinstance(every, int) or every < 1:
            raise ValueError(f"every must be a whole number above 0, found {every!r}")
        scale_of(scaler)  # raises now for what would raise in backward
        params = [(n, p) for n, p in model.named_parameters() if p.requires_grad and p.is_leaf]
        if not params:
            raise ValueError("the model has no parameter that requires a gradient")
        self.scaler = scaler
        self.every = every
        self.reset()
        self._model = weakref.ref(model)
        self._outputs: weakref.WeakSet[RemovableHandle] = weakref.WeakSet()
        self._handles: list[RemovableHandle] = [
            param.register_post_accumulate_grad_hook(self._weight_hook(name))  # type: ignore[no-untyped-call]
            for name, param in params
        ]
        self._handles += [
            module.register_forward_hook(self._forward_hook(name or type(module).__name__))
            for name, module in model.named_modules()
            if not any(True for _ in module.children())
        ]

    def reset(self) -> None:
        """Forgets all counts."""
        self.weights: dict[str, ExponentHistogram] = {}
        self.activations: dict[str, ExponentHistogram] = {}
        self.left_out: dict[str, str] = {}
        self._times: Counter[tuple[str, str]] = Counter()

    def close(self) -> None:
        """Removes every hook; the counts stay. Closing twice is fine."""
        handles, self._handles = [*self._handles, *self._outputs], []
        for handle in handles:
            handle.remove()

    def __enter__(self) -> Watch:
        """Itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Closes, also after an exception."""
        self.close()

    def report(
        self, scale: float | None = None, dtype: torch.dtype = torch.float16
    ) -> GradientReport:
        """The table of what was seen so far, judged at a loss scale in a format.

        Args:
            scale: finite and above 0; default: the scaler's at this moment.
            dtype: float16, bfloat16 or float32.
        """
        scale = scale_of(self.scaler) if scale is None else scale
        return GradientReport(self.weights, self.activations, scale, dtype, self.left_out)

    def gradients(self) -> Iterator[tuple[str, Tensor]]:
        """The names and unscaled gradients that the parameters have now, in float32."""
        model = self._model()
        scale = scale_of(self.scaler)
        for name, param in model.named_parameters() if model is not None else ():
            values = None if param.grad is None else plain(param.grad)
            if isinstance(values, Tensor):
                yield name, values.detach().float() / scale

    # Hooks: closures, not bound methods, for a deep copy of the model shares these and not those.

    def _weight_hook(self, name: str) -> Callable[[Tensor], None]:
        def hook(param: Tensor) -> None:
            if self._handles and param.grad is not None and self._turn("weight", name):
                self._count(self.weights, name, param.grad)

        return hook

    def _forward_hook(self, name: str) -> Callable[[nn.Module, Any, Any], None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            # Not leaves: a hook on a parameter that a module hands out would stay there.
            tensors = [t for t in _tensors(output) if t.grad_fn is not None]
            if self._handles and tensors and self._turn("activation", name):
                for tensor in tensors:
                    self._hook_output(name, tensor)

        return hook

    def _hook_output(self, name: str, tensor: Tensor) -> None:
        def hook(grad: Tensor) -> None:
            self._count(self.activations, name, grad)

        handle: RemovableHandle = tensor.register_hook(hook)  # type: ignore[no-untyped-call]
        # The hook holds its handle, so that the weak set has it for as long as the graph lives.
        hook.handle = handle  # type: ignore[attr-defined]
        self._outputs.add(handle)

    def _turn(self, kind: str, name: str) -> bool:
        self._times[kind, name] += 1
        return (self._times[kind, name] - 1) % self.every == 0

    def _count(self, where: dict[str, ExponentHistogram], name: str, grad: Tensor) -> None:
        values = plain(grad)
        if isinstance(values, str):
            self.left_out[name] = values
            return
        seen = ExponentHistogram.of(values, scale_of(self.scaler))
        where[name] = where[name] + seen if name in where else seen


def scale_of(source: Any) -> float:
    """The loss scale that something holds; `watch` says what it may be. None is 1.

    Raises TypeError for anything else, ValueError for a number that is no scale.
    """
    if source is None:
        return 1.0
    if hasattr(source, "get_scale"):  # first, for a GradScaler's `scale` is a method
        source = source.get_scale()
    elif callable(source):
        source = source()
    else:
        source = getattr(source, "loss_scale", getattr(source, "scale", source))
    if isinstance(source, Tensor) and source.numel() == 1:
        source = source.item()
    if isinstance(source, bool) or not isinstance(source, int | float):
        raise TypeError(
            "the scaler must be a number, something with `get_scale()`, `loss_scale` or `scale`, "
            f"or a function that returns a number; found {type(source).__name__}"
        )
    return check_scale(source, "the loss scale")


def plain(grad: Tensor) -> Tensor | str:
    """The dense numbers of a gradient, or why there are none to count."""
    if grad.is_sparse:
        grad = grad.detach().coalesce().values()
    if type(grad) not in (Tensor, nn.Parameter):
        return f"a tensor subclass, {type(grad).__name__}"
    return grad if grad.dtype in FORMATS else str(grad.dtype).removeprefix("torch.")


def _tensors(value: Any) -> Iterator[Tensor]:
    """The tensors in a module's output: tuples, lists and dicts are entered."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from _tensors(each)
    elif isinstance(value, tuple | list):
        for each in value:
            yield from _tensors(each)
