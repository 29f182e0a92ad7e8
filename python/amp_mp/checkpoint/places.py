"""Where a checkpoint has what differs between processes: experts, stages of a pipeline.

torch.distributed.checkpoint writes one process's tensor of each name, and gives it to all. So what
differs under one name is written under "amp_mp.local.RANK.", where RANK is the lowest of the
processes that have it, and the entry `PLACES` says which process had what. A checkpoint in which
nothing differs has neither.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from amp_mp.checkpoint.processes import number_of_processes, this_rank
from amp_mp.sharding.reduction import checked_groups
from amp_mp.sharding.shards import any_dtensor, is_dtensor
from amp_mp.torch_private import tree_leaves

LOCAL = "amp_mp.local"
PLACES = "amp_mp.places"

Path = tuple[str, ...]  # where something is in the nested state, as ("model", NAME)
Ranks = tuple[int, ...]


class Home(NamedTuple):
    """Where one process's tensor is: under which rank. In the file it is a plain tuple.

    parts: the processes that had parts of it, as a DTensor; () for a plain tensor. groups: those of
    the process_groups of its param_group.
    """

    owner: int
    parts: Ranks
    groups: tuple[Ranks, ...]


def parts_of(tensor: Any) -> Ranks:
    """The ranks that have parts or copies of a DTensor; () for a plain tensor."""
    return tuple(tensor.device_mesh.mesh.flatten().tolist()) if is_dtensor(tensor) else ()


def groups_of(optimizer: Any) -> dict[Tensor, tuple[Ranks, ...]]:
    """The ranks of each parameter's process_groups, for those that name some."""
    found: dict[Tensor, tuple[Ranks, ...]] = {}
    for group in () if optimizer is None else optimizer.param_groups:
        named = checked_groups(group.get("process_groups"))
        ranks = tuple(tuple(torch.distributed.get_process_group_ranks(each)) for each in named)
        found |= dict.fromkeys(group["params"] if ranks else (), ranks)
    return found


def set_apart(state: dict[str, Any], places: Mapping[Path, list[Home | None]]) -> None:
    """Moves what differs between processes, in a state to save, to the keys of its owner.

    places: one for each rank, None for those that have nothing of this name.
    """
    if not places:
        return
    state |= {key: {**state[key]} for key in {path[0] for path in places} & state.keys()}
    shared: dict[Home, tuple[Any, ...]] = {}  # what is equal is pickled once
    table: dict[str, list[Any]] = {}
    for path, by_rank in places.items():
        table[".".join(path)] = [p and shared.setdefault(p, tuple(p)) for p in by_rank]
        *outer, last = path
        inside: Any = state
        for key in outer:
            inside = inside.get(key, {})
        if (place := by_rank[this_rank()]) is None or last not in inside:
            continue
        value = inside.pop(last)
        # Of copies one process writes all: torch would take a norm's mean and variance of two.
        if place.owner != this_rank() and not any_dtensor(tree_leaves(value)):
            continue
        apart = state.setdefault(LOCAL, {}).setdefault(str(place.owner), {})
        for key in outer:
            apart = apart.setdefault(key, {})
        apart[last] = value
    state[PLACES] = (table,)  # a tuple is stored as one value


def tables(value: Any) -> dict[str, list[Home | None]]:
    """What `set_apart` has stored, by key."""
    (table,) = value
    return {key: [each and Home(*each) for each in own] for key, own in table.items()}


def refuse_other_layout(
    places: Mapping[str, list[Home | None]],
    tensors: Mapping[str, tuple[str, Tensor]],
    groups: Mapping[Tensor, tuple[Ranks, ...]],
) -> None:
    """ValueError for a tensor that differed between processes, where this one had another or none.

    tensors: by key, each with its name and the parameter. groups: as of groups_of.
    """
    rank, world = this_rank(), number_of_processes()
    for key in sorted(tensors.keys() & places.keys()):
        (name, param), by_rank = tensors[key], places[key]
        place = by_rank[rank] if len(by_rank) == world else None
        parts, own = parts_of(param), groups.get(param, ())
        if len(by_rank) != world:
            wrong = f"saved by {len(by_rank)} processes, and here are {world}"
        elif place is None:
            wrong = f"rank {rank} had none"
        elif place.parts != parts:
            before, now = (f"in parts on {[*p]}" if p else "whole" for p in (place.parts, parts))
            wrong = f"rank {rank} had it {before}, and has it {now} now"
        elif place.groups and own and {*place.groups} != {*own}:
            named, now_named = ([*map(list, each)] for each in (place.groups, own))
            wrong = f"its process_groups had the ranks {named}, and have {now_named} now"
        else:
            continue
        raise ValueError(
            f"{name!r} was another tensor on each process that saved the checkpoint, and is loaded "
            f"where the processes hold it alike: {wrong}; nothing was loaded"
        )
