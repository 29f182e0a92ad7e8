"""Where lanes of a warp that a branch has separated wait for each other."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from sass_warp import ALL, LANES, Mask


@dataclass(eq=False)
class Group:
    """Lanes that are at the same instruction; `at` is its index."""

    at: int
    lanes: Mask


class Barriers:
    """The barriers of a warp. Every lane has its own of each name, as on a GPU.

    So lanes that run the same code one after another do not disturb each other.
    """

    def __init__(self) -> None:
        self._expected: dict[str, list[Mask]] = {}  # by lane: the lanes that wait for each other
        self._waiting: list[tuple[str, Group]] = []  # to go on at the group's `at`

    def expect(self, name: str, lanes: Mask) -> None:
        """From now on `lanes` wait for each other at the barrier."""
        own = self._expected.setdefault(name, [~ALL for _ in range(LANES)])
        for lane in np.flatnonzero(lanes):
            own[lane] = lanes.copy()

    def leave(self, name: str, lanes: Mask) -> None:
        """`lanes` will not come to the barrier."""
        self._expected[name] = [expected & ~lanes for expected in self._expected[name]]

    def wait(self, name: str, group: Group) -> None:
        """A group has come to the barrier, whose lanes may have begun to wait apart."""
        lanes = group.lanes.copy()
        while lanes.any():
            together = lanes & self._expected[name][int(np.argmax(lanes))]
            if not together.any():
                raise RuntimeError(f"lanes wait at {name}, which does not expect them")
            self._waiting.append((name, Group(group.at, together)))
            lanes &= ~together

    def released(self, live: Mask) -> list[Group]:
        """The groups that wait no longer, because all `live` lanes they expect have come."""
        free = [one for one in self._waiting if self._is_complete(one, live)]
        self._waiting = [one for one in self._waiting if one not in free]
        return [group for _, group in free]

    def _is_complete(self, one: tuple[str, Group], live: Mask) -> bool:
        name, group = one
        expected = self._expected[name][int(np.argmax(group.lanes))] & live
        for other, at_it in self._waiting:
            if other == name and at_it.at == group.at:
                expected = expected & ~at_it.lanes
        return not expected.any()

    def held(self) -> list[str]:
        """Names of the barriers at which lanes still wait."""
        return sorted({name for name, _ in self._waiting})
