"""Warnings of an optimizer whose parameters are not, or not any more, those of the model."""

from collections.abc import Callable, Iterable
from operator import attrgetter

from torch import Tensor

from amp_mp import _C
from amp_mp.messages import warn
from amp_mp.param_groups import ParamInfo


class ReplacedCheck:
    """The warnings of one optimizer; `params`: its parameters with their places."""

    assignments = 0  # how many parameters load_state_dict(assign=True) has ever replaced

    def __init__(self) -> None:
        self.seen = 0  # of `assignments`
        self.had_gradient = False  # or a warning that it had none

    def check_assigned(self, params: Iterable[tuple[Tensor, ParamInfo]]) -> None:
        """Warns of parameters that load_state_dict has replaced; call where `seen` is too low."""
        self.seen = self.assignments
        rows = [(_C.weight_of(param), info.label) for param, info in params]
        if gone := [label for record, label in rows if record and record.is_replaced]:
            more = f" (and {len(gone) - 1} more)" if len(gone) > 1 else ""
            warn(
                f"{gone[0]}{more} is no longer the module's: load_state_dict(assign=True) has put "
                "another in its place, which no step changes. Make the optimizer after that call, "
                "or load without assign"
            )

    def note_gradient(self) -> None:
        """A parameter has a gradient, which the step under way does not see."""
        self.had_gradient = True

    def check_gradients(
        self, params: list[Tensor], infos: Callable[[], Iterable[tuple[Tensor, ParamInfo]]]
    ) -> None:
        """Warns once where none of the trainable parameters has had a gradient so far.

        infos: gives the parameters with their places, for the warning.
        """
        trainable = [*filter(attrgetter("requires_grad"), params)]
        if self.had_gradient or not trainable:
            return
        self.had_gradient = True
        for param in trainable:
            if param.grad is not None:
                return
        param, info = next(row for row in infos() if row[0] is trainable[0])
        warn(
            "no parameter of this optimizer has a gradient, nor had one before, so the step "
            f"changes nothing; the first is {info.label}, of shape {tuple(param.shape)}. If "
            "backward was called, the model has other parameters: fully_shard, "
            "parallelize_module and load_state_dict(assign=True) replace them. Make the "
            "optimizer after that call"
        )
