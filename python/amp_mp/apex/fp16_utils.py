"""apex.fp16_utils: conversions, masters that a training loop keeps by hand, and FP16_Optimizer."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_ as clip_grad_norm

from amp_mp.dtypes import LOW_PRECISION, check_dtype
from amp_mp.model import convert
from amp_mp.model.selection import Kept
from amp_mp.optim.state.kept_masters import taken_float32
from amp_mp.scaling.policies import Static
from amp_mp.sharding.gradients import copy_all_, overflow_in, unscale_gradients
from amp_mp.sharding.reduction import totals_of
from amp_mp.torch_private import BatchNorm
from amp_mp.wrappers import fp16_optimizer
from amp_mp.wrappers.fp16_optimizer import apex_policy
from amp_mp.wrappers.wrapper import LOSS_SCALE

# fmt: off
__all__ = [
    "BN_convert_float", "DynamicLossScaler", "FP16Model", "FP16_Optimizer", "LossScaler",
    "clip_grad_norm", "convert_module", "convert_network", "master_params_to_model_params",
    "model_grads_to_master_grads", "network_to_half", "prep_param_lists", "to_python_float",
    "tofp16",
]
# fmt: on
to_python_float = Tensor.item


class FP16_Optimizer(fp16_optimizer.FP16_Optimizer):  # noqa: N801 (Apex's name)
    """amp_mp.FP16_Optimizer with Apex's zero_grad, which writes zeros.

    A gradient of 0 is stepped: weight decay and momentum go on moving a layer that was frozen in
    mid-training and an expert that got no token. With None torch's optimizers pass them over.
    """

    def zero_grad(  # type: ignore[override]
        self,
        set_grads_to_None: bool = False,  # noqa: N803
        *,
        set_to_none: bool = False,
    ) -> None:
        """Sets the gradients of masters and model parameters to 0, with either argument to None."""
        super().zero_grad(set_grads_to_None or set_to_none)


def prep_param_lists(
    model: nn.Module, flat_master: bool = False
) -> tuple[list[Tensor], list[Tensor]]:
    """The model's trainable parameters, and float32 masters of them for an optimizer.

    flat_master: a single master, 1-D; ValueError unless parameters have one dtype and device.
    """
    params: list[Tensor] = [p for p in model.parameters() if p.requires_grad]
    if not flat_master:
        return params, [nn.Parameter(taken_float32(p)) for p in params]
    kinds = {(p.dtype, p.device) for p in params}
    if len(kinds) > 1:
        raise ValueError(
            f"flat_master needs parameters of one dtype and device, found {len(kinds)} kinds: "
            f"{sorted(map(str, kinds))}"
        )
    flat = nn.Parameter(torch.cat([taken_float32(p).reshape(-1) for p in params]))
    return params, [flat]


@torch.no_grad()
def model_grads_to_master_grads(
    model_params: list[Tensor], master_params: list[Tensor], flat_master: bool = False
) -> None:
    """Copies gradients to the masters, in float32; absent ones are None, or 0 in a flat master."""
    if not flat_master:
        pairs = [*zip(model_params, master_params, strict=True)]
        return unscale_gradients([], pairs, 1.0)
    (flat,) = master_params
    flat.grad = torch.zeros_like(flat) if flat.grad is None else flat.grad.zero_()
    pieces = zip(_pieces(flat.grad, model_params), model_params, strict=True)
    return copy_all_((piece, p.grad) for piece, p in pieces if p.grad is not None)


@torch.no_grad()
def master_params_to_model_params(
    model_params: list[Tensor], master_params: list[Tensor], flat_master: bool = False
) -> None:
    """Rounds the masters into the parameters; float16 saturates at +-65504."""
    masters = _pieces(master_params[0], model_params) if flat_master else master_params
    copy_all_(zip(model_params, masters, strict=True), saturate=True)


def _pieces(flat: Tensor, params: list[Tensor]) -> list[Tensor]:
    parts = torch.split(flat.detach(), [p.numel() for p in params])
    return [part.view(p.shape) for part, p in zip(parts, params, strict=True)]


def _batch_norms(model: nn.Module) -> list[nn.Module]:
    """The batch norms with weights, the only modules that Apex keeps in float32."""
    return [m for m in model.modules() if isinstance(m, BatchNorm) and m.affine]


def BN_convert_float(model: nn.Module) -> nn.Module:  # noqa: N802 (Apex's name)
    """Turns every batch norm with weights into float32, in place; returns the model."""
    for module in _batch_norms(model):
        module.float()
    return model


def convert_network(
    network: nn.Module,
    dtype: torch.dtype,
    keep_fp32: Kept | None = None,
    *,
    keep_fp32_only: Kept | None = None,
) -> nn.Module:
    """Converts a model in place, except batch norms with weights, and returns it.

    It keeps no float32 values aside for masters. keep_fp32: what else stays float32.
    keep_fp32_only: what stays float32 in place of the batch norms. Both, and errors, are those of
    `amp_mp.prepare`; what amp_mp.keep_fp32 has marked stays, too.
    """
    only = _batch_norms(network) if keep_fp32_only is None else keep_fp32_only
    return convert.convert_network(network, dtype, keep_fp32, keep_fp32_only=only)


class tofp16(nn.Module):  # noqa: N801 (Apex's name)
    """A layer that casts floating-point input to `dtype`; what is beyond float16 becomes inf."""

    def __init__(self, dtype: torch.dtype = torch.float16) -> None:
        super().__init__()
        self.dtype = dtype

    def forward(self, input: Tensor) -> Tensor:
        """Any shape; token ids and masks pass unchanged."""
        return input.to(self.dtype) if input.is_floating_point() else input

    def extra_repr(self) -> str:
        """The dtype."""
        return str(self.dtype)


def network_to_half(model: nn.Module, dtype: torch.dtype = torch.float16) -> nn.Sequential:
    """The model, converted in place, behind a layer that casts its input; Apex's function.

    What stays float32 is what convert_network keeps. As in Apex, names in the result's state_dict
    start with "1.". dtype: float16 or bfloat16; ValueError for another.
    """
    check_dtype(dtype, LOW_PRECISION)
    return nn.Sequential(tofp16(dtype), convert_network(model, dtype))


class FP16Model(nn.Module):
    """network_to_half with the converted model as its `network`."""

    def __init__(self, network: nn.Module, dtype: torch.dtype = torch.float16) -> None:
        super().__init__()
        _, self.network = network_to_half(network, dtype)
        self._cast = tofp16(dtype)

    def forward(self, *inputs: Tensor) -> Any:
        """What the model returns for the inputs, cast as by tofp16."""
        return self.network(*map(self._cast, inputs))


def convert_module(module: nn.Module, dtype: torch.dtype) -> None:
    """Casts a module's own floating-point parameters, gradients and buffers, in place."""
    apply: Any = module._apply
    apply(lambda t: t.to(dtype) if t.is_floating_point() else t, recurse=False)


class LossScaler:
    """A loss scale that never moves, for loops that scale by hand."""

    loss_scale: Any = LOSS_SCALE
    cur_scale: Any = LOSS_SCALE

    def __init__(self, scale: float = 1.0) -> None:
        self.loss_scaler = apex_policy(scale, False, None, None)

    def has_overflow(self, params: Iterable[Tensor]) -> bool:
        """Whether a gradient is inf or NaN; a scale that never moves does not look."""
        looks = not isinstance(self.loss_scaler, Static)
        return looks and overflow_in(totals_of([{"params": list(params)}]), 1.0)[0]

    def update_scale(self, overflow: bool) -> None:
        """Moves the scale after an iteration."""
        self.loss_scaler.update(overflow)

    def backward(self, loss: Tensor, retain_graph: bool = False) -> None:
        """Calls backward of the loss times the scale, in float32."""
        torch.autograd.backward(loss.float() * self.loss_scale, retain_graph=retain_graph)


class DynamicLossScaler(LossScaler):
    """Divides by scale_factor on overflow; multiplies after scale_window iterations without."""

    def __init__(
        self, init_scale: float = 2.0**32, scale_factor: float = 2.0, scale_window: int = 1000
    ) -> None:
        given = {"init_scale": init_scale, "scale_factor": scale_factor}
        self.loss_scaler = apex_policy(1.0, True, {**given, "scale_window": scale_window}, None)
