"""The arguments that every fused optimizer takes, their documentation, and checks of ranges."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypedDict

from torch import Tensor

from amp_mp.optim.state.formats import ROUNDINGS

# What help() of every fused optimizer ends with.
SHARED_ARGUMENTS = """
    All fused optimizers also take:
        maximize: True ascends. Default False.
        max_grad_norm: clip inside the step by the gradients' global 2-norm over all groups, as
            torch.nn.utils.clip_grad_norm_ does. Default None: no clipping.
        check_overflow: True skips a step with an inf or NaN gradient. Clipping, loss scalers, LAMB,
            LARS and NovoGrad measure the gradients anyway and then skip too. A skipped step leaves
            every byte as it was. Default False.
        amp_scaling: True lets the step take over unscaling and skipping from torch.amp.GradScaler,
            which then accepts float16 gradients. False is for frameworks that need unscaled
            gradients (Lightning's clipping, Accelerate's step_was_skipped). Default True.
        memory: how masters and states are stored with bfloat16 weights: "exact" (12 bytes per
            parameter besides the gradient, loses nothing), "lean" (7) or "tiny" (6.1). Default
            None: float32 masters and states (14).
        master: how masters alone are stored. "float32", the default: the update works on a float32
            tensor and the parameter is its copy, rounded to the nearest even value (float16 is
            clamped to +-65504). "split32", "split24": the parameter and a remainder of 2 or 1 bytes
            together are the master (nearest, ties away from zero). "none": the parameter itself is
            updated and rounded; updates below half a unit in its last place are lost unless
            rounding is "stochastic".
        exp_avg="bfloat16" and the like, by a state's name: how that state alone is stored. Averages
            of gradients are "float32", "bfloat16", "float16" or "m8", averages and sums of squares
            "float32", "bfloat16", "float16", "float16_root" or "ue8m8": see amp_mp.formats.
        rounding: "nearest" or "stochastic", of weights without a master. Default "nearest".
        seed: of stochastic rounding, a whole number in [0, 2^64). Saved in the state dict; must be
            the same on all replicas. Default 0.
        foreach, fused, capturable: torch's arguments, accepted without effect: every step is fused,
            and a CUDA graph can capture it. lr may be a tensor of one element.

    Raises TypeError for an unknown argument and ValueError for one out of range, by name.
    """


class Options(TypedDict, total=False):
    """Keyword arguments that every fused optimizer takes; see FusedOptimizer."""

    maximize: bool
    max_grad_norm: float | None
    check_overflow: bool
    amp_scaling: bool
    memory: str | None
    master: str | None
    rounding: str
    seed: int
    foreach: bool | None
    fused: bool | None
    capturable: bool
    differentiable: bool


def check_options(name: str, options: Options) -> None:
    """Raises TypeError or ValueError naming the argument; name: the optimizer's."""
    unknown = set(options) - set(Options.__annotations__)
    if unknown:
        raise TypeError(
            f"{name} has no argument {sorted(unknown)[0]!r}; it takes its "
            f"own and {', '.join(Options.__annotations__)}"
        )
    if options.get("differentiable"):
        raise ValueError("differentiable=True is not there; use torch.optim")
    rounding = options.get("rounding", "nearest")
    if rounding not in ROUNDINGS:
        raise ValueError(f"rounding must be one of {', '.join(ROUNDINGS)}; found {rounding!r}")
    seed = options.get("seed", 0)
    if not isinstance(seed, int) or not 0 <= seed < 2**64:
        raise ValueError(f"seed must be a whole number of [0, 2^64), found {seed!r}")
    max_grad_norm = options.get("max_grad_norm")
    if max_grad_norm is not None and not max_grad_norm > 0:
        raise ValueError(f"max_grad_norm must be positive or None, found {max_grad_norm!r}")


def check_ranges(lr: Any, betas: Iterable[float], eps: float, weight_decay: float) -> None:
    """Raises ValueError naming the argument; a tensor lr has to have one element."""
    if isinstance(lr, Tensor) and lr.numel() != 1:
        raise ValueError(
            f"lr must be a number or a tensor of one element, found shape {tuple(lr.shape)}"
        )
    if not float(lr) >= 0:
        raise ValueError(f"lr must not be negative, found {lr!r}")
    for i, beta in enumerate(betas):
        if not 0 <= beta < 1:
            raise ValueError(f"betas[{i}] must be in [0, 1), found {beta!r}")
    if not eps >= 0:
        raise ValueError(f"eps must not be negative, found {eps!r}")
    if not weight_decay >= 0:
        raise ValueError(f"weight_decay must not be negative, found {weight_decay!r}")
