"""The watch over overflows in a row."""

from collections.abc import Callable
from dataclasses import dataclass

from amp_mp.messages import warn
from amp_mp.scaling.policies import ScalePolicy

STUCK = 5  # overflows in a row at a scale that does not fall
SKIPS = 25  # skipped steps in a row
INCURABLE = 40  # overflows in a row at any scale: from 2^32 down to 1 there are 32 halvings


@dataclass
class OverflowWatch:
    """Counts steps, and how many of the last ones overflowed."""

    steps: int = 0
    in_a_row: int = 0
    at_scale: int = 0  # how many of those in a row had the last one's loss scale
    scale: float = 1.0  # of the last overflow
    warned: int = 0  # the first step of the overflows that `warn_of_skips` told last

    @property
    def since(self) -> int:
        """The first step of the overflows in a row."""
        return self.steps - self.in_a_row + 1

    def count(self, overflow: bool, scale: float = 1.0) -> None:
        """Adds a step; scale: what its gradients carried."""
        self.steps += 1
        if not overflow:
            self.in_a_row = self.at_scale = 0
            return
        self.in_a_row += 1
        self.at_scale = self.at_scale + 1 if scale == self.scale else 1
        self.scale = scale

    def warn_of_skips(self, name: str, describe: Callable[[], str], spike: str = "") -> None:
        """Warns once in a run of skipped steps, at SKIPS steps skipped by `name`.

        spike: what is wrong where the last was not for an overflow.
        """
        if self.in_a_row < SKIPS or self.warned == self.since:
            return
        self.warned = self.since
        what = spike or "gradients are inf or NaN"
        warn(
            f"{name} has skipped {self.in_a_row} steps in a row, since step {self.since}: "
            f"{what}, nothing is updated, and training stands still."
            + ("" if spike else f" The gradients concerned, of this step:\n{describe()}")
        )

    def update(
        self, policy: ScalePolicy, overflow: bool, max_abs: float, describe: Callable[[float], str]
    ) -> None:
        """Adds a step and moves the policy's scale; warns where no scale can end the overflows."""
        before = policy.scale
        policy.update(overflow, max_abs)
        self.count(overflow, before)
        stuck = overflow and policy.scale >= before
        if not (stuck and self.at_scale == STUCK) and self.in_a_row != INCURABLE:
            return
        floor = ", which cannot fall further" if stuck else ""
        warn(
            f"gradients have been inf or NaN in each of the last {self.in_a_row} steps, "
            f"since step {self.since}, and the loss scale is {policy.scale:g}{floor}: no scale can "
            f"cure that. The gradients concerned, of this step:\n{describe(before)}"
        )
