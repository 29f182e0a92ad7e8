"""Attention with float32 logits: no overflow, every kind of mask, 0 for a row that sees nothing."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.autograd import gradcheck
from torch.nn import functional

import amp_mp as amp
from amp_mp.nn import attention, attention_weights

LOW = [torch.float16, torch.bfloat16]
INF, NAN = math.inf, math.nan
L, S, E = 5, 7, 16


def masks(device: str) -> dict[str, Tensor | None]:
    """Of the shapes that broadcast to (2, 3, L, S); row 1 of "empty" ones sees nothing."""
    generator = torch.Generator().manual_seed(1)
    boolean = torch.rand(L, S, generator=generator) > 0.4
    boolean[:, 0] = True
    empty = boolean.clone()
    empty[1] = False
    added = torch.randn(2, 1, L, S, generator=generator)
    column = torch.zeros(L, 1)
    column[1] = -INF
    kinds = {
        "none": None,
        "boolean": boolean,
        "boolean, empty row": empty,
        "padding": boolean[0],
        "added": added,
        "added half": added.half(),
        "added with -inf": added.masked_fill(~boolean, -INF),
        "added, empty row": added.masked_fill(~empty, -INF),
        "added half, empty row": added.masked_fill(~empty, -INF).half(),
        "column, empty row": column,
        "one False": torch.tensor(False),
    }
    return {kind: None if mask is None else mask.to(device) for kind, mask in kinds.items()}


KINDS = pytest.mark.parametrize("kind", masks("cpu"))
EMPTY = pytest.mark.parametrize("kind", [kind for kind in masks("cpu") if "empty" in kind])


def inputs(device: str, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Query, key and value, leaves that require gradients; the key broadcasts."""
    shapes = [(2, 3, L, E), (2, 1, S, E), (2, 3, S, 4)]
    query, key, value = (torch.randn(s, device=device).to(dtype).requires_grad_() for s in shapes)
    return query, key, value


def formula(query: Tensor, key: Tensor, mask: Tensor | None, scale: float) -> NDArray[np.float64]:
    """Equation 1 of Vaswani et al. (2017), in float64."""
    q, k = (t.detach().double().cpu().numpy() for t in (query, key))
    logits = q @ k.swapaxes(-1, -2) * scale
    if mask is not None and mask.dtype == torch.bool:
        logits = np.where(mask.cpu().numpy(), logits, -INF)
    elif mask is not None:
        logits = logits + mask.double().cpu().numpy()
    empty = (logits == -INF).all(-1, keepdims=True)
    logits = np.where(empty, 0.0, logits)
    powers = np.exp(logits - logits.max(-1, keepdims=True))
    return np.where(empty, 0.0, powers / powers.sum(-1, keepdims=True))


@KINDS
@pytest.mark.parametrize("dtype", [torch.float32, *LOW])
@pytest.mark.parametrize("scale", [None, 0.5])
def test_attention_weights_are_the_formula(
    device: str, kind: str, dtype: torch.dtype, scale: float | None
) -> None:
    query, key, _ = inputs(device, dtype)
    mask = masks(device)[kind]
    found = attention_weights(query, key, mask, scale)
    assert found.dtype == dtype
    wanted = formula(query, key, mask, 1 / math.sqrt(E) if scale is None else scale)
    # A logit is a sum of 16 products, together below 32 in size, off by 18 * 2^-24 of it, and one
    # more for the mask; exp makes that relative, the rest adds some 16 of 2^-24. Then one rounding.
    rtol = 2.0**-24 * (2 * 19 * 32 + 16) + torch.finfo(dtype).eps / 2
    atol = 2.0**-25 if dtype == torch.float16 else 0.0
    np.testing.assert_allclose(found.detach().double().cpu(), wanted, rtol, atol)


@pytest.mark.parametrize("kind", ["none", "boolean", "added", "added with -inf"])
def test_attention_is_torchs_scaled_dot_product_attention(device: str, kind: str) -> None:
    query, key, value = inputs(device, torch.float32)
    mask = masks(device)[kind]
    exact = mask if mask is None or mask.dtype == torch.bool else mask.double()
    wide = [t.double() for t in (query, key.expand(2, 3, S, E), value)]
    wanted = functional.scaled_dot_product_attention(*wide, attn_mask=exact)
    # Weights as above, times values up to 4, and a sum of 7.
    atol = 2.0**-24 * (2 * 19 * 32 + 16 + 8) * 4
    found = attention(query, key, value, mask)
    torch.testing.assert_close(found.double(), wanted, rtol=0, atol=atol)


@KINDS
def test_gradients_are_right_through_every_mask(device: str, kind: str) -> None:
    tensors = [t.detach()[:, :1, :, :2].double() for t in inputs(device, torch.float32)]
    mask = masks(device)[kind]
    leaves = [t.requires_grad_() for t in tensors]
    assert gradcheck(lambda q, k, v: attention(q, k, v, mask), leaves)


@EMPTY
@pytest.mark.parametrize("dtype", [torch.float32, *LOW])
def test_a_row_that_sees_nothing_is_0_and_so_are_its_gradients(
    device: str, kind: str, dtype: torch.dtype
) -> None:
    query, key, value = inputs(device, dtype)
    mask = masks(device)[kind]
    assert mask is not None
    leaf = mask.clone().requires_grad_(mask.dtype != torch.bool)
    weights = attention_weights(query, key, leaf)
    output = attention(query, key, value, leaf)
    assert (weights[..., 1, :] == 0).all()
    assert (output[..., 1, :] == 0).all()
    assert (weights[..., 0, :].sum(-1) > 0.9).all()
    (weights.float().square().sum() + output.float().sum()).backward()
    leaves = [query, key, value] + [leaf] * leaf.requires_grad
    assert all(t.grad.isfinite().all() and t.grad.dtype == t.dtype for t in leaves)
    assert (query.grad[..., 1, :] == 0).all()
    assert not leaf.requires_grad or (leaf.grad[..., 1, :] == 0).all()
    assert (query.grad[..., 0, :] != 0).any()


def test_a_row_that_sees_nothing_changes_no_gradient_of_the_others(device: str) -> None:
    leaves = [t.detach().double().requires_grad_() for t in inputs(device, torch.float32)]
    query, key, value = leaves
    mask = masks(device)["boolean, empty row"]
    assert mask is not None
    others = [0, 2, 3, 4]
    output = attention(query, key, value, mask).sum()
    alone = attention(query[..., others, :], key, value, mask[others]).sum()
    for found, wanted in zip(
        torch.autograd.grad(output, leaves), torch.autograd.grad(alone, leaves), strict=True
    ):
        # The same sums in another order, a few 2^-53 apart.
        torch.testing.assert_close(found, wanted, rtol=0, atol=2.0**-44)


@pytest.mark.parametrize("dtype", LOW)
def test_a_large_negative_number_is_not_minus_infinity(device: str, dtype: torch.dtype) -> None:
    """-1e9 swallows the logits in float32; what is left is the same for all four keys."""
    query, key = (torch.randn(2, 4, 8, device=device).to(dtype) for _ in range(2))
    mask = torch.full((4, 4), -1e9, device=device)
    assert (attention_weights(query, key, mask) == 0.25).all()


def test_half_logits_beyond_65504_do_not_overflow(device: str) -> None:
    query = torch.full((1, 64), 256.0, dtype=torch.float16, device=device)
    key = torch.full((3, 64), 256.0, dtype=torch.float16, device=device)
    key[2] = -256.0
    in_half = torch.softmax((query @ key.T) / 8, -1)  # inf - inf
    assert in_half.isnan().any()
    assert attention_weights(query, key).tolist() == [[0.5, 0.5, 0.0]]


def test_an_overflow_of_the_model_is_not_taken_for_a_mask(device: str) -> None:
    query = torch.full((1, 2), -INF, device=device)
    key = torch.ones(3, 2, device=device)
    mask = torch.ones(1, 3, dtype=torch.bool, device=device)
    assert attention_weights(query, key, mask).isnan().all()
    assert (attention_weights(query, key, ~mask) == 0).all()


def test_no_keys_and_no_features_are_no_error(device: str) -> None:
    query, key, value = (torch.ones(s, device=device) for s in ((2, 4), (0, 4), (0, 3)))
    assert attention(query, key, value).tolist() == [[0.0] * 3] * 2
    assert (attention_weights(query[:, :0], query[:, :0]) == 0.5).all()


@pytest.fixture(params=["torch.autocast", "all policies low"])
def casting(device: str, request: pytest.FixtureRequest) -> Iterator[torch.autocast]:
    """A region that casts: as torch's lists say, or everything this file is about."""
    if request.param == "all policies low":
        for name in ("softmax", "_softmax", "matmul", "bmm", "mm"):
            amp.set_policy(f"aten::{name}", "low_precision", device)
    yield torch.autocast(device, torch.bfloat16)
    amp.casting.uninstall()


def test_logits_are_float32_where_casts_are_on(device: str, casting: torch.autocast) -> None:
    query, key, value = inputs(device, torch.float32)
    mask = masks(device)["added, empty row"]
    outside = attention_weights(query, key, mask)
    with casting:
        assert torch.equal(attention_weights(query, key, mask), outside)
        assert attention(query, key, value, mask).dtype == torch.bfloat16


def test_attention_compiles_into_one_graph_and_knows_its_shape_without_data(device: str) -> None:
    query, key, value = inputs(device, torch.bfloat16)
    mask = masks(device)["boolean, empty row"]
    compiled = torch.compile(attention, backend="eager", fullgraph=True)
    with torch.autocast(device, torch.bfloat16):
        found = compiled(query, key, value, mask)
    assert torch.equal(found, attention(query, key, value, mask))
    shapeless = [t.detach().to("meta") for t in (query, key, value)]
    assert attention(*shapeless).shape == (2, 3, L, 4)


ones = torch.ones
REFUSED: list[tuple[type[Exception], str, tuple[Any, ...]]] = [
    (TypeError, "query must be a floating", (ones(5, 4).long(), ones(7, 4), ones(7, 3))),
    (TypeError, "key must be a floating", (ones(5, 4), ones(7, 4).bool(), ones(7, 3))),
    (TypeError, "value must be a floating", (ones(5, 4), ones(7, 4), ones(7, 3).int())),
    (TypeError, "mask must be boolean or floating", (*[ones(5, 5)] * 3, ones(5, 5).int())),
    (ValueError, r"query must have at least two .*\(4,\)", (ones(4), ones(7, 4), ones(7, 3))),
    (ValueError, r"key must have at least two .*\(4,\)", (ones(5, 4), ones(4), ones(7, 3))),
    (ValueError, r"key must have query's last dimension, 4", (ones(5, 4), ones(7, 3), ones(7, 3))),
    (ValueError, r"key's leading dim", (ones(2, 5, 4), ones(3, 7, 4), ones(7, 3))),
    (ValueError, r"value must have shape \(..., 7, D\)", (ones(5, 4), ones(7, 4), ones(5, 3))),
    (ValueError, r"value must have shape .*found \(7,\)", (ones(5, 4), ones(7, 4), ones(7))),
    (ValueError, r"value's leading dim", (ones(2, 5, 4), ones(7, 4), ones(3, 7, 3))),
    (ValueError, r"mask must broadcast .*\(5, 5\), found \(4,", (*[ones(5, 5)] * 3, ones(4, 5))),
    (ValueError, r"mask must broadcast .*found \(2, 5, 5\)", (*[ones(5, 5)] * 3, ones(2, 5, 5))),
]


@pytest.mark.parametrize(("error", "message", "args"), REFUSED, ids=[m for _, m, _ in REFUSED])
def test_what_does_not_fit_is_refused_by_name(
    error: type[Exception], message: str, args: tuple[Any, ...]
) -> None:
    with pytest.raises(error, match=f"^{message}"):
        attention(*args)
