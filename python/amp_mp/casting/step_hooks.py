"""Hooks of every optimizer's step: casts are off while it runs, and on in its closure."""

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim import optimizer as optimizers

from amp_mp import _C
from amp_mp.casting.op_table import DEVICES

_hooks_installed = False
_steps = 0  # of all optimizers since the hooks were installed
_lock = threading.Lock()


class _Arguments(tuple[Any, ...]):
    """A step's positional arguments."""

    switched_off: list[str]  # the device types whose casts are off during the step


def install_step_hooks() -> None:
    """Adds the hooks to every optimizer's step, once per process.

    torch calls no post-hook where a step raises. There the native guard switches the casts on
    again, as soon as the exception leaves the step. It cannot do so inside a TorchDispatchMode,
    which undoes what operators change in the thread's dispatch state.
    """
    global _hooks_installed
    with _lock:
        if not _hooks_installed:
            _C.casting.guard_steps()
            optimizers.register_optimizer_step_pre_hook(_before)
            optimizers.register_optimizer_step_post_hook(_after)
            _hooks_installed = True


def steps_taken() -> int:
    """How many steps all optimizers have taken with the hooks; tells iterations apart."""
    return _steps


def _before(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    on = [device for device in DEVICES if torch.is_autocast_enabled(device)]
    if not on:
        return None
    closure = args[1] if len(args) > 1 else kwargs.get("closure")
    if callable(closure):  # it runs the model's forward pass, which is cast
        closure = _with_casts(closure, on)
        if len(args) > 1:
            args = (args[0], closure, *args[2:])
        else:
            kwargs = {**kwargs, "closure": closure}
    args = _Arguments(args)
    args.switched_off = on
    _switch(on, False)
    return args, kwargs


def _after(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    global _steps
    _steps += 1
    if isinstance(args, _Arguments):
        _switch(args.switched_off, True)
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
