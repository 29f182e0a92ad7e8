"""A limit for the norm of gradients that follows the run."""

from dataclasses import dataclass
from math import inf


@dataclass(frozen=True)
class NormSpike:
    """A limit for the gradients' norm that follows the run: `skip_norm_above` of the optimizers.

    A step is skipped where log2 of the norm is more than `sigmas` standard deviations above the
    mean of the last `window` steps taken (csrc/core/norm_limit.h: exponential averages once a
    window is full; the deviation counts as at least 1/16). While fewer than window / 2 norms are
    known nothing is skipped, as in OLMo-core's SkipStepOptimizer. Skipped steps change neither mean
    nor deviation; after `window` of them in a row all is forgotten: a norm that stays is learned.

    Raises ValueError unless sigmas > 0 and window >= 2.
    """

    sigmas: float = 6.0
    window: int = 100

    def __post_init__(self) -> None:
        if not 0 < self.sigmas < inf:
            raise ValueError(f"sigmas must be positive and finite, found {self.sigmas!r}")
        if not 2 <= self.window < inf:
            raise ValueError(f"window must be 2 or more and finite, found {self.window!r}")
