"""What a loss scaler passes to one step of an optimizer."""

from dataclasses import dataclass

import torch
from torch import Tensor

from amp_mp import _C
from amp_mp.optim.step.gather import Bucket


@dataclass
class Measured:
    """The gradients' statistics, device by device, read before the step that uses them."""

    buckets: list[Bucket]
    found: list[_C.Measurement]

    def totals(self) -> dict[torch.device, Tensor]:
        """float64 [3] per device: sum of squares, largest finite |g|, number of inf and NaN."""
        pairs = zip(self.buckets, self.found, strict=True)
        return {bucket.device: each.rows[-1] for bucket, each in pairs}


@dataclass
class Handed:
    """What GradScaler, FP16_Optimizer or a stock torch scaler passes to a step."""

    # The loss scale that the gradients carry, a number or a tensor of one element; None is 1.
    scale: Tensor | float | None = None
    # Another's verdict, not 0 to skip the step; None where the step itself decides.
    found_inf: Tensor | float | None = None
    # Read the gradients for the verdict even if the optimizer itself needs no statistics.
    measure: bool = False
    # Statistics that were read already; the step then reads the gradients only once.
    measured: Measured | None = None
    # Clip to this norm instead of the optimizer's max_grad_norm.
    max_norm: float | None = None
    # Where the loss scale goes next. The step applies it where all parameters are on one device,
    # and then sets scale_updated.
    scale_update: _C.ScaleUpdate | None = None
    scale_updated: bool = False
