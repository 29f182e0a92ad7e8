"""Following a model's gradients: counts of their binades during backward, and their overflows."""

import math
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from amp_mp.diagnose.histogram import Diagnosis, ExponentHistogram
from amp_mp.nested import tensors_in
from amp_mp.optim.step.overflow_report import OverflowReport, dense_values, nonfinite_gradients
from amp_mp.scaling.overflows import SKIPS, STUCK, OverflowWatch
from amp_mp.scaling.policies import check_scale
from amp_mp.sharding.shards import any_dtensor
from amp_mp.text_table import aligned, dtype_name, percent, scale_text

Named = nn.Module | Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]


class Row(NamedTuple):
    """One tensor's gradients: "weight" or "activation", its name, their counts and diagnosis."""

    kind: str
    name: str
    histogram: ExponentHistogram
    diagnosis: Diagnosis

    def cells(self) -> tuple[object, ...]:
        """The row of the table."""
        kind, name, seen, found = self
        shares = (seen.zeros / max(1, seen.elements), found.lost, found.subnormal, found.overflow)
        counts = (seen.elements, *(f"{percent(share):>6}" for share in shares), seen.infs or None)
        largest = f"{math.log2(seen.amax):6.1f}" if seen.amax else None
        headroom = None if found.headroom is None else f"{found.headroom:+d} binades"
        return (kind, name, *counts, seen.nans or None, largest, headroom)


class GradientReport(list[Row]):
    """A row for all weights, for all activations, and for each tensor; prints as a table.

    weights, activations: ExponentHistograms of unscaled gradients, by name as arguments, added up
    as attributes. The diagnoses are of these times `scale` in `dtype`. left_out: why tensors were
    not counted, by name. of_shards: whether only this process's shards of weights were counted.
    """

    of_shards = False

    def __init__(
        self,
        weights: Mapping[str, ExponentHistogram],
        activations: Mapping[str, ExponentHistogram],
        scale: float,
        dtype: torch.dtype,
        left_out: Mapping[str, str] | None = None,
    ) -> None:
        self.scale = scale
        self.dtype = dtype
        self.left_out = dict(left_out or {})
        self.weights = sum(weights.values(), ExponentHistogram())
        self.activations = sum(activations.values(), ExponentHistogram())
        seen = (("weight", weights, self.weights), ("activation", activations, self.activations))
        for kind, each, total in seen:
            rows = {"(all)": total, **each} if each else {}
            self.extend(Row(kind, name, h, h.at(scale, dtype)) for name, h in rows.items())

    @property
    def safe_log2_scale(self) -> int | None:
        """The largest power of two that no gradient seen overflows with; None without gradients."""
        return (self.weights + self.activations).largest_safe_log2_scale(self.dtype)

    def __str__(self) -> str:
        if not self:
            return "no gradient has been seen"
        name = dtype_name(self.dtype)
        scale = scale_text(self.scale)
        header = ("gradient of", "tensor", "elements", " zero", " lost", " subnormal", " overflow")
        lines = [
            f"Gradients, and what becomes of them in {name} at loss scale {scale}",
            "(shares of the elements that are not 0, inf or NaN; log2 of the unscaled largest)",
            aligned((*header, "inf", "NaN", "log2 largest", "headroom"), map(Row.cells, self)),
        ]
        if self.of_shards:
            lines.append("Of sharded weights only this process's shards were counted.")
        lines += [f"left out: {name}, {why}" for name, why in self.left_out.items()]
        if (safe := self.safe_log2_scale) is not None:
            there = (self.weights + self.activations).at(2.0**safe, self.dtype)
            lines.append(
                f"The largest loss scale that overflows nothing seen is 2^{safe}: there "
                f"{percent(there.lost)} would be lost and {percent(there.subnormal)} subnormal."
            )
        return "\n".join(lines)


class Watch(AbstractContextManager["Watch"]):
    """Counts the binades of every gradient of a model until closed.

        with diagnose.Watch(model, scaler) as seen:
            train(model)
        print(seen.report())

    weights, activations: an ExponentHistogram of the unscaled gradients by name of the parameter or
    module, one for all outputs and calls of a module. Sparse gradients count with their stored
    values. left_out: why gradients could not be counted (float64, tensor subclasses), by name.
    nonfinite: the module whose output was the first with inf or NaN; None if there was none.

    Around a compiled model put torch.compiler.set_stance("force_eager"), so that hooks see it.

    Args:
        model: the gradients of its parameters, after accumulation, and of the outputs of modules
            without children are counted, if these are trainable and part of it now.
        scaler: what holds the loss scale, by which gradients are divided before they are counted: a
            number, a policy, a GradScaler (amp_mp's or torch's), an FP16_Optimizer, or a function
            that returns a number. Read for each gradient. Default: None, no scale.
        every: count a tensor's gradient every n-th time; default: 1. Counting takes several passes
            over the gradient, and on CUDA the host waits for it.

    Raises TypeError for another scaler, ValueError for a scale that is not finite or not above 0,
    `every` below 1, and a model without a parameter that requires a gradient.
    """

    def __init__(self, model: nn.Module, scaler: Any = None, every: int = 1) -> None:
        if isinstance(every, bool) or not isinstance(every, int) or every < 1:
            raise ValueError(f"every must be a whole number above 0, found {every!r}")
        scale_of(scaler)  # a wrong scaler raises here, not in backward
        params = [(n, p) for n, p in model.named_parameters() if p.requires_grad and p.is_leaf]
        if not params:
            raise ValueError("the model has no parameter that requires a gradient")
        self.scaler, self.every = scaler, every
        self._of_shards = any_dtensor(param for _, param in params)
        self.reset()
        self._model = weakref.ref(model)
        self._outputs: weakref.WeakSet[RemovableHandle] = weakref.WeakSet()
        self._handles: list[RemovableHandle] = []
        # The hooks are lambdas, because a deep copy of the model shares functions. It would copy
        # bound methods, together with this object, and those would count on after `close`.
        for name, param in params:
            register: Any = param.register_post_accumulate_grad_hook
            self._handles.append(register(lambda param, n=name: self._on_weight(n, param)))
        for name, module in model.named_modules():
            if not list(module.children()):
                name, register = name or type(module).__name__, module.register_forward_hook
                self._handles.append(register(lambda _, a, out, n=name: self._on_forward(n, out)))

    def reset(self) -> None:
        """Forgets all counts."""
        self.weights: dict[str, ExponentHistogram] = {}
        self.activations: dict[str, ExponentHistogram] = {}
        self.left_out: dict[str, str] = {}
        self.nonfinite: str | None = None
        self._times: Counter[tuple[str, str]] = Counter()

    def close(self) -> None:
        """Removes every hook; the counts stay. Closing twice is fine."""
        for handle in (*self._handles, *self._outputs):
            handle.remove()
        self._handles = []

    def __exit__(self, *_: object) -> None:
        self.close()

    def report(
        self, scale: float | None = None, dtype: torch.dtype = torch.float16
    ) -> GradientReport:
        """The counts so far, judged by ExponentHistogram.at; default: at the scaler's scale."""
        scale = scale_of(self.scaler) if scale is None else scale
        report = GradientReport(self.weights, self.activations, scale, dtype, self.left_out)
        report.of_shards = self._of_shards
        return report

    def gradients(self) -> Iterator[tuple[str, Tensor]]:
        """The names and unscaled gradients that the parameters have now, in float32."""
        model, scale = self._model(), scale_of(self.scaler)
        for name, param in model.named_parameters() if model is not None else ():
            if param.grad is not None and isinstance(values := dense_values(param.grad), Tensor):
                yield name, values.detach().float() / scale

    def _on_weight(self, name: str, param: Tensor) -> None:
        if param.grad is not None and self._is_turn("weight", name):
            self._count(self.weights, name, param.grad)

    def _on_forward(self, name: str, output: Any) -> None:
        # No leaves: a module may return a parameter, and the hook would stay on it.
        tensors = [t for t in tensors_in(output, results=True) if t.grad_fn is not None]
        if self.nonfinite is None and not all(bool(t.isfinite().all()) for t in tensors):
            self.nonfinite = name
        if not tensors or not self._is_turn("activation", name):
            return

        def hook(grad: Tensor) -> None:
            self._count(self.activations, name, grad)

        handles = [t.register_hook(hook) for t in tensors]  # type: ignore[no-untyped-call]
        # The hook holds the handles, so the weak set has them for as long as the graph lives.
        hook.handles = handles  # type: ignore[attr-defined]
        self._outputs.update(handles)

    def _is_turn(self, kind: str, name: str) -> bool:
        self._times[kind, name] += 1
        return bool(self._handles) and (self._times[kind, name] - 1) % self.every == 0

    def _count(self, where: dict[str, ExponentHistogram], name: str, grad: Tensor) -> None:
        if isinstance(values := dense_values(grad), str):
            self.left_out[name] = values
        else:
            seen = ExponentHistogram.of(values, scale_of(self.scaler))
            where[name] = where.get(name, ExponentHistogram()) + seen


def scale_of(source: Any) -> float:
    """The loss scale that something holds; `Watch` lists what it may be. None means 1.

    Raises TypeError for anything else, ValueError for a scale that is not finite or not above 0.
    """
    if source is None:
        return 1.0
    if hasattr(source, "get_scale"):  # first, because a GradScaler's `scale` is a method
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


def diagnose_overflow(params: Named, scale: Any = None) -> OverflowReport:
    """Which gradients have inf or NaN now; call it between backward and the step.

    A sparse gradient counts with its values, a DTensor with this process's shard. Other tensor
    subclasses, and dtypes other than float32, float16 and bfloat16, are skipped.

    params: a module, or parameters by name: a mapping or pairs. scale: the loss scale of the
    gradients, for the advice: anything that `Watch` takes; default: None, no scale. Raises
    TypeError for other params or scales, ValueError for a scale not finite or not above 0.
    """
    return nonfinite_gradients(_named(params), scale_of(scale))


def _named(params: Named) -> list[tuple[str, Tensor]]:
    if isinstance(params, nn.Module):
        return list(params.named_parameters())
    pairs = list(params.items() if isinstance(params, Mapping) else params)
    for pair in pairs:
        if not (isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[1], Tensor)):
            expected = "expected a module or named parameters (model.named_parameters())"
            raise TypeError(f"{expected}, found {type(pair).__name__} among them")
    return pairs


class OverflowTracker:
    """Follows overflows over steps and says when no loss scale can cure them.

        tracker = diagnose.OverflowTracker(model, scaler)
        ...
        loss.backward()
        tracker.update()
        if tracker.verdict:
            raise RuntimeError(tracker.verdict)

    Args:
        params, scaler: as diagnose_overflow's params and scale, with its errors.
        patience: a gradient is incurable if it is non-finite in this many steps in a row while the
            scale falls. Default: 25, because a scale of 2^24 may need 24 halvings until it fits.
        floor_patience: a scale is stuck if it stays the same in this many overflowing steps in a
            row; default: 5. Raises ValueError for a patience below 2.
    """

    def __init__(
        self, params: Named, scaler: Any = None, patience: int = SKIPS, floor_patience: int = STUCK
    ) -> None:
        if min(patience, floor_patience) < 2:
            raise ValueError(f"patience must be 2 or more, found {patience} and {floor_patience}")
        self._params = _named(params)
        self._scaler = scaler
        self._patience, self._floor_patience = patience, floor_patience
        # For each non-finite parameter the step at which that began, and the loss scale then.
        self._began: dict[str, tuple[int, float]] = {}
        self._watch = OverflowWatch()
        self.report = OverflowReport((), scale_of(scaler))

    @property
    def steps(self) -> int:
        """How many steps `update` has seen."""
        return self._watch.steps

    def update(self) -> OverflowReport:
        """The report of the next step, from 1; call it after backward, before the scale changes."""
        report = nonfinite_gradients(self._params, scale_of(self._scaler))
        self._watch.count(bool(report), report.scale)
        start = (self.steps, report.scale)
        self._began = {row.name: self._began.get(row.name, start) for row in report}
        rows = (row._replace(since=self._began[row.name][0]) for row in report)
        self.report = OverflowReport(rows, report.scale, of_shards=report.of_shards)
        return self.report

    @property
    def verdict(self) -> str | None:
        """One sentence if the present overflows cannot end by themselves, otherwise None."""
        if not self.report:
            return None
        # The parameter that has been non-finite longest; of several, the closest to the loss.
        name, (since, start) = min(reversed(self._began.items()), key=lambda item: item[1][0])
        scale = self.report.scale
        steps = self.steps - since + 1
        stuck = self._watch.at_scale >= self._floor_patience
        fell = scale < start
        now = scale_text(scale)
        if not stuck and not (fell and steps >= self._patience):
            return None
        trouble = f"the gradient of {name} has been inf or NaN in each of the {steps} steps since"
        if scale > 1 and not fell:
            cure = "and the scale has not moved; lower it, or make it dynamic."
            return f"The loss scale is stuck at {now}: {trouble} step {since} {cure}"
        history = f"and the scale is {now} already"
        if fell:
            floor = ", its floor" if stuck else ""
            history = f"while the scale fell from {scale_text(start)} to {now}{floor}"
        look = "so look for the NaN or inf in the forward pass or the data."
        return f"No loss scale can cure this: {trouble} step {since}, {history}, {look}"
