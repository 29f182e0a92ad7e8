"""An optimizer around another one: what FP16_Optimizer and LARC show of the inner optimizer."""

from collections import OrderedDict
from collections.abc import Callable
from functools import wraps
from inspect import ismethod
from operator import attrgetter
from typing import Any

import torch

# torch.optim.Optimizer's attributes for hooks.
HOOKS = [
    f"_optimizer_{event}_{when}_hooks"
    for event in ("step", "state_dict", "load_state_dict")
    for when in ("pre", "post")
]


def shown(path: str) -> Any:
    """A property that shows an attribute of an attribute: "optimizer.state"."""
    return property(attrgetter(path), doc=f"self.{path}")


def _set_loss_scale(owner: Any, value: float) -> None:
    owner.loss_scaler.scale = value


# The factor of the next loss, of whatever has a policy as `loss_scaler`. Can be set within the
# policy's bounds (ValueError).
LOSS_SCALE: Any = property(attrgetter("loss_scaler.scale"), _set_loss_scale)


class OptimizerAround(torch.optim.Optimizer):
    """A torch.optim.Optimizer around another: hooks are its own, all else the inner one's.

    Methods that the inner one alone has, such as SAM's first_step, are passed on.
    """

    param_groups: Any = shown("optimizer.param_groups")
    state: Any = shown("optimizer.state")
    defaults: Any = shown("optimizer.defaults")
    add_param_group: Any = shown("optimizer.add_param_group")
    state_dict: Any = shown("optimizer.state_dict")
    load_state_dict: Any = shown("optimizer.load_state_dict")
    masters: Any = shown("optimizer.masters")
    zero_grad: Any = shown("optimizer.zero_grad")

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        for hooks in HOOKS:
            setattr(self, hooks, OrderedDict())
        self.optimizer = optimizer
        self._patch_step_function()

    def __getattr__(self, name: str) -> Any:
        if hasattr(type(self), name):  # a property of this class: it raises its own error
            return object.__getattribute__(self, name)
        # No "__deepcopy__": and none of the attributes, by which torch and others tell what an
        # optimizer does itself, such as _step_supports_amp_scaling.
        method = getattr(vars(self).get("optimizer"), name, None)
        if name.startswith("__") or not ismethod(method):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

        @wraps(method)
        def passed_on(*args: Any, **kwargs: Any) -> Any:
            return self._pass_on(method, *args, **kwargs)

        return passed_on

    def _pass_on(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Calls a method of the inner optimizer."""
        return method(*args, **kwargs)
