"""Scripts of users, in parts that may run on different streams."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import amp_mp as amp

DEVICE = "cuda"


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
    """The optimizer steps during the backward pass."""

    def __init__(self, make: Callable[..., Any], clip: str = "parameter") -> None:
        super().__init__(make)
        self.attachment = self.optimizer.attach(self.model, scaler=self.scaler, clip=clip)


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
    "released": lambda: Attached(clipping),
    "released, previous norm": lambda: Attached(clipping, "previous"),
    "two optimizers": TwoOptimizers,
    "FP16_Optimizer": lambda: Wrapped(adamw, check_overflow=True),
    "FP16_Optimizer, clipped": lambda: Wrapped(adamw, clips=True),
    "FP16_Optimizer, torch's SGD": lambda: Wrapped(sgd, dynamic_loss_scale=True),
    "handle": Handle,
}
