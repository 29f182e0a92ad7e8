"""The options of param_groups that slots are made of: formats, rounding, and Muon's blocks.

A script may change them between two steps. The slots are then made anew, and states converted.
"""

from amp_mp import _C
from amp_mp.optim.choices import check_choice
from amp_mp.optim.options import check_rounding
from amp_mp.optim.rule import Group, Rule, kinds_of
from amp_mp.optim.state.formats import KINDS


class GroupOptions:
    """The options of some param_groups of one rule, as they are now."""

    def __init__(self, rule: Rule, groups: list[Group]) -> None:
        own = () if rule.directions is None else rule.directions.options
        self._keys = ("memory", "master", "rounding", *rule.names, *own)
        self._formats = ("master", *rule.names)
        self._values = [[group.get(key) for group in groups] for key in self._keys]

    def are_those_of(self, groups: list[Group]) -> bool:
        """Whether these groups have the same options still."""
        return _C.holds(groups, self._keys, self._values)

    def refuse_new_memory(self, groups: list[Group]) -> None:
        """Raises ValueError where `memory` was written into one of these groups since.

        A group that has it from the start, as ZeroRedundancyOptimizer's have, is left alone.
        """
        if any(g.get("memory") != m for g, m in zip(groups, self._values[0], strict=True)):
            raise ValueError(
                "memory in a param_group is for new optimizers and new groups; delete it and write "
                f"the formats that it stands for: {', '.join(self._formats)}"
            )


def refuse_formats(rule: Rule, group: Group, index: int) -> None:
    """Raises ValueError naming a param_group, by its index, and the format that it cannot have."""
    try:
        check_rounding(group)
        for name, kind in {"master": "master", **kinds_of([rule])}.items():
            check_choice(name, group[name], KINDS[kind])
    except ValueError as error:
        raise ValueError(f"param_group {index}: {error}") from None
