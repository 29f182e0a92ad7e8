"""Hooks around every optimizer's step: casts are off, and stale casts of weights are dropped."""

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from amp_mp import _C
from amp_mp.casting.op_table import DEVICES

_installed = False
_steps = 0
_lock = threading.Lock()


class _Arguments(tuple[Any, ...]):
    """A step's positional arguments, which also hold what autocast was before.

    Post-hooks do not run where a step raises. The tuple lives in the frame that called the step, so
    its end restores the state all the same.
    """

    on: list[str]  # device types to switch on again

    def restore(self) -> None:
        on, self.on = self.on, []
        _switch(on, True)

    def __del__(self) -> None:
        self.restore()


def install_step_hooks() -> None:
    """Once a process: hooks on every optimizer's step."""
    global _installed
    with _lock:
        if not _installed:
            register_optimizer_step_pre_hook(_before)
            register_optimizer_step_post_hook(_after)
            _installed = True


def steps_taken() -> int:
    """Steps of all optimizers since the hooks were installed; tells iterations apart."""
    return _steps


def _before(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    on = [device for device in DEVICES if torch.is_autocast_enabled(device)]
    closure = args[1] if len(args) > 1 else kwargs.get("closure")
    if not on:
        return None
    if callable(closure):  # its forward is the model's: with casts
        wrapped = _with_casts(closure, on)
        args = (args[0], wrapped, *args[2:]) if len(args) > 1 else args
        kwargs = {**kwargs, "closure": wrapped} if "closure" in kwargs else kwargs
    guarded = _Arguments(args)
    guarded.on = on
    _switch(on, False)
    return guarded, kwargs


def _after(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    global _steps
    _steps += 1
    if isinstance(args, _Arguments):
        args.restore()
    torch.clear_autocast_cache()
    _C.casting.optimizer_stepped()


def _switch(devices: list[str], enabled: bool) -> None:
    for device in devices:
        torch.set_autocast_enabled(device, enabled)


def _with_casts(closure: Callable[[], Any], on: list[str]) -> Callable[[], Any]:
    def wrapped() -> Any:
        _switch(on, True)
        try:
            return closure()
        finally:
            _switch(on, False)

    return wrapped
