"""Where the true gradients of scaled losses are: three kinds of Carrier."""

import math
from collections.abc import Iterable, Sequence
from itertools import chain, islice
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from amp_mp import _C
from amp_mp.dtypes import LOW_PRECISION
from amp_mp.messages import warn
from amp_mp.optim.base import FusedOptimizer, stepper_of
from amp_mp.optim.state.replaced import ReplacedCheck
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


class Found(NamedTuple):
    """What a block has found of a parameter, and puts back if it fails."""

    param: Tensor
    grad: Tensor | None
    target: Tensor  # which gets the true gradient
    true: Tensor | None  # the target's gradient
    earlier: Earlier | None  # what was set aside already


class Carrier:
    """Unscales an optimizer's gradients where they are, in their own dtype.

        with scaled_backward([carrier], scale):
            (loss * scale).backward()
            collect([carrier], scale)

    `_C.gradient_scales` knows the scale of each gradient that is not collected. collected: whether
    `collect` was called since the last step.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self.collected = False
        # What is set aside, by the tensor that gets the true gradient.
        self.earlier: dict[Tensor, Earlier] = {}
        self._zeros = set[Tensor]()  # see ledger.present
        self._shown: dict[Tensor, Tensor] = {}  # by `show_zeros`

    def pairs(self) -> Pairs:
        """The model's parameters, each with the tensor that gets its true gradient."""
        return [(p, p) for group in self.optimizer.param_groups for p in group["params"]]

    def params(self) -> list[Tensor]:
        """The model's parameters that the optimizer updates."""
        return [param for param, _ in self.pairs()]

    # Around a backward pass.

    def drop_cleared(self, masters: Sequence[tuple[Tensor, Tensor]] = ()) -> None:
        """Drops true gradients of parameters whose own a script has cleared since.

        masters: pairs whose true gradient is the master's.
        """
        if not self.earlier and not masters:
            return
        there = ledger.present(self.params(), self._zeros)
        for param in _C.unwritten_gradients(self._shown):
            if param.grad is self._shown[param]:
                param.grad = None
        self._shown = {}
        self.earlier = {t: each for t, each in self.earlier.items() if each.param in there}
        for param, master in masters:
            if param not in there:
                master.grad = None

    def set_aside(
        self, pairs: Pairs, scales: dict[Tensor, float | None], delays: bool
    ) -> list[Found]:
        """Makes room for the gradients of a loss; those of delayed losses stay, to be added to.

        scales: of the parameters' gradients, as `_C.gradient_scales` has them. delays: whether this
        loss is delayed, too. True gradients in the parameter's dtype then stay as well, and this
        gives them a scale of 1.
        """
        found = []
        for param, target in pairs:
            grad, true = param.grad, target.grad
            if scales.get(param) is not None:
                continue
            if delays and true is not None and target is param and true.dtype == param.dtype:
                scales[param] = 1.0
                continue
            earlier = self.earlier.get(target)
            found.append(Found(param, grad, target, true, earlier))
            if true is not None:
                own = kept(true)
                own = own if earlier is None else added(earlier.true, own)
                self.earlier[target] = Earlier(param, None if target is param else grad, own)
                param.grad = target.grad = None
            elif param in scales:
                param.grad = None
        return found

    def restore(self, found: list[Found]) -> None:
        """Takes back a `set_aside` and what came after it, where a block has failed."""
        self._shown = {}
        for param, grad, target, true, earlier in found:
            self.earlier.pop(target, None)
            if earlier is not None:
                self.earlier[target] = earlier
            param.grad = grad
            target.grad = true

    def show_zeros(self) -> None:
        """Gives parameters that the loss has not reached, and of which something is aside, a 0.

        A script may clear it, and a loss that goes backward in parts adds the rest to it.
        """
        for param, _, true in self.earlier.values():
            if param.grad is None:
                param.grad = self._shown[param] = torch.zeros_like(true, dtype=param.dtype)
        self._zeros = ledger.zeros(self.params())

    def put_back(self) -> None:
        """Puts back what is still set aside of parameters that the loss has not reached."""
        if not self.earlier:
            return
        for target, (param, grad, true) in [*self.earlier.items()]:
            if param.grad is None:
                param.grad = grad
                target.grad = true
                del self.earlier[target]
        self._zeros = ledger.zeros(self.params())  # delayed losses add to them

    def take(self, pairs: Pairs, scale: float, divided_before: set[Tensor]) -> Pairs:
        """Divides the gradients by the scale and adds what is set aside.

        pairs: this carrier's. divided_before: parameters whose gradients are divided; this call
        adds its own. Returns the pairs of which this is the first loss.
        """
        adds, known = bool(self.earlier), self._zeros & divided_before
        new = [pair for pair in pairs if pair[0] not in divided_before]
        own = [param for param, target in new if target is param]
        divided_before.update(own)
        divided = dict.fromkeys(self._divided(own, scale))
        copied = [pair for pair in new if pair[1] not in divided]
        first = [pair for pair in copied if pair[1] not in self.earlier]
        gradients.unscale_gradients(list(divided), first, 1.0 / scale)
        # One at a time: two float32 gradients of every parameter would take much memory.
        for param, target in copied if self.earlier else ():
            if target in self.earlier:
                gradients.unscale_gradients([], [(param, target)], 1.0 / scale)
                self._add_earlier(target)
        for target in [*self.earlier]:
            self._add_earlier(target)
        # Those of a first loss hide nothing.
        self._zeros = ledger.zeros(self.params()) if adds else known
        self.collected = True
        return first

    def _divided(self, params: list[Tensor], scale: float) -> list[Tensor]:
        """Those whose gradients stay where they are, in their dtype."""
        return params

    def _add_earlier(self, target: Tensor) -> None:
        param, grad, true = self.earlier.pop(target)
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
        """The next step needs gradients of its own, which those are not that this one has read."""
        self.collected = False
        _C.note_gradients(_C.gradient_scales(self.params()))

    def clip(self, max_norm: float, norm_type: float) -> float:
        """Clips the true gradients by their norm over all parameters and returns the norm."""
        return reduction.clip_gradients(self.optimizer.param_groups, max_norm, norm_type)

    def zero_grad(self, drop: bool) -> None:
        """Sets the gradients to 0, or to None with `drop`."""
        tensors = list(chain(*self.pairs()))
        for tensor in tensors:
            if tensor.grad is not None:
                tensor.grad = None if drop else tensor.grad.detach().zero_()
        if not drop:
            gradients.narrow_zeros(tensors)
            _C.forget_gradients(tensors)
        self.earlier = {}


class InFloat32(Carrier):
    """Unscales low-precision gradients into float32 ones, which an optimizer of amp_mp reads.

    In float16 a division would lose what the scale has kept from vanishing. They take 4 bytes per
    parameter. torch's grad_dtype is None from then on: `.grad` may have any dtype.
    """

    optimizer: FusedOptimizer

    def __init__(self, optimizer: FusedOptimizer) -> None:
        super().__init__(optimizer)
        self._inputs = _C.StepInputs()
        self._measured = 0  # how many gradients _inputs.measured is of

    def _divided(self, params: list[Tensor], scale: float) -> list[Tensor]:
        found = []
        for param in params:
            earlier, grad = self.earlier.get(param), param.grad
            is_wide = earlier is not None and earlier.true.dtype == torch.float32
            # A gradient with a graph of its own (create_graph=True) has to stay the tensor it is.
            is_low = grad is not None and grad.dtype in LOW_PRECISION and not grad.requires_grad
            if not is_low or (scale == 1.0 and not is_wide):
                found.append(param)
        return found

    def take(self, pairs: Pairs, scale: float, divided_before: set[Tensor]) -> Pairs:
        """As Carrier's; other gradients need another `clip`."""
        self._forget_clipping()
        return super().take(pairs, scale, divided_before)

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
        # A script may have written gradients since. Of process_groups another process may have
        # those, and all have to measure again.
        differ = any(reduction.named_groups(self.optimizer.param_groups))
        if differ or len(_C.unwritten_gradients(self.params())) != self._measured:
            self._inputs.measured = None
        try:
            return stepper_of(self.optimizer).step_with(self._inputs, *closure)
        finally:
            self._forget_clipping()


class InMasters(Carrier):
    """Unscales low-precision gradients into those of the masters in param_groups.

    The model's keep the scale of the last loss. float32 parameters' are unscaled in place.
    """

    def __init__(self, masters: Masters) -> None:
        super().__init__(masters.optimizer)
        self.masters = masters
        self._replaced = ReplacedCheck()

    def pairs(self) -> Pairs:
        """Each parameter with its master, or with itself if it has none."""
        low = self.masters.low
        return [
            (low.get(p, p), p) for group in self.optimizer.param_groups for p in group["params"]
        ]

    def drop_cleared(self, masters: Sequence[tuple[Tensor, Tensor]] = ()) -> None:
        """As Carrier's, of all masters."""
        if unshown := self.masters.unshown():
            warn(
                f"the master of {self.masters.label_of(unshown[0])} was written, and the loss "
                "comes from the weights before: call what writes masters as a method of "
                "FP16_Optimizer, or zero_grad() before the forward. Models of amp_mp.prepare that "
                "are not compiled follow by themselves"
            )
        self.masters.refresh()
        super().drop_cleared(
            masters or [(p, m) for p, m in self.pairs() if m is not p and m.grad is not None]
        )

    def take(self, pairs: Pairs, scale: float, divided_before: set[Tensor]) -> Pairs:
        """As Carrier's."""
        if self._replaced.seen != ReplacedCheck.assignments:
            self._replaced.check_assigned(self.masters.model_infos())
        if not self._replaced.had_gradient:
            self._replaced.check_gradients(self.params(), self.masters.model_infos)
        return super().take(pairs, scale, divided_before)

    def foreign(self) -> list[Tensor]:
        """As Carrier's; and parameters whose masters have no gradient."""
        if not self.collected:
            return super().foreign()
        low, masters = self.masters.lists()
        without = [p for p, master in zip(low, masters, strict=True) if master.grad is None]
        return ledger.changed(without) if without else []

    def before_step(self) -> None:
        """The masters follow what was written into the model."""
        self.masters.follow()

    def after_step(self) -> None:
        """Rounds the masters into the model."""
        self.collected = False
        self.masters.to_model()

    def zero_grad(self, drop: bool) -> None:
        """As Carrier's, of the model and of the masters."""
        super().zero_grad(drop)
        if self.masters.stale:
            self.masters.to_model()
        self.masters.show()


def carrier_for(optimizer: Optimizer) -> Carrier:
    """The carrier of an optimizer without masters in its param_groups."""
    inner = without_larc(optimizer)
    return InFloat32(inner) if isinstance(inner, FusedOptimizer) else Carrier(inner)


@torch.no_grad()
def collect(
    carriers: Sequence[Carrier], scale: float, divided_before: Iterable[Tensor] = ()
) -> Pairs:
    """Divides gradients by the scale; each once, also where optimizers share it.

    divided_before: parameters whose gradients are divided already. Returns the parameters and
    masters for which this is the first loss.
    """
    done, first = set(divided_before), []
    own = [(each, each.pairs()) for each in carriers]
    # Masters copy gradients before others change them. What an optimizer of torch shares with one
    # of amp_mp is divided in its own dtype, which torch's needs.
    for kind in (InMasters, Carrier, InFloat32):
        for each, pairs in own:
            if type(each) is kind:
                first += each.take(pairs, scale, done)
    _C.note_gradients([param for _, pairs in own for param, _ in pairs])
    return first


def kept(grad: Tensor) -> Tensor:
    """A gradient that a later backward pass leaves as it is."""
    # A view is of a bucket, whose memory DistributedDataParallel uses again.
    return grad if grad._base is None else grad.clone()


def added(a: Tensor, b: Tensor) -> Tensor:
    """A new tensor; torch adds a sparse one to a dense one only. Both may be freed then."""
    _C.used_on_current_stream([local_of(a), local_of(b)])
    return b + a if a.is_sparse and not b.is_sparse else a + b


def params_of(carriers: Iterable[Carrier]) -> list[Tensor]:
    """The model's parameters, each once."""
    return [*dict.fromkeys([param for each in carriers for param, _ in each.pairs()])]


def model_groups(carriers: Iterable[Carrier]) -> list[dict[str, Any]]:
    """The param_groups of their optimizers with the model's parameters, each parameter once."""
    seen: set[Tensor] = set()
    found = []
    for carrier in carriers:
        pairs = iter(carrier.pairs())
        for group in carrier.optimizer.param_groups:
            own = [p for p, _ in islice(pairs, len(group["params"])) if p not in seen]
            seen.update(own)
            found.append({**group, "params": list(dict.fromkeys(own))})
    return found


def refuse_release(optimizer: Any, function: str) -> None:
    """Raises ValueError for an optimizer whose gradients are stepped and freed during backward."""
    if isinstance(optimizer, FusedOptimizer) and stepper_of(optimizer).release:
        raise ValueError(
            f"{function}: an optimizer with attach steps during backward, with "
            "gradients that are still scaled; attach it with scaler=amp_mp.GradScaler()"
        )
