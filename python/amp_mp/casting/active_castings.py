"""Casting that handles have switched on; the newest that has not ended is in force."""

import threading
from typing import Any, NamedTuple
from weakref import ref

import torch

from amp_mp import _C
from amp_mp.casting import op_table
from amp_mp.casting.op_table import DEVICES, table_of


class Casting(NamedTuple):
    """How one device type casts; `verbose` and the table are the process's, the rest a thread's."""

    device: str
    enabled: bool
    dtype: torch.dtype
    caching: bool
    keeps: bool
    table: tuple[str, bool]  # its name, and whether it computes what it bans in float32 instead
    verbose: bool

    def put_in_force(self) -> None:
        """Casts so from now on, by our kernels. ValueError, and no change: an unknown table."""
        if self.table != table_of(self.device, None if self.enabled else self.table):
            op_table.install(self.table[0], self.device, self.table[1])
        op_table.set_verbose(self.verbose)
        _C.casting.set_keeps_casts(self.keeps)
        torch.set_autocast_enabled(self.device, self.enabled)
        torch.set_autocast_dtype(self.device, self.dtype)
        torch.set_autocast_cache_enabled(self.caching)
        clear_casts()


def clear_casts() -> None:
    """Drops the casts of weights, torch's and ours."""
    torch.clear_autocast_cache()
    _C.casting.clear_cache()


def _casting_of(device: str) -> Casting:
    _C.casting.set_keeps_casts(keeps := _C.casting.set_keeps_casts(False))
    low, caching = torch.get_autocast_dtype(device), torch.is_autocast_cache_enabled()
    enabled = torch.is_autocast_enabled(device)
    return Casting(device, enabled, low, caching, keeps, table_of(device), op_table.is_verbose())


class _Owners(threading.local):
    began: tuple[tuple[ref[Any], Casting], ...] = ()  # in this order
    before: tuple[Casting, ...] = ()  # what was in force before the first


_owners = _Owners()


def begin(owner: Any, casting: Casting) -> None:
    """Puts it in force until `end(owner)`. An owner that is gone has no end: it was for good."""
    before = tuple(map(_casting_of, DEVICES))
    casting.put_in_force()
    if not _owners.began or _owners.began[-1][0]() is None:
        _owners.began = ()
        _owners.before = before
    _owners.began += ((ref(owner), casting),)


def end(owner: Any) -> None:
    """Puts in force what was before the first owner, and then the castings of those left."""
    if any(each() is owner for each, _ in _owners.began):
        _owners.began = tuple(row for row in _owners.began if row[0]() not in (None, owner))
        for casting in (*_owners.before, *(casting for _, casting in _owners.began)):
            casting.put_in_force()
