"""Float32 weights: read from the bits beside a model's weights, and loaded into them."""

from collections.abc import Mapping
from typing import Any, overload

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from amp_mp import _C
from amp_mp.dtypes import LOW_PRECISION, NATIVE
from amp_mp.module_names import DDP, plain_name, plain_names, without_wrappers
from amp_mp.optim.state import kept_masters
from amp_mp.param_groups import stepped_params
from amp_mp.sharding.shards import like, why_foreign


def _check_optimizer(optimizer: Any) -> None:
    if optimizer is not None and not hasattr(optimizer, "param_groups"):
        raise TypeError(f"optimizer must be a torch.optim.Optimizer, found {optimizer!r}")


def _stepped_by(optimizer: Any) -> set[Any]:
    return set() if optimizer is None else stepped_params([optimizer])


def _float32_copy(weight: Tensor, stepped: set[Any]) -> Tensor:
    """A low-precision tensor's float32 values, placed as it; a copy of any other."""
    if weight.dtype not in LOW_PRECISION:
        return weight.detach().clone()
    return like(_C.float32_of(weight, stepping=weight in stepped), weight)


def float32_of(weight: Tensor, optimizer: Optimizer | None = None) -> Tensor:
    """A weight's float32 value, exactly: the weight and the bits that rounding has cut off.

        amp.float32_of(model.head.weight)  # the masters; model.head.weight.float() lacks the bits

    A copy of the weight's shape and layout on its device, dtype float32, without gradient; of a
    DTensor a DTensor of its placements, and no process sends anything. `float32_state_dict` gives
    the same for all of a model. To write, use `optimizer.masters`.

    weight: the Parameter itself, float16, bfloat16 or float32: other tensors of the same memory,
    such as `.data`, have no bits. Where there are none, the value is the weight's. A weight that
    a script has written since the last step counts as it is, as for a new optimizer.
    optimizer: the one that goes on; where it has state for the weight, the bits count also beside
    what was written. Default None.

    TypeError for what is no tensor, for a tensor of another dtype, and for no optimizer;
    RuntimeError inside of AveragedModel.swap.
    """
    if not isinstance(weight, Tensor):
        raise TypeError(
            "weight must be a tensor, such as model.head.weight, found a "
            f"{type(weight).__name__}; float32_state_dict(model) takes a whole model"
        )
    if weight.dtype not in NATIVE:
        raise TypeError(
            f"weight must be float16, bfloat16 or float32, found {weight.dtype}, which has no "
            "master; weight.detach().float() casts it"
        )
    _check_optimizer(optimizer)
    _C.refuse_borrowed([weight], "float32_of()", reads=True)
    return _float32_copy(weight, _stepped_by(optimizer))


def float32_state_dict(model: nn.Module, optimizer: Optimizer | None = None) -> dict[str, Any]:
    """The model's state dict with every low-precision floating-point tensor as float32.

    Names are those of model.state_dict(), with what wrappers put into them (docs/between_steps.md).
    A weight's float32 value is exact: what `prepare` or a load has rounded, and from the first step
    on the optimizer's master, also after the optimizer is gone. Others are cast up. All are copies,
    tied tensors the same one; what is no tensor is as the modules give it. DTensors stay DTensors
    with their placements; no process sends anything.

    A weight that a script has written since the last step counts as it is, as for a new optimizer.
    optimizer: the one that goes on; then the bits of such weights are in the result, too, where it
    has state for them (docs/between_steps.md). TypeError for no optimizer.
    """
    _check_optimizer(optimizer)
    _C.refuse_borrowed(model.parameters(), "float32_state_dict()", reads=True)
    found, stepped = model.state_dict(keep_vars=True), _stepped_by(optimizer)
    made: dict[int, Any] = {}
    for value in {id(each): each for each in found.values()}.values():
        is_tensor = isinstance(value, Tensor)
        made[id(value)] = _float32_copy(value, stepped) if is_tensor else value
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
    either one's: `_orig_mod.`, `_checkpoint_wrapped_module.`, `module.`. A sharded model's DTensors
    are loaded from DTensors; torch.distributed.checkpoint.state_dict's set_model_state_dict makes
    them of whole tensors. An optimizer between the two is not needed any more; one of amp_mp that
    is passed makes its state first, so that its format decides how a value half way between two
    weights is rounded. Returns what Module.load_state_dict does, and raises what it does;
    ValueError for another rank's DTensors, TypeError for no optimizer.
    """
    if state_dict is None and isinstance(optimizer, Mapping):
        optimizer, state_dict = None, optimizer
    _check_optimizer(optimizer)
    for name, value in state_dict.items():
        if wrong := why_foreign(value):
            raise ValueError(f"state_dict: {name!r} {wrong}; nothing was loaded")
    _C.refuse_borrowed(model.parameters(), "load_float32_state_dict()")
    if hasattr(optimizer, "init_state"):
        optimizer.init_state()
    handles = [handle for m in model.modules() for handle in kept_masters.keeps_loads(m)]
    try:
        return model.load_state_dict(_under_names_of(model, state_dict), strict=strict)
    finally:
        for handle in handles:
            handle.remove()


def _under_names_of(model: nn.Module, state_dict: Mapping[str, Any]) -> Mapping[str, Any]:
    """The state dict with the model's names, where wrappers alone make the difference."""
    own = dict.fromkeys(model.state_dict())
    if own.keys() >= state_dict.keys():
        return state_dict
    plain = plain_names(model)
    names = {plain_name(plain, name): name for name in own}

    def found(name: str) -> str:
        outer = without_wrappers(name)
        bare = f".{outer}".replace(f".{DDP}", ".").removeprefix(".")  # around parts, too
        inner = (names[each] for each in (outer, outer.removeprefix(DDP), bare) if each in names)
        return next(inner, name)

    return {name if name in own else found(name): value for name, value in state_dict.items()}
