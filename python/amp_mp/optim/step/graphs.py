"""CUDA graphs, and the graphs of torch.compile."""

import weakref
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, _disable_dynamo  # type: ignore[attr-defined]
from torch.utils.hooks import RemovableHandle

Function = TypeVar("Function", bound=Callable[..., Any])


def is_capturing(device: torch.device) -> bool:
    """Whether a CUDA graph records what is queued on the device now."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def refuse_split(part: str, captured: bool, captures: bool) -> None:
    """Raises RuntimeError where a CUDA graph captures a part and not what it reads, or the reverse.

    Replays of one would use what the other has left of another iteration.
    """
    if captured != captures:
        graph = "is captured by a CUDA graph" if captures else "is outside of the CUDA graph"
        raise RuntimeError(
            f"{part} {graph}, and the part of the iteration before it is not: capture unscale_, "
            "step and update together, or none of them"
        )


def drop_in_a_capture(param: Tensor) -> RemovableHandle:
    """Lets the parameter's next backward begin without its gradient if a CUDA graph captures it.

    Zeros to which a graph adds would grow with every replay; without them it makes its own.
    """
    kept = weakref.ref(param)

    def drop(_: Tensor) -> None:
        handle.remove()
        if (param := kept()) is not None and is_capturing(param.device):
            param.grad = None

    handle: RemovableHandle = param.register_hook(drop)  # type: ignore[no-untyped-call]
    return handle


def outside_graphs(function: Function) -> Function:
    """The function, which a compiled caller calls as it is, with everything that it calls.

    Traced, a step would take torch.compile a minute and be computed by other kernels with other
    results. torch loads its compiler at the first call, as it does when an optimizer is made.
    """
    return cast("Function", _disable_dynamo(function))
