"""Signatures of the native submodule _C.amp_C, whose names amp_C shows.

csrc/torch/apex has their docstrings in full.
"""

from collections.abc import Sequence

from torch import Tensor

Lists = Sequence[Sequence[Tensor]]

def multi_tensor_scale(
    chunk_size: int, noop_flag: Tensor, tensor_lists: Lists, scale: float
) -> None:
    """out = in * scale."""

def multi_tensor_axpby(
    chunk_size: int,
    noop_flag: Tensor,
    tensor_lists: Lists,
    a: float,
    b: float,
    arg_to_check: int = -1,
) -> None:
    """out = a x + b y."""

def multi_tensor_l2norm(
    chunk_size: int, noop_flag: Tensor, tensor_lists: Lists, per_tensor: bool | None = False
) -> tuple[Tensor, Tensor]:
    """The 2-norm of all tensors, float32 [1], and with per_tensor of each, float32 [n]."""

def multi_tensor_unscale_l2norm(
    chunk_size: int,
    noop_flag: Tensor,
    tensor_lists: Lists,
    inv_scale: Tensor,
    per_tensor: bool | None = False,
) -> tuple[Tensor, Tensor]:
    """multi_tensor_l2norm of the tensors times |inv_scale|."""

def multi_tensor_adam(
    chunk_size: int,
    noop_flag: Tensor,
    tensor_lists: Lists,
    lr: Tensor | float,
    beta1: float,
    beta2: float,
    eps: float,
    step: int,
    mode: int,
    bias_correction: bool,
    weight_decay: float,
) -> None:
    """amp_mp.optim.Adam's step, in a mode other than 0 AdamW's."""

def multi_tensor_adagrad(
    chunk_size: int,
    noop_flag: Tensor,
    tensor_lists: Lists,
    lr: Tensor | float,
    eps: float,
    mode: int,
    weight_decay: float,
) -> None:
    """amp_mp.optim.Adagrad's step."""

def multi_tensor_lamb(
    chunk_size: int,
    noop_flag: Tensor,
    tensor_lists: Lists,
    lr: Tensor | float,
    beta1: float,
    beta2: float,
    eps: float,
    step: int,
    bias_correction: bool,
    weight_decay: float,
    grad_averaging: int,
    mode: int,
    global_grad_norm: Tensor | float,
    max_grad_norm: float,
    use_nvlamb: bool,
) -> None:
    """amp_mp.optim.LAMB's step."""

def multi_tensor_novograd(
    chunk_size: int,
    noop_flag: Tensor,
    tensor_lists: Lists,
    grad_norms: Tensor,
    lr: Tensor | float,
    beta1: float,
    beta2: float,
    eps: float,
    step: int,
    bias_correction: bool,
    weight_decay: float,
    grad_averaging: bool,
    moment_mode: int,
    norm_type: int,
) -> None:
    """amp_mp.optim.NovoGrad's step."""

def multi_tensor_sgd(
    chunk_size: int,
    noop_flag: Tensor,
    tensor_lists: Lists,
    weight_decay: float,
    momentum: float,
    dampening: float,
    lr: Tensor | float,
    nesterov: bool,
    first_run: bool,
    wd_after_momentum: bool,
    scale: float,
) -> None:
    """amp_mp.optim.SGD's step of the gradients times scale."""

def update_scale_hysteresis(
    current_scale: Tensor,
    growth_tracker: Tensor,
    hysteresis_tracker: Tensor,
    found_inf: Tensor,
    growth_factor: float,
    backoff_factor: float,
    growth_interval: int,
    hysteresis: int,
) -> Tensor:
    """amp_mp.scaling.Hysteresis on tensors of one element, in place; returns current_scale."""
