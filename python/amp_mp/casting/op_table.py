"""In which precision each operator runs: the table, changing it, and the casts that it makes."""

import hashlib
import sys
import threading
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch

from amp_mp import _C
from amp_mp.dtypes import LOW_PRECISION, check_choice
from amp_mp.text_table import aligned

DEVICES = ("cpu", "cuda")
APEX = _C.casting.op_list("apex")  # csrc/torch/casting/op_lists.h
OFF, PRINT, RECORD = 0, 1, 2  # csrc/torch/casting/trace.h

_lock = threading.Lock()
# The table that is in force, by device: its name, and whether it allows what is banned.
_active: dict[str, tuple[str, bool]] = {}
_overrides: dict[tuple[str, str], str] = {}  # what users have set, on top of any table
_trace = OFF  # outside of explain


class PolicyTable(dict[str, str]):
    """Operators by overload, and the policy of each; prints as a table by policy and name."""

    def __str__(self) -> str:
        rows = sorted(self.items(), key=lambda row: (row[1], row[0]))
        return aligned(("operator", "policy"), rows)


def check_device(device: str | None, argument: str = "device") -> str:
    """The device type, by default "cuda" where there is one; ValueError naming the argument."""
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device not in DEVICES:
        raise ValueError(f'{argument} must be "cpu" or "cuda", found {device!r}')
    return device


def expand(op: str) -> list[str]:
    """The overloads that set_policy's `op` names, as far as this torch has them."""
    if "." in op:
        return [op]
    namespace, name = op.split("::")
    library = getattr(torch.ops, namespace)
    return [
        f"{namespace}::{base}.{overload}".removesuffix(".default")
        for base in (name, f"{name}_")
        if hasattr(library, base)
        for overload in getattr(library, base).overloads()
    ]


def install(table: str, device: str, allow_banned: bool = False) -> None:
    """Puts a named table in force on a device type: "apex", "torch", or "stock" for torch as it is.

    What users have set with set_policy stays. Raises ValueError for another name.
    """
    check_choice("policies", table, ("apex", "torch", "stock"))
    with _lock:
        wanted = dict.fromkeys(_C.casting.policies(device), "stock")
        rows = _apex_rows(device, allow_banned) if table == "apex" else _torch_rows(device)
        # "stock": torch's kernels, which our own call without torch's cache outside of regions.
        wanted |= dict.fromkeys(rows, "stock") if table == "stock" else rows
        for (where, op), policy in _overrides.items():
            if where == device:
                wanted |= dict.fromkeys(expand(op), policy)
        for op, policy in wanted.items():
            _C.casting.set_policy(device, op, policy)
        _active[device] = table, allow_banned
    _changed()


def table_of(device: str, never: Any = ("stock", False)) -> Any:
    """The table in force on a device type, and whether it allows what is banned; or `never`."""
    return _active.get(device, never)


def _apex_rows(device: str, allow_banned: bool) -> dict[str, str]:
    rows = {}
    for policy, names in (*APEX, *_C.casting.op_list(f"apex {device}")):
        # An in-place sum has no dtype to set: like other in-place operators that belong in
        # float32, it is refused on low precision.
        in_place = "float32" if policy == "set_output_dtype" else policy
        if policy == "banned" and allow_banned:
            policy = in_place = "float32"
        for op in (op for name in names for op in expand(name)):
            rows[op] = in_place if op.split(".")[0].endswith("_") else policy
    return rows


def _torch_rows(device: str) -> dict[str, str]:
    lists = _C.casting.op_list(f"torch {device}")
    # torch's lists name single overloads: "aten::conv1d" is the default overload there.
    return {op: p for p, ops in lists for op in ops if op in expand(op.split(".")[0])}


def policies(device: str | None = None) -> PolicyTable:
    """The policy of every operator that has one of amp_mp's, by overload, as a table.

    device: "cpu" or "cuda"; default: "cuda" where there is one; ValueError for another.
    """
    return PolicyTable(_C.casting.policies(check_device(device)))


def uninstall() -> None:
    """Removes every policy: torch's dispatch tables are as they were before the first init.

    Call it while no other thread runs operators. A later init or set_policy adds policies again.
    """
    with _lock:
        _C.casting.uninstall()
        _active.clear()
        _overrides.clear()
    _changed()


def set_policy(op: str, policy: str, device: str | None = None) -> ExitStack[None]:
    """Sets how an operator is cast, before or after init, also an operator of another library.

    Args:
        op: "aten::gelu" for all its overloads and its in-place form, "aten::sum.dim_IntList" for
            one overload, "mylib::myop" for an operator of your own.
        policy: "low_precision", "float32", "widest", "set_output_dtype" (float32 results without
            casting the arguments), "bfloat16_only", "unchanged", "banned", or "stock" for what
            torch does.
        device: "cpu" or "cuda"; both if not given.

    Returns a context manager: at the end of its `with` block the policy is what it was before.
    Raises ValueError for an unknown policy or device, or an operator this torch does not have.
    """
    check_choice("policy", policy, _C.casting.policy_names())
    devices = DEVICES if device is None else (check_device(device),)
    found = expand(op) if "::" in op else []
    if not found:
        raise ValueError(f'op: torch has no operator {op!r}; expected a name like "aten::gelu"')
    before = {(where, op): _overrides.get((where, op)) for where in devices}
    with _lock:
        for where in devices:
            # Some overloads are TorchScript's alone; those the dispatcher lacks answer "".
            answers = [_C.casting.set_policy(where, each, policy) for each in found]
            if not any(answers):
                raise ValueError(f"op: torch's dispatcher has no operator {op!r}")
            _overrides[where, op] = policy
    _changed()
    change: ExitStack[None] = ExitStack()
    change.callback(_change_back, before)
    return change


def _change_back(before: dict[tuple[str, str], str | None]) -> None:
    for key, policy in before.items():
        with _lock:
            if policy is None:
                _overrides.pop(key, None)
            else:
                _overrides[key] = policy
        table, allow_banned = table_of(key[0])
        install(table, key[0], allow_banned)


def _changed() -> None:
    """Keeps graphs that were compiled under other policies from being used again."""
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()
    tables = sorted((d, *row) for d in DEVICES for row in _C.casting.policies(d).items())
    digest = hashlib.sha256(repr(tables).encode()).hexdigest()[:16]
    torch.compiler.config.cache_key_tag = f"amp_mp:{digest}"


class Cast(NamedTuple):
    """One cast: the operator, its argument, the dtypes, and whether the cache had the result."""

    op: str
    argument: str
    from_dtype: str
    to_dtype: str
    cached: bool


class CastTable(list[Cast]):
    """Casts in the order in which they were made; prints as a table."""

    was_on = True  # whether casting was on where explain was called

    def __str__(self) -> str:
        if not self and not self.was_on:
            return "no casts: casting is off here; call explain in amp.autocast or after amp.init"
        rows = ((*cast[:4], "cached" if cast.cached else "") for cast in self)
        slow = [low for low in LOW_PRECISION if _C.products.choice(low) == "float32"]
        notes = [f"\n{low} on this CPU: products are faster in float32, and stay" for low in slow]
        return aligned(("operator", "argument", "from", "to", ""), rows) + "".join(notes)


def explain(function: Callable[..., Any], *args: Any, **kwargs: Any) -> CastTable:
    """Calls the function once and returns the casts that its operators made, as a table.

    Only operators with a policy of amp_mp's report. A weight whose cast came from the cache is
    listed too, and marked. Use it in a region with casts on; the table says if they were off.
    """
    _C.casting.take_log()
    _C.casting.set_trace(RECORD)
    try:
        function(*args, **kwargs)
    finally:
        _C.casting.set_trace(_trace)
    table = CastTable(Cast(*row) for row in _C.casting.take_log())
    table.was_on = any(map(torch.is_autocast_enabled, DEVICES))
    return table


def is_verbose() -> bool:
    """Whether every cast is printed."""
    return _trace == PRINT


def set_verbose(verbose: bool) -> None:
    """Prints every cast to stderr while on."""
    global _trace
    _trace = PRINT if verbose else OFF
    _C.casting.set_trace(_trace)
