"""apex.multi_tensor_apply: calls a function of amp_C on lists of tensors."""

from collections.abc import Callable
from typing import Any, ClassVar

__all__ = ["MultiTensorApply", "multi_tensor_applier"]


class MultiTensorApply:
    """op(chunk_size, noop_flag_buffer, tensor_lists, *args); chunk_size changes no result."""

    available: ClassVar[bool] = True

    def __init__(self, chunk_size: int) -> None:
        self.chunk_size = chunk_size

    def __call__(self, op: Callable[..., Any], *arguments: Any) -> Any:
        """arguments: noop_flag_buffer, tensor_lists, and the op's own. Returns what op returns."""
        return op(self.chunk_size, *arguments)


multi_tensor_applier = MultiTensorApply(2048 * 32)
