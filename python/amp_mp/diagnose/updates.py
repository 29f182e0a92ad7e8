"""How large updates are beside their weights, and which would be lost without float32 masters."""

from collections.abc import MutableMapping
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import optimizer as torch_optimizer
from torch.optim.optimizer import Optimizer
from torch.utils.weak import WeakTensorKeyDictionary

from amp_mp import _C
from amp_mp.diagnose.histogram import limits
from amp_mp.dtypes import LOW_PRECISION
from amp_mp.sharding.shards import any_dtensor, local_of, locals_of
from amp_mp.text_table import aligned, dtype_name, percent
from amp_mp.wrappers.fp16_optimizer import FP16_Optimizer

Source = Optimizer | FP16_Optimizer | nn.Module | None


class Updates(NamedTuple):
    """One parameter's updates over all steps seen.

    dtype: the format they are judged for. elements: how many had a gradient or an update. lost,
    between, kept: shares of these, together 1. median: the median of |update| / |weight| over the
    whole layer at the last step, None where no weight had an update.
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
        if not self:
            return "no step of an optimizer has been seen"
        title = "Updates: what weights in low precision, without masters, would lose"
        header = ("parameter", "weights in", "updates", " lost", " between", " kept")
        rows = []
        for name, dtype, elements, *shares, median in self:
            parts = (f"{percent(share):>6}" for share in shares)
            ratio = None if median is None else f"{median:.2g}"
            rows.append((name, dtype_name(dtype), elements, *parts, ratio))
        return f"{title}\n{aligned((*header, 'median |update / weight| of the layer'), rows)}"


class UpdateRatios(ExitStack):
    """Compares every update with its weight, in steps of an optimizer, until closed.

        with diagnose.UpdateRatios(optimizer) as ratios:
            train(model)
        print(ratios.report())

    A weight w in a format with unit eps (2^-10 in float16), rounded to nearest even, loses every
    update |u| < |w| eps / 4 (2^-12 |w|; in bfloat16 2^-9 |w|) and keeps every |u| > |w| eps / 2; in
    between it depends on the weight's fraction and on the sign. Below the normal numbers half the
    constant spacing (float16: 2^-25) is the edge of both. w is the weight rounded to the format, u
    the step's exact change of the float32 weight: a parameter, or the master in the optimizer.

    Without a master an update of a low-precision parameter is lost where the weight stayed the same
    although its gradient is not zero. Not counted: a step that changed nothing because of inf or
    NaN in the gradients, and a first step that makes the master of a weight which has none.
    Weights are copied during each step. DTensors count with the shards of this process.

    Args:
        source: the optimizer or FP16_Optimizer whose steps are compared; or a module: every step of
            any optimizer, for the module's parameters; or None: every step of any optimizer.
        dtype: float16, bfloat16 or float32, the format to judge for; default: the parameter's own
            if it is float16 or bfloat16, otherwise float16.

    `close` removes the hooks; the counts stay, and closing twice is fine. Raises TypeError for
    another source, ValueError for another dtype.
    """

    def __init__(self, source: Source = None, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        if dtype is not None:
            limits(dtype)  # raises for another dtype
        self._dtype = dtype
        self._names: MutableMapping[Tensor, str] = WeakTensorKeyDictionary()
        self._named_only = isinstance(source, nn.Module)
        self._before: list[tuple[str, Tensor, Tensor]] = []  # name, parameter, copy of the weight
        self.reset()
        pre = torch_optimizer.register_optimizer_step_pre_hook
        post = torch_optimizer.register_optimizer_step_post_hook
        if isinstance(source, FP16_Optimizer):
            source = source.optimizer
        if isinstance(source, Optimizer):
            pre, post = source.register_step_pre_hook, source.register_step_post_hook
        elif isinstance(source, nn.Module):
            self.name(source)
        elif source is not None:
            raise TypeError(
                f"UpdateRatios takes an optimizer or a module, found {type(source).__name__}"
            )
        self.callback(self._before.clear)
        self.callback(pre(self._before_step).remove)
        self.callback(post(self._after_step).remove)

    def name(self, model: nn.Module, prefix: str = "") -> None:
        """Uses the names that parameters have in the model, after a prefix, in the table."""
        self._names.update({p: prefix + name for name, p in model.named_parameters()})

    def reset(self) -> None:
        """Forgets what was counted."""
        # By parameter name: the format, and how many updates were lost, in between and kept.
        self._counts: dict[str, tuple[torch.dtype, Tensor]] = {}
        self.medians: dict[str, float] = {}
        self.steps = self.skipped = 0  # steps that ran, and those that inf or NaN stopped

    def report(self) -> UpdateTable:
        """The table of what was counted so far."""
        table = UpdateTable()
        for name, (dtype, counts) in self._counts.items():
            n = int(counts.sum())
            lost, between, kept = (counts.double() / max(n, 1)).tolist()
            median = self.medians.get(_layer(name))
            table.append(Updates(name, dtype, n, lost, between, kept, median))
        return table

    def _before_step(self, optimizer: Optimizer, *_: Any) -> None:
        self._before.clear()
        for index, group in enumerate(optimizer.param_groups):
            for i, param in enumerate(group["params"]):
                name = self._names.get(param)
                if name is None and not self._named_only:
                    given = group.get("param_names")
                    name = given[i] if given else f"group {index}[{i}]"
                if name is not None and param.is_floating_point():
                    self._before.append((name, param, _weight(optimizer, param).detach().clone()))

    @torch.no_grad()
    def _after_step(self, optimizer: Optimizer, *_: Any) -> None:
        before = self._before.copy()
        self._before.clear()
        self.steps += 1
        steps = [(name, param, old, _weight(optimizer, param)) for name, param, old in before]
        # Another dtype means that this step has made the parameter's master.
        steps = [step for step in steps if step[2].dtype == step[3].dtype]
        sharded = any_dtensor(param for _, param, *_ in steps)
        # Perhaps because of another process's gradients.
        skipped = sharded and getattr(optimizer, "step_was_skipped", False)
        unchanged = all(torch.equal(old, new) for *_, old, new in steps)
        grads = locals_of(p.grad for _, p, *_ in steps if p.grad is not None)
        if skipped or (unchanged and not all(grad.isfinite().all() for grad in grads)):
            self.skipped += 1
            return
        layers: dict[str, list[Tensor]] = {}
        for name, param, old, new in steps:
            layers.setdefault(_layer(name), []).append(self._count(name, param, old, new))
        for layer, ratios in layers.items():
            if (joined := torch.cat(ratios)).numel():
                self.medians[layer] = float(joined.median())

    def _count(self, name: str, param: Tensor, old: Tensor, new: Tensor) -> Tensor:
        """Adds a parameter's step to the counts; returns the ratios |update| / |weight|."""
        change = (new.double() - old.double()).abs()
        size = old.double().abs()
        moved = change > 0
        if param.grad is not None and not param.grad.is_sparse:
            grad = local_of(param.grad)
            if grad.shape == moved.shape:  # otherwise it is placed in another way than the weight
                moved |= grad != 0
        low = self._dtype or (param.dtype if param.dtype in LOW_PRECISION else torch.float16)
        if old.dtype in LOW_PRECISION:
            low = old.dtype
            lost, kept = moved & (change == 0), change > 0
        else:
            weight = old.to(low).double().abs()
            eps = torch.finfo(low).eps
            least = limits(low).lost
            lost = moved & (change < (weight * (eps / 4)).clamp(min=least))
            kept = change > (weight * (eps / 2)).clamp(min=least)
        sums = torch.stack([lost.sum(), (moved & ~lost & ~kept).sum(), kept.sum()]).cpu()
        _, seen = self._counts.get(name, (low, torch.zeros(3, dtype=torch.int64)))
        self._counts[name] = (low, seen + sums)
        where = moved & (size > 0)
        return change[where] / size[where]


def _weight(optimizer: Optimizer, param: Tensor) -> Tensor:
    """What the update changes: the float32 value of a weight with a master, or the parameter.

    A DTensor gives this process's shard.
    """
    record = _C.weight_of(param)
    if record is None or record.entry is None:
        return local_of(param)
    return _C.float32_of(param, stepping=bool(optimizer.state.get(param)))


def _layer(name: str) -> str:
    return name.rpartition(".")[0] or name
