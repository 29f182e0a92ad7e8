"""Hooks of every optimizer's step: casts are off while it runs, and on in its closure."""

import threading
from collections.abc import Callable, MutableMapping
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.optim import Optimizer
from torch.optim import optimizer as optimizers

from amp_mp import _C
from amp_mp.casting.op_table import DEVICES

_hooks_installed = False
_steps = 0  # of all optimizers since the hooks were installed
# The device types whose casts are off during an optimizer's step.
_switched_off: MutableMapping[Optimizer, list[str]] = WeakKeyDictionary()
_lock = threading.Lock()


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
    _switched_off[optimizer] = on
    if not on:
        return None
    _switch(on, False)
    closure = args[1] if len(args) > 1 else kwargs.get("closure")
    if not callable(closure):
        return None
    closure = _with_casts(closure, on)  # it runs the model's forward pass, which is cast
    if len(args) > 1:
        return (args[0], closure, *args[2:]), kwargs
    return args, {**kwargs, "closure": closure}


def _after(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    global _steps
    _steps += 1
    _switch(_switched_off.pop(optimizer, []), True)
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
