"""QK-Clip: attention logits that stay below a threshold, by smaller query and key weights."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from amp_mp import _C
from amp_mp.sharding.shards import local_of, part_of_whole
from amp_mp.torch_private import outside_graphs


@outside_graphs
@torch.no_grad()
def qk_clip_(
    optimizer: Any,
    q_proj: nn.Module | Tensor | Iterable[Tensor | None],
    k_proj: nn.Module | Tensor | Iterable[Tensor | None],
    max_logits: Tensor,
    threshold: float = 100.0,
    alpha: float = 0.5,
) -> Tensor:
    """Scales query and key weights of heads whose logits are too large; call it after `step`.

    Kimi Team, "Kimi K2" (arXiv 2507.20534, 2025), section 2.1. S being a head's largest logit:

        gamma = min(1, threshold / S)
        W_q = gamma^alpha W_q
        W_k = gamma^(1 - alpha) W_k

    Keys that query heads share get the largest gamma^(1 - alpha) of these, and each query head the
    rest of its own gamma: no weight grows. It is the masters that are scaled.

    Args:
        optimizer: of amp_mp, with these parameters.
        q_proj, k_proj: nn.Linear, its weight [rows, inputs], or (weight, bias); may be DTensors.
            Rows are head after head. Consecutive query heads share a key head.
        max_logits: [query heads], over all tokens and processes, on the weights' device. A head
            where it is inf or NaN stays as it is.
        threshold, alpha: above 0; the queries' share, in [0, 1].

    Returns gamma, float32 [query heads], without waiting. Raises TypeError or ValueError naming the
    argument, and what `optimizer.masters` raises; nothing is changed then.
    """
    if not hasattr(optimizer, "masters"):
        raise TypeError(f"optimizer must be an optimizer of amp_mp, found {optimizer!r}")
    params = [_params(q_proj), _params(k_proj)]
    with optimizer.masters(params) as masters:
        gamma, *factors = _C.qk_clip_factors(max_logits, threshold, alpha, *params)
        for own, of_own, factor in zip(params, masters, factors, strict=True):
            for param, master in zip(own, of_own, strict=True):
                by_row = factor.view(-1, *[1] * (param.dim() - 1)).expand(param.shape)
                local_of(master).mul_(part_of_whole(by_row, param))
    return gamma


def _params(projection: Any) -> list[Any]:
    """A projection's weight and bias."""
    if isinstance(projection, nn.Module):
        projection = [getattr(projection, name, None) for name in ("weight", "bias")]
    params = [projection] if isinstance(projection, Tensor) else projection
    return [param for param in params if param is not None]
