"""What FP16_Optimizer has beside its steps: the loss scale, the wrapped optimizer, snapshots."""

from collections import OrderedDict
from typing import Any

import torch
from torch import Tensor

from amp_mp.apex.masters import Masters
from amp_mp.scaling.dynamic import Backoff, from_state_dict, make_policy
from amp_mp.scaling.policies import NO_CEILING, ScalePolicy, Static, check_scale

# torch.optim.Optimizer's attributes for hooks.
HOOKS = [
    f"_optimizer_{event}_{when}_hooks"
    for event in ("step", "state_dict", "load_state_dict")
    for when in ("pre", "post")
]


class LossScale:
    """A policy, `loss_scaler`, whose scale can be read and set as `loss_scale`."""

    def __init__(self, policy: ScalePolicy) -> None:
        self.loss_scaler = policy

    @property
    def loss_scale(self) -> float:
        """The factor of the next loss. Can be set within the policy's bounds (ValueError)."""
        return self.loss_scaler.scale

    @loss_scale.setter
    def loss_scale(self, value: float) -> None:
        self.loss_scaler.scale = value


def apex_policy(
    static: float,
    dynamic: bool,
    arguments: dict[str, Any] | None,
    loss_scale: float | str | ScalePolicy | None,
) -> ScalePolicy:
    """The policy that the scale arguments of FP16_Optimizer describe."""
    given = dict(arguments or {})
    start = check_scale(given.pop("init_scale", 2.0**32), "dynamic_loss_args['init_scale']")
    factor, window = given.pop("scale_factor", 2.0), given.pop("scale_window", 1000)
    if given:
        raise ValueError(
            f"dynamic_loss_args: unknown {sorted(given)}; "
            "known are init_scale, scale_factor, scale_window"
        )
    try:
        preset = Backoff(min(1.0, start), NO_CEILING, factor, window, init_scale=start)
    except ValueError as error:  # it names Backoff's arguments, not Apex's
        raise ValueError(f"dynamic_loss_args: {error}") from None
    if loss_scale is not None:
        return make_policy(loss_scale, preset)
    return preset if dynamic else make_policy(check_scale(static, "static_loss_scale"))


class WrappedOptimizer(LossScale, torch.optim.Optimizer):
    """An optimizer with masters and a loss scale; `checks`: a static scale is checked too.

    A torch.optim.Optimizer, for schedulers and frameworks that ask: its param_groups, state and
    defaults are those of the wrapped one.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, masters: Masters, policy: ScalePolicy, checks: bool
    ) -> None:
        LossScale.__init__(self, policy)
        for hooks in HOOKS:  # all that it has of its own as a torch.optim.Optimizer
            setattr(self, hooks, OrderedDict())
        self.optimizer = optimizer
        self.dynamic_loss_scale = not isinstance(policy, Static)
        self.overflow = False
        self.first_closure_call_this_step = True
        self._masters = masters
        self._checks = self.dynamic_loss_scale or checks

    def _patch_step_function(self) -> None:
        """Leaves torch's hooks of all steps to the wrapped optimizer's, lest they run twice."""

    @property
    def fp16_groups(self) -> list[list[Tensor]]:
        """The model's low-precision parameters, a list a group."""
        return self._masters.fp16_groups

    @property
    def fp32_from_fp16_groups(self) -> list[list[Tensor]]:
        """Their masters, in the same order."""
        return self._masters.fp32_from_fp16_groups

    @property
    def fp32_from_fp32_groups(self) -> list[list[Tensor]]:
        """The model's float32 parameters, their own masters."""
        return self._masters.fp32_from_fp32_groups

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The wrapped optimizer's, holding masters (the model's parameters in amp_mp's own)."""
        return self.optimizer.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        """The wrapped optimizer's, keyed by what is in its param_groups."""
        return self.optimizer.state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        """The wrapped optimizer's."""
        return self.optimizer.defaults

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's; low-precision parameters get masters."""
        self.optimizer.add_param_group(param_group)
        try:
            self._masters.refresh()
        except TypeError:
            self.optimizer.param_groups.pop()
            raise

    def state_dict(self) -> dict[str, Any]:
        """A snapshot in plain containers and tensors; the masters are in it, bit for bit."""
        for before in self._optimizer_state_dict_pre_hooks.values():
            before(self)
        inner = _snapshot(self.optimizer.state_dict())
        found: dict[str, Any] = {
            "loss_scaler": self.loss_scaler.state_dict(),
            "dynamic_loss_scale": self.dynamic_loss_scale,
            "overflow": self.overflow,
            "first_closure_call_this_step": self.first_closure_call_this_step,
            "optimizer_state_dict": inner,
            "fp32_from_fp16": self._masters.snapshot(inner),
        }
        for after in self._optimizer_state_dict_post_hooks.values():
            changed = after(self, found)
            found = found if changed is None else changed
        return found

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continues from a snapshot, also with its kind of loss scale; load the model separately.

        Raises ValueError, before anything is changed, where groups, shapes or keys do not match.
        """
        state_dict = state_dict.copy()
        for before in self._optimizer_load_state_dict_pre_hooks.values():
            changed = before(self, state_dict)
            state_dict = state_dict if changed is None else changed
        needed = {"loss_scaler", "overflow", "first_closure_call_this_step", "fp32_from_fp16"}
        missing = sorted((needed | {"optimizer_state_dict"}) - state_dict.keys())
        if missing:
            raise ValueError(f"state_dict: {missing} missing; nothing was loaded")
        self._masters.check(state_dict["fp32_from_fp16"])
        policy = from_state_dict(state_dict["loss_scaler"])
        self.optimizer.load_state_dict(_snapshot(state_dict["optimizer_state_dict"]))
        if type(policy) is type(self.loss_scaler):
            self.loss_scaler.load_state_dict(state_dict["loss_scaler"])
        else:  # the snapshot's kind counts, as in Apex
            self.loss_scaler = policy
        self.dynamic_loss_scale = not isinstance(policy, Static)
        self._checks = self._checks or self.dynamic_loss_scale
        self.overflow = state_dict["overflow"]
        self.first_closure_call_this_step = state_dict["first_closure_call_this_step"]
        self._masters.load(state_dict["fp32_from_fp16"])
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)

    def __getstate__(self) -> Any:
        # As Apex's. A pickled copy would not belong to its model.
        raise RuntimeError("FP16_Optimizer should be serialized using state_dict().")

    def __setstate__(self, state: Any) -> None:
        raise RuntimeError("FP16_Optimizer should be deserialized using load_state_dict().")


def _snapshot(value: Any) -> Any:
    """A copy in which every tensor is cloned, also inside lists, tuples and dicts."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {k: _snapshot(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_snapshot(v) for v in value)
    return value
