"""Callers that are recognised by their stack frames; no other file looks at the stack.

Each function says why no argument can tell.
"""

import sys
from types import FrameType
from typing import Any

LIGHTNING = ("lightning", "pytorch_lightning", "lightning_fabric")
INNER = ("amp_mp", "torch", "contextlib")


def lightning_asks() -> bool:
    """Whether Lightning reads the property in whose getter this is called.

    It reads the attribute that torch's GradScaler reads, and refuses to clip where it is true.
    """
    return _modules()[1].split(".")[0] in LIGHTNING


def zero_redundancy_group() -> Any:
    """The process group of the ZeroRedundancyOptimizer that is making an optimizer, or None.

    It passes on what a user gave, and not its group; as an option the group would be in its state
    dict, which no file could hold.
    """
    for frame in _frames():
        if frame.f_globals.get("__name__") == "torch.distributed.optim.zero_redundancy_optimizer":
            return getattr(frame.f_locals.get("self"), "process_group", None)
    return None


def level_outside() -> int:
    """warnings.warn's stacklevel, in the caller, of the line outside of amp_mp and torch.

    How many frames are between depends on the call, and on torch's wrappers around it.
    """
    modules = _modules()
    inner = (depth for depth, name in enumerate(modules) if name.split(".")[0] not in INNER)
    return 1 + next(inner, len(modules) - 1)


def _modules() -> list[str]:
    """The modules of the stack frames, outwards from the caller of the function that calls this."""
    return [frame.f_globals.get("__name__") or "" for frame in _frames()][1:]


def _frames() -> list[FrameType]:
    """The stack frames, outwards from the caller of the function that calls this."""
    frame: FrameType | None = sys._getframe(2)
    found = []
    while frame is not None:
        found.append(frame)
        frame = frame.f_back
    return found
