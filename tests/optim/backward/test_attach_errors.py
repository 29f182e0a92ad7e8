"""attach refuses by name what it cannot do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from attached import loss_of, model
from helpers import raw_bytes
from torch import nn

import amp_mp as amp
from amp_mp.optim.base import stepper_of


def scaler_of_torch() -> Any:
    return torch.amp.GradScaler("cpu")


REFUSED: dict[str, tuple[type[Exception], str, dict[str, Any]]] = {
    "neither": (ValueError, "release and measure", {}),
    "both": (ValueError, "release and measure", {"release": True, "measure": True}),
    "clip": (ValueError, "clip must be one of parameter, previous", {"clip": "all"}),
    "torch's scaler": (TypeError, "amp_mp.GradScaler", {"scaler": scaler_of_torch}),
    "a number": (TypeError, "amp_mp.GradScaler", {"scaler": lambda: 1024.0}),
    "measured scaler": (
        ValueError,
        "scaler= is for release=True",
        {"measure": True, "release": False, "scaler": lambda: amp.GradScaler("cpu")},
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_wrong_arguments_are_refused_by_name(name: str) -> None:
    kind, message, arguments = REFUSED[name]
    given = {k: v() if callable(v) else v for k, v in arguments.items()}
    net = model("cpu")
    optimizer = amp.optim.AdamW(net.parameters())
    release = {} if name == "neither" else {"release": True}
    with pytest.raises(kind, match=message):
        optimizer.attach(net, **{**release, **given})
    assert not any(p._post_accumulate_grad_hooks for p in net.parameters())
    optimizer.attach(net, release=True)
    with pytest.raises(RuntimeError, match="attached already"):
        optimizer.attach(net, release=True)


def test_models_that_do_not_fit_are_refused() -> None:
    optimizer = amp.optim.AdamW(model("cpu").parameters())
    with pytest.raises(ValueError, match="model holds none"):
        optimizer.attach(model("cpu"), release=True)
    with pytest.raises(TypeError, match=r"model must be a torch\.nn\.Module"):
        optimizer.attach([], release=True)
    whole = torch.zeros(10)
    net = nn.ParameterList([nn.Parameter(whole[:6]), nn.Parameter(whole[4:])])
    with pytest.raises(ValueError, match="parameter 1 of group 0"):
        amp.optim.AdamW(net.parameters()).attach(net, release=True)
    net = model("cpu")
    optimizer = amp.optim.AdamW(net.parameters(), amp_scaling=False)
    with pytest.raises(ValueError, match="amp_scaling"):
        optimizer.attach(net, release=True, scaler=amp.GradScaler("cpu"))


@pytest.mark.parametrize("mode", ["release", "measure"])
@pytest.mark.parametrize("clipped", [False, True])
def test_a_sparse_gradient_is_refused_by_name(mode: str, clipped: bool) -> None:
    net = nn.Embedding(10, 4, sparse=True)
    before = raw_bytes(net.weight)
    optimizer = amp.optim.AdamW(net.named_parameters(), max_grad_norm=1.0 if clipped else None)
    optimizer.attach(net, **{mode: True})
    with pytest.raises((TypeError, ValueError), match=r"'weight'.*[Ss]parse"):  # noqa: PT012
        net(torch.tensor([1])).sum().backward()
        optimizer.step()
    assert raw_bytes(net.weight) == before


def test_scalers_that_were_not_named_are_refused_not_ignored() -> None:
    for scaler in (amp.GradScaler("cpu"), torch.amp.GradScaler("cpu")):
        net = model("cpu")
        optimizer = amp.optim.AdamW(net.parameters())
        optimizer.attach(net, release=True)
        scaler.scale(loss_of(net, 0)).backward()
        with pytest.raises(RuntimeError, match="scaler="):
            scaler.step(optimizer)
    net = model("cpu")
    optimizer = amp.optim.AdamW(net.parameters())
    scaler = amp.GradScaler("cpu")
    optimizer.attach(net, release=True, scaler=scaler)
    scaler.scale(loss_of(net, 0)).backward()
    with pytest.raises(RuntimeError, match="unscale_"):
        scaler.unscale_(optimizer)
    net = model("cpu")
    optimizer = amp.optim.AdamW(net.parameters())
    optimizer.attach(net, release=True)
    with pytest.raises(RuntimeError, match="nothing has measured them"):
        stepper_of(optimizer).totals()


def test_scale_loss_refuses_an_optimizer_that_releases(device: str) -> None:
    """It would step with gradients that are still scaled."""
    net = nn.Linear(2, 2).to(device)
    optimizer = amp.optim.SGD(net.parameters(), lr=0.1)
    optimizer.attach(net, release=True)
    handle = amp.init(device_type=device, dtype=torch.bfloat16, loss_scale=8.0)
    try:
        with (
            pytest.raises(ValueError, match="release=True steps during backward"),
            handle.scale_loss(net(torch.ones(1, 2, device=device)).sum(), optimizer),
        ):
            pass
    finally:
        handle._deactivate()
        amp.casting.uninstall()
