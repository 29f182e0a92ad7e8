"""What a step must not do while a CUDA graph is captured, or in torch.inference_mode."""

from collections.abc import Iterable

import torch


def is_capturing(device: torch.device) -> bool:
    """Whether a CUDA graph records what is queued on the device now."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def refuse_new_state(devices: Iterable[torch.device]) -> None:
    """Raises RuntimeError during capture, where every replay would make the state anew.

    And in torch.inference_mode, whose tensors cannot be updated later.
    """
    if torch.is_inference_mode_enabled():
        raise RuntimeError(
            "the first step, or the first one after a change of the optimizer's tensors, makes "
            "state, and what torch.inference_mode() makes cannot be updated later; call step "
            "outside of it"
        )
    if any(is_capturing(device) for device in devices):
        raise RuntimeError(
            "the optimizer's tensors are not what they were at its last step, and a CUDA graph is "
            "being captured; take a step before capturing, and change nothing in between"
        )
