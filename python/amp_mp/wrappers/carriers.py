"""Where the true gradients of scaled losses are: three kinds of Carrier."""

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain, islice
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from amp_mp import _C
from amp_mp.dtypes import LOW_PRECISION
from amp_mp.optim.base import FusedOptimizer, stepper_of
from amp_mp.optim.state.replaced import ReplacedCheck
from amp_mp.param_groups import params_in
from amp_mp.sharding import gradients, reduction
from amp_mp.sharding.shards import local_of
from amp_mp.wrappers import ledger
from amp_mp.wrappers.larc import without_larc
from amp_mp.wrappers.masters import Masters

Pairs = list[tuple[Tensor, Tensor]]


class Earlier(NamedTuple):
    """What the losses before the present one have left of a parameter."""

    param: Tensor
    grad: Tensor | None  # the parameter's, where a master has the true one
    true: Tensor


class Carrier:
    """Unscales an optimizer's gradients where they are, in their own dtype.

        with scaled_backward([carrier], scale):
            (loss * scale).backward()
            collect([carrier], scale)

    `_C.gradient_scales` knows the scale of each gradient that is not collected. collected: whether
    `collect` was called since the last step.
    """

    turn = 1  # in `collect`: masters copy gradients before others change them

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self.collected = False
        self.inside: Pairs | None = None  # the pairs of the scaled_backward under way
        self._earlier: dict[Tensor, Earlier] = {}  # by the tensor that gets the true gradient
        # What the present block has found: parameter, its gradient, target, its gradient.
        self._found: list[tuple[Tensor, Tensor | None, Tensor, Tensor | None]] = []

    def pairs(self) -> Pairs:
        """The model's parameters, each with the tensor that gets its true gradient."""
        return self._find_pairs() if self.inside is None else self.inside

    def _find_pairs(self) -> Pairs:
        return [(param, param) for param in params_in(self.optimizer.param_groups)]

    def params(self) -> list[Tensor]:
        """The model's parameters that the optimizer updates."""
        return [param for param, _ in self.pairs()]

    def carried(self) -> float | None:
        """The scale of gradients that are not collected yet; None if all are."""
        scales = _C.gradient_scales(self.params()).values()
        return next((scale for scale in scales if scale is not None), None)

    def settled(self) -> list[Tensor]:
        """The parameters whose gradients were collected."""
        scales = _C.gradient_scales(self.params())
        return [param for param, scale in scales.items() if scale is None]

    # Around a backward pass.

    def drop_cleared(self) -> None:
        """Drops true gradients of parameters whose own a script has cleared since."""
        if not self._earlier:
            return
        there = ledger.present([each.param for each in self._earlier.values()])
        self._earlier = {t: each for t, each in self._earlier.items() if each.param in there}

    def set_aside(self, delays: bool) -> None:
        """Makes room for the gradients of a loss; those of delayed losses stay, to be added to.

        delays: whether this loss is delayed, too. True gradients in the parameter's dtype then stay
        as well, at a scale of 1.
        """
        pairs = self.pairs()
        known = _C.gradient_scales([param for param, _ in pairs])
        self._found = []
        for param, target in pairs:
            grad, true = param.grad, target.grad
            if known.get(param) is not None:
                continue
            if delays and true is not None and target is param and true.dtype == param.dtype:
                _C.note_gradients([param], 1.0)
                continue
            self._found.append((param, grad, target, true))
            if true is not None:
                # A view is of a bucket, whose memory DistributedDataParallel uses again.
                own = true if true._base is None else true.clone()
                self._earlier[target] = Earlier(param, None if target is param else grad, own)
                param.grad = target.grad = None
            elif param in known:
                param.grad = None

    def restore(self) -> None:
        """Takes back the last `set_aside`, after an exception."""
        for param, grad, target, true in self._found:
            self._earlier.pop(target, None)
            param.grad = grad
            target.grad = true

    def put_back(self) -> None:
        """Puts back what is still set aside of parameters that the loss has not reached."""
        for target, (param, grad, true) in [*self._earlier.items()]:
            if param.grad is None:
                param.grad = grad
                target.grad = true
                del self._earlier[target]

    def take(self, scale: float, settled: set[Tensor]) -> Pairs:
        """Divides the gradients by the scale; returns the pairs of which this is the first loss.

        settled: parameters whose gradients are divided; this adds those divided in place.
        """
        new = [(param, target) for param, target in self.pairs() if param not in settled]
        own = [param for param, target in new if target is param]
        settled.update(own)
        divided = dict.fromkeys(self._divided(own, scale))
        copied = [pair for pair in new if pair[1] not in divided]
        first = [pair for pair in copied if pair[1] not in self._earlier]
        gradients.multiply_gradients(list(divided), 1.0 / scale)
        gradients.copy_gradients(first, 1.0 / scale)
        # One at a time: two float32 gradients of every parameter would take much memory.
        for param, target in copied if self._earlier else ():
            if target in self._earlier:
                gradients.copy_gradients([(param, target)], 1.0 / scale)
                self._add_earlier(target)
        for target in [*self._earlier]:
            self._add_earlier(target)
        self.collected = True
        return first

    def _divided(self, params: list[Tensor], scale: float) -> list[Tensor]:
        """Those whose gradients stay where they are, in their dtype."""
        return params

    def _add_earlier(self, target: Tensor) -> None:
        param, grad, true = self._earlier.pop(target)
        if (new := target.grad) is None:
            target.grad = true
        else:
            _C.used_on_current_stream([local_of(true)])
            is_dense = true.is_sparse and not new.is_sparse  # torch adds a sparse one to it only
            target.grad = new.add_(true) if is_dense else true.add_(new)
        if param.grad is None:
            param.grad = grad

    # Around a step.

    def check(self) -> None:
        """Raises RuntimeError if a gradient other than 0 is not collected."""
        pairs = self.pairs()
        scales = _C.gradient_scales([param for param, _ in pairs])
        # A scale of 1 matters to masters only, which have not got the gradient yet.
        waiting = [p for p, t in pairs if (s := scales.get(p)) and (s != 1.0 or t is not p)]
        if waiting and ledger.nonzero(waiting):
            raise RuntimeError(
                f"step: gradients carry the loss scale {scales[waiting[0]]} since "
                "scale_loss(delay_unscale=True) or backward(loss, update_master_grads=False); the "
                "last loss before a step needs delay_unscale=False, or update_master_grads()"
            )

    def foreign(self) -> list[Tensor]:
        """The low-precision parameters with new gradients other than 0 since the last step."""
        if self.collected:
            return []
        low = [p for p in self.params() if p.requires_grad and p.dtype in LOW_PRECISION]
        return ledger.changed(low)

    def before_step(self) -> None:
        """What a step needs beside gradients: nothing, where the optimizer updates the model."""

    def step(self, *closure: Any) -> Any:
        """The optimizer's step."""
        return self.optimizer.step(*closure)

    def after_step(self) -> None:
        """The next step needs gradients of its own."""
        self.collected = False

    def clip(self, max_norm: float, norm_type: float) -> float:
        """Clips the true gradients by their norm over all parameters and returns the norm."""
        return reduction.clip_gradients(self.optimizer.param_groups, max_norm, norm_type)

    def zero_grad(self, drop: bool) -> None:
        """Sets the gradients to 0, or to None with `drop`."""
        tensors = list(dict.fromkeys(chain(*self.pairs())))
        for tensor in tensors:
            if tensor.grad is not None:
                tensor.grad = None if drop else tensor.grad.detach().zero_()
        gradients.narrow_zeros(tensors)
        _C.forget_gradients(tensors)
        self._earlier = {}


class InFloat32(Carrier):
    """Unscales low-precision gradients into float32 ones, which an optimizer of amp_mp reads.

    In float16 a division would lose what the scale has kept from vanishing. They take 4 bytes per
    parameter. torch's grad_dtype is None from then on: `.grad` may have any dtype.
    """

    turn = 2  # what an optimizer of torch shares with this one is divided in its own dtype
    optimizer: FusedOptimizer

    def __init__(self, optimizer: FusedOptimizer) -> None:
        super().__init__(optimizer)
        self._inputs = _C.StepInputs()
        self._measured = 0  # how many gradients _inputs.measured is of

    def _divided(self, params: list[Tensor], scale: float) -> list[Tensor]:
        wide = {t for t, each in self._earlier.items() if each.true.dtype == torch.float32}
        # A gradient with a graph of its own (create_graph=True) has to stay the tensor it is.
        given = [p for p in params if p.grad is not None and not p.grad.requires_grad]
        low = {p for p in given if p.grad is not None and p.grad.dtype in LOW_PRECISION}
        return [p for p in params if p not in low or (scale == 1.0 and p not in wide)]

    def take(self, scale: float, settled: set[Tensor]) -> Pairs:
        """As Carrier's; other gradients need another `clip`."""
        self._forget_clipping()
        return super().take(scale, settled)

    def zero_grad(self, drop: bool) -> None:
        """As Carrier's."""
        self._forget_clipping()
        super().zero_grad(drop)

    def _forget_clipping(self) -> None:
        self._inputs.max_norm = self._inputs.measured = None

    def clip(self, max_norm: float, norm_type: float) -> float:
        """Leaves clipping by the 2-norm to the next step, which rounds nothing to low precision."""
        if norm_type != 2:
            return super().clip(max_norm, norm_type)
        limits = max_norm, self._inputs.max_norm, self.optimizer.max_grad_norm
        self._inputs.max_norm = min(limit for limit in limits if limit is not None)
        self._inputs.measured = stepper_of(self.optimizer).measure()
        params = self.params()
        scales = _C.gradient_scales(params)
        _C.note_gradients([param for param in params if scales.get(param) is None])
        self._measured = len(_C.unwritten_gradients(params))
        totals = self._inputs.measured.totals().values()
        found = [gradients.Statistics(*total.tolist()) for total in totals]
        if any(total.non_finite for total in found):  # the sum has finite elements alone
            return math.inf
        return math.sqrt(sum(total.sum_squares for total in found))

    def step(self, *closure: Any) -> Any:
        """The optimizer's step, which clips as `clip` was told."""
        if self._inputs.measured and len(_C.unwritten_gradients(self.params())) != self._measured:
            self._inputs.measured = None  # a script has written gradients since
        try:
            return stepper_of(self.optimizer).step_with(self._inputs, *closure)
        finally:
            self._forget_clipping()


class InMasters(Carrier):
    """Unscales low-precision gradients into those of the masters in param_groups.

    The model's keep the scale of the last loss. float32 parameters' are unscaled in place.
    """

    turn = 0

    def __init__(self, masters: Masters) -> None:
        super().__init__(masters.optimizer)
        self.masters = masters
        self._replaced = ReplacedCheck()

    def _find_pairs(self) -> Pairs:
        """Each parameter with its master, or with itself if it has none."""
        low = self.masters.low
        return [
            (low.get(p, p), p) for group in self.optimizer.param_groups for p in group["params"]
        ]

    def drop_cleared(self) -> None:
        """As Carrier's, and the masters' gradients."""
        super().drop_cleared()
        self.masters.refresh()
        pairs = [(p, m) for p, m in self.pairs() if m is not p and m.grad is not None]
        there = ledger.present([param for param, _ in pairs]) if pairs else set()
        for param, master in pairs:
            if param not in there:
                master.grad = None

    def take(self, scale: float, settled: set[Tensor]) -> Pairs:
        """As Carrier's."""
        if self._replaced.seen != ReplacedCheck.assignments:
            self._replaced.check_assigned(self.masters.model_infos())
        self._replaced.check_gradients(self.masters.model_infos())
        return super().take(scale, settled)

    def foreign(self) -> list[Tensor]:
        """As Carrier's; and parameters whose masters have no gradient."""
        if not self.collected:
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
        if self.masters.stale:
            self.masters.to_model()


def carrier_for(optimizer: Optimizer) -> Carrier:
    """The carrier of an optimizer without masters in its param_groups."""
    inner = without_larc(optimizer)
    return InFloat32(inner) if isinstance(inner, FusedOptimizer) else Carrier(inner)


@contextmanager
def scaled_backward(
    carriers: Sequence[Carrier], scale: float, delays: bool = False
) -> Iterator[None]:
    """A block for a backward pass at this scale, and for `collect` unless it is delayed.

    True gradients of earlier losses are set aside, and `collect` adds them. Gradients of delayed
    losses stay where they are, and follow where this loss has another scale.
    """
    for each in carriers:
        each.drop_cleared()
        each.inside = each.pairs()
    for each in carriers:
        each.set_aside(delays)
    params = _params(carriers)
    factors: dict[float, list[Tensor]] = {}
    for param, before in _C.gradient_scales(params).items():
        if before is not None:
            factors.setdefault(scale / before, []).append(param)
    for factor, own in factors.items():
        gradients.multiply_gradients(own, factor)
        _C.note_gradients(own, scale)
    try:
        yield
    except BaseException:
        for each in reversed(carriers):  # the first has found what parameters had
            each.restore()
        raise
    finally:
        for each in carriers:
            each.inside = None
    if delays:
        _C.note_gradients(params, scale)
    for each in carriers:
        each.put_back()


@torch.no_grad()
def collect(carriers: Iterable[Carrier], scale: float, settled: Iterable[Tensor] = ()) -> Pairs:
    """Divides gradients by the scale; each once, also where optimizers share it.

    settled: parameters whose gradients are divided already. Returns the parameters and masters for
    which this is the first loss.
    """
    done, first = set(settled), []
    for each in sorted(carriers, key=attrgetter("turn")):
        first += each.take(scale, done)
    _C.note_gradients(_params(carriers))
    return first


def _params(carriers: Iterable[Carrier]) -> list[Tensor]:
    """The model's parameters, each once."""
    return [*dict.fromkeys([param for each in carriers for param, _ in each.pairs()])]


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


def refuse_release(optimizer: Any, function: str) -> None:
    """Raises ValueError for an optimizer whose gradients are stepped and freed during backward."""
    if isinstance(optimizer, FusedOptimizer) and stepper_of(optimizer).releases:
        raise ValueError(
            f"{function}: an optimizer attached with release=True steps during backward, with "
            "gradients that are still scaled; attach it with scaler=amp_mp.GradScaler()"
        )
