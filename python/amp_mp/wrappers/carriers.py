"""Where the true gradients of scaled losses are: three kinds of Carrier."""

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import chain, islice
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from amp_mp import _C
from amp_mp.dtypes import LOW_PRECISION
from amp_mp.optim.base import FusedOptimizer, stepper_of
from amp_mp.optim.step import ledger
from amp_mp.optim.step.replaced import ReplacedCheck
from amp_mp.param_groups import params_in
from amp_mp.sharding import gradients, reduction
from amp_mp.wrappers.larc import without_larc
from amp_mp.wrappers.masters import Masters


class Carrier:
    """Unscales an optimizer's gradients where they are, in their own dtype.

        with carrier.backward(scale):
            (loss * scale).backward()
            carrier.collect(scale)

    carried: the scale of the gradients since a backward pass that did not collect them; None if
    they are true. collected: whether `collect` was called since the last step.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self.carried: float | None = None
        self.collected = False
        self._noted = False  # whether the last backward pass has left gradients

    def params(self) -> list[Tensor]:
        """The model's parameters that the optimizer updates."""
        return params_in(self.optimizer.param_groups)

    @contextmanager
    def backward(self, scale: float, delays: bool = False) -> Iterator[None]:
        """A block for a backward pass at this scale, and for `collect` unless it is delayed.

        True gradients of earlier losses are set aside and added again at the end. If `delays`,
        they are scaled instead, and follow where the next loss has another scale.
        """
        own = self._own_params()
        if delays or self.carried is not None:
            gradients.multiply_gradients(self.params(), scale / (self.carried or 1.0))
            self.carried = scale
            yield
        else:
            with gradients.set_aside(own):
                yield
        self._noted = ledger.note(own)

    @torch.no_grad()
    def collect(self, scale: float) -> None:
        """Divides the gradients by the scale; each once, also where optimizers share it."""
        params = self._own_params()
        true = ledger.kept(params) if self.carried is None else ()
        if scaled := [param for param in params if param not in true]:
            self._unscale(scaled, scale)
        self.carried, self.collected = None, True
        ledger.note(params)

    def _own_params(self) -> list[Tensor]:
        """The parameters without masters in param_groups."""
        return self.params()

    def _unscale(self, params: list[Tensor], scale: float) -> None:
        gradients.multiply_gradients(params, 1.0 / scale)

    def foreign(self) -> list[Tensor]:
        """The low-precision parameters with new gradients other than 0 since the last `collect`."""
        if self.collected or self.carried is not None:
            return []
        low = [p for p in self.params() if p.requires_grad and p.dtype in LOW_PRECISION]
        return ledger.changed(low)

    def clip(self, max_norm: float, norm_type: float) -> float:
        """Clips the true gradients by their norm over all parameters and returns the norm."""
        return reduction.clip_gradients(self.optimizer.param_groups, max_norm, norm_type)

    def step(self, *closure: Any) -> Any:
        """The optimizer's step."""
        return self.optimizer.step(*closure)

    def check(self) -> None:
        """Raises RuntimeError if gradients other than 0 carry a scale still."""
        if self.carried not in (None, 1.0) and ledger.nonzero(self.params()):
            raise RuntimeError(
                f"step: gradients carry the loss scale {self.carried} since "
                "scale_loss(delay_unscale=True) or backward(loss, update_master_grads=False); the "
                "last loss before a step needs delay_unscale=False, or update_master_grads()"
            )

    def before_step(self) -> None:
        """What a step needs beside gradients: nothing, where the optimizer updates the model."""

    def after_step(self) -> None:
        """The next step needs a `collect` of its own."""
        self.collected = False

    def zero_grad(self, drop: bool) -> None:
        """Sets the gradients to 0, or to None with `drop`."""
        self.carried = None
        for param in {*self.params(), *params_in(self.optimizer.param_groups)}:
            if param.grad is not None:
                param.grad = None if drop else param.grad.detach().zero_()


class InFloat32(Carrier):
    """Unscales low-precision gradients into float32 ones, which an optimizer of amp_mp reads.

    In float16 a division would lose what the scale has kept from vanishing. They take 4 bytes per
    parameter. torch's grad_dtype is None from then on: `.grad` may have any dtype.
    """

    optimizer: FusedOptimizer

    def __init__(self, optimizer: FusedOptimizer) -> None:
        super().__init__(optimizer)
        self._inputs = _C.StepInputs()

    def _unscale(self, params: list[Tensor], scale: float) -> None:
        if scale == 1.0:
            return
        given = [p for p in params if p.grad is not None and p.grad.dtype in LOW_PRECISION]
        low = dict.fromkeys(given)
        gradients.copy_gradients([(param, param) for param in low], 1.0 / scale)
        super()._unscale([param for param in params if param not in low], scale)

    def clip(self, max_norm: float, norm_type: float) -> float:
        """Leaves clipping by the 2-norm to the next step, which rounds nothing to low precision."""
        if norm_type != 2:
            return super().clip(max_norm, norm_type)
        limits = max_norm, self._inputs.max_norm, self.optimizer.max_grad_norm
        self._inputs.max_norm = min(limit for limit in limits if limit is not None)
        self._inputs.measured = stepper_of(self.optimizer).measure()
        totals = self._inputs.measured.totals().values()
        found = [gradients.Statistics(*total.tolist()) for total in totals]
        if any(total.non_finite for total in found):  # the sum has finite elements alone
            return math.inf
        return math.sqrt(sum(total.sum_squares for total in found))

    def step(self, *closure: Any) -> Any:
        """The optimizer's step, which clips as `clip` was told."""
        try:
            return stepper_of(self.optimizer).step_with(self._inputs, *closure)
        finally:
            self._inputs = _C.StepInputs()


class InMasters(Carrier):
    """Unscales low-precision gradients into those of the masters in param_groups.

    The model's keep the scale of the last loss. Those of other parameters are unscaled in place.
    """

    def __init__(self, masters: Masters) -> None:
        super().__init__(masters.optimizer)
        self.masters = masters
        self._replaced = ReplacedCheck()
        # By master, while the model has a later loss's gradients: the parameter, what the loss
        # before has left of it, and the true gradient of all losses.
        self._earlier: dict[Tensor, tuple[Tensor, Tensor | None, Tensor]] = {}

    def params(self) -> list[Tensor]:
        """The model's parameters."""
        return self.masters.model_params(self.optimizer.param_groups)

    def _own_params(self) -> list[Tensor]:
        return list(chain(*self.masters.fp32_from_fp32_groups))

    @contextmanager
    def backward(self, scale: float, delays: bool = False) -> Iterator[None]:
        """As Carrier's; afterwards the model has this loss's gradients, masters those of all."""
        self.masters.refresh()
        pairs = self.masters.pairs()
        if not self._noted or ledger.are_gone(self.params()):
            self._forget(pairs)
        elif self.carried is None:
            self._set_aside(pairs)
        try:
            with super().backward(scale, delays):
                yield
        except BaseException:
            for master, (param, grad, true) in self._earlier.items():
                param.grad, master.grad = grad, true
            self._earlier = {}
            raise
        self._noted = ledger.note([param for param, _ in pairs]) or self._noted

    def _forget(self, pairs: list[tuple[Tensor, Tensor]]) -> None:
        """Drops the masters' gradients: a script has cleared the model's."""
        self.carried, self._noted, self._earlier = None, False, {}
        for _, master in pairs:
            master.grad = None

    def _set_aside(self, pairs: list[tuple[Tensor, Tensor]]) -> None:
        """Makes room in model and masters for the gradients of the next loss."""
        for param, master in pairs:
            if master.grad is not None:
                self._earlier[master] = (param, param.grad, master.grad)
            param.grad = master.grad = None

    @torch.no_grad()
    def collect(self, scale: float) -> None:
        """Copies the model's gradients, divided by the scale, to the masters."""
        pairs = self.masters.pairs()
        low = [param for param, _ in pairs]
        if self._replaced.seen != ReplacedCheck.assignments:
            self._replaced.check_assigned(self.masters.model_infos())
        self._replaced.check_gradients(self.masters.model_infos())
        only = [(param, master) for param, master in pairs if master not in self._earlier]
        gradients.copy_gradients(only, 1.0 / scale)
        # One at a time: two float32 gradients of every parameter would take much memory.
        for master, (param, grad, true) in self._earlier.items():
            gradients.copy_gradients([(param, master)], 1.0 / scale)
            master.grad = true if master.grad is None else true.add_(master.grad)
            if param.grad is None:
                param.grad = grad
        self._earlier = {}
        ledger.note(low)
        super().collect(scale)

    def foreign(self) -> list[Tensor]:
        """As Carrier's, and of parameters whose masters have no gradient."""
        if not self.collected or self.carried is not None:
            return super().foreign()
        return ledger.changed(p for p, m in self.masters.pairs() if m.grad is None)

    def before_step(self) -> None:
        """The masters follow what was written into the model."""
        self.masters.follow(self.masters.pairs())

    def after_step(self) -> None:
        """Rounds the masters into the model."""
        super().after_step()
        self.masters.to_model()

    def zero_grad(self, drop: bool) -> None:
        """As Carrier's, of the model and of the masters."""
        super().zero_grad(drop)
        self._noted, self._earlier = False, {}
        if self.masters.stale:
            self.masters.to_model()

    def drop(self) -> None:
        """Sets the gradients of masters and their parameters to None."""
        pairs = self.masters.pairs()
        self._forget(pairs)
        for param, _ in pairs:
            param.grad = None


def carrier_for(optimizer: Optimizer) -> Carrier:
    """The carrier of an optimizer without masters in its param_groups."""
    inner = without_larc(optimizer)
    return InFloat32(inner) if isinstance(inner, FusedOptimizer) else Carrier(inner)


def model_groups(carriers: Iterable[Carrier]) -> list[dict[str, Any]]:
    """The param_groups of their optimizers with the model's parameters, each parameter once."""
    seen: set[Tensor] = set()
    found = []
    for carrier in carriers:
        params = iter(carrier.params())
        for group in carrier.optimizer.param_groups:
            own = [p for p in islice(params, len(group["params"])) if p not in seen]
            seen.update(own)
            found.append({**group, "params": list(dict.fromkeys(own))})
    return found
