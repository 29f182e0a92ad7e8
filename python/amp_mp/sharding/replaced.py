"""Parameters that others have replaced in their modules after the optimizer was made."""

import gc
import sys
from collections.abc import Iterable, Iterator, MutableMapping

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from amp_mp import _C
from amp_mp.messages import warn
from amp_mp.sharding.shards import is_dtensor, is_placed_as, local_of, part

# Parameters of prepared modules that load_state_dict(assign=True) has replaced by plain ones.
assigned: MutableMapping[Tensor, None] = WeakTensorKeyDictionary()


class ReplacedCheck:
    """Refuses parameters that no module has any more; they would never get a gradient again."""

    assignments = 0  # how many parameters were ever `assigned`

    def __init__(self) -> None:
        self._passed: set[int] = set()  # ids of parameters that modules have
        self._sharded = 0  # modules of fully_shard, when they passed
        self.seen = 0  # of `assignments`

    def is_due(self) -> bool:
        """Whether fully_shard was called since the last check."""
        return self._sharded != _C.count_sharded_modules()

    def check(self, params: Iterable[tuple[Tensor, str]]) -> None:
        """Raises ValueError, by name, for parameters that DTensors have replaced; else warns once.

        params: an optimizer's, each with its name for messages.

        All modules of the process are looked at, but seldom: only where trainable parameters
        without a gradient are new, or modules have been sharded since.
        """
        seen, self.seen = self.seen, self.assignments
        if self.is_due():
            self._passed.clear()
            self._sharded = _C.count_sharded_modules()
        # There are no DTensors without a process group.
        dtensors = "torch.distributed.tensor" in sys.modules and torch.distributed.is_initialized()
        if seen == self.seen and not dtensors:
            return
        params = list(params)
        if seen != self.seen and (gone := [label for param, label in params if param in assigned]):
            more = f" (and {len(gone) - 1} more)" if len(gone) > 1 else ""
            warn(
                f"{gone[0]}{more} is no longer the module's: load_state_dict(assign=True) has put "
                "another in its place, which no step changes. Make the optimizer after that call, "
                "or load without assign"
            )
        if not dtensors:
            return
        trainable = [each for each in params if each[0].requires_grad]
        suspects = [
            (param, label)
            for param, label in trainable
            if param.grad is None and id(param) not in self._passed
        ]
        own = {id(param) for param, _ in trainable}
        lost = _replaced(suspects, own) if suspects else []
        if lost:  # by a module that is only waiting to be freed?
            gc.collect()
            lost = _replaced(suspects, own)
        # Parameters that never were in a module may have the shape of a DTensor, too.
        if any(_has_values_of(param, dtensors) for param, _, dtensors in lost):
            param, label, _ = lost[0]
            more = f" (and {len(lost) - 1} more)" if len(lost) > 1 else ""
            self._sharded = -1  # so that the next step raises, too
            raise ValueError(
                f"{label}{more} is in no module any more: fully_shard, parallelize_module or "
                "load_state_dict(assign=True) has put a DTensor of its shape "
                f"{tuple(param.shape)} in its place. It would never get a gradient; make the "
                "optimizer after that call"
            )
        self._passed |= {id(param) for param, _ in suspects}


def _replaced(
    suspects: list[tuple[Tensor, str]], own: set[int]
) -> list[tuple[Tensor, str, list[Tensor]]]:
    """Those that no module has, with trainable DTensors of their shape that modules have.

    own: ids of the optimizer's parameters, which have replaced nothing.
    """
    held: set[int] = set()
    dtensors: dict[tuple[int, ...], list[Tensor]] = {}
    for param in _parameters_of_modules():
        held.add(id(param))
        if is_dtensor(param) and param.requires_grad and id(param) not in own:
            dtensors.setdefault(tuple(param.shape), []).append(param)
    return [
        (param, label, dtensors[tuple(param.shape)])
        for param, label in suspects
        if id(param) not in held and tuple(param.shape) in dtensors
    ]


def _has_values_of(param: Tensor, dtensors: list[Tensor]) -> bool:
    """Whether one of the DTensors has the parameter's values, which are not all the same."""
    for dtensor in dtensors:
        if is_dtensor(param) and not is_placed_as(param, dtensor):
            continue
        values, own = local_of(dtensor).detach(), part(param.detach(), dtensor)
        if values.device.type == "meta" or values.dtype != own.dtype or values.numel() < 2:
            continue
        own = own.to(values.device)
        if torch.equal(own, values) and bool((own != own.flatten()[0]).any()):
            return True
    return False


def _parameters_of_modules() -> Iterator[Tensor]:
    for each in gc.get_objects():
        if issubclass(type(each), nn.Module):
            own = vars(each).get("_parameters")
            if isinstance(own, dict):
                yield from (param for param in own.values() if param is not None)
