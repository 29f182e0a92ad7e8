"""The norm of an earlier step, to clip by where the present one is known too late."""

import torch
from torch import Tensor

from amp_mp import _C


class PreviousNorm:
    """The norm of the last step without overflow.

    norm: float64 [], -1 while no step was clean; None before the first step. known: float64 [3],
    the statistics of all gradients of the step under way, where they are known before it: in the
    first step of shards, whose gradients wait for all processes.
    """

    def __init__(self) -> None:
        self.norm: Tensor | None = None
        self.known: Tensor | None = None

    def forget(self) -> None:
        """Begins anew."""
        self.norm = self.known = None

    def is_there(self) -> bool:
        """Whether `statistics` has something to clip by."""
        return self.norm is not None or self.known is not None

    def statistics(self, own: Tensor, scale: Tensor | None, is_shard: bool) -> Tensor:
        """What a parameter's step is decided from, float64 [3].

        own: the statistics of its gradient, or of this process's shard of it. scale: that the
        gradient carries.
        """
        if self.known is not None:
            return self.known.to(own.device)
        assert self.norm is not None
        if is_shard:  # what is inf on this process may be finite on another, which would not skip
            own = torch.zeros_like(own)
        norm = self.norm.to(own.device)
        squares = (norm if scale is None else norm * scale.double()).square()
        return torch.stack([torch.where(norm >= 0, squares, own[0]), own[1], own[2]])

    def take(self, verdict: Tensor) -> None:
        """Takes the norm of a step's verdict; keeps the present one after an overflow.

        Shards go on waiting until a step was clean, which the host has to know: it waits for the
        device, in these first steps alone.
        """
        first, self.known = self.known, None
        if first is not None and bool(verdict[0] != 0):
            return
        before = torch.full_like(verdict[2], -1.0) if self.norm is None else self.norm
        _C.used_on_current_stream([before])  # of another step's stream, and dropped here
        self.norm = torch.where(verdict[0] != 0, before, verdict[2])
