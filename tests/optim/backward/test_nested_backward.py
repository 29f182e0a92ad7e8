"""Released gradients beside backward passes inside of another: the ordinary steps' bits."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from attached import LOW, SCALE, state_of
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import amp_mp as amp


class Recurrent(nn.Module):
    """A cell used three times under reentrant checkpoints, and where `outside` says once more."""

    def __init__(self, outside: str = "") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.cell = nn.Linear(16, 16)
        self.head = nn.Linear(16, 4)
        self.outside = outside

    def forward(self, x: Tensor, reentrant: bool = True) -> Tensor:
        if self.outside == "before":
            x = self.cell(x)
        for _ in range(3):
            x = checkpoint(lambda t: self.cell(t).tanh(), x, use_reentrant=reentrant)
        if self.outside == "after":
            x = self.cell(x)
        return self.head(x)


def noise(step: int, device: str, dtype: torch.dtype = torch.float32) -> Tensor:
    x = torch.randn(8, 16, generator=torch.Generator().manual_seed(step))
    return x.to(device, dtype).requires_grad_()


@pytest.mark.parametrize("outside", ["", "before", "after"])
def test_a_cell_under_several_reentrant_checkpoints_is_stepped_once(
    device: str, outside: str
) -> None:
    found = []
    for release in (True, False):
        net = amp.prepare(Recurrent(outside).to(device), LOW)
        optimizer = amp.optim.AdamW(net.parameters(), lr=0.01, check_overflow=True)
        if release:
            optimizer.attach(net)
        norms = []
        for step in range(3):
            loss = net(noise(step, device, LOW)).float().square().mean()
            if release and step == 0:
                with pytest.warns(UserWarning, match="use_reentrant=False"):
                    loss.backward()
            else:
                loss.backward()
            optimizer.step()
            norms.append(optimizer.grad_norm)
            assert not release or all(p.grad is None for p in net.parameters())
            optimizer.zero_grad()
        found.append([state_of(net, optimizer), norms])
    assert found[0] == found[1]


@pytest.mark.filterwarnings("ignore:amp_mp. gradient release steps and frees nothing")
def test_a_scaler_and_gradients_of_two_backwards(device: str) -> None:
    """Gradients that wait add up, as without attach."""
    found = []
    for release in (True, False):
        net = amp.prepare(Recurrent("after").to(device), LOW)
        optimizer = amp.optim.AdamW(net.parameters(), lr=0.01)
        scaler = amp.GradScaler(device, init_scale=SCALE)
        if release:
            optimizer.attach(net, scaler=scaler)
        for step in range(2):
            for part in range(2):
                loss = net(noise(2 * step + part, device, LOW)).float().square().mean()
                scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        found.append([state_of(net, optimizer), optimizer.grad_norm, scaler.get_scale()])
    assert found[0] == found[1]


@pytest.mark.filterwarnings("ignore:amp_mp. gradient release steps and frees nothing")
def test_what_waits_depends_on_the_backward_pass(device: str) -> None:
    """One that raises leaves nothing that steps later; one without nested ones frees again."""
    net, twin = Recurrent().to(device), Recurrent().to(device)
    optimizer = amp.optim.AdamW(net.parameters(), lr=0.01)
    ordinary = amp.optim.AdamW(twin.parameters(), lr=0.01)
    optimizer.attach(net)
    before = state_of(net, optimizer)

    def fail(_: Tensor) -> None:
        raise ArithmeticError

    x = noise(0, device)
    x.register_hook(fail)
    with pytest.raises(ArithmeticError):
        net(x).sum().backward()
    assert any(p.grad is not None for p in net.parameters())
    assert state_of(net, optimizer) == before
    optimizer.zero_grad()
    for step, reentrant in enumerate((True, False, True, False)):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            net(noise(step, device), reentrant).sum().backward()
        waits = [p.grad is not None for p in net.parameters()]
        assert waits == [reentrant] * 4
        optimizer.step()
        twin(noise(step, device), reentrant).sum().backward()
        ordinary.step()
        ordinary.zero_grad()
        assert state_of(net, optimizer) == state_of(twin, ordinary)


class Recomputed(torch.autograd.Function):
    """A checkpoint of a script's own."""

    @staticmethod
    def forward(ctx: Any, function: Any, x: Tensor) -> Tensor:
        ctx.function = function
        ctx.save_for_backward(x)
        with torch.no_grad():
            return function(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            y = ctx.function(x)
        torch.autograd.backward(y, grad)
        return None, x.grad


class Hidden(Recomputed):
    """The same, in whose own code no backward pass is to be seen."""

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return Recomputed.__dict__["backward"](ctx, grad)


@pytest.mark.filterwarnings("ignore:amp_mp. gradient release steps and frees nothing")
@pytest.mark.parametrize("kind", [Recomputed, Hidden])
def test_checkpoints_of_a_scripts_own(device: str, kind: Any) -> None:
    """Waited for, or, where nothing shows them, refused by the parameter's name."""
    torch.manual_seed(0)
    cell = nn.Linear(16, 16).to(device)
    twin = copy.deepcopy(cell)
    optimizer = amp.optim.SGD(cell.named_parameters(), lr=0.1)
    ordinary = amp.optim.SGD(twin.parameters(), lr=0.1)
    optimizer.attach(cell)

    def loss_of(net: nn.Module) -> Tensor:
        return net(kind.apply(net, noise(0, device))).square().sum()

    if kind is Hidden:
        with pytest.raises(RuntimeError, match=r"has stepped .*(weight|bias).*inside of this one"):
            loss_of(cell).backward()
        return
    loss_of(cell).backward()
    loss_of(twin).backward()
    for each in (optimizer, ordinary):
        each.step()
    assert torch.equal(cell.weight, twin.weight)
