"""An optimizer's state: made, gathered for the native step, and restored exactly."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from amp_mp import _C
from amp_mp.optim.originals import LOW_PRECISION, rounded, take_original

DTYPES = {
    "float32": torch.float32,
    "float16": torch.float16,
    "float16_root": torch.float16,
}

if TYPE_CHECKING:
    from amp_mp.optim.base import FusedOptimizer


def init_state(optimizer: FusedOptimizer, group: dict[str, Any], param: Tensor) -> Tensor:
    """Fills in what is missing of a parameter's tensors; returns its clock (clock_of).

    One tensor of the parameter's shape and layout for each state, in its format. master: float32,
    only for a low-precision parameter; the exact original where `prepare` has kept one.
    """
    state = optimizer.state[param]
    clock = clock_of(state, param, group.get("betas", (0.0, 0.0)))
    for name in optimizer._states():
        if state.get(name) is None:
            dtype = DTYPES[optimizer.formats.get(name, "float32")]
            state[name] = torch.zeros_like(param, dtype=dtype, memory_format=torch.preserve_format)
            optimizer._fill(name, state[name], group)
    if optimizer.master != "none" and param.dtype in LOW_PRECISION and "master" not in state:
        state["master"] = take_original(param)
    return clock


def clock_of(state: dict[str, Any], param: Tensor, betas: tuple[float, float]) -> Tensor:
    """The parameter's applied steps and beta powers as one float64 [3]; the state has views.

    step: float64 []. beta_powers: float64 [2], running products of the betas. Rebuilt where the
    state's tensors no longer lie side by side (after loading, copying, or somebody's own
    assignment), or where a torch.optim checkpoint has no powers.
    """
    step, powers = state.get("step"), state.get("beta_powers")
    if (
        isinstance(step, Tensor)
        and isinstance(powers, Tensor)
        and step.dtype == powers.dtype == torch.float64
        and step.device == powers.device == param.device
        and powers.data_ptr() == step.data_ptr() + step.element_size()
        and step.untyped_storage().data_ptr() == powers.untyped_storage().data_ptr()
    ):
        return step.as_strided((3,), (1,))
    # torch's SGD counts no steps: a buffer says that there have been some.
    count = float(step) if step is not None else float(state.get("momentum_buffer") is not None)
    products = [b**count for b in betas] if powers is None else powers.tolist()
    clock = torch.tensor([count, *products], dtype=torch.float64, device=param.device)
    state["step"], state["beta_powers"] = clock[0], clock[1:]
    return clock


def ensure_state(optimizer: FusedOptimizer) -> None:
    """Makes the state of every trainable parameter, gradient or not."""
    for group in optimizer.param_groups:
        for param in group["params"]:
            if param.requires_grad:
                init_state(optimizer, group, param)


@dataclass
class Bucket:
    """The parameters of one device that have state, with their tensors in lists."""

    device: torch.device
    params: list[Tensor] = field(default_factory=list)
    dormant: list[Tensor] = field(default_factory=list)  # no gradient yet, hence no state
    dicts: list[dict[str, Any]] = field(default_factory=list)
    keys: tuple[str, ...] = ()
    values: list[list[Tensor | None]] = field(default_factory=list)
    slots: _C.Slots = field(init=False)
    everything: list[Tensor] = field(default_factory=list)  # all params when gathered


def all_current(buckets: list[Bucket], lists: list[list[Tensor]], names: tuple[str, ...]) -> bool:
    """Whether gathering again would find the same tensors in the same places."""
    return _C.same_items(lists, buckets[0].everything if buckets else []) and all(
        b.keys == _keys(names)
        and _C.holds(b.dicts, b.keys, b.values)
        and all(p.grad is None for p in b.dormant)
        for b in buckets
    )


def _keys(names: tuple[str, ...]) -> tuple[str, ...]:
    return ("step", "beta_powers", "master", *names)


def gather_buckets(optimizer: FusedOptimizer) -> list[Bucket]:
    """Sorts the parameters by device, makes missing state, and has every tensor checked."""
    by_device: dict[torch.device, Bucket] = {}
    lists: dict[torch.device, list[tuple[Tensor, int, str, Tensor]]] = {}
    names = optimizer._states()
    for index, group in enumerate(optimizer.param_groups):
        given = group.get("param_names")
        for position, param in enumerate(group["params"]):
            bucket = by_device.setdefault(param.device, Bucket(param.device))
            rows = lists.setdefault(param.device, [])
            state = optimizer.state.get(param, {})
            if param.grad is None and not state:
                bucket.dormant.append(param)
                continue
            label = f"parameter {position} of group {index}"
            label += f" ({given[position]!r})" if given else ""
            if not param.is_floating_point() or param.dtype == torch.float64:
                raise TypeError(
                    f"{label} has dtype {param.dtype}; amp_mp's optimizers take float32, float16 "
                    "and bfloat16, use torch.optim for the others"
                )
            clock = init_state(optimizer, group, param)
            bucket.params.append(param)
            bucket.dicts.append(optimizer.state[param])
            rows.append((param, index, label, clock))
    everything = [p for group in optimizer.param_groups for p in group["params"]]
    for device, bucket in by_device.items():
        rows = lists[device]
        bucket.everything = everything
        bucket.keys = _keys(names)
        bucket.values = [[d.get(key) for d in bucket.dicts] for key in bucket.keys]
        bucket.slots = _C.Slots(
            params=bucket.params,
            masters=bucket.values[2],
            states=[[d[name] for d in bucket.dicts] for name in names],
            formats=[optimizer.formats.get(name, "float32") for name in names],
            clocks=[clock for _, _, _, clock in rows],
            groups=[index for _, index, _, _ in rows],
            names=[label for _, _, label, _ in rows],
        )
    return list(by_device.values())


def restore_state(
    optimizer: FusedOptimizer, state_dict: dict[str, Any], load: Callable[[dict[str, Any]], None]
) -> None:
    """Runs torch's `load` and puts the saved states back at their own width."""
    final: dict[str, Any] = {}

    def capture(_: Any, seen: dict[str, Any]) -> None:
        final.update(seen)  # after the user's own pre-hooks

    params = [p for group in optimizer.param_groups for p in group["params"]]
    _check_loadable(state_dict, params)
    handle = optimizer.register_load_state_dict_pre_hook(capture)
    try:
        load(state_dict)
    finally:
        handle.remove()
    ids = [i for group in final["param_groups"] for i in group["params"]]
    for number, param in zip(ids, params, strict=True):
        for name, value in final["state"].get(number, {}).items():
            stored = optimizer.formats.get(name, "float32")
            optimizer.state[param][name] = _own_copy(value, param, stored)


def _own_copy(value: Any, param: Tensor, stored: str) -> Any:
    """The saved value in the format, not shared with what it came from, where the parameter is."""
    if not isinstance(value, Tensor):
        return value
    if value.shape != param.shape or value.dim() == 0:  # step, beta_powers
        return value.detach().to(param.device, copy=True)
    like = torch.empty_like(
        param,
        dtype=value.dtype if value.dtype == torch.float64 else DTYPES[stored],
        memory_format=torch.preserve_format,
    )
    if value.dtype == like.dtype:
        return like.copy_(value)
    value = value.float().sqrt() if stored == "float16_root" else value
    return like.copy_(rounded(value.float(), like.dtype) if like.dtype in LOW_PRECISION else value)


def _check_loadable(state_dict: dict[str, Any], params: list[Tensor]) -> None:
    for index, group in enumerate(state_dict["param_groups"]):
        if group.get("amsgrad"):
            raise ValueError(
                f"state_dict: group {index} has amsgrad=True, which this optimizer does not have; "
                "nothing was loaded"
            )
    ids = [i for group in state_dict["param_groups"] for i in group["params"]]
    for position, (number, param) in enumerate(zip(ids, params, strict=False)):
        for name, value in state_dict["state"].get(number, {}).items():
            counted = name in ("step", "beta_powers")
            if isinstance(value, Tensor) and not counted and value.shape != param.shape:
                raise ValueError(
                    f"state_dict: {name!r} of parameter {position} has shape "
                    f"{tuple(value.shape)}, but the parameter has shape {tuple(param.shape)}; "
                    "nothing was loaded"
                )
