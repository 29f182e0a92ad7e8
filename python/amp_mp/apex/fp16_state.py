"""The part of FP16_Optimizer that passes through to the wrapped optimizer, saves and loads."""

from typing import Any

import torch
from torch import Tensor

from amp_mp.apex.masters import Masters
from amp_mp.scaling.lookup import from_state_dict
from amp_mp.scaling.policies import ScalePolicy, Static


class WrappedOptimizer:
    """An optimizer with masters and a loss scale, without its steps."""

    optimizer: torch.optim.Optimizer
    loss_scaler: ScalePolicy
    dynamic_loss_scale: bool
    overflow: bool
    first_closure_call_this_step: bool
    _masters: Masters
    _checks: bool

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
    def loss_scale(self) -> float:
        """The factor of the next loss; can be set (ValueError if out of range)."""
        return self.loss_scaler.scale

    @loss_scale.setter
    def loss_scale(self, value: float) -> None:
        self.loss_scaler.scale = value

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The wrapped optimizer's, holding masters (the model's parameters in amp_mp's own)."""
        return self.optimizer.param_groups

    @property
    def state(self) -> Any:
        """The wrapped optimizer's, keyed by masters."""
        return self.optimizer.state

    @property
    def defaults(self) -> dict[str, Any]:
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
        inner = snapshot(self.optimizer.state_dict())
        return {
            "loss_scaler": self.loss_scaler.state_dict(),
            "dynamic_loss_scale": self.dynamic_loss_scale,
            "overflow": self.overflow,
            "first_closure_call_this_step": self.first_closure_call_this_step,
            "optimizer_state_dict": inner,
            "fp32_from_fp16": self._masters.snapshot(inner),
        }

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continues from a snapshot; load the model's own state separately.

        Raises ValueError, before anything is changed, where groups or shapes differ, or something
        is missing. The loss scale becomes the snapshot's, also if it is of another kind.
        """
        needed = {"loss_scaler", "overflow", "optimizer_state_dict", "fp32_from_fp16"}
        missing = sorted((needed | {"first_closure_call_this_step"}) - state_dict.keys())
        if missing:
            raise ValueError(f"state_dict: {missing} missing; nothing was loaded")
        self._masters.check(state_dict["fp32_from_fp16"])
        policy = from_state_dict(state_dict["loss_scaler"])
        self.optimizer.load_state_dict(snapshot(state_dict["optimizer_state_dict"]))
        if type(policy) is type(self.loss_scaler):
            self.loss_scaler.load_state_dict(state_dict["loss_scaler"])
        else:  # the snapshot's kind counts, as in Apex
            self.loss_scaler = policy
        self.dynamic_loss_scale = not isinstance(policy, Static)
        self._checks = self._checks or self.dynamic_loss_scale
        self.overflow = state_dict["overflow"]
        self.first_closure_call_this_step = state_dict["first_closure_call_this_step"]
        self._masters.load(state_dict["fp32_from_fp16"])

    def __getstate__(self) -> Any:
        """Refuses, as Apex's: a pickled copy would not belong to its model."""
        raise RuntimeError("FP16_Optimizer should be serialized using state_dict().")

    def __setstate__(self, state: Any) -> None:
        """Refuses, as Apex's."""
        raise RuntimeError("FP16_Optimizer should be deserialized using load_state_dict().")


def snapshot(value: Any) -> Any:
    """A copy in which every tensor is cloned, also inside lists, tuples and dicts."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {k: snapshot(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(snapshot(v) for v in value)
    return value
