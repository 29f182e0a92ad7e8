"""The arguments that every fused optimizer takes, their documentation, and the checks of values."""

from collections.abc import Collection, Mapping, Sequence
from decimal import Decimal
from difflib import get_close_matches
from inspect import Parameter, Signature, signature
from numbers import Integral, Real
from typing import Any, Literal, TypedDict, get_type_hints

from torch import Tensor

from amp_mp import _C
from amp_mp.dtypes import check_choice
from amp_mp.messages import warn
from amp_mp.optim.rule import choosable_states
from amp_mp.optim.state.stored_formats import ROUNDINGS
from amp_mp.scaling.norm_spike import NormSpike
from amp_mp.sharding.reduction import checked_groups

# What help() of every fused optimizer ends with.
SHARED = """
    All fused optimizers also take (docs/formats.md has the formats in full):
        params: parameters or param_groups.
        maximize: True ascends. Default False.
        max_grad_norm: clip by the gradients' global 2-norm, as torch's clip_grad_norm_ does.
            Default None.
        check_overflow: True skips a step with an inf or NaN gradient; so do clipping, loss scalers,
            LAMB, LARS and NovoGrad, which measure the gradients anyway. A skipped step leaves every
            byte as it was. The first gives a warning, and so do 25 in a row, which names the
            parameters. False steps all the same, as torch does, and reads the gradients once less.
            Default True; with `attach`, whose hooks see one gradient each, only where True is
            passed.
        skip_norm_above: skips a step whose gradients' norm, before clipping, is above this number,
            or far above those before: amp_mp.scaling.NormSpike(sigmas=6, window=100). On all
            processes alike; no loss scale counts it as an overflow. Default None.
        raise_after_skips: after as many skipped steps in a row, for a norm or an overflow, raise
            RuntimeError; on CUDA when the report has arrived. Default None.
        amp_scaling: True lets the step unscale and skip for torch.amp.GradScaler, which then takes
            float16 gradients. False is for frameworks that need unscaled gradients. Default True.
        process_groups: torch.distributed process groups, or a device mesh, whose processes hold
            other parameters of the model (pipeline stages, ZeroRedundancyOptimizer; experts, in a
            param_group of their own): the norm and the decision to skip are of all. Groups of
            DTensors are known already. Default None.
        memory: bytes per low-precision parameter with two states, besides its gradient: "exact"
            (12, loses nothing), "lean" (7), "tiny" (6.1), "micro" (5.1, for beta2 <= .99), "nano"
            (4.6: micro's states, for lr above 5e-6 and bfloat16 alone), "masterless" (4.1: micro's
            states, and parameters that round at random) or "float32" (14). Default "exact".
            float32 parameters have no master.
        master: how masters alone are stored: "split32", "split24", "split20" (the parameter and a
            remainder of 2, 1 or half a byte are the master), "float32", or "none": the parameter
            itself is updated. What a script writes into a parameter counts with any of them.
            Default: as memory.
        exp_avg="bfloat16" and the like: how the state of that name alone is stored. Averages of
            gradients: "float32", "bfloat16", "float16", "m8", "i8"; squares: "float32", "bfloat16",
            "float16", "float16_root", "ue8m8", "log8". Default: as memory. Some are float32 always.
        rounding: "nearest" or "stochastic", of low-precision parameters without a master. Default
            "nearest"; "stochastic" with memory="masterless".
        seed: of stochastic rounding, in [0, 2^64); the same on all replicas. Default 0.
        offload: "state" keeps masters and states in pinned memory of the host, where a GPU's
            kernels step them (docs/memory.md); on a CPU it does nothing. Default None.
        foreach, fused, capturable: torch's arguments, accepted without effect.
    Every state also has step, and low-precision parameters master, remainder16, remainder8 or
    remainder4.
    Raises TypeError for an unknown argument and ValueError for one out of range, by name.
    """

Preset = Literal["exact", "lean", "tiny", "micro", "nano", "masterless", "float32"]


class StateFormats(TypedDict, total=False):
    """How states are stored, by name; an optimizer takes those of its own."""

    exp_avg: str | None
    exp_avg_sq: str | None
    momentum_buffer: str | None
    square_avg: str | None
    acc_delta: str | None
    sum: str | None


class Options(StateFormats, total=False):
    """The fused optimizers' keyword arguments, which SHARED describes."""

    maximize: bool
    max_grad_norm: float | None
    check_overflow: bool | None
    skip_norm_above: float | NormSpike | None
    raise_after_skips: int | None
    amp_scaling: bool
    process_groups: Any
    memory: Preset | None
    master: str | None
    rounding: str
    seed: int
    offload: Literal["state"] | None
    foreach: bool | None
    fused: bool | None
    capturable: bool
    differentiable: bool


# Options kept as attributes of the optimizer, not in its param_groups.
LIMITS = ("max_grad_norm", "skip_norm_above", "raise_after_skips")
WHOLE = (*LIMITS, "check_overflow", "amp_scaling")
# Accepted without effect, and not in signatures.
WITHOUT_EFFECT = ("foreach", "fused", "capturable", "differentiable")
STATES = tuple(StateFormats.__annotations__)
DEFAULTS: dict[str, Any] = {"maximize": False, "check_overflow": True, "amp_scaling": True}
DEFAULTS |= {"rounding": "nearest", "seed": 0}
# What the entries of param_groups may be, by name: a flag, any number, one that is not negative, or
# one in an interval. csrc/core/rules declares those that rules read; the others choose a rule or
# are Muon's.
CHOICES = dict.fromkeys(("amsgrad", "centered", "hyperball"), "flag")
SEQUENCES = ("betas", "ns_coefficients", "split")  # entries that may be more than one number
ALLOWED = _C.allowed_numbers() | CHOICES | {"beta2": "[0, 1)"}
ADJUSTMENTS = (None, "original", "match_rms_adamw", "spectral_unclamped", "sqrt")


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
        raise ValueError("differentiable=True is not supported; use the optimizer of torch.optim")
    for limit in LIMITS:
        value = options.get(limit)
        if value is None or (limit == "skip_norm_above" and isinstance(value, NormSpike)):
            continue
        _check_number(limit, value)
        if not float(value) > 0:  # type: ignore[arg-type]
            raise ValueError(f"{limit} must be positive or None, found {value!r}")
    for flag in ("check_overflow", "amp_scaling"):
        _check_allowed(flag, options.get(flag), "flag")


def make_plain(group: dict[str, Any]) -> None:
    """Makes tuples of sequences that a configuration brings, such as OmegaConf's: files hold those.

    group: a param_group, or numbers by name, changed in place.
    """

    def plain(value: Any) -> Any:
        known = not isinstance(value, Sequence) or isinstance(value, str | bytes | tuple | list)
        return value if known else tuple(map(plain, value))

    group.update({name: plain(group[name]) for name in SEQUENCES if name in group})


def check_group(group: Mapping[str, Any]) -> None:
    """Raises ValueError naming the entry of a param_group, or the argument, that is out of range.

    Numbers are int, float, Decimal or NumPy's, arrays without dimensions among them; lr and others
    may also be a tensor of one element.
    """
    given = with_betas(group)
    for name, allowed in ALLOWED.items():
        if name in given:
            _check_allowed(name, given[name], allowed)
    _refuse_contradictions(group)
    check_muon(group)
    check_choices(group)
    history = group.get("norm_history", ())
    if "norm_history" in group and (not isinstance(history, tuple | list) or len(history) != 4):
        raise ValueError(f"norm_history must be four numbers, found {history!r}")
    for value in history:
        _check_number("norm_history", value)
    seed = group.get("seed", 0)
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**64:
        raise ValueError(f"seed must be a whole number of [0, 2^64), found {seed!r}")


def with_betas(group: Mapping[str, Any]) -> dict[str, Any]:
    """A group with each of its betas as an entry, too; ValueError where they are not two."""
    if "betas" not in group:
        return dict(group)
    betas = group["betas"]
    if not isinstance(betas, tuple | list) or len(betas) != 2:
        raise ValueError(f"betas must be two numbers, found {betas!r}")
    return {**group, "betas[0]": betas[0], "betas[1]": betas[1]}


def _refuse_contradictions(group: Mapping[str, Any]) -> None:
    """Raises ValueError for two entries that cannot both be."""
    if group.get("cautious") and not group.get("decoupled_weight_decay", True):
        raise ValueError("cautious is for decoupled weight decay; set decoupled_weight_decay=True")
    for name in ("amsgrad", "cautious") if group.get("hyperball") else ():
        if group.get(name):
            raise ValueError(f"hyperball goes without {name}; set one of them to False")
    dampens = group.get("nesterov") and "dampening" in group  # Muon's groups have none
    if dampens and (group.get("momentum", 1) <= 0 or group["dampening"] != 0):
        raise ValueError(
            "nesterov needs momentum > 0 and dampening = 0, "
            f"found {group['momentum']!r} and {group['dampening']!r}"
        )


def check_scatter(group: Mapping[str, Any]) -> None:
    """Warns where squares are averaged too slowly for log8, whose steps round at random.

    ValueError where they would stand still.
    """
    if "log8" not in map(group.get, ("exp_avg_sq", "square_avg", "acc_delta")):
        return
    given = with_betas(group)
    decays = {name: float(given.get(name, 0.0)) for name in ("betas[1]", "alpha", "rho")}
    decay, name = max((decay, name) for name, decay in decays.items())
    if decay <= 0.99:
        return
    stored = 'squares stored as "log8" (memory="micro", "nano" or "masterless")'
    found = f"{stored} and averaged with {name}={decay:g}"
    if decay >= 0.9999:
        raise ValueError(f'{found} would stand still; take memory="tiny", or 0.99 and less')
    warn(f"{found} scatter: by 14 % at 0.999, 31 % while they fall; 0.99 and less is advised")


# Below this rate the masters of split20 get more than a tenth of noise in 2,000 steps.
LEAST_RATE_OF_SPLIT20 = 5e-6


def warn_of_small_rate(group: Mapping[str, Any]) -> None:
    """Warns where masters in split20 would be noise: a new group's rate, before any schedule."""
    if group.get("master") != "split20":
        return  # without a look at a rate that may be on a GPU
    lr = float(group["lr"])
    if 0 < lr < LEAST_RATE_OF_SPLIT20:
        warn(
            f'masters stored as "split20" (memory="nano") at lr={lr:g} get noise: at 1e-6 a '
            'quarter of how far weights move in 2,000 steps; memory="exact" has none'
        )


def check_choices(group: Mapping[str, Any]) -> None:
    """Raises ValueError for what a param_group cannot have as rounding or offload."""
    check_choice("rounding", group.get("rounding", "nearest"), ROUNDINGS)
    if group.get("offload") not in (None, "state"):
        raise ValueError(f'offload must be None or "state", found {group["offload"]!r}')


def check_keys(group: Mapping[str, Any], known: Collection[str], own: Any) -> None:
    """Raises ValueError for an option of the whole optimizer, `own`, that a param_group changes.

    TypeError for process_groups that are none.

    Warns of a key that is almost an option, known or of the whole optimizer. Others may be there:
    ZeroRedundancyOptimizer writes all options into its groups.
    """
    checked_groups(group.get("process_groups"))
    given = {name: group[name] for name in WHOLE if name in group}
    for name in [n for n, value in given.items() if value != getattr(own, n, None)]:
        raise ValueError(
            f"{name} holds for the whole optimizer, not for a param_group; give it to the optimizer"
        )
    options = {*known, *WHOLE, "memory"}
    for key in group.keys() - options - {"params", "param_names", *WITHOUT_EFFECT}:
        for meant in get_close_matches(str(key), options, 1, 0.83):
            if f"_{meant}" not in f"_{key}":  # max_momentum of a schedule
                warn(f"a param_group has {key!r}, which no step reads; is {meant!r} meant?")


def check_muon(group: Mapping[str, Any]) -> None:
    """Raises ValueError naming a number of Muon's that a param_group has and that cannot be."""
    for name in ("use_muon", "flatten"):
        if not isinstance(group.get(name, False), bool):
            raise ValueError(f"{name} must be True or False, found {group[name]!r}")
    split = group.get("split", 1)
    counts = split if isinstance(split, tuple | list) and split else (split,)
    if any(isinstance(n, bool) or not isinstance(n, int) or n < 1 for n in counts):
        raise ValueError(
            "split must be a whole number of at least 1, how many equal blocks there are, or a "
            f"tuple of such numbers, the rows of each block; found {split!r}"
        )
    if "ns_steps" not in group:
        return
    if group.get("normalize") not in (None, "rows"):
        raise ValueError(f'normalize must be None or "rows", found {group["normalize"]!r}')
    _C.ns_iterations(dict(group))
    if group.get("adjust_lr_fn") not in ADJUSTMENTS:
        known = ", ".join(repr(each) for each in ADJUSTMENTS)
        raise ValueError(f"adjust_lr_fn must be one of {known}; found {group['adjust_lr_fn']!r}")


def _check_allowed(name: str, value: Any, allowed: str) -> None:
    if allowed == "flag":
        one = isinstance(value, Tensor) and value.numel() == 1 and not value.is_meta
        if not one and not isinstance(value, bool | Real | None) and "bool" not in str(type(value)):
            raise ValueError(f"{name} must be True or False, found {value!r}")
        return
    _check_number(name, value)
    if allowed == "not negative" and not float(value) >= 0:
        raise ValueError(f"{name} must not be negative, found {value!r}")
    if allowed == "[0, 1)" and not 0 <= float(value) < 1:
        raise ValueError(f"{name} must be in [0, 1), found {value!r}")
    if allowed == "[0, 1]" and not 0 <= float(value) <= 1:
        raise ValueError(f"{name} must be in [0, 1], found {value!r}")


def _check_number(name: str, value: Any) -> None:
    if isinstance(value, Tensor):
        if value.numel() != 1 or value.is_meta or value.is_complex():
            found = f"shape {tuple(value.shape)}, {value.dtype} on {value.device}"
            raise ValueError(f"{name} must be a number or a tensor of one element, found {found}")
    elif type(value) is not float and not _is_number(value):
        raise ValueError(f"{name} must be a number, found {value!r}{_of_yaml(value)}")


def _of_yaml(value: Any) -> str:
    """What an error adds to a text that is meant to be a number."""
    try:
        if not isinstance(value, str):
            return ""
        float(value)
    except ValueError:
        return ""
    return ", which is text; YAML reads 1e-4 as text and 1.0e-4 as a number"


def _is_number(value: Any) -> bool:
    """Whether it is one besides tensors, of Python or NumPy, and no truth value."""
    if isinstance(value, bool | Real | Decimal):
        return not isinstance(value, bool)
    return getattr(value, "shape", None) == () and getattr(value.dtype, "kind", "") in "fiu"


def as_python(value: Any) -> Any:
    """A number as Python's, which torch.load reads from files, also in a list or tuple.

    Any other value is returned as it is.
    """
    if type(value) in (list, tuple):
        return type(value)(as_python(each) for each in value)
    if type(value) in (int, float, str) or isinstance(value, Tensor) or not _is_number(value):
        return value
    return int(value) if isinstance(value, Integral) else float(value)


class FullSignature:
    """An optimizer class's signature, with the shared arguments in place of **options.

    They are written once, in Options and SHARED, for all classes; help() and editors show them with
    each. Made when it is asked for: for all classes that would be a fifth of amp_mp's import.
    """

    def __get__(self, _: object, kind: Any) -> Signature:
        own = [p for p in signature(kind.__init__).parameters.values() if p.name != "self"]
        states = choosable_states(getattr(kind, "_rules", ()))
        shared = [
            Parameter(name, Parameter.KEYWORD_ONLY, default=DEFAULTS.get(name), annotation=hint)
            for name, hint in get_type_hints(Options).items()
            if name not in WITHOUT_EFFECT and (name not in STATES or name in states)
        ]
        return Signature([p for p in own if p.kind is not Parameter.VAR_KEYWORD] + shared)
