"""FP16_Optimizer as a torch.optim.Optimizer, and its error for a plain loss.backward()."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import NO_GRADIENT, raw_bytes, warns
from tiers import paired
from torch import Tensor, nn
from torch.optim import optimizer as torch_optimizer

import amp_mp as amp

LOW = [torch.bfloat16, torch.float16]
# Masters of the wrapper, or of an optimizer of amp_mp, however it stores them.
INNER: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "torch SGD": lambda params: torch.optim.SGD(params, lr=0.125, momentum=0.5),
    "torch AdamW": lambda params: torch.optim.AdamW(params, lr=0.125),
    "amp float32": lambda params: amp.optim.AdamW(params, lr=0.125, memory="float32"),
    "amp exact": lambda params: amp.optim.AdamW(params, lr=0.125, memory="exact"),
}


class Mixed(nn.Module):
    """A low-precision layer, a float32 norm, and a layer that the loss does not reach."""

    def __init__(self, dtype: torch.dtype, device: str) -> None:
        super().__init__()
        self.body = nn.Linear(32, 32, device=device, dtype=dtype)
        self.norm = nn.LayerNorm(32, device=device)
        self.unused = nn.Linear(32, 32, device=device, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.body(x).float()).square().mean()


def make(
    device: str, inner: str = "torch SGD", dtype: torch.dtype = torch.bfloat16, **options: Any
) -> tuple[Mixed, amp.FP16_Optimizer, Tensor]:
    torch.manual_seed(0)
    model = Mixed(dtype, device)
    optimizer = amp.FP16_Optimizer(INNER[inner](model.parameters()), verbose=False, **options)
    return model, optimizer, torch.randn(4, 32, device=device).to(dtype)


@pytest.mark.parametrize(
    ("inner", "dtype", "options"),
    paired(INNER, LOW, [{}, {"dynamic_loss_scale": True}, {"loss_scale": 128.0}]),
)
def test_a_plain_backward_is_an_error_that_names_the_right_one(
    device: str, inner: str, dtype: torch.dtype, options: dict[str, Any]
) -> None:
    """Only the float32 parameters used to train, without a word."""
    model, optimizer, x = make(device, inner, dtype, **options)
    before = raw_bytes([*model.parameters()])
    model(x).backward()
    message = r"parameter 0 of group 0 .*optimizer\.backward\(loss\) in place of loss\.backward"
    with pytest.raises(RuntimeError, match=message):
        optimizer.step()
    assert raw_bytes([*model.parameters()]) == before
    optimizer.zero_grad()
    optimizer.backward(model(x))
    optimizer.step()


@pytest.mark.parametrize("inner", INNER)
@pytest.mark.parametrize("clear", ["optimizer", "set to None", "model", "model to 0"])
def test_a_plain_backward_in_a_later_iteration_is_noticed_too(
    device: str, inner: str, clear: str
) -> None:
    model, optimizer, x = make(device, inner)
    optimizer.backward(model(x))
    optimizer.step()
    if clear == "optimizer":
        optimizer.zero_grad()
    elif clear == "set to None":
        optimizer.zero_grad(set_to_none=True)
    else:
        model.zero_grad(set_to_none=clear == "model")
    model(x).backward()
    with pytest.raises(RuntimeError, match=r"call optimizer\.backward\(loss\)"):
        optimizer.step()


@pytest.mark.parametrize("inner", ["torch SGD", "amp exact"])
def test_a_plain_backward_in_a_closure_is_noticed(device: str, inner: str) -> None:
    model, optimizer, x = make(device, inner)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = model(x)
        loss.backward()
        return loss

    with pytest.raises(RuntimeError, match=r"call optimizer\.backward\(loss\)"):
        optimizer.step(closure)


def _twice(model: Mixed, optimizer: Any, x: Tensor) -> None:
    optimizer.backward(model(x))
    optimizer.step()
    optimizer.step()


def _written_twice(model: Mixed, optimizer: Any, x: Tensor) -> None:
    """A second step on gradients that were clipped before the first one."""
    optimizer.backward(model(x))
    for param in optimizer.param_groups[0]["params"]:
        if param.grad is not None:
            param.grad.mul_(0.5)
    optimizer.step()
    optimizer.step()


def _late(model: Mixed, optimizer: Any, x: Tensor) -> None:
    optimizer.backward(model(x), update_master_grads=False)
    optimizer.backward(model(x), update_master_grads=False)
    optimizer.update_master_grads()
    optimizer.clip_master_grads(1.0)
    optimizer.step()


def _zeros(model: Mixed, optimizer: Any, x: Tensor) -> None:
    for param in model.parameters():
        param.grad = torch.zeros_like(param)
    optimizer.step()


def _clipped_in_the_model(model: Mixed, optimizer: Any, x: Tensor) -> None:
    optimizer.backward(model(x))
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()


def _closure(model: Mixed, optimizer: Any, x: Tensor) -> None:
    def evaluate() -> Tensor:
        optimizer.zero_grad()
        loss = model(x)
        optimizer.backward(loss)
        return loss

    optimizer.step(evaluate)


def _accumulated(model: Mixed, optimizer: Any, x: Tensor) -> None:
    with warns(NO_GRADIENT, isinstance(optimizer.optimizer, amp.optim.FusedOptimizer)):
        optimizer.step()
    for _ in range(2):
        for _ in range(3):
            optimizer.backward(model(x))
        optimizer.step()


@pytest.mark.parametrize(
    ("inner", "scale"), [("torch SGD", 128.0), ("torch SGD", 1.0), ("amp exact", 128.0)]
)
@pytest.mark.parametrize("in_closure", [False, True])
def test_a_step_on_gradients_that_were_not_collected_is_refused(
    device: str, inner: str, scale: float, in_closure: bool
) -> None:
    """At a scale of 1, too, where there are masters: these have not got them."""
    model, optimizer, x = make(device, inner, loss_scale=scale)

    def closure() -> Tensor:
        loss = model(x)
        optimizer.backward(loss, update_master_grads=False)
        return loss

    before = raw_bytes([*model.parameters()])
    if not in_closure:
        closure()
        optimizer.clip_master_grads(1e9)  # too early, and no collecting either
    with pytest.raises(RuntimeError, match=rf"loss scale {scale}.*update_master_grads\(\)"):
        optimizer.step(*([closure] if in_closure else []))
    assert raw_bytes([*model.parameters()]) == before
    optimizer.update_master_grads()
    optimizer.step()
    assert raw_bytes([*model.parameters()]) != before


def test_a_plain_backward_after_a_skipped_step_is_an_error(device: str) -> None:
    model, optimizer, x = make(device, loss_scale="dynamic")
    optimizer.backward(model(x) * float("inf"))
    optimizer.step()
    optimizer.zero_grad()
    model(x).backward()
    with pytest.raises(RuntimeError, match=r"call optimizer\.backward\(loss\)"):
        optimizer.step()


LEGAL: list[Callable[..., None]] = [_twice, _late, _zeros, _clipped_in_the_model, _closure]
LEGAL += [_accumulated, _written_twice]


@pytest.mark.parametrize(
    ("inner", "options", "flow"), paired(INNER, [{}, {"dynamic_loss_scale": True}], LEGAL)
)
def test_what_is_right_does_not_raise(
    device: str, inner: str, options: dict[str, Any], flow: Callable[..., None]
) -> None:
    flow(*make(device, inner, **options))


def test_float32_parameters_alone_may_have_a_plain_backward(device: str) -> None:
    model, optimizer, x = make(device)
    model.body.requires_grad_(False)
    model(x).backward()
    before = raw_bytes(model.norm.weight)
    optimizer.step()
    assert raw_bytes(model.norm.weight) != before


# An Optimizer.


@pytest.mark.parametrize("inner", INNER)
def test_it_is_an_optimizer_with_all_its_own_attributes(device: str, inner: str) -> None:
    _, optimizer, _ = make(device, inner)
    assert isinstance(optimizer, torch.optim.Optimizer)
    assert optimizer.param_groups is optimizer.optimizer.param_groups
    assert optimizer.state is optimizer.optimizer.state
    assert optimizer.defaults is optimizer.optimizer.defaults
    assert "param_groups" not in vars(optimizer)
    assert "set_to_none" in inspect.signature(optimizer.zero_grad).parameters  # Accelerate asks
    assert "lr: 0.125" in repr(optimizer)


SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "StepLR": lambda o: torch.optim.lr_scheduler.StepLR(o, 2, 0.5),
    "cosine": lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 5),
    "one cycle": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.25, total_steps=10),
    "plateau": lambda o: torch.optim.lr_scheduler.ReduceLROnPlateau(o, patience=0),
}


@pytest.mark.filterwarnings("error:Detected call of `lr_scheduler.step")
@pytest.mark.parametrize("inner", ["torch AdamW", "amp exact"])
@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_scheduler_takes_it_and_does_what_it_does_for_the_wrapped_one(
    device: str, inner: str, name: str
) -> None:
    found = []
    for attach in (lambda o: o, lambda o: o.optimizer):
        model, optimizer, x = make(device, inner)
        scheduler = SCHEDULERS[name](attach(optimizer))
        rates = []
        for _ in range(5):
            optimizer.zero_grad()
            optimizer.backward(model(x))
            optimizer.step()
            scheduler.step(*([1.0] if name == "plateau" else []))
            rates.append(optimizer.param_groups[0]["lr"])
        found.append([rates, raw_bytes([*model.parameters()])])
    assert found[0] == found[1]
    assert len(set(found[0][0])) > 1


def test_its_hooks_are_called_once_and_global_ones_once(device: str) -> None:
    model, optimizer, x = make(device)
    seen: list[str] = []
    everywhere = torch_optimizer.register_optimizer_step_post_hook(
        lambda *_: seen.append("everywhere")
    )
    optimizer.register_step_pre_hook(lambda o, *_: seen.append(f"before {o is optimizer}"))
    optimizer.register_step_post_hook(lambda o, *_: seen.append(f"after {o is optimizer}"))
    optimizer.register_state_dict_post_hook(lambda _, saved: {**saved, "epoch": 3})
    optimizer.register_load_state_dict_pre_hook(lambda _, saved: saved.pop("epoch") and None)
    optimizer.register_load_state_dict_post_hook(lambda _: seen.append("loaded"))
    try:
        optimizer.backward(model(x))
        optimizer.step()
    finally:
        everywhere.remove()
    saved = optimizer.state_dict()
    assert saved["epoch"] == 3
    optimizer.load_state_dict(saved)
    assert saved["epoch"] == 3
    assert seen == ["before True", "everywhere", "after True", "loaded"]


def test_what_unscales_by_itself_refuses_it_by_name(device: str) -> None:
    _, optimizer, _ = make(device)
    with amp.init(device_type=device, loss_scale=128.0) as handle:
        for wrap in (handle.wrap_optimizer, amp.FP16_Optimizer):
            with pytest.raises(TypeError, match="FP16_Optimizer"):
                wrap(optimizer)
