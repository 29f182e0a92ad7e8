"""An optimizer's state: made, and gathered for the native step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from amp_mp import _C
from amp_mp.optim.capture import refuse_new_state
from amp_mp.optim.originals import LOW_PRECISION, take_original
from amp_mp.optim.storage import (
    REST_FORMATS,
    format_of,
    get,
    native_name,
    new_rest,
    new_state,
    put,
    split_name,
)

if TYPE_CHECKING:
    from amp_mp.optim.base import FusedOptimizer

CLOCK = ("step", "beta_powers", "layer")  # float64 [], [2] and []: core/rules/base.h, Clock


def init_state(optimizer: FusedOptimizer, group: dict[str, Any], param: Tensor) -> Tensor:
    """Fills in what is missing of a parameter's tensors; returns its clock (clock_of).

    One tensor of the parameter's shape and layout for each state, in its format, and for m8 one of
    scales, NAME_scale. For a low-precision parameter `master`, float32, or `remainder`, int16 or
    int8, from the exact original where `prepare` has kept one.
    """
    state = optimizer.state[param]
    clock = clock_of(state, param, group.get("betas", (0.0, 0.0)))
    for name in optimizer._states():
        if state.get(name) is not None:
            continue
        format = format_of(group[name], param)
        state[name], scale = new_state(format, param)
        if scale is not None:
            state[f"{name}_scale"] = scale
        start = optimizer._fill(name, group)
        if start:
            values = torch.full_like(param, start, dtype=torch.float32)
            put(values, state[name], scale, native_name(format))
    if param.dtype in LOW_PRECISION:
        set_master(group["master"], param, state)
    return clock


def set_master(
    format: str, param: Tensor, state: dict[str, Any], values: Tensor | None = None
) -> None:
    """Gives a low-precision parameter its master in the format, from values if there are any.

    Without, one that is there stays, one in another format is converted. A split master writes the
    parameter too: where its float32 value lies half way between two weights, it rounds away.
    """
    rest = state.get("remainder")
    if values is None:
        if "master" in state if format == "float32" else rest is not None:
            return
        if format == "none":
            return
        values = master_of(param, state)
        values = take_original(param) if values is None else values
    state.pop("master", None)
    state.pop("remainder", None)
    if format == "float32":
        state["master"] = values
    elif format != "none":
        state["remainder"] = new_rest(format, param)
        with torch.no_grad():
            put(values, param.detach(), state["remainder"], split_name(format, param.dtype))


def master_of(param: Tensor, state: dict[str, Any]) -> Tensor | None:
    """A low-precision parameter's master as float32: the tensor itself, or decoded; None without.

    Same shape and layout as the parameter.
    """
    master: Tensor | None = state.get("master")
    if master is not None:
        return master
    rest = state.get("remainder")
    if rest is None:
        return None
    return get(param.detach(), rest, split_name(REST_FORMATS[rest.dtype], param.dtype))


def clock_of(state: dict[str, Any], param: Tensor, betas: tuple[float, float]) -> Tensor:
    """The parameter's clock as one float64 [4]; the state has views of it.

    step: float64 []. beta_powers: float64 [2], running products of the betas. layer: float64 [],
    what a layerwise rule remembers. Rebuilt where the state's tensors no longer lie side by side
    (after loading, copying, or somebody's own assignment), or where a torch.optim checkpoint has
    none but the step.
    """
    step, powers, layer = (state.get(name) for name in CLOCK)
    if (
        isinstance(step, Tensor)
        and isinstance(powers, Tensor)
        and isinstance(layer, Tensor)
        and step.dtype == powers.dtype == layer.dtype == torch.float64
        and step.device == powers.device == layer.device == param.device
        and powers.data_ptr() == step.data_ptr() + step.element_size()
        and layer.data_ptr() == step.data_ptr() + 3 * step.element_size()
        and step.untyped_storage().data_ptr() == layer.untyped_storage().data_ptr()
    ):
        return step.as_strided((4,), (1,))
    # torch's SGD counts no steps: a buffer says that there have been some.
    count = float(step) if step is not None else float(state.get("momentum_buffer") is not None)
    products = [b**count for b in betas] if powers is None else powers.tolist()
    norm = 0.0 if layer is None else float(layer)
    clock = torch.tensor([count, *products, norm], dtype=torch.float64, device=param.device)
    state["step"], state["beta_powers"], state["layer"] = clock[0], clock[1:3], clock[3]
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
        b.keys == state_keys(names)
        and _C.holds(b.dicts, b.keys, b.values)
        and all(p.grad is None for p in b.dormant)
        for b in buckets
    )


def state_keys(names: tuple[str, ...]) -> tuple[str, ...]:
    """The state entries whose tensors the slots hold."""
    scales = (f"{names[0]}_scale",) if names else ()
    return ("master", "remainder", "step", *scales, *names)


class Place(NamedTuple):
    """Where a parameter is in its optimizer."""

    group: int
    number: int  # among all parameters
    label: str


def places_of(optimizer: FusedOptimizer) -> Iterator[tuple[Tensor, Place]]:
    """Every parameter with its place, in order."""
    number = 0
    for index, group in enumerate(optimizer.param_groups):
        given = group.get("param_names")
        for position, param in enumerate(group["params"]):
            label = f"parameter {position} of group {index}"
            label += f" ({given[position]!r})" if given else ""
            yield param, Place(index, number, label)
            number += 1


def gather_buckets(optimizer: FusedOptimizer) -> list[Bucket]:
    """Sorts the parameters by device, makes missing state, and has every tensor checked.

    Raises RuntimeError under capture by a CUDA graph.
    """
    refuse_new_state({p.device for group in optimizer.param_groups for p in group["params"]})
    by_device: dict[torch.device, Bucket] = {}
    places: dict[torch.device, list[Place]] = {}
    for param, place in places_of(optimizer):
        bucket = by_device.setdefault(param.device, Bucket(param.device))
        if param.grad is None and not optimizer.state.get(param, {}):
            bucket.dormant.append(param)
            continue
        bucket.params.append(param)
        places.setdefault(param.device, []).append(place)
    everything = [p for group in optimizer.param_groups for p in group["params"]]
    for device, bucket in by_device.items():
        bucket.everything = everything
        fill_bucket(optimizer, bucket, places.get(device, []))
    return list(by_device.values())


def fill_bucket(optimizer: FusedOptimizer, bucket: Bucket, places: list[Place]) -> None:
    """Makes the missing state of a bucket's parameters, and the slots, which check every tensor."""
    groups = optimizer.param_groups
    rows = list(zip(bucket.params, places, strict=True))
    clocks = [_checked_clock(optimizer, groups[at.group], p, at.label) for p, at in rows]
    names = optimizer._states()
    bucket.dicts = dicts = [optimizer.state[p] for p in bucket.params]
    bucket.keys = state_keys(names)
    bucket.values = [[d.get(key) for d in dicts] for key in bucket.keys]

    def natives(name: str) -> list[str]:
        return [native_name(format_of(groups[at.group][name], p)) for p, at in rows]

    bucket.slots = _C.Slots(
        params=bucket.params,
        masters=[d.get("master", d.get("remainder")) for d in dicts],
        states=[[d[name] for d in dicts] for name in names],
        scales=[d.get(f"{names[0]}_scale") if names else None for d in dicts],
        formats=[natives(name) for name in names],
        stochastic=[groups[at.group]["rounding"] == "stochastic" for at in places],
        clocks=clocks,
        groups=[at.group for at in places],
        numbers=[at.number for at in places],
        firsts=[0] * len(places),
        names=[at.label for at in places],
    )


def _checked_clock(
    optimizer: FusedOptimizer, group: dict[str, Any], param: Tensor, label: str
) -> Tensor:
    """init_state's; raises TypeError with the label for a dtype that no rule takes."""
    if not param.is_floating_point() or param.dtype == torch.float64:
        raise TypeError(
            f"{label} has dtype {param.dtype}; amp_mp's optimizers take float32, float16 "
            "and bfloat16, use torch.optim for the others"
        )
    return init_state(optimizer, group, param)
