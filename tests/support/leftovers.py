"""What a test may leave behind in a process: casts, hooks, dtypes, its folder; putting it back."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import torch
from helpers import autocast_state
from torch.nn.modules import module as modules
from torch.optim import optimizer as optimizers

import amp_mp as amp
from amp_mp import _C
from amp_mp.casting import op_table, products
from amp_mp.dtypes import LOW_PRECISION

# torch's hooks on all modules and on all optimizers.
HOOKS = [
    value
    for of in (modules, optimizers)
    for name, value in vars(of).items()
    if name.startswith("_global_") and "hook" in name and isinstance(value, dict)
]
# Without a GPU torch.manual_seed keeps the seed for one, with a printed stack of the call: 2 ms for
# each of ten thousand calls, and they are never forgotten.
if not torch.cuda.is_available():
    for module in (torch.cuda, torch.xpu, torch.mtia):
        module.manual_seed_all = lambda seed: None
# It names the test and its phase, so it is another one before and after every test.
PYTESTS_OWN = "PYTEST_CURRENT_TEST"


@dataclass
class GlobalState:
    """What is the same for a whole process."""

    autocast: Any
    casts: bool
    hooks: list[set[int]]
    dtype: torch.dtype
    threads: int
    folder: str
    variables: dict[str, str]
    products: dict[torch.dtype, tuple[tuple[str, products.Seconds], dict[str, str]]]


def global_state() -> GlobalState:
    return GlobalState(
        autocast_state(),
        bool(op_table._active),
        [set(hooks) for hooks in HOOKS],
        torch.get_default_dtype(),
        torch.get_num_threads(),
        os.getcwd(),
        {name: value for name, value in os.environ.items() if name != PYTESTS_OWN},
        {low: (_C.products.chosen[low], _C.products.ways(low)) for low in LOW_PRECISION},
    )


def restore(state: GlobalState) -> GlobalState:
    """Puts everything back; returns what it was before that."""
    torch.set_grad_enabled(True)
    found = global_state()
    if found == state:
        return found
    restore_autocast(state.autocast)
    if op_table._active and not state.casts:
        amp.casting.uninstall()
    for hooks, before in zip(HOOKS, state.hooks, strict=True):
        for key in hooks.keys() - before:
            if not hooks[key].__module__.startswith("amp_mp."):  # ours are added once and stay
                del hooks[key]
    torch.set_default_dtype(state.dtype)
    torch.set_num_threads(state.threads)
    os.chdir(state.folder)
    for name in found.variables.keys() - state.variables.keys():
        del os.environ[name]
    os.environ.update(state.variables)
    for low, (choice, _) in state.products.items():
        _C.products.choose(low, *choice)
    return found


def restore_autocast(state: tuple[bool, dict[str, tuple[bool, torch.dtype]]]) -> None:
    torch.set_autocast_cache_enabled(state[0])
    for device, (enabled, dtype) in state[1].items():
        torch.set_autocast_enabled(device, enabled)
        torch.set_autocast_dtype(device, dtype)
