"""Which parameters differ between the processes that save: they compare what they have.

A param_group's process_groups says that its parameters differ. Others do where their bytes do.
Buffers do not count, because the copies of a norm have other statistics on each process.
"""

import ctypes
import hashlib
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from amp_mp.checkpoint import places
from amp_mp.checkpoint.model_part import named_params
from amp_mp.checkpoint.places import Home, Path, Ranks
from amp_mp.checkpoint.processes import number_of_processes
from amp_mp.param_groups import params_in
from amp_mp.sharding.shards import local_of
from amp_mp.torch_private import tree_leaves

GROUPS: Path = ("optimizer", "param_groups")


class Held(NamedTuple):
    """What one process has of a parameter, or of its optimizer's state."""

    digest: bytes  # of its bytes on this process
    parts: Ranks  # as in Home
    groups: tuple[Ranks, ...]  # the same
    copies: Ranks  # the processes that a DistributedDataParallel keeps equal, or ()


class Told(NamedTuple):
    """What one process tells the others before a checkpoint is written.

    held: of parameters that may differ, by path. leaders: for each buffer, by path, the parameters
    that it goes with. names: a digest of the param_groups' parameters. items: digests of what has
    to be the same on all processes, by the name under which it is saved.
    """

    held: dict[Path, Held]
    leaders: dict[Path, list[Path]]
    names: bytes
    items: dict[str, bytes]


def told(
    model: nn.Module, optimizer: Optimizer | None, state: dict[str, Any], more: dict[str, Any]
) -> Told:
    """What this process tells. state: what it would save, with the state dicts of `more`."""
    found = Told({}, {}, b"", {})
    if number_of_processes() == 1:
        return found
    packed = state.get("optimizer", {})
    copies, groups = _copies(model), places.groups_of(optimizer)
    named = named_params(model, every_name=True)
    for name, param in named.items():
        own: dict[Path, Any] = {("model", name): state["model"].get(name)}
        own["optimizer", "state", name] = packed.get("state", {}).get(name)
        found.held.update(_held(own, param, copies, groups))
    found.leaders.update(_leaders(found.held, named, "model", state["model"]))
    if "param_groups" in packed:
        settings = [list(group.items()) for group in packed["param_groups"]]
        found.held[GROUPS] = Held(_digest(settings), (), (), ())
        names = [group["params"] for group in packed["param_groups"]]
        found = found._replace(names=_digest(names))
    for item, each in more.items():
        if isinstance(each, nn.Module):
            named, same = dict(each.named_parameters(remove_duplicate=False)), _copies(each)
            for name, param in named.items():
                found.held.update(_held({(item, name): state[item].get(name)}, param, same, {}))
            found.leaders.update(_leaders(found.held, named, item, state[item]))
            found.items[item] = _digest(list(state[item]))
        elif isinstance(each, Optimizer) and not copies.keys() >= {*params_in(each.param_groups)}:
            tensors = [leaf for leaf in tree_leaves(state[item]) if isinstance(leaf, Tensor)]
            found.items[item] = _digest(tensors)
    return found


def set_apart(state: dict[str, Any], every: Sequence[Told]) -> None:
    """Moves what differs between processes, in a state to save, to keys of its own.

    every: what each process has told. ValueError, on all processes, for a module in `more` whose
    names differ, and for an optimizer whose state does.
    """
    for item in sorted({name for each in every for name in each.items}):
        if len({each.items.get(item) for each in every}) > 1:
            raise ValueError(
                f"{item} is not the same on all processes, as it must be beside the model; save "
                "it in a directory of its own: a module as the model, an optimizer with its model"
            )
    found = _different([each.held for each in every])
    if found.keys() == {GROUPS} and len({each.names for each in every}) == 1:
        found.clear()  # one process's settings, as of everything that is the same
    for path, near in chain.from_iterable(each.leaders.items() for each in every):
        known = [found.get(each) for each in near]
        if known and known[0] is not None and all(each == known[0] for each in known):
            found[path] = known[0]
    places.set_apart(state, found)


def _different(every: Sequence[Mapping[Path, Held]]) -> dict[Path, list[Home | None]]:
    """The places, by rank, of what is not the same on all processes that have it.

    A plain tensor is the same where its bytes are; a DTensor, where those of all parts are. Two
    processes that stand at other places of its process_groups have two tensors also while the bytes
    are equal, as before the first step.
    """
    found = {}
    for path in dict.fromkeys(chain.from_iterable(every)):
        by_rank = [each.get(path) for each in every]
        known: dict[tuple[bytes, ...], list[tuple[Ranks, int]]] = {}
        digests: dict[Ranks, tuple[bytes, ...]] = {}
        own_places: list[Home | None] = []
        for rank, own in enumerate(by_rank):
            if own is None:
                own_places.append(None)
                continue
            among = own.parts or (min(own.copies, default=rank),)
            if among not in digests:
                parts = (by_rank[other] for other in among)
                digests[among] = tuple(part.digest if part else b"" for part in parts)
            where = tuple(group.index(rank) for group in own.groups)
            alike = known.setdefault(digests[among], [])
            owner = next((o for w, o in alike if not where or not w or w == where), None)
            if owner is None:
                owner = rank
                alike.append((where, owner))
            own_places.append(Home(owner, own.parts, own.groups))
        if len({place.owner for place in own_places if place}) > 1:
            found[path] = own_places
    return found


def _copies(model: nn.Module) -> dict[Tensor, Ranks]:
    """The ranks that have copies of each parameter, for those in a DistributedDataParallel."""
    found: dict[Tensor, Ranks] = {}
    for module in model.modules():
        if isinstance(module, DistributedDataParallel):
            ranks = tuple(torch.distributed.get_process_group_ranks(module.process_group))
            own = module.module.named_parameters()
            found |= {p: ranks for n, p in own if n not in module.parameters_to_ignore}
    return found


def _held(
    values: Mapping[Path, Any],
    param: Tensor,
    copies: Mapping[Tensor, Ranks],
    groups: Mapping[Tensor, tuple[Ranks, ...]],
) -> dict[Path, Held]:
    """What this process has of a parameter: its values, but for those that are None or empty dicts.

    Nothing where all processes have parts or copies of it, and where it has no memory to compare.
    """
    parts, same, local = places.parts_of(param), copies.get(param, ()), local_of(param)
    whole = number_of_processes() in (len(parts), len(same))
    if whole or local.is_meta or hasattr(local, "__tensor_flatten__"):
        return {}
    own = {path: x for path, x in values.items() if isinstance(x, Tensor) or x}
    named = groups.get(param, ())
    return {path: Held(_digest(value), parts, named, same) for path, value in own.items()}


def _leaders(
    held: Mapping[Path, Held], params: Iterable[str], item: str, names: Iterable[str]
) -> dict[Path, list[Path]]:
    """For each buffer and extra state, by path, the parameters of the nearest module with some.

    None of those of which one is the same on all processes. item: what is before the names.
    params, names: the parameters, and all that the state dict has.
    """
    params = {*params}
    found: dict[Path, list[Path]] = {}
    for name in {*names} - params if held else ():
        near, outer = set[str](), name
        if name.startswith("remainders.") and "/" in name:  # the rest of an AveragedModel's average
            near = params & {name.replace("remainders.", "module.", 1).replace("/", ".")}
        while not near and outer:
            outer = outer.rpartition(".")[0]
            near = {each for each in params if each.startswith(f"{outer}." if outer else "")}
        paths: list[Path] = [(item, each) for each in sorted(near)]
        if held.keys() >= {*paths}:
            found[item, name] = paths
    return found


def _digest(values: Any) -> bytes:
    """A hash of the tensors in containers and of what is beside them."""
    made = hashlib.blake2b(digest_size=16)
    for value in tree_leaves(values):
        if not isinstance(value, Tensor):
            made.update(repr(value).encode())
            continue
        made.update(repr((value.dtype, *value.shape, *getattr(value, "placements", ()))).encode())
        local = local_of(value).detach().cpu().contiguous()
        if local.nbytes:
            made.update((ctypes.c_char * local.nbytes).from_address(local.data_ptr()))
    return made.digest()
