"""apex.contrib.clip_grad: torch's clip_grad_norm_ in one native read and one write."""

from collections.abc import Iterable

from torch import Tensor, nn

from amp_mp import _C

__all__ = ["clip_grad_norm_"]


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
    norm = _C.clip_grad_norm_(params, max_norm, error_if_nonfinite) if norm_type == 2 else None
    theirs = nn.utils.clip_grad_norm_
    return theirs(params, max_norm, norm_type, error_if_nonfinite) if norm is None else norm
