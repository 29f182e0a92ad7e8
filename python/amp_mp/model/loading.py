"""Keeps a prepared model's float32 values through load_state_dict, deepcopy and pickle."""

import weakref
from typing import Any

import torch
from torch import Tensor, nn

from amp_mp.dtypes import LOW_PRECISION, rounded
from amp_mp.model.sharded import local_part
from amp_mp.optim.state.original_values import (
    OriginalValues,
    awaits_original,
    drop_original,
    entry_of,
    follow_sharding,
    keep_original,
    mark_owner,
    put_entry,
)
from amp_mp.sharding.shards import local_of

# A module's float32 values from a state dict, between its two hooks.
_given: weakref.WeakKeyDictionary[nn.Module, dict[str, Tensor]] = weakref.WeakKeyDictionary()


def track(module: nn.Module) -> None:
    """Makes the float32 values of a module's own parameters follow it."""
    mark_owner(module, own_parameters(module))
    if _after_load not in module._load_state_dict_post_hooks.values():  # else prepared before
        hooks: Any = module  # whose methods torch has not typed
        hooks.register_load_state_dict_pre_hook(BeforeLoad(module))
        hooks.register_load_state_dict_post_hook(_after_load)


class BeforeLoad:
    """A module's hook that notes the float32 values which load_state_dict is about to round.

    deepcopy and pickle copy it with its module, and with it what original_values has of the
    module's parameters.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = weakref.ref(module)

    def __call__(
        self, module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: object
    ) -> None:
        """Called by load_state_dict before it copies the module's own tensors."""
        # Whether a parameter awaits them is asked after loading: FSDP2's own hook, which puts the
        # shards back in place of gathered parameters, may run after this one.
        loaded = {name: state_dict.get(prefix + name) for name in module._parameters}
        _given[module] = {name: v for name, v in loaded.items() if isinstance(v, Tensor)}

    def __reduce__(self) -> tuple[Any, ...]:
        module = self._module()
        params = {} if module is None else own_parameters(module)
        waiting = {name: p for name, p in params.items() if awaits_original(p)}
        return _restored, (module, [(p, entry_of(p)) for p in waiting.values()], list(waiting))


def own_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """The module's own parameters by name, each under every name that it has there."""
    return {name: param for name, param in module._parameters.items() if param is not None}


def _restored(
    module: nn.Module,
    entries: list[tuple[nn.Parameter, OriginalValues | None]],
    names: list[str] | None = None,  # pickles of amp_mp before sharding was known have none
) -> BeforeLoad:
    """The hook of a copy, whose parameters get their entries."""
    for param, entry in entries:
        put_entry(param, entry, module)
    if names is not None:  # the module has no parameters yet
        mark_owner(module, {n: p for n, (p, _) in zip(names, entries, strict=True)})
    return BeforeLoad(module)


@torch.no_grad()
def _after_load(module: nn.Module, _: Any) -> None:
    """Keeps what was rounded; where something else is in the parameter, that is the value."""
    given = _given.pop(module, {})
    follow_sharding(module, given)
    for name, value in given.items():
        param = module._parameters.get(name)
        if param is None or not awaits_original(param) or param.shape != value.shape:
            continue
        if param.dtype in LOW_PRECISION and value.dtype == torch.float32:
            weight = local_of(param)
            values = torch.empty_like(weight, dtype=torch.float32).copy_(local_part(value, param))
            loaded = rounded(values, param.dtype) == weight
            keep_original(param, torch.where(loaded, values, weight.float()))
        else:
            drop_original(param)
