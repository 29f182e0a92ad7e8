"""Parameters that DTensors have replaced in their modules after the optimizer was made."""

import gc
import sys
from collections.abc import Iterator

from torch import Tensor, nn

from amp_mp.optim.rule import Group
from amp_mp.optim.step.gather import param_infos
from amp_mp.sharding.shards import is_dtensor


def count_sharded_modules() -> int:
    """How many modules of fully_shard there are."""
    states = sys.modules.get("torch.distributed._composable_state")
    return len(getattr(states, "_module_state_mapping", ()))


class ReplacedCheck:
    """Refuses parameters that no module has any more; they would never get a gradient again."""

    def __init__(self) -> None:
        self._passed: set[int] = set()  # ids of parameters that modules have
        self._sharded = 0  # modules of fully_shard, when they passed

    def is_due(self) -> bool:
        """Whether fully_shard was called since the last check."""
        return self._sharded != count_sharded_modules()

    def check(self, groups: list[Group]) -> None:
        """Raises ValueError, by name, for a parameter that a DTensor of its shape has replaced.

        Such a parameter has no gradient, no module has it, and one has a DTensor of its shape that
        is not in these groups. All modules of the process are looked at, but seldom: only where
        trainable parameters without a gradient are new, or modules have been sharded since.
        """
        if self.is_due():
            self._passed.clear()
            self._sharded = count_sharded_modules()
        if "torch.distributed.tensor" not in sys.modules:
            return
        suspects = {
            id(param): (param, info.label)
            for param, info in param_infos(groups)
            if param.requires_grad and param.grad is None and id(param) not in self._passed
        }
        if not suspects:
            return
        own = {id(param) for group in groups for param in group["params"]}
        held, shapes = set(), set()
        for param in _parameters_of_modules():
            held.add(id(param))
            if is_dtensor(param) and id(param) not in own:
                shapes.add(tuple(param.shape))
        lost = [
            (tuple(param.shape), label)
            for key, (param, label) in suspects.items()
            if key not in held and tuple(param.shape) in shapes
        ]
        if lost:
            shape, label = lost[0]
            more = f" (and {len(lost) - 1} more)" if len(lost) > 1 else ""
            self._sharded = -1  # so that the next step raises, too
            raise ValueError(
                f"{label}{more} is in no module any more: fully_shard, parallelize_module or "
                f"load_state_dict(assign=True) has put a DTensor of its shape {shape} in its "
                "place. It would never get a gradient; make the optimizer after that call"
            )
        self._passed |= suspects.keys()


def _parameters_of_modules() -> Iterator[Tensor]:
    """The parameters of all modules of this process."""
    for each in gc.get_objects():
        if issubclass(type(each), nn.Module):
            own = vars(each).get("_parameters")
            if isinstance(own, dict):
                yield from (param for param in own.values() if param is not None)
