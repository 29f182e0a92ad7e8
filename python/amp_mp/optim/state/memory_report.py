"""Bytes of an optimizer and its parameters, counted from their storages."""

from dataclasses import dataclass

from torch import Tensor
from torch.optim import Optimizer

from amp_mp import _C
from amp_mp.optim.state import kept_masters
from amp_mp.optim.state.stored_formats import CLOCK
from amp_mp.param_groups import params_in
from amp_mp.sharding.shards import local_of
from amp_mp.text_table import aligned, size_text


@dataclass(frozen=True)
class MemoryReport:
    """Bytes by kind of tensor: weight, grad, master or remainder, each state, step, original.

    `original` is what `prepare` keeps of the float32 weights until the first step.

    Printed, it is a table. Every storage is counted once, whole, so a small view of a large
    buffer shows what it keeps alive. A DTensor counts with its part on this process.
    """

    parameters: int  # elements
    bytes: dict[str, int]
    host: dict[str, int]  # the part of `bytes` that offload="state" keeps in memory of the host

    @property
    def per_parameter(self) -> dict[str, float]:
        """Bytes per element by kind."""
        return {kind: n / max(self.parameters, 1) for kind, n in self.bytes.items()}

    @property
    def bytes_per_parameter(self) -> float:
        """The sum of weights, masters and states, without gradients."""
        return sum(n for kind, n in self.per_parameter.items() if kind != "grad")

    @property
    def total(self) -> int:
        """Bytes of everything, gradients included."""
        return sum(self.bytes.values())

    def __str__(self) -> str:
        per, host = self.per_parameter, self.host
        rows = [(kind, n, host.get(kind, 0), per[kind]) for kind, n in self.bytes.items()]
        grad, away = self.bytes.get("grad", 0), sum(host.values())
        rows += [("all", self.total, away, sum(per.values()))]
        rows += [("all but grad", self.total - grad, away, self.bytes_per_parameter)]
        header = ("", f"{'memory':>11}", f"{'host':>11}", "bytes a parameter")
        shown = [
            (kind, f"{size_text(n):>11}", f"{size_text(there):>11}", f"{each:17.3f}")
            for kind, n, there, each in rows
        ]
        return aligned(header, shown)


def report_memory(optimizer: Optimizer) -> MemoryReport:
    """See FusedOptimizer.memory_report; takes any torch optimizer."""
    counted: set[int] = set()
    found: dict[str, int] = {}
    host: dict[str, int] = {}
    params = params_in(optimizer.param_groups)
    for param in params:
        tensors = [("weight", param), ("grad", param.grad), *optimizer.state.get(param, {}).items()]
        tensors += [("original", tensor) for tensor in kept_masters.tensors_of(param)]
        for name, value in tensors:
            if not isinstance(value, Tensor):
                continue
            storage = local_of(value).untyped_storage()
            if storage.data_ptr() not in counted:
                counted.add(storage.data_ptr())
                kind = "step" if name in CLOCK else name
                found[kind] = found.get(kind, 0) + storage.nbytes()
                if _C.is_on_host(local_of(value)):
                    host[kind] = host.get(kind, 0) + storage.nbytes()
    return MemoryReport(sum(local_of(p).numel() for p in params), found, host)
