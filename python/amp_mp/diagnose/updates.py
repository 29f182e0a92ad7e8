"""How large updates are beside their weights, and which would be lost without float32 masters."""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.weak import WeakTensorKeyDictionary

from amp_mp.apex.fp16_optimizer import FP16_Optimizer
from amp_mp.diagnose.histogram import limits
from amp_mp.diagnose.report import share, short
from amp_mp.dtypes import LOW_PRECISION
from amp_mp.optim.state.masters import master_of
from amp_mp.text_table import aligned


class Updates(NamedTuple):
    """One parameter's updates over all steps seen.

    dtype: the format they are judged for. elements: how many there were, elements without gradient
    and update left out. lost, between, kept: shares of these; together 1. median: of |update| /
    |weight| over the whole layer at the last step, None where no weight had an update.
    """

    name: str
    dtype: torch.dtype
    elements: int
    lost: float
    between: float
    kept: float
    median: float | None


class UpdateTable(list[Updates]):
    """A row for each parameter; prints as a table."""

    def __str__(self) -> str:
        """A line each."""
        if not self:
            return "no step of an optimizer has been seen"
        header = ("parameter", "weights in", "updates", " lost", " between", " kept")
        rows = (
            (
                row.name,
                short(row.dtype),
                str(row.elements),
                *map(share, (row.lost, row.between, row.kept)),
                "" if row.median is None else f"{row.median:.2g}",
            )
            for row in self
        )
        table = aligned((*header, "median |update / weight| of the layer"), rows)
        return f"Updates: what weights in low precision, without masters, would lose\n{table}"


class UpdateRatios:
    """Compares every update with its weight, in steps of an optimizer, until closed.

        with diagnose.UpdateRatios(optimizer) as ratios:
            train(model)
        print(ratios.report())

    A weight w that is kept in a format with unit eps (2^-10 in float16) loses, rounding to nearest
    even, every update |u| < |w| eps / 4 (2^-12 |w|), and keeps every |u| > |w| eps / 2 (2^-11 |w|);
    in between it depends on the weight's fraction and on the sign. Below the normal numbers the
    spacing is constant, and half of it (float16: 2^-25) is the edge of both. In bfloat16 the ratios
    are 2^-9 and 2^-8. w is taken as the format has it, the update as the float32 weight's exact
    difference over the step: a float32 parameter's, or a `master`'s in the optimizer's state.

    A low-precision parameter without a master shows what happened instead of what would: an update
    is lost where the weight stayed the same although its gradient is not zero. A step that changed
    nothing because of inf or NaN in the gradients is not counted; nor is the one in which an amp_mp
    optimizer makes a parameter's master.

    Needs a copy of the weights during each step.

    Args:
        source: the optimizer or FP16_Optimizer whose steps are looked at; a module: every step of
            any optimizer, as far as the module's parameters go; None: every step of any optimizer.
        dtype: float16, bfloat16 or float32, the format to judge for; default: the parameter's own
            if that is a low-precision one, otherwise float16.

    Raises:
        TypeError: another source.
        ValueError: another dtype.
    """

    def __init__(
        self,
        source: Optimizer | FP16_Optimizer | nn.Module | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """See the class."""
        if dtype is not None:
            limits(dtype)
        self._dtype = dtype
        self._names: MutableMapping[Tensor, str] = WeakTensorKeyDictionary()
        self._named_only = isinstance(source, nn.Module)
        self._before: list[tuple[str, Tensor, Tensor]] = []  # name, parameter, copy of the weight
        self.reset()
        if isinstance(source, FP16_Optimizer):
            source = source.optimizer
        if isinstance(source, Optimizer):
            handles = (source.register_step_pre_hook, source.register_step_post_hook)
        elif source is None or isinstance(source, nn.Module):
            handles = (register_optimizer_step_pre_hook, register_optimizer_step_post_hook)
            if source is not None:
                self.name(source)
        else:
            raise TypeError(
                f"UpdateRatios takes an optimizer or a module, found {type(source).__name__}"
            )
        self._handles = [handles[0](self._pre), handles[1](self._post)]

    def name(self, model: nn.Module, prefix: str = "") -> None:
        """Calls the model's parameters by their names, with a prefix, in the table."""
        self._names.update({p: prefix + name for name, p in model.named_parameters()})

    def reset(self) -> None:
        """Forgets what was counted."""
        self._counts: dict[str, tuple[torch.dtype, Tensor]] = {}  # lost, between, kept
        self.medians: dict[str, float] = {}

    def close(self) -> None:
        """Removes the hooks; the counts stay. Closing twice is fine."""
        for handle in self._handles:
            handle.remove()
        self._before = []

    def __enter__(self) -> UpdateRatios:
        """Itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Closes, also after an exception."""
        self.close()

    def report(self) -> UpdateTable:
        """The table of what was seen so far."""
        table = UpdateTable()
        for name, (dtype, counts) in self._counts.items():
            lost, between, kept = counts.tolist()
            n = lost + between + kept
            shares = (lost / max(n, 1), between / max(n, 1), kept / max(n, 1))
            table.append(Updates(name, dtype, n, *shares, self.medians.get(_layer(name))))
        return table

    # Hooks.

    def _pre(self, optimizer: Optimizer, *_: Any) -> None:
        self._before = [
            (name, param, _weight(optimizer, param).detach().clone())
            for name, param in self._params(optimizer)
        ]

    def _params(self, optimizer: Optimizer) -> list[tuple[str, Tensor]]:
        found = []
        for index, group in enumerate(optimizer.param_groups):
            given = group.get("param_names")
            for i, param in enumerate(group["params"]):
                name = self._names.get(param)
                if name is None and not self._named_only:
                    name = given[i] if given else f"group {index}[{i}]"
                if name is not None and param.is_floating_point():
                    found.append((name, param))
        return found

    @torch.no_grad()
    def _post(self, optimizer: Optimizer, *_: Any) -> None:
        before, self._before = self._before, []
        layers: dict[str, list[tuple[str, Tensor, Tensor, Tensor]]] = {}
        for name, param, old in before:
            new = _weight(optimizer, param)
            if new.dtype == old.dtype:  # else its master was made in this very step
                layers.setdefault(_layer(name), []).append((name, param, old, new))
        steps = [each for layer in layers.values() for each in layer]
        if all(torch.equal(old, new) for *_, old, new in steps) and any(
            p.grad is not None and not p.grad.isfinite().all() for _, p, _, _ in steps
        ):
            return
        for layer, members in layers.items():
            ratios = torch.cat([self._count(*member) for member in members])
            if ratios.numel():
                self.medians[layer] = float(ratios.median())

    def _count(self, name: str, param: Tensor, old: Tensor, new: Tensor) -> Tensor:
        """Adds a parameter's step to the counts; returns the ratios |update| / |weight|."""
        change = (new.double() - old.double()).abs()
        size = old.double().abs()
        moved = change > 0
        if param.grad is not None and not param.grad.is_sparse:
            moved |= param.grad != 0
        low = self._dtype or (param.dtype if param.dtype in LOW_PRECISION else torch.float16)
        if old.dtype in LOW_PRECISION:
            low = old.dtype
            lost, kept = moved & (change == 0), change > 0
        else:
            weight, eps = old.to(low).double().abs(), torch.finfo(low).eps
            least = limits(low).lost
            lost = moved & (change < (weight * (eps / 4)).clamp(min=least))
            kept = change > (weight * (eps / 2)).clamp(min=least)
        sums = torch.stack([lost.sum(), (moved & ~lost & ~kept).sum(), kept.sum()]).cpu()
        _, seen = self._counts.get(name, (low, torch.zeros(3, dtype=torch.int64)))
        self._counts[name] = (low, seen + sums)
        where = moved & (size > 0)
        return change[where] / size[where]


def _weight(optimizer: Optimizer, param: Tensor) -> Tensor:
    """What the update acts on: the parameter, or the float32 master in the optimizer's state."""
    master = master_of(param, optimizer.state[param]) if param in optimizer.state else None
    return param if master is None else master


def _layer(name: str) -> str:
    """The module that a parameter is named after; itself if it has none."""
    return name.rpartition(".")[0] or name
