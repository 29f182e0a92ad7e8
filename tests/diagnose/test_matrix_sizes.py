"""Which products Tensor Cores do not take whole, and what to pad them to."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import raw_bytes
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from amp_mp.diagnose import pad_to_multiple, tensor_core_report


class Model(nn.Module):
    """Every kind of layer that is looked at; one of them called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 16, 3, stride=2, padding=1)
        self.grouped = nn.Conv2d(16, 24, 1, groups=2)
        self.norm = nn.BatchNorm2d(24)
        self.up = nn.ConvTranspose2d(24, 8, 2, stride=2)
        self.drop = nn.Dropout(0.5)
        self.square = nn.Linear(8, 8)
        self.head = nn.Linear(8, 10)

    def forward(self, x: Tensor, *, twice: bool = True) -> Tensor:
        y = self.up(self.norm(self.grouped(self.conv(x))))
        y = self.square(input=y.flatten(2).transpose(1, 2))
        y = self.square(y) if twice else y
        return self.head(self.drop(y))


def test_the_report_names_the_sizes_that_are_no_multiples_of_8() -> None:
    """For 2 images of 12 x 12: 2 * 6 * 6 positions after the stride, 2 * 144 tokens."""
    rows = tensor_core_report(Model(), torch.randn(2, 3, 12, 12))
    assert [tuple(row) for row in rows] == [
        ("conv", "Conv2d", 72, 3 * 9, 16, {"K": 32}),
        ("grouped", "Conv2d", 72, 8, 12, {"N": 16}),
        ("head", "Linear", 288, 8, 10, {"N": 16}),
    ]
    odd = tensor_core_report(Model(), torch.randn(1, 3, 10, 10), twice=False)
    assert [(row.name, row.M, row.padding) for row in odd] == [
        ("conv", 25, {"M": 32, "K": 32}),
        ("grouped", 25, {"M": 32, "N": 16}),
        ("up", 25, {"M": 32}),
        ("square", 100, {"M": 104}),
        ("head", 100, {"M": 104, "N": 16}),
    ]


def test_the_sizes_account_for_every_multiplication() -> None:
    """torch counts two operations for each; a grouped layer has a product a group."""
    model, x = Model().eval(), torch.randn(2, 3, 12, 12)
    with FlopCounterMode(display=False) as counter:
        model(x, twice=False)
    rows = tensor_core_report(model, x, multiple=10_007)
    assert len(rows) == 5
    groups = {"grouped": 2}
    total = sum(2 * row.M * row.K * row.N * groups.get(row.name, 1) for row in rows)
    assert total == counter.get_total_flops()


def test_the_report_prints_as_a_table() -> None:
    model = nn.Sequential(nn.Linear(30, 16), nn.Linear(16, 33))
    assert str(tensor_core_report(model, torch.ones(8, 30))).splitlines() == [
        "module  layer   M  K   N   pad",
        "0       Linear  8  30  16  K to 32",
        "1       Linear  8  16  33  N to 40",
    ]


def test_the_model_is_left_as_it_was() -> None:
    model = Model()
    model.conv.eval()
    modes = [module.training for module in model.modules()]
    state, generator = raw_bytes(model.state_dict()), torch.get_rng_state()
    x = torch.zeros(2, 3, 12, 12)
    tensor_core_report(model, x)
    with pytest.raises(RuntimeError):
        tensor_core_report(model, torch.ones(2, 5, 12, 12))
    assert [module.training for module in model.modules()] == modes
    assert raw_bytes(model.state_dict()) == state
    assert torch.equal(torch.get_rng_state(), generator)
    assert not any(module._forward_hooks for module in model.modules())


@pytest.mark.parametrize(
    ("size", "multiple", "wanted"),
    [(0, 8, 0), (1, 8, 8), (8, 8, 8), (9, 8, 16), (50257, 8, 50264), (50257, 64, 50304), (7, 1, 7)],
)
def test_pad_to_multiple_is_the_smallest_that_holds_the_size(
    size: int, multiple: int, wanted: int
) -> None:
    assert pad_to_multiple(size, multiple) == wanted


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: pad_to_multiple(-1), "^size must not be negative, found -1"),
        (lambda: pad_to_multiple(8, 0), "^multiple must be positive, found 0"),
        (
            lambda: tensor_core_report(nn.Linear(8, 8), torch.ones(1, 8), multiple=-8),
            "^multiple must be positive, found -8",
        ),
    ],
)
def test_wrong_sizes_are_refused_by_name(call: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()
