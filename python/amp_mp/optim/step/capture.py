"""What a step that a CUDA graph captures must not do."""

from collections.abc import Iterable

import torch


def is_capturing(device: torch.device) -> bool:
    """Whether a CUDA graph records what is queued on the device now."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def refuse_new_state(devices: Iterable[torch.device]) -> None:
    """Raises RuntimeError during capture: every replay would make the state anew."""
    if any(is_capturing(device) for device in devices):
        raise RuntimeError(
            "the optimizer's tensors are not what they were at its last step, and a CUDA graph is "
            "being captured; take a step before capturing, and change nothing in between"
        )
