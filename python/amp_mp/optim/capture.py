"""What a step captured by a CUDA graph must not do."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from amp_mp.optim.state import Bucket


def is_capturing(device: torch.device) -> bool:
    """Whether what is queued on the device now goes into a CUDA graph."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def refuse_new_state(devices: set[torch.device]) -> None:
    """Raises RuntimeError under capture: replays would make the state again, every time."""
    if any(is_capturing(device) for device in devices):
        raise RuntimeError(
            "the optimizer's tensors are not what they were at its last step, and a CUDA graph is "
            "being captured; take a step before capturing, and change nothing in between"
        )


def refuse_dormant(buckets: list[Bucket]) -> None:
    """Raises ValueError under capture where a parameter has no state: it would never be stepped.

    One that has state but no gradient is refused by the native step.
    """
    for bucket in buckets:
        if not bucket.dormant or not is_capturing(bucket.device):
            continue
        for param in bucket.dormant:
            if param.requires_grad:
                raise ValueError(
                    f"a parameter of shape {tuple(param.shape)} has had no gradient yet, and a "
                    "step captured now would leave it out for ever; take a step with all "
                    "gradients before capturing, or freeze it"
                )
