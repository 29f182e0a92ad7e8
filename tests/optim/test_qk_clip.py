"""amp.optim.qk_clip_ against the formula of Kimi K2's report, in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from helpers import DTYPES, array, raw_bytes
from numpy.typing import NDArray
from rules import MASTERED, cases
from torch import Tensor, nn

import amp_mp as amp

Floats = NDArray[np.float64]
SIZE, INPUTS = 16, 48  # rows of a head, and columns


def projections(
    device: str, heads: int, key_heads: int, dtype: str = "bfloat16", bias: bool = True
) -> nn.ModuleDict:
    torch.manual_seed(heads)
    sizes = {"q": heads * SIZE, "k": key_heads * SIZE, "v": 8}
    model = nn.ModuleDict({name: nn.Linear(INPUTS, n, bias) for name, n in sizes.items()})
    return model.to(device) if dtype == "float32" else amp.prepare(model.to(device), DTYPES[dtype])


def doubles(optimizer: Any, layer: nn.Linear) -> list[Floats]:
    """The masters of weight and bias."""
    with optimizer.masters([*layer.parameters()]) as masters:
        return [array(master).astype(np.float64) for master in masters]


def logits(optimizer: Any, model: nn.ModuleDict, heads: int, key_heads: int) -> Floats:
    """Of the masters, in float64: [heads, queries, keys]."""
    x = np.random.default_rng(0).standard_normal((2, 9, INPUTS))
    (q, q_bias), (k, k_bias) = (doubles(optimizer, model[name]) for name in "qk")
    queries = (x[0] @ q.T + q_bias).reshape(9, heads, SIZE)
    keys = (x[1] @ k.T + k_bias).reshape(9, key_heads, SIZE).repeat(heads // key_heads, axis=1)
    return np.einsum("ihd,jhd->hij", queries, keys)


def gammas(max_logits: Tensor, threshold: float) -> Floats:
    s = array(max_logits).astype(np.float64)
    return np.minimum(1, threshold / np.where(np.isfinite(s) & (s > 0), s, threshold))


@pytest.mark.parametrize("key_heads", [6, 3, 1])
@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0])
def test_every_heads_logits_follow_its_gamma(device: str, key_heads: int, alpha: float) -> None:
    """To 2^-20 in exact masters; of bfloat16 weights that are scaled themselves, to 2^-9 or worse.

    Each of the four float32 products and factors of a logit is off by 2^-24 at most.
    """
    model = projections(device, 6, key_heads)
    optimizer = amp.optim.AdamW(model.parameters())
    found = torch.tensor([90.0, 100.5, 137.0, 99.0, 250.0, 100.1], device=device)
    before = logits(optimizer, model, 6, key_heads)
    direct = [p.detach().clone() for name in "qk" for p in model[name].parameters()]
    gamma = amp.optim.qk_clip_(optimizer, model["q"], model["k"], found, 100.0, alpha=alpha)
    wanted = gammas(found, 100.0)
    assert np.allclose(array(gamma), wanted, rtol=2**-23, atol=0)
    after = logits(optimizer, model, 6, key_heads)
    largest = np.abs(before).max(axis=(1, 2))
    error = np.abs(after - wanted[:, None, None] * before).max(axis=(1, 2)) / largest
    assert error.max() <= 2**-20
    if key_heads != 6 or alpha != 0.5:
        return
    # The same factors on the bfloat16 weights.
    root = torch.from_numpy(np.sqrt(wanted)).to(device).repeat_interleave(SIZE)
    plain = projections(device, 6, 6)
    for param, value in zip((p for n in "qk" for p in plain[n].parameters()), direct, strict=True):
        param.data.copy_(value)
    own = amp.optim.AdamW(plain.parameters())
    before = logits(own, plain, 6, 6)
    with torch.no_grad():
        for name in "qk":
            plain[name].weight.mul_(root[:, None])
            plain[name].bias.mul_(root)
    after = logits(own, plain, 6, 6)
    rounded = np.abs(after - wanted[:, None, None] * before).max(axis=(1, 2)) / largest
    assert rounded[wanted < 1].min() > 2**-12
    assert rounded.max() > 2**-10
    print(f"masters 2^{np.log2(error.max()):.1f}, weights 2^{np.log2(rounded.max()):.1f}")


@pytest.mark.parametrize("key_heads", [4, 2])
def test_the_factors_are_those_of_the_report(device: str, key_heads: int) -> None:
    """gamma^alpha and gamma^(1 - alpha); shared keys get the largest, so that nothing grows."""
    model = projections(device, 4, key_heads)
    optimizer = amp.optim.AdamW(model.parameters())
    found = torch.tensor([400.0, 200.0, 50.0, 150.0], device=device)
    before = [doubles(optimizer, model[name]) for name in "qkv"]
    untouched = raw_bytes(model["q"].weight.detach()[2 * SIZE : 3 * SIZE])
    amp.optim.qk_clip_(optimizer, model["q"], model["k"], found, alpha=0.25)
    gamma = gammas(found, 100.0)
    of_keys = (gamma**0.75).reshape(key_heads, -1).max(axis=1)
    of_queries = gamma / of_keys.repeat(4 // key_heads)
    if key_heads == 4:
        assert np.allclose(of_queries, gamma**0.25)
    assert of_queries.max() <= 1
    for name, old, factor in zip("qkv", before, (of_queries, of_keys, None), strict=True):
        by_row = np.ones(8) if factor is None else factor.repeat(SIZE)
        for now, then in zip(doubles(optimizer, model[name]), old, strict=True):
            wanted = then * by_row.reshape(-1, *[1] * (then.ndim - 1))
            assert np.allclose(now, wanted, rtol=2**-22, atol=0), name
    assert raw_bytes(model["q"].weight.detach()[2 * SIZE : 3 * SIZE]) == untouched


@pytest.mark.parametrize(("storage", "dtype"), cases(MASTERED, DTYPES))
def test_every_format_and_kind_of_projection(device: str, storage: str, dtype: str) -> None:
    """Layers, weights, and pairs; a head without a finite maximum stays as it is."""
    model = projections(device, 3, 3, dtype)
    optimizer = amp.optim.AdamW(model.parameters(), betas=(0.9, 0.99), **MASTERED[storage])
    optimizer.init_state()  # here a compact format stores what was rounded
    query, key = model["q"], model["k"]
    for given in (
        (query, key),
        (query.weight, key.weight),
        ((query.weight, None), [key.weight]),
        ((query.weight, query.bias), key),
    ):
        before = doubles(optimizer, query)[0]
        found = torch.tensor([float("inf"), float("nan"), 200.0], device=device)
        gamma = amp.optim.qk_clip_(optimizer, *given, found, threshold=50.0)
        assert gamma.tolist() == [1, 1, 0.25]
        after = doubles(optimizer, query)[0]
        assert np.array_equal(after[: 2 * SIZE], before[: 2 * SIZE])
        assert np.allclose(after[2 * SIZE :], 0.5 * before[2 * SIZE :], rtol=2**-16, atol=2**-26)


def test_around_torchs_optimizer(device: str) -> None:
    model = projections(device, 2, 1)
    optimizer = amp.FP16_Optimizer(torch.optim.AdamW(model.parameters()), verbose=False)
    before = logits(optimizer, model, 2, 1)
    found = torch.tensor([100.0, 300.0], device=device)
    amp.optim.qk_clip_(optimizer, model["q"], model["k"], found)
    after = logits(optimizer, model, 2, 1)
    assert np.allclose(after[1], before[1] / 3, rtol=0, atol=2**-20 * np.abs(before).max())
    assert np.array_equal(after[0], before[0])


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "threshold": ({"threshold": 0.0}, "threshold must be finite and above 0, found 0"),
    "threshold inf": ({"threshold": float("inf")}, "threshold must be finite"),
    "alpha": ({"alpha": 1.5}, r"alpha must be in \[0, 1\], found 1.5"),
    "heads": ({"max_logits": torch.ones(5)}, r"max_logits \(shape \[5\].* one number for each qu"),
    "no heads": ({"max_logits": torch.ones(0)}, "must have one number for each query head"),
    "a matrix": ({"max_logits": torch.ones(2, 2)}, "must have one number for each query head"),
    "a list": ({"max_logits": [1.0, 2.0]}, r"max_logits must be a tensor, found \[1.0, 2.0\]"),
    "optimizer": (
        {"optimizer": torch.optim.SGD([nn.Parameter(torch.ones(1))])},
        "optimizer must be an optimizer of amp_mp, found SGD",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_arguments_that_do_not_fit(what: str) -> None:
    model = projections("cpu", 4, 2)
    optimizer = amp.optim.AdamW(model.parameters())
    given = {"q_proj": model["q"], "k_proj": model["k"], "max_logits": torch.full((4,), 1e3)}
    change, text = REFUSED[what]
    before = raw_bytes(model.state_dict())
    with pytest.raises((TypeError, ValueError), match=text):
        amp.optim.qk_clip_(**{"optimizer": optimizer, **given, **change})
    assert raw_bytes(model.state_dict()) == before


PAIRS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "the same": (lambda m: (m["q"], m["q"]), "q_proj and k_proj must have parameters of their own"),
    "rows": (lambda m: (m["q"], m["v"]), r"q_proj has tensors of \[64, 64\] rows, k_proj of \[8"),
    "more keys": (lambda m: (m["k"], m["q"]), "must have one number for each query head"),
    "foreign": (lambda m: (nn.Linear(48, 64), m["k"]), r"params\[0\]\[0\], a tensor of shape"),
    "nothing": (lambda m: (nn.Dropout(), m["k"]), r"q_proj has tensors of \[\] rows"),
    "unlike": (lambda m: ((m["q"].weight, m["k"].bias), m["k"].weight), r"tensors of \[64, 32\]"),
}


@pytest.mark.parametrize("what", PAIRS)
def test_projections_that_do_not_fit(what: str) -> None:
    model = projections("cpu", 4, 2)
    optimizer = amp.optim.AdamW(model.parameters())
    choose, text = PAIRS[what]
    before = raw_bytes(model.state_dict())
    with pytest.raises(ValueError, match=text):
        amp.optim.qk_clip_(optimizer, *choose(model), torch.full((4,), 1e3))
    assert raw_bytes(model.state_dict()) == before
