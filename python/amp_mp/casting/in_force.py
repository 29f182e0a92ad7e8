"""What casts in this thread, and the regions without an end that have switched it on."""

import threading
from typing import Any, NamedTuple
from weakref import ref

import torch

from amp_mp import _C
from amp_mp.casting.autocast import set_keep_casts
from amp_mp.casting.op_table import DEVICES, install, is_verbose, set_verbose, table_of


class Casting(NamedTuple):
    """How one device type casts. `verbose` and the table are the process's, the rest this thread's.

    table: its name, and whether it computes what it bans in float32 instead.
    """

    device: str
    enabled: bool
    dtype: torch.dtype
    caching: bool
    keeps: bool
    table: tuple[str, bool]
    verbose: bool

    def put_in_force(self) -> None:
        """Casts so from now on; ValueError for an unknown table, before anything is changed."""
        if self.table != table_of(self.device):
            install(self.table[0], self.device, self.table[1])
        set_verbose(self.verbose)
        set_keep_casts(self.keeps)
        torch.set_autocast_enabled(self.device, self.enabled)
        torch.set_autocast_dtype(self.device, self.dtype)
        torch.set_autocast_cache_enabled(self.caching)
        clear_casts()


def clear_casts() -> None:
    """Drops the casts of weights, torch's and ours."""
    torch.clear_autocast_cache()
    _C.casting.clear_cache()


def casting_of(device: str) -> Casting:
    """How the device type casts now."""
    set_keep_casts(keeps := set_keep_casts(False))
    low, caching = torch.get_autocast_dtype(device), torch.is_autocast_cache_enabled()
    enabled = torch.is_autocast_enabled(device)
    return Casting(device, enabled, low, caching, keeps, table_of(device), is_verbose())


class _Regions(threading.local):
    def __init__(self) -> None:
        self.owners: list[tuple[ref[Any], Casting]] = []  # in the order in which they began
        self.before: list[Casting] = []  # what was in force before the first


_regions = _Regions()


def begin(owner: Any, casting: Casting) -> None:
    """Puts it in force until `end(owner)`. An owner that is gone has no end: it was for good."""
    before = list(map(casting_of, DEVICES))
    casting.put_in_force()
    if not _regions.owners or _regions.owners[-1][0]() is None:
        _regions.owners, _regions.before = [], before
    _regions.owners.append((ref(owner), casting))


def end(owner: Any) -> None:
    """What the owner has begun ends; what was before, and the other owners' castings, are in force.

    In any order: the one that began last among those left decides.
    """
    left = [(each, casting) for each, casting in _regions.owners if each() not in (None, owner)]
    if all(each() is not owner for each, _ in _regions.owners):
        return
    _regions.owners = left
    for casting in (*_regions.before, *(casting for _, casting in left)):
        casting.put_in_force()
