"""The arguments that every fused optimizer takes, their documentation, and the checks of values."""

from collections.abc import Mapping
from numbers import Real
from typing import Any, TypedDict

from torch import Tensor

from amp_mp.optim.choices import check_choice
from amp_mp.optim.muon.numbers import check_numbers
from amp_mp.optim.state.formats import ROUNDINGS

# What help() of every fused optimizer ends with.
SHARED_ARGUMENTS = """
    All fused optimizers also take:
        params: parameters or param_groups.
        maximize: True ascends. Default False.
        max_grad_norm: clip inside the step by the gradients' global 2-norm over all groups, as
            torch.nn.utils.clip_grad_norm_ does. Default None: no clipping.
        check_overflow: True skips a step with an inf or NaN gradient. Clipping, loss scalers, LAMB,
            LARS and NovoGrad measure the gradients anyway and then skip too. A skipped step leaves
            every byte as it was. Default False. 25 skipped steps in a row give one warning, which
            names the parameters.
        amp_scaling: True lets the step take over unscaling and skipping from torch.amp.GradScaler,
            which then accepts float16 gradients. False is for frameworks that need unscaled
            gradients (Lightning's clipping, Accelerate's step_was_skipped). Default True.
        memory: how masters and states are stored with bfloat16 weights: "exact" (12 bytes per
            parameter besides the gradient, loses nothing), "lean" (7), "tiny" (6.1), "micro" (5.1,
            for beta2 <= .99) or "float32" (14: float32 masters and states). Default "exact".
            float32 parameters have no master.
        master: how masters alone are stored. "split32", "split24": the parameter and a remainder of
            2 or 1 bytes together are the master (nearest, ties away from zero). "float32": the
            parameter is the copy of a float32 tensor, rounded to the nearest even value (float16 is
            clamped to +-65504). "none": the parameter itself is updated and rounded; updates below
            half a unit in its last place are lost unless rounding is "stochastic". With any of
            them the parameter is the truth: what is written into it is what the next step starts
            from. Default None: as memory says.
        exp_avg="bfloat16" and the like, by a state's name: how that state alone is stored. Averages
            of gradients are "float32", "bfloat16", "float16" or "m8", averages and sums of squares
            "float32", "bfloat16", "float16", "float16_root", "ue8m8" or "log8": see
            amp_mp.formats. Default None: as memory says. max_exp_avg_sq, exp_inf and grad_avg are
            always float32.
        rounding: "nearest" or "stochastic", of weights without a master. Default "nearest".
        process_groups: torch.distributed process groups, or a device mesh, whose processes hold
            other parameters of the same model: pipeline stages, or the rest of the parameters under
            ZeroRedundancyOptimizer. The norm and the decision to skip are then those of all of
            them. Groups over which DTensors are sharded are known already. Default None.
        seed: of stochastic rounding, a whole number in [0, 2^64). Saved in the state dict; must be
            the same on all replicas. Default 0.
        foreach, fused, capturable: torch's arguments, accepted without effect: every step is fused,
            and a CUDA graph can capture it. lr may be a tensor of one element.

    Every state also has step, and for low-precision parameters master, remainder16 or remainder8.
    Codes have names of their own: exp_avg_m8v2, exp_avg_sq_ue8m8 (docs/formats.md).
    Raises TypeError for an unknown argument and ValueError for one out of range, by name.
    """


class Options(TypedDict, total=False):
    """Keyword arguments of the fused optimizers, explained in SHARED_ARGUMENTS."""

    maximize: bool
    max_grad_norm: float | None
    check_overflow: bool
    amp_scaling: bool
    process_groups: Any
    memory: str | None
    master: str | None
    rounding: str
    seed: int
    foreach: bool | None
    fused: bool | None
    capturable: bool
    differentiable: bool
    # Formats of states; an optimizer takes those of its own.
    exp_avg: str | None
    exp_avg_sq: str | None
    momentum_buffer: str | None
    square_avg: str | None
    acc_delta: str | None
    sum: str | None


STATES = ("exp_avg", "exp_avg_sq", "momentum_buffer", "square_avg", "acc_delta", "sum")
NOT_NEGATIVE = (
    *("lr", "eps", "weight_decay", "momentum", "lr_decay", "momentum_decay"),
    *("initial_accumulator_value", "trust_coefficient"),
)
NUMBERS = (*NOT_NEGATIVE, "alpha", "rho", "dampening")


def check_options(name: str, states: tuple[str, ...], options: Options) -> None:
    """Raises TypeError or ValueError naming the argument.

    name: the optimizer's. states: those whose format may be chosen.
    """
    known = [option for option in Options.__annotations__ if option not in STATES]
    unknown = set(options) - set(known) - set(states)
    if unknown:
        raise TypeError(
            f"{name} has no argument {min(unknown)!r}; it takes its own and {', '.join(known)}"
        )
    if options.get("differentiable"):
        raise ValueError("differentiable=True is not there; use torch.optim")
    _check_number("max_grad_norm", options.get("max_grad_norm"), optional=True)
    max_grad_norm = options.get("max_grad_norm")
    if max_grad_norm is not None and not max_grad_norm > 0:
        raise ValueError(f"max_grad_norm must be positive or None, found {max_grad_norm!r}")


def check_group(group: Mapping[str, Any]) -> None:
    """Raises ValueError naming the entry of a param_group, or the argument, that is out of range.

    Numbers are int, float or NumPy's; lr and others may also be a tensor of one element.
    """
    for name in (name for name in NUMBERS if name in group):
        _check_number(name, group[name])
    for name in NOT_NEGATIVE:
        if not float(group.get(name, 0.0)) >= 0:
            raise ValueError(f"{name} must not be negative, found {group[name]!r}")
    betas = group.get("betas", (0.0, 0.0))
    if not isinstance(betas, tuple | list) or len(betas) != 2:
        raise ValueError(f"betas must be two numbers, found {betas!r}")
    for name, value in [("betas[0]", betas[0]), ("betas[1]", betas[1])]:
        _check_number(name, value)
        if not 0 <= value < 1:
            raise ValueError(f"{name} must be in [0, 1), found {value!r}")
    if not 0 <= group.get("alpha", 0.0) < 1:
        raise ValueError(f"alpha must be in [0, 1), found {group['alpha']!r}")
    if not 0 <= group.get("rho", 0.0) <= 1:
        raise ValueError(f"rho must be in [0, 1], found {group['rho']!r}")
    check_numbers(group)
    dampens = "dampening" in group  # Muon has none
    if dampens and group.get("nesterov") and (group["momentum"] <= 0 or group["dampening"] != 0):
        raise ValueError(
            "nesterov needs momentum > 0 and dampening = 0, "
            f"found {group['momentum']!r} and {group['dampening']!r}"
        )
    check_rounding(group)
    check_seed(group)


def check_rounding(group: Mapping[str, Any]) -> None:
    """Raises ValueError for a rounding of a param_group that is not known."""
    check_choice("rounding", group.get("rounding", "nearest"), ROUNDINGS)


def check_seed(group: Mapping[str, Any]) -> None:
    """Raises ValueError for a seed of a param_group that cannot be."""
    seed = group.get("seed", 0)
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**64:
        raise ValueError(f"seed must be a whole number of [0, 2^64), found {seed!r}")


def _check_number(name: str, value: Any, optional: bool = False) -> None:
    if optional and value is None:
        return
    if isinstance(value, Tensor):
        if value.numel() != 1:
            found = f"shape {tuple(value.shape)}"
            raise ValueError(f"{name} must be a number or a tensor of one element, found {found}")
    elif isinstance(value, bool) or not isinstance(value, Real):
        raise ValueError(f"{name} must be a number, found {value!r}")
