"""What a step does while a CUDA graph captures it."""

import weakref

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from amp_mp.messages import warn


def is_capturing(device: torch.device) -> bool:
    """Whether a CUDA graph records what is queued on the device now."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def refuse_split(part: str, captured: bool, captures: bool) -> None:
    """Raises RuntimeError where a CUDA graph captures a part and not what it reads, or the reverse.

    Replays of one would read what the other has written in another iteration.
    """
    if captured != captures:
        graph = "is captured by a CUDA graph" if captures else "is outside of the CUDA graph"
        raise RuntimeError(
            f"{part} {graph}, and the part of the iteration before it is not: capture unscale_, "
            "step and update together, or none of them"
        )


def warn_of_graph() -> None:
    """Warns that a CUDA graph has captured a step of tensors that are no longer the optimizer's."""
    warn(
        "a CUDA graph has captured this optimizer's step, and its tensors are others now (a "
        "state dict was loaded, or a param_group, a format, a device or a NormSpike's history "
        "has changed); replays go on with the old ones. Capture the step again"
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
