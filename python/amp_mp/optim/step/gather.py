"""Gathers an optimizer's tensors for the native step, and notices when they have changed."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from amp_mp import _C
from amp_mp.optim.rule import Group, Rule
from amp_mp.optim.state.formats import format_of, native_name
from amp_mp.optim.state.init import States, init_state
from amp_mp.optim.step.capture import is_capturing, refuse_new_state


@dataclass
class Bucket:
    """The parameters of one device that have state, with their tensors in lists."""

    device: torch.device
    params: list[Tensor] = field(default_factory=list)
    dormant: list[Tensor] = field(default_factory=list)  # no gradient so far, hence no state
    dicts: list[dict[str, Any]] = field(default_factory=list)
    keys: tuple[str, ...] = ()
    values: list[list[Tensor | None]] = field(default_factory=list)
    slots: _C.Slots = field(init=False)
    everything: list[Tensor] = field(default_factory=list)  # all parameters when gathered


class ParamInfo(NamedTuple):
    """Where a parameter is in its optimizer."""

    group: int
    tensor_index: int  # among all parameters
    label: str  # for messages


class Gatherer:
    """Keeps the buckets of the last step as long as they hold the optimizer's tensors."""

    def __init__(self) -> None:
        self.buckets: list[Bucket] | None = None

    def forget(self) -> None:
        """Gathers anew at the next step."""
        self.buckets = None

    def gather(self, rule: Rule, groups: list[Group], states: States) -> list[Bucket]:
        """The buckets, made anew where a tensor was replaced.

        Raises RuntimeError or ValueError during capture by a CUDA graph where a parameter's state
        would have to be made.
        """
        lists = [group["params"] for group in groups]
        if self.buckets is None or not all_current(self.buckets, lists, rule):
            self.buckets = gather_buckets(rule, groups, states)
        for bucket in self.buckets:
            if bucket.dormant and is_capturing(bucket.device):
                refuse_dormant(bucket)
        return self.buckets


def all_current(buckets: list[Bucket], lists: list[list[Tensor]], rule: Rule) -> bool:
    """Whether gathering again would find the same tensors in the same places."""
    keys = state_keys(rule)
    return _C.same_items(lists, buckets[0].everything if buckets else []) and all(
        b.keys == keys
        and _C.holds(b.dicts, b.keys, b.values)
        and all(p.grad is None for p in b.dormant)
        for b in buckets
    )


def state_keys(rule: Rule) -> tuple[str, ...]:
    """The state entries whose tensors the slots hold."""
    names = rule.names
    scales = (f"{names[0]}_scale",) if names else ()
    return ("master", "remainder", "step", *scales, *names)


def param_infos(groups: list[Group]) -> Iterator[tuple[Tensor, ParamInfo]]:
    """Every parameter with its place, in order."""
    index = 0
    for number, group in enumerate(groups):
        given = group.get("param_names")
        for position, param in enumerate(group["params"]):
            label = f"parameter {position} of group {number}"
            label += f" ({given[position]!r})" if given else ""
            yield param, ParamInfo(number, index, label)
            index += 1


def gather_buckets(rule: Rule, groups: list[Group], states: States) -> list[Bucket]:
    """Sorts the parameters by device, makes missing state, and has every tensor checked.

    Raises RuntimeError during capture by a CUDA graph.
    """
    everything = [p for group in groups for p in group["params"]]
    refuse_new_state({p.device for p in everything})
    by_device: dict[torch.device, Bucket] = {}
    infos: dict[torch.device, list[ParamInfo]] = {}
    for param, info in param_infos(groups):
        bucket = by_device.setdefault(param.device, Bucket(param.device, everything=everything))
        if param.grad is None and not states.get(param, {}):
            bucket.dormant.append(param)
            continue
        bucket.params.append(param)
        infos.setdefault(param.device, []).append(info)
    for device, bucket in by_device.items():
        fill_bucket(rule, groups, states, bucket, infos.get(device, []))
    return list(by_device.values())


def fill_bucket(
    rule: Rule, groups: list[Group], states: States, bucket: Bucket, infos: list[ParamInfo]
) -> None:
    """Makes the missing state of a bucket's parameters, and the slots, which check every tensor."""
    rows = list(zip(bucket.params, infos, strict=True))
    for param, info in rows:
        _check_dtype(param, info.label)
    clocks = [init_state(rule, groups[info.group], p, states[p]) for p, info in rows]
    names = rule.names
    bucket.dicts = dicts = [states[p] for p in bucket.params]
    bucket.keys = state_keys(rule)
    bucket.values = [[d.get(key) for d in dicts] for key in bucket.keys]

    def natives(name: str) -> list[str]:
        return [native_name(format_of(groups[info.group][name], p)) for p, info in rows]

    bucket.slots = _C.Slots(
        params=bucket.params,
        masters=[d.get("master", d.get("remainder")) for d in dicts],
        states=[[d[name] for d in dicts] for name in names],
        scales=[d.get(f"{names[0]}_scale") if names else None for d in dicts],
        formats=[natives(name) for name in names],
        stochastic=[groups[info.group]["rounding"] == "stochastic" for info in infos],
        clocks=clocks,
        groups=[info.group for info in infos],
        tensor_indices=[info.tensor_index for info in infos],
        firsts=[0] * len(infos),
        names=[info.label for info in infos],
    )


def _check_dtype(param: Tensor, label: str) -> None:
    """Raises TypeError with the label for a dtype that no rule takes."""
    if not param.is_floating_point() or param.dtype == torch.float64:
        raise TypeError(
            f"{label} has dtype {param.dtype}; amp_mp's optimizers take float32, float16 "
            "and bfloat16, use torch.optim for the others"
        )


def refuse_dormant(bucket: Bucket) -> None:
    """Raises ValueError during capture for a parameter without state: no replay would step it.

    The native step refuses a parameter that has state but no gradient.
    """
    for param in bucket.dormant:
        if param.requires_grad:
            raise ValueError(
                f"a parameter of shape {tuple(param.shape)} has had no gradient yet, and a "
                "step captured now would leave it out for ever; take a step with all "
                "gradients before capturing, or freeze it"
            )
