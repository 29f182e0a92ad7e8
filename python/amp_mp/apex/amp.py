"""apex.amp: initialize with its opt levels, scale_loss, and the functions of 2018."""

import copy
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from amp_mp.apex.hooks import LossScaler, Stash, cast_forward, save_float32, stash_of
from amp_mp.apex.opt_levels import Properties, choose, make_scale
from amp_mp.casting.autocast import disable_casts
from amp_mp.casting.decorators import (
    float_function,
    half_function,
    promote_function,
    register_float_function,
    register_half_function,
    register_promote_function,
)
from amp_mp.casting.products import choose_products
from amp_mp.casting.step_hooks import install_step_hooks
from amp_mp.dtypes import LOW_PRECISION
from amp_mp.messages import say, warn
from amp_mp.model.convert import convert_network, prepare
from amp_mp.model.selection import named_tensors
from amp_mp.module_names import adds_module
from amp_mp.param_groups import params_in
from amp_mp.scaling.policies import ScalePolicy, Static, check_scale
from amp_mp.switch import ENABLED
from amp_mp.wrappers.carriers import Carrier
from amp_mp.wrappers.fp16_optimizer import FP16_Optimizer
from amp_mp.wrappers.handle import AmpHandle, init
from amp_mp.wrappers.larc import without_larc

# fmt: off
__all__ = [
    "disable_casts", "float_function", "half_function", "init", "initialize", "load_state_dict",
    "master_params", "promote_function", "register_float_function", "register_half_function",
    "register_promote_function", "scale_loss", "state_dict",
]
# fmt: on


class _amp_state:  # noqa: N801 (Apex's name)
    """What the last initialize has chosen, for the process."""

    opt_properties: Properties | None = None
    loss_scalers: ClassVar[list[LossScaler]] = []
    handle: AmpHandle | None = None


def initialize(
    models: Any,
    optimizers: Any = None,
    enabled: bool = ENABLED,
    opt_level: str = "O1",
    cast_model_type: torch.dtype | Literal[False] | None = None,
    patch_torch_functions: bool | None = None,
    keep_batchnorm_fp32: bool | str | None = None,
    master_weights: bool | None = None,
    loss_scale: float | str | ScalePolicy | None = None,
    cast_model_outputs: torch.dtype | None = None,
    num_losses: int = 1,
    verbosity: int = 1,
    min_loss_scale: float | None = None,
    max_loss_scale: float = 2.0**24,
    *,
    dtype: torch.dtype | None = None,
) -> Any:
    """Sets models and optimizers up for an opt level and returns them, the same objects.

        model, optimizer = amp.initialize(model, optimizer, opt_level="O2")
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), 1.0)
        optimizer.step()

    O0 is float32. O1 is `init`: operators in low precision over float32 weights. O2 converts the
    models as amp_mp.prepare does, casts what they are given and return, and puts float32 masters
    into the optimizers' param_groups at the first loss. O3 converts without masters. In O2 and O3
    state_dict of a model is float32, in O2 the masters themselves, and load_state_dict fills them.
    A later call ends the level, the loss scales and the casts of an earlier one.

    Args:
        models, optimizers: one or a list each. Models before DistributedDataParallel; float32 where
            they are converted.
        enabled: False returns all as it is, scale_loss yields the loss; the default under AMP_MP=0.
        cast_model_type, patch_torch_functions, keep_batchnorm_fp32, master_weights, loss_scale:
            instead of the level's own, where not None. "True", "False" and "128.0" are taken as
            what they say; loss_scale may be a policy of amp_mp.scaling. keep_batchnorm_fp32 keeps
            every normalisation layer, as prepare does. cast_model_type=False converts nothing.
        cast_model_outputs: what models return in O1, O2, O3; default: float32, in O1 as it comes.
        num_losses: how many loss scales there are, each with a loss_id in scale_loss.
        verbosity: 0 prints nothing.
        min_loss_scale, max_loss_scale: bounds of a dynamic scale, from 1 to 2^24 by default. It
            starts at 2^16, is halved on overflow, and doubled after 2000 steps without one.
        dtype: torch.float16 or torch.bfloat16; default: cast_model_type, or the environment
            variable AMP_MP_APEX_DTYPE, or float16. In bfloat16 the loss scale is 1 by default.

    Raises, before anything is changed, RuntimeError for an unknown level, arguments that contradict
    it, a low-precision parameter where models are converted, a model in DistributedDataParallel, an
    FP16_Optimizer, or an optimizer given before; TypeError or ValueError for another argument.
    """
    model_list = _listed(models, nn.Module, "models")
    optimizer_list = [] if optimizers is None else _listed(optimizers, Optimizer, "optimizers")
    result = models if optimizers is None else (models, optimizers)
    if not enabled:
        _begin(Properties())
        return result
    given = cast_model_type, patch_torch_functions, keep_batchnorm_fp32, master_weights
    chosen = choose(opt_level, dtype, (*given, loss_scale, cast_model_outputs))
    policy = make_scale(chosen.loss_scale, min_loss_scale, max_loss_scale)
    if isinstance(num_losses, bool) or not isinstance(num_losses, int) or num_losses < 1:
        raise ValueError(f"num_losses must be a whole number above 0, found {num_losses!r}")
    _check(model_list, optimizer_list, chosen)
    _begin(chosen)
    device = "cuda" if any(p.is_cuda for m in model_list for p in m.parameters()) else "cpu"
    if verbosity > 0:
        say(f"amp_mp: {chosen}")
    for model in model_list:
        _convert(model, chosen)
    masters = bool(chosen.master_weights)
    is_one = isinstance(policy, Static) and policy.scale == 1
    for inner in map(without_larc, optimizer_list):
        inner._amp_stash = Stash(inner, masters, takes_closure=is_one and not masters)
    if chosen.patch_torch_functions:
        _amp_state.handle = init(True, True, verbosity > 1, dtype=chosen.dtype, device_type=device)
    install_step_hooks()
    _amp_state.loss_scalers = [
        LossScaler(i, copy.deepcopy(policy), device, verbosity > 0) for i in range(num_losses)
    ]
    return result


def _listed(given: Any, kind: type[Any], argument: str) -> list[Any]:
    found = list(given) if isinstance(given, list | tuple) else [given]
    for each in found:
        if not isinstance(each, kind):
            name = f"{kind.__module__.removesuffix('.module')}.{kind.__name__}"
            other = type(each)
            raise TypeError(f"{argument} must be a {name} or a list, found {other.__name__}")
    return found


def _check(models: list[nn.Module], optimizers: list[Optimizer], chosen: Properties) -> None:
    converts = chosen.cast_model_type is not None
    for model in models:
        for module in model.modules():
            if adds_module(module):
                kind = type(module).__name__
                raise RuntimeError(f"models: found a {kind}; wrap the model after amp.initialize")
        for name, tensor in named_tensors(model).items():
            if converts and tensor.dtype in LOW_PRECISION:
                raise RuntimeError(
                    f"models: {name} is {tensor.dtype} already; opt_level={chosen.opt_level!r} "
                    "converts a float32 model: give it that, or with cast_model_type=False this "
                    "one stays as it is"
                )
    for optimizer in optimizers:
        if isinstance(optimizer, FP16_Optimizer):
            raise RuntimeError(
                "optimizers: found an FP16_Optimizer, which has masters and a loss scale of its "
                "own; give amp.initialize the optimizer inside of it"
            )
        if stash_of(optimizer) is not None or optimizers.count(optimizer) > 1:
            raise RuntimeError(
                f"optimizers: this {type(optimizer).__name__} was given to amp.initialize before; "
                "call it once for each optimizer, with all models and optimizers together"
            )
    if len(set(models)) < len(models):
        raise RuntimeError("models: the same module is given twice; give it once")


def _begin(properties: Properties) -> None:
    if _amp_state.handle is not None:
        _amp_state.handle.deactivate()
    _amp_state.handle = None
    _amp_state.loss_scalers = []
    _amp_state.opt_properties = properties


def _convert(model: nn.Module, chosen: Properties) -> None:
    target, out = chosen.cast_model_type, chosen.cast_model_outputs
    if target in LOW_PRECISION:
        kept: Any = None if chosen.keep_batchnorm_fp32 else ()
        function = partial(prepare, enabled=True) if chosen.master_weights else convert_network
        function(model, target, keep_fp32_only=kept)
        choose_products("auto", target)
    elif target is not None:
        convert_network(model, target)
    if target in LOW_PRECISION or chosen.master_weights:
        save_float32(model)
    cast_forward(model, target, out or (None if target is None else torch.float32))


@contextmanager
def scale_loss(
    loss: Tensor,
    optimizers: Optimizer | Iterable[Optimizer],
    loss_id: int = 0,
    model: Any = None,
    delay_unscale: bool = False,
    delay_overflow_check: bool = False,
) -> Iterator[Tensor]:
    """Yields the loss times its scale; afterwards the optimizers' gradients are the true ones.

    With masters these are the masters' gradients, in float32. Gradients of several losses add up.
    If one is inf or NaN, the scale of this loss falls, and the next step of each of the optimizers
    changes nothing. At a scale that is 1 for good nothing is scaled or checked.

    Args:
        loss: any floating dtype; it is multiplied in float32.
        optimizers: all that own what this loss has gradients for.
        loss_id: which of the num_losses scales is taken. model: ignored, as in Apex.
        delay_unscale: True leaves the gradients scaled in the model's `.grad`, to be added to by
            the next loss, as DistributedDataParallel.no_sync needs; the last loss before a step
            must have False. They follow where the next loss has another scale.

    Raises RuntimeError if initialize was not called, or not for this optimizer; ValueError for an
    unknown loss_id, NotImplementedError for delay_overflow_check, TypeError without an optimizer.
    """
    if _amp_state.opt_properties is None:
        raise RuntimeError(
            "scale_loss: amp.initialize was not called; call `model, optimizer = "
            "amp.initialize(model, optimizer, opt_level=...)` before the first loss"
        )
    if not _amp_state.opt_properties.enabled:
        yield loss
        return
    if delay_overflow_check:
        raise NotImplementedError(
            "delay_overflow_check=True, which Apex has since June 2019, leaves overflows to the "
            "script: leave it out, every block checks"
        )
    if loss_id not in range(len(_amp_state.loss_scalers)):
        known = f"num_losses={len(_amp_state.loss_scalers)} of amp.initialize"
        raise ValueError(f"loss_id must be from 0 on and below {known}, found {loss_id!r}")
    scaler = _amp_state.loss_scalers[loss_id]
    with scaler.block(loss, optimizers, _carrier_of, delay_unscale) as scaled_loss:
        yield scaled_loss


def _carrier_of(optimizer: Optimizer) -> Carrier:
    """RuntimeError for an optimizer that initialize was not given."""
    if (stash := stash_of(optimizer)) is None:
        raise RuntimeError(
            f"optimizers: this {type(optimizer).__name__} was not given to amp.initialize; give it "
            "all models and optimizers"
        )
    return stash.carrier()


def master_params(optimizer: Any) -> Iterator[Tensor]:
    """What the optimizer updates, masters in place of low precision: what is to be clipped."""
    if (stash := stash_of(optimizer)) is not None:
        stash.make_masters()
    return iter(params_in(optimizer.param_groups))


def state_dict(destination: dict[str, Any] | None = None) -> dict[str, Any]:
    """A snapshot of the loss scales, {"loss_scaler0": {"loss_scale": ..., "unskipped": ...}, ...}.

    destination: a dict to add to; default a new one.
    """
    found = {} if destination is None else destination
    for i, scaler in enumerate(_amp_state.loss_scalers):
        found[f"loss_scaler{i}"] = scaler.state_dict()
    return found


def load_state_dict(state_dict: dict[str, Any]) -> None:
    """Goes on with the loss scales of a snapshot; warns if it has another number of losses.

    RuntimeError, before anything is changed: keys of something else, or values that are no scale.
    """
    scalers = {f"loss_scaler{i}": s for i, s in enumerate(_amp_state.loss_scalers)}
    foreign = [key for key in state_dict if not str(key).startswith("loss_scaler")]
    wrong = [key for key, value in state_dict.items() if not _is_scale(value)]
    if foreign or wrong:
        raise RuntimeError(
            f"load_state_dict: unexpected keys {foreign}, or no loss scale in {wrong}; pass "
            "what amp.state_dict returned"
        )
    if state_dict.keys() != scalers.keys():
        warn(
            f"load_state_dict: the snapshot has {len(state_dict)} loss scalers, and num_losses of "
            f"amp.initialize is {len(scalers)}; those that both have are loaded"
        )
    for key in state_dict.keys() & scalers.keys():
        scalers[key].load_state_dict(state_dict[key])


def _is_scale(value: Any) -> bool:
    try:
        check_scale(value["loss_scale"], "loss_scale")
        return int(value["unskipped"]) >= 0
    except (TypeError, KeyError, ValueError):
        return False
