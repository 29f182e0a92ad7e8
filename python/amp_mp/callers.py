"""Callers that are recognised by their stack frames; no other file looks at the stack.

Each function says why no argument can tell.
"""

import sys
from types import FrameType

LIGHTNING = ("lightning", "pytorch_lightning", "lightning_fabric")
INNER = ("amp_mp", "torch", "contextlib")


def lightning_asks() -> bool:
    """Whether Lightning reads the property in whose getter this is called.

    It reads the attribute that torch's GradScaler reads, and refuses to clip where it is true.
    """
    return _modules()[1].split(".")[0] in LIGHTNING


def is_inside_zero_redundancy() -> bool:
    """Whether a ZeroRedundancyOptimizer is making an optimizer; it passes on what a user gave."""
    return "torch.distributed.optim.zero_redundancy_optimizer" in _modules()


def level_outside() -> int:
    """warnings.warn's stacklevel, in the caller, of the line outside of amp_mp and torch.

    How many frames are between depends on the call, and on torch's wrappers around it.
    """
    modules = _modules()
    inner = (depth for depth, name in enumerate(modules) if name.split(".")[0] not in INNER)
    return 1 + next(inner, len(modules) - 1)


def _modules() -> list[str]:
    """The modules of the stack frames, outwards from the caller of the function that calls this."""
    frame: FrameType | None = sys._getframe(2)
    found = []
    while frame is not None:
        found.append(frame.f_globals.get("__name__") or "")
        frame = frame.f_back
    return found
