"""What initialize leaves on models and optimizers, and for each loss: hooks, masters, scales."""

from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import Optimizer

from amp_mp import _C
from amp_mp.apex.fp16_utils import tofp16
from amp_mp.dtypes import LOW_PRECISION
from amp_mp.messages import say
from amp_mp.model.convert import have_masters
from amp_mp.model.kept_modules import NotScriptable
from amp_mp.model.selection import named_tensors
from amp_mp.nested import map_tensors
from amp_mp.scaling.policies import Backoff, ScalePolicy
from amp_mp.wrappers.carriers import Carrier, InMasters, carrier_for
from amp_mp.wrappers.larc import without_larc
from amp_mp.wrappers.masters import Masters
from amp_mp.wrappers.scale_loss import ScaledLosses, SkippedSteps

skips = SkippedSteps()


class _Cast(NotScriptable, partial[Any]):
    """A hook that casts what a model is given or returns."""


def cast_forward(model: nn.Module, dtype: torch.dtype | None, out: torch.dtype | None) -> None:
    """Casts what the model is given to `dtype`, and what it returns to `out`; None does not.

    Hooks, so that copies and pickles of the model cast as it does.
    """
    if dtype is not None:
        model.register_forward_pre_hook(_Cast(_cast_inputs, tofp16(dtype)), with_kwargs=True)
    if out is not None:
        model.register_forward_hook(_Cast(_cast_outputs, tofp16(out)))


def _cast_inputs(cast: nn.Module, _: nn.Module, args: Any, kwargs: Any) -> Any:
    return map_tensors(cast, (args, kwargs))


def _cast_outputs(cast: nn.Module, _module: nn.Module, _args: Any, output: Any) -> Any:
    return map_tensors(cast, output, results=True)


def save_float32(model: nn.Module) -> None:
    """Makes state_dict of the model and its parts float32, as Apex's."""
    for module in model.modules():
        if _to_float32 not in module._state_dict_hooks.values():
            hooks: Any = module  # whose methods torch has not typed
            hooks.register_state_dict_post_hook(_to_float32)


@torch.no_grad()
def _to_float32(module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """Masters, or the values that were rounded, in place of low precision; all are copies."""
    for name, tensor in named_tensors(module, recurse=False).items():
        if tensor.dtype not in LOW_PRECISION or prefix + name not in state_dict:
            continue
        state_dict[prefix + name] = _C.float32_of(tensor, stepping=True)


class LossScaler(ScaledLosses):
    """A loss of `num_losses`, with its scale."""

    def __init__(self, loss_id: int, policy: ScalePolicy, device_type: str, prints: bool) -> None:
        super().__init__(policy, device_type, skips)
        self.device_type = device_type
        self._loss_id, self._prints = loss_id, prints

    def loss_scale(self) -> float:
        """The factor of the next loss."""
        return self.loss_scaler.scale

    def report_overflow(self, before: float) -> None:
        """Prints Apex's message."""
        if self._prints:
            falls = f"loss scaler {self._loss_id} reducing loss scale to {self.loss_scale()}"
            say(f"Gradient overflow.  Skipping step, {falls}")

    def state_dict(self) -> dict[str, Any]:
        """The scale, and how many steps since it changed had no overflow."""
        state = self.loss_scaler.state_dict()
        unskipped = 0
        if isinstance(self.loss_scaler, Backoff):
            since = state["iteration"] - 1 - state["last_overflow"]
            unskipped = int(since % state["step_window"])
        return {"loss_scale": self.loss_scale(), "unskipped": unskipped}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continues from a snapshot; ValueError: a scale that this policy cannot have."""
        state = {**self.loss_scaler.state_dict(), "scale": state_dict["loss_scale"]}
        if isinstance(self.loss_scaler, Backoff):
            state |= {"iteration": float(state_dict["unskipped"]), "last_overflow": -1.0}
        self.give_up()
        self.loss_scaler.load_state_dict(state)


class Stash:
    """What is known of an optimizer that initialize was given; Apex's _amp_stash.

    Its masters, if it gets any, are made at the first loss or when they are asked for: until then
    the model's weights may still be loaded, or sent by DistributedDataParallel.
    """

    def __init__(self, optimizer: Optimizer, with_masters: bool, takes_closure: bool) -> None:
        self._carrier: Carrier | None = None if with_masters else carrier_for(optimizer)
        self._optimizer = optimizer
        self._takes_closure = takes_closure
        optimizer.register_step_pre_hook(self._before_step)
        optimizer.register_step_post_hook(self._after_step)
        if with_masters:
            have_masters.add(optimizer)
            optimizer.register_load_state_dict_pre_hook(self.make_masters)
            self._zero_grad = optimizer.zero_grad
            optimizer.zero_grad = self.zero_grad  # type: ignore[method-assign]

    def carrier(self) -> Carrier:
        """What unscales the gradients."""
        if self._carrier is None:
            self._carrier = InMasters(Masters(self._optimizer))
        return self._carrier

    def make_masters(self, *_: Any) -> None:
        """Gives masters to low-precision parameters that have none yet."""
        if isinstance(carrier := self.carrier(), InMasters):
            carrier.masters.refresh()

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """The optimizer's, and gradients of low-precision parameters and of masters are None."""
        self._zero_grad(*args, **kwargs)
        if isinstance(self._carrier, InMasters):
            for tensor in chain(*self._carrier.masters.pairs()):
                tensor.grad = None

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self.make_masters()
        carrier = self.carrier()
        if any(map(callable, (*args[1:], *kwargs.values()))) and not self._takes_closure:
            raise RuntimeError(
                "step: a closure's losses cannot be scaled from here, and there are masters or a "
                "loss scale; as in Apex, leave it out, or use amp_mp.FP16_Optimizer, which takes it"
            )
        carrier.check()
        if isinstance(carrier, InMasters) and (foreign := carrier.foreign()):
            raise RuntimeError(
                f"step: {carrier.masters.label_of(foreign[0])} has a gradient that did not come "
                "through amp.scale_loss, so that its master would not be updated; call backward "
                "inside of `with amp.scale_loss(loss, optimizer) as scaled_loss:`"
            )
        carrier.before_step()

    def _after_step(self, *_: Any) -> None:
        carrier = self.carrier()
        carrier.after_step()
        if isinstance(carrier, InMasters):
            for pair in carrier.masters.pairs():
                pair[1].grad = None  # which model.zero_grad() would leave


def stash_of(optimizer: Any) -> Stash | None:
    """What initialize has left on an optimizer, or on the one inside of a LARC."""
    found: Stash | None = getattr(without_larc(optimizer), "_amp_stash", None)
    return found
