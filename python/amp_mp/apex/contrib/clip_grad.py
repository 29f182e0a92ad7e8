"""apex.contrib.clip_grad: torch's clip_grad_norm_ in one native read and one write."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from amp_mp import _C
from amp_mp.dtypes import NATIVE

__all__ = ["clip_grad_norm_"]


@torch.no_grad()
def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
) -> Tensor:
    """Gradients times min(max_norm / (norm + 1e-6), 1), as torch.nn.utils.clip_grad_norm_.

    Returns the norm of all gradients, a float32 tensor of no dimension; the host does not wait. The
    2-norm of float16 gradients does not overflow. Gradients that are on several devices, sparse,
    DTensors or float64, and other norms, are torch's. RuntimeError for an inf or NaN with
    error_if_nonfinite; else gradients get the factor 0, as in torch.
    """
    params = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    grads = [p.grad for p in params if p.grad is not None]
    plain = all(type(g) is Tensor and g.layout == torch.strided for g in grads)
    alike = len({g.device for g in grads}) == 1 and all(g.dtype in NATIVE for g in grads)
    if not (plain and alike and float(norm_type) == 2.0) or not all(map(_is_dense, grads)):
        return nn.utils.clip_grad_norm_(params, max_norm, norm_type, error_if_nonfinite)
    total = _C.measure(grads)[-1]
    norm = total[0].sqrt().masked_fill(total[2] > 0, torch.inf)
    if error_if_nonfinite and not norm.isfinite():
        raise RuntimeError(f"The total norm of order {norm_type} for gradients is non-finite")
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    # The native verdict: do not skip, multiply by the factor.
    _C.copy_(grads, grads, verdict=torch.stack([factor * 0, factor, norm, norm, factor]))
    return norm.float()


def _is_dense(grad: Tensor) -> bool:
    return grad.numel() == 0 or grad.contiguous().data_ptr() == grad.data_ptr()
