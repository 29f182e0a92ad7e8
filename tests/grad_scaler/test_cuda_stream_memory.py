"""Backward and unscaling on one stream, the step on another, and the first one's memory is reused.

Each script waits where torch's documentation says. Its side stream reads the next batch while the
step may not have run yet, so that what amp_mp freed on the side stream is written over: what the
step reads of it has to be recorded for the step's stream.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from helpers import PRETEND_GPU
from streams import hold_up, late, take_memory
from torch import Tensor, nn

import amp_mp as amp

DEVICE = "cuda"
ORDERS = range(4) if PRETEND_GPU else range(1)
STEPS = 5
OVERFLOW = 3  # the step in which there is one
pytestmark = pytest.mark.usefixtures("cuda")


@pytest.fixture(params=[f"cuda-order{order}" for order in ORDERS])
def cuda(request: pytest.FixtureRequest) -> Iterator[None]:
    """Delays on a device that has none of its own."""
    with late(int(request.param[-1])):
        yield


class Script:
    """A user's: `first` runs on the side stream, `second` on another, `third` on a third one."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        torch.manual_seed(3)
        self.model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4)).to(DEVICE, dtype)
        self.scaler: Any = amp.GradScaler(DEVICE, init_scale=2.0**10, growth_interval=2)

    def loss(self, batch: Tensor) -> Tensor:
        weight = next(self.model.parameters())
        return self.model(batch.to(weight.dtype)).float().square().mean()

    def first(self, batch: Tensor) -> None:
        raise NotImplementedError

    def second(self) -> None:
        self.scaler.step(self.optimizer)

    def third(self) -> None:
        self.scaler.update()

    def zero_grad(self) -> None:
        """On the side stream, when it has waited for the step: the gradients are its memory."""
        self.optimizer.zero_grad()

    def result(self) -> list[Tensor]:
        scale = torch.tensor(self.scaler.get_scale())
        return [scale, *(p.detach().float().cpu() for p in self.model.parameters())]

    optimizer: Any


class Unscaled(Script):
    """scaler.unscale_ on the side stream, with clipping where there is a norm to clip to."""

    def __init__(self, make: Callable[..., Any], clips: bool = False, **scaling: Any) -> None:
        super().__init__()
        self.scaler = amp.GradScaler(DEVICE, init_scale=2.0**10, growth_interval=2, **scaling)
        self.optimizer = make(self.model.parameters())
        self.clips = clips

    def first(self, batch: Tensor) -> None:
        self.scaler.scale(self.loss(batch)).backward()
        self.scaler.unscale_(self.optimizer)
        if self.clips:
            nn.utils.clip_grad_norm_(self.model.parameters(), 0.5)


class Scaled(Script):
    """Without unscale_: the step reads the gradients; update follows on a stream of its own."""

    def __init__(self, make: Callable[..., Any]) -> None:
        super().__init__()
        self.optimizer = make(self.model.parameters())

    def first(self, batch: Tensor) -> None:
        self.scaler.scale(self.loss(batch)).backward()


class Attached(Scaled):
    """The optimizer measures, or steps, during the backward pass."""

    def __init__(self, make: Callable[..., Any], clip: str = "parameter", **how: bool) -> None:
        super().__init__(make)
        scaler = self.scaler if how.get("release") else None
        self.attachment = self.optimizer.attach(self.model, scaler=scaler, clip=clip, **how)


class TwoOptimizers(Script):
    """Each with half of the parameters, one loss scale for both."""

    def __init__(self) -> None:
        super().__init__()
        first, _, second = self.model
        self.optimizer = amp.optim.AdamW(first.parameters(), lr=1e-2)
        self.other = torch.optim.SGD(second.parameters(), lr=1e-2)

    def first(self, batch: Tensor) -> None:
        self.scaler.scale(self.loss(batch)).backward()
        self.scaler.unscale_(self.other)

    def second(self) -> None:
        self.scaler.step(self.optimizer)
        self.scaler.step(self.other)

    def zero_grad(self) -> None:
        super().zero_grad()
        self.other.zero_grad()


class Wrapped(Script):
    """FP16_Optimizer, whose backward collects and measures."""

    def __init__(self, make: Callable[..., Any], clips: bool = False, **how: Any) -> None:
        super().__init__(torch.bfloat16)
        inner = make(self.model.parameters())
        self.optimizer = amp.FP16_Optimizer(inner, verbose=False, **how)
        self.clips = clips

    def first(self, batch: Tensor) -> None:
        self.optimizer.backward(self.loss(batch))
        if self.clips:
            self.optimizer.clip_master_grads(0.5)

    def second(self) -> None:
        self.optimizer.step()

    def third(self) -> None:
        pass


class Handle(Script):
    """handle.scale_loss around the backward pass."""

    def __init__(self) -> None:
        super().__init__(torch.float16)
        self.handle = amp.init(device_type=DEVICE, dtype=torch.float16, loss_scale="dynamic")
        self.optimizer = amp.optim.AdamW(self.model.parameters(), lr=1e-2, max_grad_norm=0.5)

    def first(self, batch: Tensor) -> None:
        with self.handle.scale_loss(self.loss(batch), self.optimizer) as scaled:
            scaled.backward()

    def second(self) -> None:
        self.optimizer.step()

    def third(self) -> None:
        pass

    def result(self) -> list[Tensor]:
        self.handle._deactivate()
        return super().result()


def adamw(params: Any, **more: Any) -> amp.optim.AdamW:
    return amp.optim.AdamW(params, lr=1e-2, **more)


def clipping(params: Any) -> amp.optim.AdamW:
    return adamw(params, max_grad_norm=0.5)


def lamb(params: Any) -> amp.optim.LAMB:
    return amp.optim.LAMB(params, lr=1e-2)


def sgd(params: Any) -> torch.optim.SGD:
    return torch.optim.SGD(params, lr=1e-2)


def torch_fused(params: Any) -> torch.optim.AdamW:
    return torch.optim.AdamW(params, lr=1e-2, fused=True)


SCRIPTS: dict[str, Callable[[], Script]] = {
    "unscaled": lambda: Unscaled(adamw),
    "unscaled and clipped": lambda: Unscaled(adamw, clips=True),
    "unscaled, clipped twice": lambda: Unscaled(clipping, clips=True),
    "unscaled, LogMax": lambda: Unscaled(adamw, loss_scale="LogMax"),
    "unscaled, LAMB": lambda: Unscaled(lamb),
    "unscaled, torch's SGD": lambda: Unscaled(sgd, clips=True),
    "unscaled, torch's fused AdamW": lambda: Unscaled(torch_fused, clips=True),
    "scaled": lambda: Scaled(clipping),
    "scaled, LAMB": lambda: Scaled(lamb),
    "scaled, torch's SGD": lambda: Scaled(sgd),
    "scaled, torch's fused AdamW": lambda: Scaled(torch_fused),
    "measured in backward": lambda: Attached(clipping, measure=True),
    "released": lambda: Attached(clipping, release=True),
    "released, previous norm": lambda: Attached(clipping, "previous", release=True),
    "two optimizers": TwoOptimizers,
    "FP16_Optimizer": lambda: Wrapped(adamw, check_overflow=True),
    "FP16_Optimizer, clipped": lambda: Wrapped(adamw, clips=True),
    "FP16_Optimizer, torch's SGD": lambda: Wrapped(sgd, dynamic_loss_scale=True),
    "handle": Handle,
}


def trained(
    script: Script, first: Any, steps: list[Any], third: Any, early: bool = False
) -> list[Tensor]:
    """The script with its three parts on streams; steps take turns on theirs.

    early: the third part is behind the first one alone.
    """
    source = torch.Generator().manual_seed(1)
    batches = torch.randn(STEPS, 6, 8, generator=source)
    batches[OVERFLOW, 0, 0] = float("inf")
    batches = batches.to(DEVICE)
    first.wait_stream(torch.cuda.current_stream())
    for number, batch in enumerate(batches):
        with torch.cuda.stream(first):
            script.zero_grad()
            script.first(batch)
        second = steps[number % len(steps)]
        second.wait_stream(first)
        with torch.cuda.stream(second):
            hold_up()
            script.second()
        third.wait_stream(first if early else second)
        with torch.cuda.stream(third):
            script.third()
        for stream in (first, *steps, third):
            with torch.cuda.stream(stream):
                take_memory()
        for stream in (second, third):
            first.wait_stream(stream)
    torch.cuda.synchronize()
    return script.result()


def assert_same(found: list[Tensor], wanted: list[Tensor]) -> None:
    for a, b in zip(found, wanted, strict=True):
        assert torch.equal(a, b)
        assert a.isfinite().all()


@pytest.mark.parametrize("streams", ["two", "three", "turns"])
@pytest.mark.parametrize("name", SCRIPTS)
def test_a_step_on_another_stream_than_its_backward_reads_its_own_statistics(
    name: str, streams: str
) -> None:
    here, beside = torch.cuda.current_stream(), torch.cuda.Stream()
    wanted = trained(SCRIPTS[name](), here, [here], here)
    third = torch.cuda.Stream() if streams == "three" else here
    steps = [torch.cuda.Stream(), torch.cuda.Stream()] if streams == "turns" else [here]
    assert_same(trained(SCRIPTS[name](), beside, steps, third), wanted)


@pytest.mark.parametrize("name", [name for name in SCRIPTS if name.startswith("unscaled")])
def test_an_update_before_the_step_has_run(name: str) -> None:
    """After unscale_ the update needs nothing of the step, and drops what the step reads."""
    here, beside = torch.cuda.current_stream(), torch.cuda.Stream()
    wanted = trained(SCRIPTS[name](), here, [here], here)
    assert_same(trained(SCRIPTS[name](), beside, [here], beside, early=True), wanted)
