"""Contract: after a loss's block gradients are the sum of the true ones since they were cleared.

Whatever the scales, the order, the way in which a script clears or writes them, and the optimizer.
A dictionary of whole numbers is the model of it: every sum and product below is exact in float16.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from random_tests import examples
from torch import Tensor, nn

import amp_mp as amp
from amp_mp.scaling import Backoff

pytestmark = [
    pytest.mark.filterwarnings("ignore:amp_mp. gradients have been"),
    pytest.mark.filterwarnings("ignore:amp_mp. no parameter of this optimizer has a gradient"),
]


class Two(nn.Module):
    """A low-precision weight and a float32 one, whose gradients are what the loss is given."""

    def __init__(self, device: str, dtype: torch.dtype) -> None:
        super().__init__()
        self.low = nn.Parameter(torch.zeros(3, dtype=dtype, device=device))
        self.wide = nn.Parameter(torch.zeros(3, device=device))

    def loss(self, factors: dict[str, float]) -> Tensor:
        """A number; a weight that is not in `factors` gets no gradient."""
        terms = [getattr(self, name).float().sum() * x for name, x in factors.items()]
        return sum(terms, torch.zeros((), device=self.low.device))


def raise_error(*_: Any) -> None:
    raise ZeroDivisionError


class Failing(torch.autograd.Function):
    """The loss, whose backward pass raises."""

    @staticmethod
    def forward(_: Any, loss: Tensor) -> Tensor:
        """See Failing."""
        return loss.clone()

    @staticmethod
    def backward(_: Any, grad: Tensor) -> None:
        """See Failing."""
        raise_error()


class Way:
    """One way of scaling losses: its optimizer, one loss, and the true gradients it shows."""

    clears_after_step = False  # the low-precision weight's gradient
    delays = False  # whether a loss may leave its gradients scaled
    takes_plain = True  # whether a plain backward adds to them

    def __init__(self, model: Two, kind: str) -> None:
        package = torch.optim if kind == "torch" else amp.optim
        self.model, self.is_ours = model, kind != "torch"
        self.optimizer: Any = package.SGD(model.parameters(), lr=2.0**-4)

    def backward(self, loss: Tensor, scale: float, delay: bool) -> None:
        """The script's lines for one loss."""
        raise NotImplementedError

    def collect(self) -> None:
        """What follows losses that were delayed, if no other loss does."""

    def again(self) -> None:
        """A call that a script may repeat without effect."""

    def gradients(self) -> list[Tensor | None]:
        """Those of the model's parameters, in their order."""
        return [p.grad for p in self.model.parameters()]


class Handle(Way):
    """amp.init."""

    def __init__(self, model: Two, kind: str) -> None:
        super().__init__(model, kind)
        device = model.low.device.type
        self.handle = amp.init(
            device_type=device, dtype=torch.float16, loss_scale=Backoff(1, 2.0**8)
        )

    def backward(self, loss: Tensor, scale: float, delay: bool) -> None:
        """See Way."""
        self.handle.loss_scaler.scale = scale
        with self.handle.scale_loss(loss, self.optimizer) as scaled:
            scaled.backward()


class Wrapper(Way):
    """FP16_Optimizer."""

    delays, takes_plain = True, False

    def __init__(self, model: Two, kind: str) -> None:
        super().__init__(model, kind)
        self.optimizer = amp.FP16_Optimizer(
            self.optimizer, verbose=False, loss_scale=Backoff(1, 2.0**8)
        )

    def backward(self, loss: Tensor, scale: float, delay: bool) -> None:
        """See Way."""
        self.optimizer.loss_scale = scale
        self.optimizer.backward(loss, update_master_grads=not delay)

    def collect(self) -> None:
        """See Way."""
        self.optimizer.update_master_grads()

    def again(self) -> None:
        """See Way."""
        self.optimizer.update_master_grads()

    def gradients(self) -> list[Tensor | None]:
        """See Way."""
        return [p.grad for p in self.optimizer.param_groups[0]["params"]]


class Apex(Way):
    """amp.scale_loss at opt level O2, where masters stand in the param_groups."""

    clears_after_step, delays, takes_plain = True, True, False

    def __init__(self, model: Two, kind: str) -> None:
        super().__init__(model, kind)
        options = {"opt_level": "O2", "cast_model_type": False, "verbosity": 0}
        amp.apex.amp.initialize(model, self.optimizer, **options, loss_scale="dynamic")

    def backward(self, loss: Tensor, scale: float, delay: bool) -> None:
        """See Way."""
        amp.apex.amp._amp_state.loss_scalers[0].loss_scaler.scale = scale
        with amp.apex.amp.scale_loss(loss, self.optimizer, delay_unscale=delay) as scaled:
            scaled.backward()

    def collect(self) -> None:
        """See Way."""
        with amp.apex.amp.scale_loss(self.model.loss({}), self.optimizer):
            pass

    def gradients(self) -> list[Tensor | None]:
        """See Way."""
        return [p.grad for p in amp.apex.amp.master_params(self.optimizer)]


def by_hand_to_0(way: Way) -> None:
    for param in way.model.parameters():
        if param.grad is not None:
            param.grad.zero_()


def by_data_to_0(way: Way) -> None:
    """As torch's own zero_grad before 1.4; no version counter tells of it."""
    for param in way.model.parameters():
        if param.grad is not None:
            param.grad.data.zero_()


CLEAR: dict[str, Callable[[Way], Any]] = {
    "optimizer": lambda way: way.optimizer.zero_grad(),
    "model": lambda way: way.model.zero_grad(),
    "model to 0": by_hand_to_0,
    "model's data to 0": by_data_to_0,
}


@contextmanager
def ended(way: Way) -> Iterator[None]:
    try:
        yield
    finally:
        if isinstance(way, Handle):
            way.handle.deactivate()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("kind", ["torch", "ours"])
@pytest.mark.parametrize("way", [Handle, Wrapper, Apex])
def test_gradients_are_the_sum_of_the_true_ones(
    device: str, way: type[Way], kind: str, dtype: torch.dtype
) -> None:
    for seed in range(examples(25)):
        draw = random.Random(f"{way.__name__} {kind} {dtype} {seed}")
        run = way(Two(device, dtype), kind)
        with ended(run):
            script = Script(run, draw)
            for _ in range(12):
                script.act()


class Script:
    """Random actions, and what they have to make of gradients and weights."""

    def __init__(self, way: Way, draw: random.Random) -> None:
        self.way, self.draw = way, draw
        self.true: dict[str, float] = {}
        self.weights = {"low": 0.0, "wide": 0.0}
        self.waits = False  # whether the last loss has left its gradients scaled
        self.has_losses = False  # since the last step
        self.is_zero = False  # whether the last loss has left the low-precision gradient 0
        self.done: list[str] = []

    def act(self) -> None:
        """One action; then gradients and weights are compared."""
        names = ["loss", "loss", "delay", "clear", "write", "plain", "step", "skip"]
        names += ["fail", "again", "clear_one"]
        action = self.draw.choice(names)
        self.done.append(action)
        getattr(self, action)()
        self.compare()

    def compare(self) -> None:
        message = f"{type(self.way).__name__}: {self.done}"
        for name, param in self.way.model.named_parameters():
            assert param.detach().float().tolist() == [self.weights[name]] * 3, message
        if not self.waits:
            for name, grad in zip(("low", "wide"), self.way.gradients(), strict=True):
                found = [0.0] * 3 if grad is None else grad.float().tolist()
                assert found == [self.true.get(name, 0.0)] * 3, message

    def factors(self) -> dict[str, float]:
        """What a loss gives to the weights, or to one of them, and adds to the true gradients."""
        names = self.draw.choice([["low", "wide"], ["low"], ["wide"]])
        found = {name: float(self.draw.randint(1, 3)) for name in names}
        if len(found) == 2 and self.draw.random() < 0.2:
            found["low"] = 0.0  # which is no cleared gradient
        self.is_zero = found.get("low", 0.0 if self.is_zero else 1.0) == 0.0
        self.true |= {name: self.true.get(name, 0.0) + x for name, x in found.items()}
        self.has_losses = True
        return found

    def loss(self, delay: bool = False) -> None:
        scale = 2.0 ** self.draw.randint(1, 6)
        self.way.backward(self.way.model.loss(self.factors()), scale, delay)
        self.waits = delay

    def delay(self) -> None:
        self.loss(self.way.delays)

    def plain(self) -> None:
        if self.way.takes_plain:
            self.way.model.loss(self.factors()).backward()

    def write(self) -> None:
        if self.is_zero:  # beside what was written a cleared 0 would look the same
            return
        if not self.waits and (self.has_losses or self.way.takes_plain):
            for grad in self.way.gradients():
                if grad is not None:
                    grad.mul_(2)
            self.true = {name: 2 * x for name, x in self.true.items()}

    def clear(self) -> None:
        how = self.draw.choice([*CLEAR])
        CLEAR[how](self.way)
        self.done.append(f"by {how}")
        self.true, self.waits = {}, False
        if how != "optimizer":  # the masters follow with the next loss
            self.loss()

    def clear_one(self) -> None:
        """One weight's gradient, before a loss; `waits` or not, nothing of it is left."""
        name = self.draw.choice(["low", "wide"])
        getattr(self.way.model, name).grad = None
        self.true.pop(name, None)
        self.loss()

    def again(self) -> None:
        if not self.waits and self.has_losses:
            self.way.again()

    def fail(self) -> None:
        """A loss whose backward pass raises at once, or when it has made a gradient."""
        hook = None
        if not self.waits and self.draw.random() < 0.5:
            hook = self.way.model.wide.register_post_accumulate_grad_hook(raise_error)
        loss = self.way.model.loss({"low": 1.0, "wide": 1.0})
        scale = 2.0 ** self.draw.randint(1, 6)
        with pytest.raises(ZeroDivisionError):
            self.way.backward(loss if hook else Failing.apply(loss), scale, False)
        if hook is not None:
            hook.remove()

    def step(self) -> None:
        if self.waits:
            self.way.collect()
            self.waits = False
        self.way.optimizer.step()
        self.weights = {n: x - 2.0**-4 * self.true.get(n, 0.0) for n, x in self.weights.items()}
        self.has_losses = False
        if self.way.clears_after_step:
            self.true.pop("low", None)
        if self.draw.random() < 0.5 or max(self.true.values(), default=0) > 8:
            self.way.optimizer.zero_grad()
            self.true = {}

    def skip(self) -> None:
        """An overflow."""
        self.way.backward(self.way.model.loss({"low": math.inf, "wide": 1.0}), 8.0, False)
        self.way.optimizer.step()
        self.way.optimizer.zero_grad()
        self.true, self.waits, self.has_losses = {}, False, False
