"""Momentum in float16 against the figures published for it: where it helps and where it cannot."""

from __future__ import annotations

import fp16_momentum
import pytest
import torch

import amp_mp as amp
from amp_mp.compat import shift_for_scale

# Case, step: shares of the starting loss left, in the order of the example's arms. The starting
# points of the published runs are not known, hence tolerances.
PUBLISHED = {
    ("A", 200): (0.0741, 0.281, 0.475, 0.0742, 0.0741),
    ("A", 500): (0.00943, 0.373, 0.345, 0.00953, 0.00944),
    ("A'", 500): (0.452, 1.0, 1.0, 0.479, 0.452),
}


@pytest.mark.parametrize(("name", "step"), PUBLISHED)
def test_the_published_figures_are_reproduced(name: str, step: int) -> None:
    case = next(case for case in fp16_momentum.CASES if case.name == name)
    case = fp16_momentum.Case(name, case.log2_weight, case.momentum, case.lr, (step,))
    for arm, wanted in zip(fp16_momentum.ARMS, PUBLISHED[name, step], strict=True):
        found = fp16_momentum.remaining(case, arm)[-1]
        assert found == pytest.approx(wanted, rel=0.08), arm


def test_an_ordinary_weight_at_a_small_rate_stands_still_without_a_master() -> None:
    case = fp16_momentum.Case("D", -5, 0.9, 1e-4, (2000,))
    left = {arm: fp16_momentum.remaining(case, arm)[-1] for arm in fp16_momentum.ARMS}
    assert left["classic"] > 0.9998  # a few weights close to zero move
    assert left["reformulated"] > 0.999
    assert left["master"] == pytest.approx(left["float32"], rel=1e-3)
    assert left["float32"] < 0.98


# Loss scaling by hand.

KINDS = {
    "SGD": lambda p, kind: kind.SGD(p, lr=0.125, momentum=0.5, weight_decay=0.25),
    "Adam": lambda p, kind: kind.Adam(p, lr=0.125, weight_decay=0.25, eps=2.0**-10),
    "AdamW": lambda p, kind: kind.AdamW(p, lr=0.125, weight_decay=0.25, eps=2.0**-10),
    "NAdam": lambda p, kind: kind.NAdam(p, lr=0.125, weight_decay=0.25, eps=2.0**-10),
    "RMSprop": lambda p, kind: kind.RMSprop(p, lr=0.125, weight_decay=0.25, eps=2.0**-10),
    "Adagrad": lambda p, kind: kind.Adagrad(p, lr=0.125, weight_decay=0.25, eps=2.0**-10),
}


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("library", [torch.optim, amp.optim], ids=["torch", "amp"])
def test_shifted_hyperparameters_make_up_for_a_scale_bit_for_bit(
    device: str, name: str, library: object
) -> None:
    scale = 2.0**10  # a power of two: every product is exact
    weights = [torch.nn.Parameter(torch.linspace(-1, 1, 50, device=device)) for _ in range(2)]
    plain, shifted = (KINDS[name]([w], library) for w in weights)
    assert shift_for_scale(shifted, scale) is shifted
    for step in range(5):
        grad = torch.sin(torch.arange(50, device=device) + float(step))
        weights[0].grad, weights[1].grad = grad, scale * grad
        plain.step()
        shifted.step()
    assert torch.equal(*weights)


def test_clipping_is_shifted_too_and_unknown_optimizers_are_refused(device: str) -> None:
    weight = torch.nn.Parameter(torch.ones(2, device=device))
    optimizer = shift_for_scale(amp.optim.SGD([weight], max_grad_norm=0.5), 8.0)
    assert optimizer.max_grad_norm == 4.0
    with pytest.raises(ValueError, match="Adadelta make up for a loss scale; unscale"):
        shift_for_scale(torch.optim.Adadelta([weight]), 8.0)
    with pytest.raises(ValueError, match="RAdam make up for a loss scale; unscale"):
        shift_for_scale(amp.optim.RAdam([weight]), 8.0)
    with pytest.raises(ValueError, match="scale must be finite and above 0"):
        shift_for_scale(optimizer, 0.0)
