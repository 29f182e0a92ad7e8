"""A weight owns its float32 value: optimizers that come, go and take turns own their moments alone.

Random sequences of what a script does with the optimizers of one model. After every call each
weight's float32 value is a float64 twin's, and the weight is this value rounded. Weights, gradients
and updates are whole multiples of powers of two, so the twin's values are met exactly, but for
those half way between two weights and those with more bits than a format has.
"""

from __future__ import annotations

import copy
import io
import pickle
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from helpers import DTYPES
from hypothesis import given
from hypothesis import strategies as st
from random_tests import random_runs
from torch import Tensor, nn

import amp_mp as amp

Random = np.random.Generator
LONG = ("exact", "float32")  # presets that keep 24 bits of a master, and moments in float32
SHORT = ("lean", "tiny", "micro")  # 16 bits and more
PLACES = ("A", "B", "FP16_Optimizer of torch", "FP16_Optimizer of amp_mp")
LATTICE = 2.0**-12


def drawn(shape: Any, random: Random, largest: int, apart: int = 1) -> Tensor:
    """Whole numbers of a size from `apart` to `largest`, and their negatives."""
    sizes = random.integers(apart, largest + 1, shape) * random.choice([-1, 1], shape)
    return torch.from_numpy(sizes.astype(np.float64))


@dataclass
class Owner:
    """An optimizer, and what its steps do: w -= lr * (the sign of g, or its moving sum)."""

    optimizer: Any
    lr: float
    decay: float | None  # of the sum; None for the sign
    sums: dict[int, Tensor] = field(default_factory=dict)

    def update(self, number: int, grad: Tensor) -> Tensor:
        if self.decay is None:
            return self.lr * grad.sign()
        self.sums[number] = self.decay * self.sums.get(number, torch.zeros_like(grad)) + grad
        return self.lr * self.sums[number]

    @property
    def inner(self) -> Any:
        """The optimizer that has the state."""
        own = self.optimizer
        return own.optimizer if isinstance(own, amp.FP16_Optimizer) else own


def make(kind: str, memory: str | None, params: list[Tensor]) -> Owner:
    """memory: None for torch's own."""
    if kind == "AdamW":  # g / sqrt(g * g)
        own = amp.optim.AdamW(params, lr=2.0**-9, betas=(0.0, 0.0), weight_decay=0.0, memory=memory)
        return Owner(own, 2.0**-9, None)
    if kind == "Lion":
        own = amp.optim.Lion(params, lr=2.0**-9, betas=(0.0, 0.9), weight_decay=0.0, memory=memory)
        return Owner(own, 2.0**-9, None)
    if memory is None:
        return Owner(torch.optim.SGD(params, lr=2.0**-10, momentum=0.5), 2.0**-10, 0.5)
    decay = 0.5 if memory in LONG else 0.0  # sums in fewer bits would not be the twin's
    return Owner(amp.optim.SGD(params, lr=2.0**-10, momentum=decay, memory=memory), 2.0**-10, decay)


class Numbers:
    """A weight's wanted float32 values, and by how much each may be missed."""

    def __init__(self, values: Tensor, dtype: torch.dtype, short: bool) -> None:
        self.values, self.missed = values, torch.zeros_like(values)
        self.dtype, self.short = dtype, short

    def exponent(self) -> Tensor:
        return torch.frexp(self.values).exponent - 1

    def unit(self) -> Tensor:
        """The last place of the values in the shortest format."""
        e = self.exponent()
        if self.dtype == torch.bfloat16:
            return torch.ldexp(torch.ones_like(self.values), e - (15 if self.short else 23))
        if self.short:  # steps of 2^-18 of the weight, which may have been rounded up
            return torch.ldexp(torch.ones_like(self.values), e.clamp(min=-14) - 17)
        return torch.ldexp(torch.ones_like(self.values), (e - 23).clamp(min=-40))

    def is_half_way(self) -> Tensor:
        """Between two weights, where a format stores the number beside it."""
        digits, least = (7, -126) if self.dtype == torch.bfloat16 else (10, -14)
        place = torch.ldexp(torch.ones_like(self.values), self.exponent().clamp(min=least) - digits)
        return (self.values / place) % 1 == 0.5

    def store(self) -> None:
        """A step, or another optimizer's format: two units where a value is not stored exactly."""
        unit = self.unit()
        lossy = (self.missed > 0) | self.is_half_way() | ((self.values / unit) % 1 != 0)
        self.missed = self.missed + 2 * unit * lossy

    def move(self, by: Tensor) -> None:
        self.store()
        self.values = self.values + by
        self.store()


class Run:
    """A low-precision model with the optimizers over it, and the numbers of each weight."""

    def __init__(self, device: str, dtype: str, short: bool) -> None:
        self.device, self.dtype, self.short = device, DTYPES[dtype], short
        self.model: nn.Module = nn.Sequential(nn.Conv2d(2, 4, (1, 2), bias=False), nn.Linear(32, 2))
        random = np.random.default_rng(0)
        with torch.no_grad():
            for param in self.model.parameters():
                param.copy_(drawn(param.shape, random, 2**13, 2**9) * LATTICE)
        self.numbers = [
            Numbers(param.detach().double(), self.dtype, short) for param in self.model.parameters()
        ]
        amp.prepare(self.model.to(device), self.dtype)
        self.owners: dict[str, Owner] = {}
        self.made: dict[str, tuple[str, str | None]] = {}
        self.averaged: amp.AveragedModel | None = None
        self.means: list[tuple[Tensor, Tensor]] = []  # values, and by how much they may be missed
        self.saved: Any = None

    @property
    def weights(self) -> list[nn.Parameter]:
        return list(self.model.parameters())

    def add(self, place: str) -> Owner:
        """A new optimizer in a place, as self.made says."""
        kind, memory = self.made[place]
        for weight in self.weights:  # a wrapper makes masters for what trains
            weight.requires_grad_(True)
        owner = make(kind, memory, list(self.weights))
        if place.startswith("FP16_Optimizer"):
            owner.optimizer = amp.FP16_Optimizer(owner.optimizer, verbose=False)
        self.owners[place] = owner
        return owner

    def make(self, random: Random, place: str) -> None:
        formats = LONG + SHORT if self.short else LONG
        memory: str | None = formats[int(random.integers(len(formats)))]
        kind = ("SGD", "AdamW", "Lion")[int(random.integers(3))]
        if place == "B" and "A" in self.made:  # another format
            others = [each for each in formats if each != self.made["A"][1]]
            memory = others[int(random.integers(len(others)))]
        if place.endswith("torch"):
            kind, memory = "SGD", None
        self.made[place] = kind, memory
        self.add(place)

    def pick(self, random: Random, places: tuple[str, ...] = PLACES) -> Owner:
        found = [place for place in places if place in self.owners]
        if not found:
            self.make(random, places[0])
            found = [places[0]]
        return self.owners[found[int(random.integers(len(found)))]]

    # Steps.

    def grads(self, random: Random, weights: list[Any]) -> list[Tensor | None]:
        """Gradients for some of the weights."""
        made: list[Tensor | None] = []
        for weight in weights:
            has = weight.requires_grad and random.random() < 0.9
            made.append(drawn(weight.shape, random, 3) if has else None)
        return made

    def set_grads(self, weights: list[Any], grads: list[Tensor | None]) -> None:
        for weight, grad in zip(weights, grads, strict=True):
            weight.grad = None if grad is None else torch.empty_like(weight).copy_(grad)

    def step(self, random: Random, place: str) -> None:
        if place not in self.owners:
            self.make(random, place)
        owner = self.owners[place]
        for _ in range(int(random.integers(1, 3))):
            grads = self.grads(random, self.weights)
            self.set_grads(self.weights, grads)
            if isinstance(owner.optimizer, amp.FP16_Optimizer):
                owner.optimizer.update_master_grads()
            owner.optimizer.step()
            self.follow(owner, grads)

    def nested(self, random: Random) -> None:
        """Two losses, in blocks inside of one another: every gradient is divided once."""
        owner, other = self.pick(random, ("A", "B")), self.pick(random, ("A", "B"))
        trained = [weight for weight in self.weights if weight.requires_grad]
        if not trained:
            return
        self.set_grads(self.weights, [None] * len(self.weights))
        both = [[drawn(weight.shape, random, 3) for weight in trained] for _ in range(2)]
        with amp.init(device_type=self.weights[0].device.type, loss_scale=128.0) as handle:
            first, second = (
                sum(
                    (w.float() * g.to(w.device).float()).sum()
                    for w, g in zip(trained, grads, strict=True)
                )
                for grads in both
            )
            with handle.scale_loss(first, owner.optimizer) as scaled:
                with handle.scale_loss(second, other.optimizer) as inside:
                    inside.backward()
                    if random.random() < 0.5:
                        scaled.backward()
                        scaled = None
                if scaled is not None:
                    scaled.backward()
            owner.optimizer.step()
        sums = iter(a + b for a, b in zip(*both, strict=True))
        self.follow(owner, [next(sums) if w.requires_grad else None for w in self.weights])

    def follow(self, owner: Owner, grads: list[Tensor | None]) -> None:
        """The twin's step."""
        for number, (own, grad) in enumerate(zip(self.numbers, grads, strict=True)):
            if grad is not None:
                own.move(-owner.update(number, grad))

    # What is read and written beside steps.

    def edit(self, random: Random) -> None:
        with self.pick(random).optimizer.masters(self.weights) as masters:
            for own, master in zip(self.numbers, masters, strict=True):
                self.assert_close(master, own, "a master in a block")
                delta = drawn(master.shape, random, 9, 0) * LATTICE
                delta *= torch.from_numpy(random.integers(0, 2, master.shape))
                master.add_(delta.to(master))
                own.move(delta)

    def write(self, random: Random) -> None:
        """Optimizers end, and a script writes: the next begins with exactly what was written."""
        self.owners.clear()
        for number, weight in enumerate(self.weights):
            values = drawn(weight.shape, random, 255) * 2.0**-8
            with torch.no_grad():
                weight.copy_(values)
            self.numbers[number] = Numbers(values, self.dtype, self.short)

    def average(self, random: Random) -> None:
        if self.averaged is None:
            self.averaged, self.means = amp.AveragedModel(self.model, decay=0.5), []
        self.averaged.update()
        old = self.means or [(own.values, own.missed) for own in self.numbers]
        self.means = [
            (
                0.5 * mean + 0.5 * own.values,
                0.5 * missed + 0.5 * own.missed + 2.0**-22 * mean.abs().clamp(min=1),
            )
            for (mean, missed), own in zip(old, self.numbers, strict=True)
        ]
        found = self.averaged.float32_state_dict()
        for (name, _), (mean, missed) in zip(
            self.model.named_parameters(), self.means, strict=True
        ):
            is_close = bool(((found[name].cpu().double() - mean).abs() <= missed).all())
            assert is_close, f"an average of {name}"

    def swap(self, random: Random) -> None:
        if self.averaged is None:
            return
        half = 2.0**-8 if self.dtype == torch.bfloat16 else 2.0**-11
        with self.averaged.swap():
            for weight, (mean, missed) in zip(self.weights, self.means, strict=True):
                off = (weight.detach().cpu().double() - mean).abs()
                is_rounded = bool((off <= half * mean.abs() + 2 * missed + 2.0**-25).all())
                assert is_rounded, "in a swap"
                with pytest.raises(RuntimeError, match=r"float32_of\(\) inside"):
                    amp.float32_of(weight)

    # Files and copies.

    def save(self, random: Random) -> None:
        self.pick(random)
        for weight in self.weights:
            weight.requires_grad_(True)
        for owner in self.owners.values():
            if isinstance(owner.inner, amp.optim.FusedOptimizer):
                owner.inner.init_state()
        file = io.BytesIO()
        optimizers = {place: each.optimizer.state_dict() for place, each in self.owners.items()}
        torch.save({"model": self.model.state_dict(), "optimizers": optimizers}, file)
        sums = {place: dict(each.sums) for place, each in self.owners.items()}
        for own in self.numbers:
            own.store()
        self.saved = file.getvalue(), copy.deepcopy((dict(self.made), sums, self.numbers))

    def load(self, random: Random) -> None:
        if self.saved is None:
            return
        for weight in self.weights:
            weight.requires_grad_(True)
        found = torch.load(io.BytesIO(self.saved[0]))
        made, sums, self.numbers = copy.deepcopy(self.saved[1])
        self.model.load_state_dict(found["model"])
        for place, state_dict in found["optimizers"].items():
            if place not in self.owners or self.made[place] != made[place]:
                self.made[place] = made[place]
                self.add(place)
            self.owners[place].optimizer.load_state_dict(state_dict)
            self.owners[place].sums = sums[place]

    def load_float32(self, random: Random) -> None:
        """Float32 weights, with every optimizer alive."""
        found = {}
        for number, (name, weight) in enumerate(self.model.named_parameters()):
            weight.requires_grad_(True)
            values = drawn(weight.shape, random, 2**13, 2**9) * LATTICE
            found[name] = values.float()
            self.numbers[number] = Numbers(values, self.dtype, self.short)
        amp.load_float32_state_dict(self.model, found)

    def checkpoint(self, random: Random) -> None:
        """The model of before a step is loaded after it, with every optimizer alive."""
        for weight in self.weights:
            weight.requires_grad_(True)
        for own in self.numbers:
            own.store()
        before = copy.deepcopy(self.numbers)
        with tempfile.TemporaryDirectory() as folder:
            amp.checkpoint.save(f"{folder}/c", self.model)
            self.step(random, PLACES[int(random.integers(len(PLACES)))])
            amp.checkpoint.load(f"{folder}/c", self.model)
        self.numbers = before

    def copy(self, random: Random, through: Callable[[Any], Any]) -> None:
        """Goes on with copies of the model and of the optimizers that can be copied."""
        self.owners = {n: self.owners[n] for n in ("A", "B") if n in self.owners}
        optimizers = [owner.optimizer for owner in self.owners.values()]
        self.model, optimizers = through((self.model, optimizers))
        for owner, optimizer in zip(self.owners.values(), optimizers, strict=True):
            owner.optimizer = optimizer
        self.averaged = None

    def copy_optimizer(self, random: Random) -> None:
        """A copy of an optimizer alone, whose own parameters are trained."""
        given = self.pick(random, ("A", "B"))
        owner = Owner(copy.deepcopy(given.optimizer), given.lr, given.decay, dict(given.sums))
        params = owner.optimizer.param_groups[0]["params"]
        numbers = copy.deepcopy(self.numbers)
        for param, own in zip(params, numbers, strict=True):
            own.store()
            self.assert_close(amp.float32_of(param), own, "a copy of the optimizer")
        grads = self.grads(random, params)
        self.set_grads(params, grads)
        owner.optimizer.step()
        for number, (own, grad) in enumerate(zip(numbers, grads, strict=True)):
            if grad is not None:
                own.move(-owner.update(number, grad))
            self.assert_close(amp.float32_of(params[number]), own, "a copy after a step")

    # Moments that are lost, weights that are frozen, tensors that move.

    def clear(self, random: Random) -> None:
        owner = self.pick(random)
        owner.inner.state.clear()
        owner.sums.clear()

    def delete(self, random: Random) -> None:
        owner, number = self.pick(random), int(random.integers(len(self.weights)))
        owner.inner.state.pop(owner.inner.param_groups[0]["params"][number], None)
        owner.sums.pop(number, None)

    def empty(self, random: Random) -> None:
        owner, number = self.pick(random), int(random.integers(len(self.weights)))
        owner.inner.state[owner.inner.param_groups[0]["params"][number]] = {}
        owner.sums.pop(number, None)

    def freeze(self, random: Random) -> None:
        weight = self.weights[int(random.integers(len(self.weights)))]
        weight.requires_grad_(not weight.requires_grad)

    def turn(self, random: Random) -> None:
        formats = torch.channels_last, torch.contiguous_format
        self.model.to(memory_format=formats[int(random.integers(2))])

    def replace_data(self, random: Random) -> None:
        for weight in self.weights:
            weight.data = weight.data.clone()

    def move_state(self, random: Random) -> None:
        """As trainers move states to the host and back."""
        inner = self.pick(random).inner
        for state in inner.state.values():
            for name, value in state.items():
                if isinstance(value, Tensor):
                    state[name] = value.clone()
        if isinstance(inner, amp.optim.FusedOptimizer):
            amp.optim.forget(inner)

    # The contract.

    def assert_close(self, found: Tensor, own: Numbers, what: str) -> None:
        off = (found.detach().cpu().double() - own.values).abs()
        is_close = bool((off <= own.missed).all())
        assert is_close, f"{what}: off by {off.max():.2g}"

    def check(self, after: str) -> None:
        names = [name for name, _ in self.model.named_parameters()]
        for name, weight, own in zip(names, self.weights, self.numbers, strict=True):
            what = f"after {after}: {name}"
            own.store()
            found = amp.float32_of(weight)
            self.assert_close(found, own, what)
            seen, exact = weight.detach().double(), found.double()
            nearest = (found.to(self.dtype).double() - exact).abs()
            is_rounded = bool(((seen - exact).abs() <= nearest).all())
            assert is_rounded, f"{what}: not the rounded value"
            for place, owner in self.owners.items():
                agrees = torch.equal(amp.float32_of(weight, owner.optimizer), found)
                assert agrees, f"{what}: the value with which {place} goes on"


def through_pickle(held: Any) -> Any:
    return pickle.loads(pickle.dumps(held))


CALLS: dict[str, Callable[[Run, Random], None]] = {
    **{f"make {p}": (lambda run, random, p=p: run.make(random, p)) for p in PLACES},
    **{f"step {p}": (lambda run, random, p=p: run.step(random, p)) for p in PLACES},
    "edit": Run.edit,
    "write": Run.write,
    "average": Run.average,
    "swap": Run.swap,
    "save": Run.save,
    "load": Run.load,
    "load float32 weights": Run.load_float32,
    "checkpoint": Run.checkpoint,
    "copy": lambda run, random: run.copy(random, copy.deepcopy),
    "pickle": lambda run, random: run.copy(random, through_pickle),
    "copy the optimizer": Run.copy_optimizer,
    "state.clear()": Run.clear,
    "del state[w]": Run.delete,
    "state[w] = {}": Run.empty,
    "freeze or unfreeze": Run.freeze,
    "to another layout": Run.turn,
    "p.data = p.data.clone()": Run.replace_data,
    "move the state": Run.move_state,
    "nested blocks": Run.nested,
}


@pytest.mark.filterwarnings("ignore:amp_mp. no parameter of this optimizer has a gradient")
@pytest.mark.slow
@pytest.mark.timeout(0)
@random_runs(200)
@given(
    dtype=st.sampled_from(["bfloat16", "float16"]),
    short=st.booleans(),
    calls=st.lists(
        st.tuples(st.sampled_from(list(CALLS)), st.integers(0, 2**16)), min_size=3, max_size=14
    ),
)
def test_a_weight_owns_its_float32_value(
    device: str, dtype: str, short: bool, calls: list[tuple[str, int]]
) -> None:
    run = Run(device, dtype, short)
    for name, seed in [("step A", 0), *calls, ("step A", 1), ("step B", 2)]:
        CALLS[name](run, np.random.default_rng(seed))
        run.check(name)
