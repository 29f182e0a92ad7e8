"""The table that says in which precision each operator runs: read it and change it."""

import hashlib
import sys
import threading

import torch

from amp_mp import _C
from amp_mp.casting.op_lists import APEX, TORCH_LOW, TORCH_WIDEST
from amp_mp.text_table import aligned

DEVICES = ("cpu", "cuda")

_lock = threading.Lock()
_active: dict[str, str] = {}  # the table each device has: its name
_overrides: dict[tuple[str, str], str] = {}  # what users have set, on top of any table


class PolicyTable(dict[str, str]):
    """Operators by overload, and the policy of each; prints as a table."""

    def __str__(self) -> str:
        """One line per operator, by policy and name."""
        rows = sorted(self.items(), key=lambda row: (row[1], row[0]))
        return aligned(("operator", "policy"), rows)


def expand(op: str) -> list[str]:
    """The operator's overloads and those of its in-place form, as far as this torch has them.

    "aten::sum" gives all; "aten::sum.dim_IntList" is one already; other libraries' names likewise.
    """
    if "." in op:
        return [op]
    namespace, name = op.split("::")
    found = []
    for base in (name, f"{name}_"):
        packet = getattr(getattr(torch.ops, namespace), base, None)
        if packet is not None:
            for overload in packet.overloads():
                found.append(
                    f"{namespace}::{base}" + ("" if overload == "default" else f".{overload}")
                )
    return found


def install(table: str, device: str, allow_banned: bool = False) -> None:
    """Puts a named table in force on a device type: "apex", "torch", or "stock" for torch as it is.

    What users have set with set_policy stays. Raises ValueError for another name.
    """
    if table not in ("apex", "torch", "stock"):
        raise ValueError(f'policies must be "apex", "torch" or "stock", found {table!r}')
    with _lock:
        wanted = _rows(table, device, allow_banned)
        for op in _C.casting.policies(device):
            wanted.setdefault(op, "stock")
        for (where, op), policy in _overrides.items():
            if where == device:
                wanted.update(dict.fromkeys(expand(op), policy))
        for op, policy in wanted.items():
            _C.casting.set_policy(device, op, policy)
        _active[device] = table
    _changed()


def install_default(table: str, device: str) -> None:
    """Puts the table in force unless one is, or was and has been deactivated."""
    if device not in _active:
        install(table, device)


def _rows(table: str, device: str, allow_banned: bool) -> dict[str, str]:
    if table == "stock":
        return {}
    if table == "torch":
        low = {op: "low_precision" for name in TORCH_LOW[device] for op in _exactly(name)}
        low |= dict.fromkeys(_exactly("aten::mkldnn_rnn_layer"), "bfloat16_only")
        return low | {op: "widest" for name in TORCH_WIDEST for op in _exactly(name)}
    rows = {}
    for group in APEX:
        policy = "float32" if group.policy == "banned" and allow_banned else group.policy
        for name in group.ops:
            for op in expand(name):
                rows[op] = _overload_policy(op, policy)
    return rows


def _exactly(name: str) -> list[str]:
    """The one overload torch's list names: "aten::conv1d" is the default overload there."""
    return [name] if name in expand(name.split(".")[0]) else []


def _overload_policy(op: str, policy: str) -> str:
    """An in-place sum has no dtype to set: it is refused on low precision like the others."""
    base = op.split("::")[1].split(".")[0]
    return "float32" if policy == "set_output_dtype" and base.endswith("_") else policy


def policies(device: str | None = None) -> PolicyTable:
    """The policy of every operator that has one of amp_mp's, by overload, as a table.

    Args:
        device: "cpu" or "cuda"; default: "cuda" where there is one.

    Raises:
        ValueError: another device.
    """
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    return PolicyTable(_C.casting.policies(_check_device(device)))


def uninstall() -> None:
    """Removes every policy: torch's dispatch tables are as they were before the first init.

    Call it while no other thread runs operators. A later init or set_policy adds policies again.
    """
    with _lock:
        _C.casting.uninstall()
        _active.clear()
        _overrides.clear()
    _changed()


class _Change:
    """A changed policy; as a context manager it is changed back on leaving."""

    def __init__(self, before: dict[tuple[str, str], str | None]) -> None:
        self._before = before

    def __enter__(self) -> None:
        return None

    def __exit__(self, *_: object) -> None:
        for (device, op), policy in self._before.items():
            with _lock:
                if policy is None:
                    _overrides.pop((device, op), None)
                else:
                    _overrides[device, op] = policy
            install(_active.get(device, "stock"), device)


def set_policy(op: str, policy: str, device: str | None = None) -> _Change:
    """Sets how an operator is cast, before or after init, also an operator of another library.

    Args:
        op: "aten::gelu" for all its overloads and its in-place form, "aten::sum.dim_IntList" for
            one overload, "mylib::myop" for an operator of your own.
        policy: "low_precision", "float32", "widest", "set_output_dtype" (float32 results without
            casting the arguments), "bfloat16_only", "unchanged", "banned", or "stock" for what
            torch does.
        device: "cpu" or "cuda"; both if not given.

    Returns:
        Something to use with `with`, to have the policy for a block only.

    Raises:
        ValueError: an unknown policy or device, or an operator this torch does not have.
    """
    if policy not in _C.casting.policy_names():
        known = ", ".join(_C.casting.policy_names())
        raise ValueError(f"policy must be one of {known}; found {policy!r}")
    devices = DEVICES if device is None else (_check_device(device),)
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
    return _Change(before)


def _check_device(device: str) -> str:
    if device not in DEVICES:
        raise ValueError(f'device must be "cpu" or "cuda", found {device!r}')
    return device


def _changed() -> None:
    """Keeps graphs that were compiled under other policies from being used again."""
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()
    tables = sorted((d, *row) for d in DEVICES for row in _C.casting.policies(d).items())
    digest = hashlib.sha256(repr(tables).encode()).hexdigest()[:16]
    torch.compiler.config.cache_key_tag = f"amp_mp:{digest}"
