"""The diffusion model of docs/memory.md: its table, and its script beside ordinary training."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import raw_bytes
from pages import blocks
from torch import nn

import amp_mp as amp

PAGE = (Path(__file__).resolve().parents[2] / "docs/memory.md").read_text()
PAGE = PAGE[PAGE.index("## A 12 B diffusion model") :]
LEAST = 4096  # elements: smaller arrays stay on the GPU


@pytest.fixture(scope="module")
def page() -> dict[str, Any]:
    """What the page's script defines and has done; `printed`: its tables."""
    names: dict[str, Any] = {"__name__": "__main__"}
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        for block in blocks(PAGE):
            exec(compile(block, "docs/memory.md", "exec"), names)
    return {**names, "printed": printed.getvalue()}


def peak_of_gradients(model: nn.Module) -> list[int]:
    """The bytes of all gradients whenever one arrives, from now on: the most, in a list of one."""
    peak = [0]

    def arrived(_: torch.Tensor) -> None:
        held = [p.grad.nbytes for p in model.parameters() if p.grad is not None]
        peak[0] = max(peak[0], sum(held))

    for param in model.parameters():
        param.register_post_accumulate_grad_hook(arrived)
    return peak


def train(page: dict[str, Any], release: bool, **options: Any) -> tuple[Any, ...]:
    model = amp.prepare(page["small_flux"](), torch.bfloat16).to(page["device"])
    model.enable_gradient_checkpointing()
    peak = peak_of_gradients(model)
    optimizer = amp.optim.AdamW(model.parameters(), lr=1e-3, **page["formats"], **options)
    if release:
        optimizer.attach(model)
    return page["fine_tune"](model, optimizer, steps=4), model, optimizer, peak[0]


def held(model: nn.Module, optimizer: Any) -> Any:
    return raw_bytes([[p.detach() for p in model.parameters()], optimizer.state_dict()["state"]])


def test_the_table_is_what_the_page_prints(page: dict[str, Any]) -> None:
    rows = page["printed"].splitlines()[:4]
    assert "\n".join(rows) in PAGE
    assert [row.split()[1] for row in rows] == ["exact", "lean", "tiny", "micro"]


def test_the_script_has_the_bits_of_ordinary_training(page: dict[str, Any]) -> None:
    losses, model, optimizer, _ = train(page, release=False)
    assert page["losses"] == losses
    assert held(page["model"], page["optimizer"]) == held(model, optimizer)
    before = page["small_flux"]().to(page["device"]).state_dict()
    assert all((before[name] != param).any() for name, param in model.named_parameters())


def test_one_gradient_is_held_at_a_time(page: dict[str, Any]) -> None:
    *_, released, _, of_release = train(page, release=True, offload="state")
    sizes = [param.nbytes for param in released.parameters()]
    assert of_release == max(sizes)
    *_, of_ordinary = train(page, release=False)
    assert of_ordinary == sum(sizes)
    assert all(param.grad is None for param in released.parameters())


def test_masters_and_states_are_where_and_as_large_as_the_page_says(page: dict[str, Any]) -> None:
    report = page["optimizer"].memory_report()
    low = [p.numel() for p in page["model"].parameters() if p.dtype == torch.bfloat16]
    widths = {"remainder8": 1, "exp_avg": 2, "exp_avg_sq_ue8m8": 2}  # "lean"
    wanted = {name: width * sum(n for n in low if n >= LEAST) for name, width in widths.items()}
    assert report.host == (wanted if page["device"] == "cuda" else {})
    lean = page["found"].rows[3]
    assert lean.host == sum(widths.values()) * page["parameters"]
    assert report.bytes["remainder8"] == sum(low)
    assert "grad" not in report.bytes
