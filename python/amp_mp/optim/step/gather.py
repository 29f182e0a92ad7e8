"""Gathers an optimizer's tensors for the native step, and notices when they have changed."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from amp_mp import _C
from amp_mp.optim.rule import Group, MakeUpdates, Rule, Shape
from amp_mp.optim.state.entries import entries_of, held_here, scales_of
from amp_mp.optim.state.follow import follow
from amp_mp.optim.state.formats import MASTER_ENTRIES, beside, format_of, native_name
from amp_mp.optim.state.init import States, init_state
from amp_mp.optim.step.capture import is_capturing, refuse_new_state
from amp_mp.optim.step.group_options import GroupOptions, refuse_formats
from amp_mp.optim.step.refuse import refuse_param, refuse_state
from amp_mp.optim.step.whole import WholeStatistics
from amp_mp.sharding.gradients import local_gradient
from amp_mp.sharding.shards import is_dtensor, local_of, origin_of


class ParamInfo(NamedTuple):
    """Where a parameter is in its optimizer."""

    group: int
    tensor_index: int  # among all parameters
    label: str  # for messages


Members = list[tuple[Tensor, ParamInfo]]


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


def state_keys(rule: Rule, dicts: list[dict[str, Any]]) -> tuple[str, ...]:
    """The entries of these states whose tensors the slots hold.

    Entries that no state has are left out: each costs a look-up for every parameter in every step.
    """
    entries = [e for name in rule.names for e in (*entries_of(name), *scales_of(name))]
    known = (*MASTER_ENTRIES, "step", *entries)
    return tuple(name for name in known if any(d.get(name) is not None for d in dicts))


def _kinds(
    rule: Rule, groups: list[Group], members: Members
) -> tuple[list[int], list[tuple[int, Shape | None]]]:
    """Where each member's numbers are in a list, and what the list has: hyper()'s arguments.

    An entry for each group, and for each shape in a group where numbers depend on it.
    """
    found: list[tuple[int, Shape | None]] = [(info.group, None) for _, info in members]
    if rule.directions is not None:
        shape_of = rule.directions.shape_of
        found = [(info.group, shape_of(groups[info.group], param)) for param, info in members]
    kinds = sorted(set(found))  # a rule's kinds all have a shape, or none has
    numbers = {kind: number for number, kind in enumerate(kinds)}
    return [numbers[kind] for kind in found], kinds


class Bucket:
    """Parameters of one device and rule that have state, and the slots that hold all their tensors.

    Of a DTensor the slots hold this process's shard.
    """

    def __init__(
        self,
        device: torch.device,
        members: Members,
        rule: Rule,
        groups: list[Group],
        states: States,
    ) -> None:
        """Makes the missing state, and brings the rest to where the parameters are now.

        The slots check every tensor.
        """
        self.device, self.rule = device, rule
        places, self.kinds = _kinds(rule, groups, members)
        order = sorted(range(len(members)), key=places.__getitem__)
        members, places = [members[i] for i in order], [places[i] for i in order]
        self.params = [param for param, _ in members]
        self.infos = infos = [info for _, info in members]
        for param, info in members:
            refuse_param(param, info.label)
            refuse_state(rule, param, states.get(param, {}), info.label)
        for param, info in members:
            follow(rule, groups[info.group], param, states[param])
        clocks = [init_state(rule, groups[i.group], param, states[param]) for param, i in members]
        self._groups = sorted({info.group for info in infos})
        self._options = GroupOptions(rule, [groups[index] for index in self._groups])
        self._dicts = dicts = [states[param] for param in self.params]
        self._keys = state_keys(rule, dicts)
        self._values = [[d.get(key) for d in dicts] for key in self._keys]
        names = rule.names
        found = [[own for d in dicts if (own := held_here(d, name))] for name in names]
        origins = [origin_of(param) for param in self.params]
        self.slots = _C.Slots(
            params=[local_of(param) for param in self.params],
            dtensors=[param if is_dtensor(param) else None for param in self.params],
            masters=[beside(p, d) for p, d in zip(self.params, dicts, strict=True)],
            states=[[own.data for own in each] for each in found],
            scales=[[own.scale for own in each] for each in found],
            formats=[
                [native_name(format_of(groups[i.group][name], param)) for param, i in members]
                for name in names
            ],
            stochastic=[groups[i.group]["rounding"] == "stochastic" for i in infos],
            clocks=clocks,
            groups=places,
            tensor_indices=[i.tensor_index for i in infos],
            firsts=[origin.first for origin in origins],
            row_lengths=[origin.row_length for origin in origins],
            row_strides=[origin.row_stride for origin in origins],
            names=[i.label for i in infos],
            device=device,
        )
        # What the native step calls between its passes, for rules with directions.
        self.updates: MakeUpdates | None = None
        if rule.directions is not None:
            self.updates = rule.directions.make([(p, groups[i.group]) for p, i in members])

    def find_gradients(self) -> None:
        """Finds the shards of DTensors' gradients as they are now, for measuring and the step.

        TypeError, by name, where the gradient of a DTensor is a plain tensor.
        """
        for i in self.slots.find_gradients():  # those that are placed otherwise
            local = local_gradient(self.params[i], self.infos[i].label)
            if local is not None:
                self.slots.set_gradient(i, local)

    def is_current(self, rules: list[Rule], groups: list[Group]) -> bool:
        """Whether the state holds the tensors that the slots were made of, and these fit still.

        rules: of each param_group.
        """
        return (
            all(rules[group] is self.rule for group in self._groups)
            and self._options.are_those_of([groups[index] for index in self._groups])
            and _C.holds(self._dicts, self._keys, self._values)
            and self.slots.fit()
        )

    def refuse_new_memory(self, groups: list[Group]) -> None:
        """See GroupOptions."""
        if all(index < len(groups) for index in self._groups):  # a script may remove a group
            self._options.refuse_new_memory([groups[index] for index in self._groups])

    def is_of(self, states: States, rules: list[Rule], groups: list[Group]) -> bool:
        """As is_current; False also where a parameter's state was deleted or replaced."""
        own = zip(self.params, self._dicts, strict=True)
        return all(states.get(p) is held for p, held in own) and self.is_current(rules, groups)


class Gathered:
    """All of an optimizer's parameters: those with state in buckets by device and rule.

    whole: what adds their statistics over processes; None where no other process has a part.
    """

    def __init__(
        self, rules: list[Rule], groups: list[Group], states: States, process_groups: Sequence[Any]
    ) -> None:
        """Makes the missing state. RuntimeError during capture by a CUDA graph.

        rules: of each group. ValueError, before that, for an option that a group cannot have.
        """
        for index, (rule, group) in enumerate(zip(rules, groups, strict=True)):
            refuse_formats(rule, group, index)
        self._params = [p for group in groups for p in group["params"]]
        self._dormant: list[Tensor] = []  # no gradient so far, hence no state
        members: dict[tuple[torch.device, Rule], Members] = {}
        for param, info in param_infos(groups):
            rule = rules[info.group]
            if rule.directions is not None:
                rule.directions.refuse(groups[info.group], param, info.label)
            own = members.setdefault((local_of(param).device, rule), [])
            if param.grad is None and not states.get(param):
                self._dormant.append(param)
            else:
                own.append((param, info))
        refuse_new_state(device for device, _ in members)
        self.buckets = [
            Bucket(device, own, rule, groups, states) for (device, rule), own in members.items()
        ]
        self._states = list(states.values())  # a parameter's may be replaced or deleted
        held = [(b.device, [info.tensor_index for info in b.infos]) for b in self.buckets]
        whole = WholeStatistics(held, self._params, process_groups)
        self.whole = whole if whole.is_needed else None

    def is_current(self, rules: list[Rule], groups: list[Group], states: States) -> bool:
        """Whether gathering again would find the same tensors in the same places."""
        return (
            _C.same_items([group["params"] for group in groups], self._params)
            and _C.same_values(states, self._states)
            and all(bucket.is_current(rules, groups) for bucket in self.buckets)
            and all(param.grad is None for param in self._dormant)
        )

    def has_no_gradient(self) -> bool:
        """Whether no parameter has one."""
        return next((p for p in self._params if p.grad is not None), None) is None

    def check_capture(self) -> None:
        """Raises ValueError during capture for a parameter without state: no replay would step it.

        The native step refuses a parameter that has state but no gradient.
        """
        for param in self._dormant:
            if param.requires_grad and is_capturing(param.device):
                raise ValueError(
                    f"a parameter of shape {tuple(param.shape)} has had no gradient yet, and a "
                    "step captured now would leave it out for ever; take a step with all "
                    "gradients before capturing, or freeze it"
                )
