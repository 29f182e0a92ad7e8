"""What amp_mp says to a user: lines that it prints, and warnings."""

import warnings

import torch

from amp_mp.callers import level_outside


def say(message: str) -> None:
    """Prints it; of several processes rank 0 does."""
    dist = torch.distributed
    if not (dist.is_available() and dist.is_initialized()) or dist.get_rank() == 0:
        print(message)


def warn(message: str) -> None:
    """Warns at the line outside of amp_mp and torch that led here."""
    warnings.warn(f"amp_mp: {message}", stacklevel=level_outside())
