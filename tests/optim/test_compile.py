"""torch.compile around a step: the step stays outside of the graphs, with the same bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from rules import is_allowed
from torch import Tensor, nn

import amp_mp as amp

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW": lambda params: amp.optim.AdamW(params, lr=1e-2, max_grad_norm=1.0),
    "exact": lambda params: amp.optim.AdamW(params, lr=1e-2, memory="exact"),
    "lean": lambda params: amp.optim.AdamW(params, lr=1e-2, memory="lean"),
    "tiny": lambda params: amp.optim.AdamW(params, lr=1e-2, memory="tiny", max_grad_norm=1.0),
    "micro": lambda params: amp.optim.AdamW(params, lr=1e-2, memory="micro", max_grad_norm=1.0),
    "nano": lambda params: amp.optim.AdamW(params, lr=1e-2, memory="nano", max_grad_norm=1.0),
    "SGD": lambda params: amp.optim.SGD(params, lr=1e-2, momentum=0.9),
    "LAMB": lambda params: amp.optim.LAMB(params, lr=1e-2),
}


class Graphs:
    """A backend of torch.compile that runs graphs as they are, and counts them."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, graph: Any, inputs: list[Tensor]) -> Any:
        self.count += 1
        return graph.forward


@pytest.fixture(autouse=True)
def _fresh_compiler(device: str) -> Any:
    """And the hooks of every step, with operators in them, that amp.init installs for good."""
    amp.init(device_type=device, dtype=torch.bfloat16)._deactivate()
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def train(
    device: str,
    dtype: torch.dtype,
    make: Callable[[Any], torch.optim.Optimizer],
    wrap: Callable[[torch.optim.Optimizer], Callable[[], Any]],
) -> list[Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)).to(device, dtype)
    optimizer = make(model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    step = wrap(optimizer)
    for i in range(6):
        for k, param in enumerate(model.parameters()):
            values = torch.linspace(-1, 1, param.numel(), device=device) * (1 + i + k)
            param.grad = values.reshape(param.shape).to(dtype)
        step()
        scheduler.step()
    return [param.detach().clone() for param in model.parameters()]


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        (name, dtype)
        for name in OPTIMIZERS
        for dtype in DTYPES
        if not (dtype == torch.float32 and name in ("exact", "lean", "tiny", "micro", "nano"))
        if is_allowed(name, dtype)
    ],
)
def test_a_compiled_step_has_the_steps_bits_and_no_graph(
    device: str, name: str, dtype: torch.dtype
) -> None:
    """It took 40 s, one graph per changed learning rate, and gave other weights."""
    graphs = Graphs()
    plain = train(device, dtype, OPTIMIZERS[name], lambda optimizer: optimizer.step)
    compiled = train(
        device,
        dtype,
        OPTIMIZERS[name],
        lambda optimizer: torch.compile(optimizer.step, backend=graphs),
    )
    assert all(torch.equal(a, b) for a, b in zip(plain, compiled, strict=True))
    assert graphs.count == 0


def steps_of(kind: str, model: nn.Module, device: str) -> Callable[[Tensor], Tensor]:
    """A training step in one of the forms in which an optimizer of ours takes part."""
    params = list(model.parameters())
    if kind == "FP16_Optimizer":
        wrapped = amp.FP16_Optimizer(torch.optim.SGD(params, lr=1e-2), verbose=False)

        def with_masters(x: Tensor) -> Tensor:
            loss = model(x).float().square().mean()
            wrapped.zero_grad()
            wrapped.backward(loss)
            wrapped.step()
            return loss

        return with_masters
    optimizer = amp.optim.AdamW(params, lr=1e-2, max_grad_norm=1.0)
    scaler = amp.GradScaler(device, enabled=kind == "GradScaler")

    def step(x: Tensor) -> Tensor:
        loss = model(x).float().square().mean()
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return loss

    return step


@pytest.mark.parametrize("kind", ["step", "GradScaler", "FP16_Optimizer"])
def test_a_compiled_training_step_has_the_bits_of_the_plain_one(device: str, kind: str) -> None:
    """With fullgraph=False; the model's forward is in graphs, and what follows it is not.

    A step goes on from what was written after the one before.
    """
    x = torch.linspace(-1, 1, 4 * 32, device=device).reshape(4, 32).bfloat16()
    found = []
    for compiled in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))
        model = model.to(device, torch.bfloat16)
        made, graphs = steps_of(kind, model, device), Graphs()
        run = torch.compile(made, backend=graphs) if compiled else made
        losses = []
        for step in range(6):
            losses.append(run(x).item())
            if step in (2, 3, 4):
                for param in model.parameters():
                    param.data.clamp_(-0.05, 0.05)
                    param.data.view(-1)[::7] = 0
        largest = max(param.abs().max().item() for param in model.parameters())
        assert largest <= 0.05 * (1 + 2.0**-7) + 0.02  # two learning rates beside the clamp
        found.append([losses, [param.detach().clone() for param in model.parameters()]])
        assert (graphs.count > 0) == compiled
    assert found[0][0] == found[1][0]
    assert all(torch.equal(a, b) for a, b in zip(found[0][1], found[1][1], strict=True))
