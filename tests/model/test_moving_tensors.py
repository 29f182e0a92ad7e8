"""Low-precision buffers that count or average, and frozen weights that something moves, are named.

Each network is one that people train; beside each that is named stands one that is not.
"""

from __future__ import annotations

import copy
import itertools
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from converting import CONVERTERS
from helpers import through_a_file
from torch import Tensor, nn

import amp_mp as amp

BF16, F16 = torch.bfloat16, torch.float16
STEPS = 12


def train(model: nn.Module, steps: int = STEPS, **changes: Any) -> None:
    """Steps of a model that returns its result for x of (16, 8); changes: `after` each step."""
    device = next(model.parameters()).device
    trained = [param for param in model.parameters() if param.requires_grad]
    optimizer = changes.get("make", amp.optim.AdamW)(trained, lr=0.01)
    for _ in range(steps):
        x = torch.randn(16, 8, device=device).to(next(model.parameters()).dtype)
        model(x).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if "after" in changes:
            with torch.no_grad():
                changes["after"]()


@contextmanager
def named(*names: str) -> Iterator[None]:
    """The block warns of these alone, each one time."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    texts = [str(w.message) for w in caught if "small steps" in str(w.message)]
    found = [n for t in texts for n in re.findall(r"steps: (.*?)(?: \(|\. )", t)[0].split(", ")]
    assert sorted(found) == sorted(names), texts


class Counts(nn.Module):
    """Counts its forwards, as a warm-up does, in a float32 buffer of shape (1,)."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.calls += 1
        return self.layer(x)


class Replaces(Counts):
    """The same, with a new tensor each time."""

    def forward(self, x: Tensor) -> Tensor:
        self.calls = self.calls + 1
        return self.layer(x)


class Codebook(nn.Module):
    """A vector quantiser whose codes are averages of what they stand for."""

    def __init__(self, codes: int = 32) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        table = torch.randn(codes, 8)
        self.register_buffer("codes", table)
        self.register_buffer("sizes", torch.ones(codes))
        self.register_buffer("sums", table.clone())

    def forward(self, x: Tensor) -> Tensor:
        z = self.layer(x)
        taken = torch.cdist(z.detach().float(), self.codes.float()).argmin(1)
        hits = nn.functional.one_hot(taken, len(self.codes)).to(z.dtype)
        if self.training:
            self.sizes.data.mul_(0.99).add_(hits.sum(0), alpha=0.01)
            self.sums.data.mul_(0.99).add_(hits.T @ z.detach(), alpha=0.01)
            self.codes.data.copy_(self.sums / self.sizes.clamp(min=1e-3)[:, None])
        return z + (self.codes[taken] - z).detach().to(z.dtype)


class Momentum(nn.Module):
    """MoCo's two encoders; `move` writes the second one as a paper's code does."""

    def __init__(self, move: Callable[[Tensor, Tensor], None], decay: float = 0.99) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(8, 256), nn.ReLU(), nn.Linear(256, 8))
        self.target = copy.deepcopy(self.encoder).requires_grad_(False)
        self.move, self.decay = move, decay

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            for old, new in zip(self.target.parameters(), self.encoder.parameters(), strict=True):
                self.move(old, new, self.decay)
            keys = self.target(x)
        return self.encoder(x) - keys.to(x.dtype)


def lerp(old: Tensor, new: Tensor, decay: float) -> None:
    old.lerp_(new.to(old.dtype), 1 - decay)


def follow(target: nn.Module, model: nn.Module, decay: float) -> None:
    """The target becomes an average of itself and the model; with decay 0 its copy."""
    for old, new in zip(target.parameters(), model.parameters(), strict=True):
        lerp(old, new, decay)


def moco(old: Tensor, new: Tensor, decay: float) -> None:
    old.data = old.data * decay + new.data * (1 - decay)


def dino(old: Tensor, new: Tensor, decay: float) -> None:
    old.data.mul_(decay).add_((1 - decay) * new.detach().data)


NAMED: dict[str, tuple[Callable[[], nn.Module], list[str]]] = {
    "counter": (Counts, ["calls"]),
    "replaced counter": (Replaces, ["calls"]),
    "codebook": (Codebook, ["codes", "sizes", "sums"]),
    "inside": (
        lambda: nn.Sequential(Codebook(), nn.Linear(8, 4)),
        ["0.codes", "0.sizes", "0.sums"],
    ),
    "lerp": (lambda: Momentum(lerp), ["target"]),
    "moco": (lambda: Momentum(moco), ["target"]),
    "dino": (lambda: Momentum(dino), ["target"]),
    "decay of .999": (lambda: Momentum(dino, 0.999), ["target"]),
}


@pytest.mark.parametrize("dtype", [BF16, F16])
@pytest.mark.parametrize("kind", NAMED)
def test_what_counts_or_averages_is_named_once(device: str, kind: str, dtype: torch.dtype) -> None:
    make, names = NAMED[kind]
    model = amp.prepare(make().to(device), dtype)
    with named(*names):
        train(model)


@pytest.mark.parametrize("kind", NAMED)
def test_kept_as_the_warning_says_it_is_right_and_not_named(device: str, kind: str) -> None:
    make, names = NAMED[kind]
    model = amp.prepare(make().to(device), BF16, keep_fp32=names)
    with named():
        train(model)
    kept = {n: t for n, t in model.state_dict().items() if n.startswith(tuple(names))}
    assert {tensor.dtype for tensor in kept.values()} == {torch.float32}


@pytest.mark.parametrize("convert", CONVERTERS.values(), ids=CONVERTERS)
@pytest.mark.parametrize("make", [amp.optim.AdamW, torch.optim.SGD, "FP16_Optimizer", "release"])
def test_whatever_converts_and_steps(make: Any, convert: Any) -> None:
    def optimizer(params: Any, lr: float) -> Any:
        if make == "release":
            found = amp.optim.AdamW(params, lr=lr)
            found.attach(model)
            return found
        return make(params, lr=lr)

    model = convert(Counts(), BF16)
    with named("calls"):
        if make == "FP16_Optimizer":
            found = amp.FP16_Optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
            for _ in range(STEPS):
                found.backward(model(torch.randn(16, 8).bfloat16()).float().square().mean())
                found.step()
        else:
            train(model, make=optimizer)


def test_in_compiled_models() -> None:
    model = amp.prepare(Counts(), BF16)
    with named("calls"):
        train(torch.compile(model, backend="aot_eager"), 5)  # type: ignore[arg-type]


@pytest.mark.parametrize("change", [copy.deepcopy, through_a_file], ids=["deepcopy", "file"])
def test_copies_are_seen_for_themselves(change: Any) -> None:
    model = amp.prepare(Counts(), BF16)
    with named("calls"):
        train(model)
    with named("Counts.calls"):  # of a copy the names of modules alone are known
        train(change(model))


def test_a_copy_made_after_prepare_that_follows_the_model() -> None:
    """BYOL's target network."""
    model = amp.prepare(nn.Sequential(nn.Linear(8, 8)), BF16)
    train(model)
    target = copy.deepcopy(model).requires_grad_(False)

    with named("Linear.weight", "Linear.bias"):
        train(model, after=lambda: follow(target, model, 0.99))


# What is not named.


class Queue(nn.Module):
    """MoCo's queue, noise that is drawn anew, a mask, and statistics that stay."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.at = 0
        self.register_buffer("queue", torch.randn(8, 64))
        self.register_buffer("noise", torch.randn(64))
        self.register_buffer("mask", torch.ones(64))
        self.register_buffer("mean", torch.randn(8))
        self.register_buffer("cache", torch.zeros(64, 8))

    def forward(self, x: Tensor) -> Tensor:
        z = self.layer(x - self.mean)
        self.queue[:, self.at : self.at + 16] = z.detach().T
        self.cache[self.at : self.at + 16] = z.detach()
        self.at = (self.at + 16) % 64
        self.noise.normal_()
        self.mask[self.at] = 0
        return z + self.noise[:8]


def adapters() -> nn.Module:
    """A frozen layer with a trained one beside it, as LoRA's."""
    model = nn.Sequential(nn.Linear(8, 64), nn.Linear(64, 8))
    model[0].requires_grad_(False)
    return model


def spectral() -> nn.Module:
    return nn.Sequential(nn.utils.spectral_norm(nn.Linear(8, 8)), nn.Linear(8, 8))


@pytest.mark.parametrize("make", [Queue, adapters, spectral])
def test_what_is_written_otherwise_or_not_at_all_is_not_named(device: str, make: Any) -> None:
    model = amp.prepare(make().to(device), BF16)
    with named():
        train(model, 40)


def test_networks_that_are_frozen_in_turns_are_not_named() -> None:
    """pix2pix freezes the discriminator while the generator is trained."""
    nets = [amp.prepare(nn.Linear(8, 8), BF16) for _ in range(2)]
    optimizers = [amp.optim.SGD(net.parameters(), lr=0.1) for net in nets]
    with named():
        for step in range(40):
            ours, other = (nets[(step + i) % 2] for i in range(2))
            ours.requires_grad_(True)
            other.requires_grad_(False)
            other(ours(torch.randn(16, 8).bfloat16())).float().square().mean().backward()
            optimizers[step % 2].step()
            optimizers[step % 2].zero_grad()


def test_averages_of_ours_are_not_named() -> None:
    """They have bits beside them; nor are weights that are swapped for them and back."""
    model = amp.prepare(Momentum(lambda *_: None), BF16)
    averaged = amp.AveragedModel(model, decay=0.9)
    copied = copy.deepcopy(averaged)
    copied.follow(model)

    def after() -> None:
        averaged.update()
        copied.update()
        with averaged.swap():
            pass

    with named():
        train(model, 40, after=after)


def test_a_model_that_is_given_changes_is_not_named() -> None:
    """It gets weights whose masters are elsewhere, and loses nothing."""
    model = amp.prepare(nn.Linear(8, 8), BF16)
    sampler = copy.deepcopy(model).requires_grad_(False)
    changes = amp.Changes(model)
    with named():
        train(model, 40, after=lambda: amp.apply_changes(sampler, changes.take()))
    assert torch.equal(model.weight, sampler.weight)


def with_target() -> tuple[nn.Linear, nn.Linear]:
    """A model, and a frozen copy of it."""
    model = amp.prepare(nn.Linear(8, 8), BF16)
    return model, copy.deepcopy(model).requires_grad_(False)


@pytest.mark.parametrize("every", [1, 4])
@pytest.mark.parametrize("way", ["load_state_dict", "copy_"])
def test_a_copy_of_the_model_is_not_named(way: str, every: int) -> None:
    """A target network that gets whole weights loses nothing, whenever it gets them."""
    model, target, steps = *with_target(), itertools.count(1)

    def after() -> None:
        if next(steps) % every:
            return
        if way == "copy_":
            follow(target, model, 0.0)
        else:
            target.load_state_dict(model.state_dict())

    with named():
        train(model, 40, after=after)
    assert torch.equal(model.weight, target.weight)


def test_a_copy_that_becomes_an_average_is_named() -> None:
    model, target, steps = *with_target(), itertools.count(1)
    with named("Linear.weight", "Linear.bias"):
        train(model, 40, after=lambda: follow(target, model, 0.0 if next(steps) < 8 else 0.95))


def test_loading_is_not_counting() -> None:
    model = amp.prepare(Momentum(lambda *_: None), BF16)
    saved = copy.deepcopy(model.state_dict())
    with named():
        for scale in (1.0, 1.1):
            model.load_state_dict({name: scale * value for name, value in saved.items()})
            train(model)
