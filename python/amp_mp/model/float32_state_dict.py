"""A model's float32 weights: read from the bits beside its weights, and loaded into them."""

from collections.abc import Mapping
from typing import Any, overload

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from amp_mp.dtypes import LOW_PRECISION
from amp_mp.module_names import DDP, is_wrapper, without_wrappers
from amp_mp.optim.state import low_bits
from amp_mp.optim.state.edit_blocks import refuse_swapped
from amp_mp.sharding.shards import like, why_foreign


def _check_optimizer(optimizer: Any) -> None:
    if optimizer is not None and not hasattr(optimizer, "param_groups"):
        raise TypeError(f"optimizer must be a torch.optim.Optimizer, found {optimizer!r}")


def float32_state_dict(model: nn.Module, optimizer: Optimizer | None = None) -> dict[str, Any]:
    """The model's state dict with every low-precision floating-point tensor as float32.

    Names are those of model.state_dict(), with what wrappers put into them (docs/between_steps.md).
    A weight's float32 value is exact: what `prepare` or a load has rounded, and from the first step
    on the optimizer's master, also after the optimizer is gone. Others are cast up. All are copies,
    of what is tied one; what is no tensor is as the modules give it. DTensors give DTensors, placed
    as they are; no process sends anything.

    A weight that a script has written since the last step counts as it is: so a new optimizer would
    begin. optimizer: pass the one that goes on, and the bits of such weights are in the result, too
    (docs/between_steps.md). TypeError for no optimizer.
    """
    _check_optimizer(optimizer)
    refuse_swapped(model.parameters(), "float32_state_dict()")
    found = model.state_dict(keep_vars=True)
    made: dict[int, Any] = {}
    for value in {id(each): each for each in found.values()}.values():
        if not isinstance(value, Tensor):
            made[id(value)] = value
        elif value.dtype in LOW_PRECISION:
            exact = low_bits.float32_of(value, goes_on=optimizer is not None)
            made[id(value)] = like(exact, value)
        else:
            made[id(value)] = value.detach().clone()
    return {name: made[id(value)] for name, value in found.items()}


@overload
def load_float32_state_dict(
    model: nn.Module, state_dict: Mapping[str, Any], /, *, strict: bool = True
) -> Any: ...


@overload
def load_float32_state_dict(
    model: nn.Module, optimizer: Any, state_dict: Mapping[str, Any], strict: bool = True
) -> Any: ...


@torch.no_grad()
def load_float32_state_dict(
    model: nn.Module, optimizer: Any = None, state_dict: Any = None, strict: bool = True
) -> Any:
    """Loads a float32 model's state dict, `load_float32_state_dict(model, state_dict)`, exactly.

    Weights become the rounded values; the bits that rounding cuts off stay beside them, and every
    optimizer over them goes on from the values themselves, as exactly as its `memory=` stores them.
    Other optimizer states stay. Names are those of model.state_dict(), whatever wrappers put into
    either one's: `_orig_mod.`, `_checkpoint_wrapped_module.`, DDP's `module.`. A sharded
    model's DTensors are loaded from DTensors; torch.distributed.checkpoint.state_dict's
    set_model_state_dict makes them of whole tensors. An optimizer between the two is not needed
    any more; one of amp_mp that is passed makes its state first, so that its format decides how a
    value half way between two weights is rounded. Returns what Module.load_state_dict does, and
    raises what it does; ValueError for another rank's DTensors, TypeError for no optimizer.
    """
    if state_dict is None and isinstance(optimizer, Mapping):
        optimizer, state_dict = None, optimizer
    _check_optimizer(optimizer)
    for name, value in state_dict.items():
        if wrong := why_foreign(value):
            raise ValueError(f"state_dict: {name!r} {wrong}; nothing was loaded")
    refuse_swapped(model.parameters(), "load_float32_state_dict()")
    if hasattr(optimizer, "init_state"):
        optimizer.init_state()
    handles = [handle for m in model.modules() for handle in low_bits.keeps_loads(m)]
    try:
        return model.load_state_dict(_under_names_of(model, state_dict), strict=strict)
    finally:
        for handle in handles:
            handle.remove()


def _under_names_of(model: nn.Module, state_dict: Mapping[str, Any]) -> Mapping[str, Any]:
    """The state dict with the model's names for what has others only because of wrappers."""
    own = dict.fromkeys(model.state_dict())
    if own.keys() >= state_dict.keys():
        return state_dict
    root = DDP if is_wrapper(model) else ""
    names = {without_wrappers(name.removeprefix(root)): name for name in own}

    def found(name: str) -> str:
        plain = without_wrappers(name)
        return names.get(plain) or names.get(without_wrappers(name.removeprefix(DDP))) or name

    return {name if name in own else found(name): value for name, value in state_dict.items()}
