"""Backward passes inside of another, as reentrant checkpoints start them.

Each gives a parameter a part of its gradient; the gradient is whole when the outermost one ends.
"""

from inspect import unwrap

from torch import Tensor

from amp_mp import _C
from amp_mp.torch_private import at_end_of_backward, current_backward


class Passes:
    """Tells a hook whether its gradient is whole, by the backward pass that it runs in."""

    def __init__(self) -> None:
        self._outermost = -1  # torch's number of the pass that was looked at last
        self._nests = False  # whether it may run others inside
        self._whole: set[int] = set()  # in it, the parameters whose gradients were called whole

    def forget(self) -> None:
        """Call at the end of an iteration: a pass that raised ends without telling."""
        self._outermost = -1
        self._whole.clear()

    def is_whole(self, param: Tensor) -> bool:
        """Whether no pass inside of this one adds to the gradient that has come.

        False for all of a pass that may run others: what is stepped would be recomputed with other
        weights. What `calls_backward` cannot know is found by `was_whole`.
        """
        if _C.is_nested_backward():
            return False
        outermost = current_backward()
        if outermost != self._outermost:
            self.forget()
            self._outermost = outermost
            self._nests = any(calls_backward(kind) for kind in _C.autograd_functions())
            if outermost >= 0:
                at_end_of_backward(self.forget)
        if not self._nests:
            self._whole.add(id(param))
        return not self._nests

    def was_whole(self, param: Tensor) -> bool:
        """Whether the outermost pass under way has called the parameter's gradient whole."""
        return id(param) in self._whole


def calls_backward(kind: type) -> bool:
    """Whether a Function's backward starts another backward pass; kind: the class of its node."""
    function = getattr(getattr(kind, "_forward_cls", None), "backward", None)
    code = getattr(unwrap(function), "__code__", None) if function is not None else None
    return code is not None and not {"backward", "run_backward"}.isdisjoint(code.co_names)
