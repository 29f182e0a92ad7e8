"""A weight's float32 value belongs to the weight: whoever steps it goes on from there.

Random sequences in which optimizers are made, step in turns, are wrapped, lose their state and end,
while the model is copied, pickled, loaded and written. After every call the float32 values are
those of a float32 model that was treated alike.
"""

from __future__ import annotations

import copy
import gc
import pickle
import tempfile
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from helpers import DTYPES
from hypothesis import given
from hypothesis import strategies as st
from random_tests import random_runs
from torch import nn

import amp_mp as amp

MASTERS = ("split32", "float32", "split24")
FEW = 2.0**-20  # float32 numbers, for conversions
HALF_UNIT = 2.0**-17  # of the 16 significant bits of a split24, lost in each step


def made(kind: str, model: nn.Module, master: str | None) -> Any:
    """An optimizer over a model; master: its format, None for the float32 model."""
    own = {} if master is None else {"master": master}
    params = list(model.parameters())
    if kind == "SGD":
        return amp.optim.SGD(params, lr=1e-3, momentum=0.9, **own)
    if kind == "AdamW":
        return amp.optim.AdamW(params, lr=1e-4, weight_decay=0.1, **own)
    inner = torch.optim.SGD(params, lr=1e-3, momentum=0.9)
    return inner if master is None else amp.FP16_Optimizer(inner, verbose=False)


class Run:
    """A low-precision model and its optimizers, each beside its float32 twin."""

    def __init__(self, device: str, dtype: str, short: bool, prepared: bool) -> None:
        torch.manual_seed(0)
        self.full: nn.Module = nn.Sequential(nn.Linear(16, 24), nn.Linear(24, 3)).to(device)
        self.low = copy.deepcopy(self.full)
        self.dtype, self.short, self.steps = DTYPES[dtype], short, 2
        self.formats = MASTERS if short else MASTERS[:2]
        if prepared:
            amp.prepare(self.low, self.dtype)
        else:
            self.low.to(self.dtype)
            self.full.load_state_dict({n: p.float() for n, p in self.low.state_dict().items()})
        self.optimizers: list[tuple[Any, Any]] = []

    def assert_close(self, found: torch.Tensor, wanted: torch.Tensor, what: str) -> None:
        close = self.steps * HALF_UNIT if self.short else FEW
        torch.testing.assert_close(found, wanted, rtol=close, atol=close / 10, msg=what)

    def make(self, random: np.random.Generator) -> None:
        kind = ("SGD", "AdamW", "FP16_Optimizer")[int(random.integers(0, 3))]
        master = self.formats[int(random.integers(0, len(self.formats)))]
        self.optimizers.append((made(kind, self.low, master), made(kind, self.full, None)))
        self.optimizers = self.optimizers[-3:]

    def pick(self, random: np.random.Generator) -> tuple[Any, Any]:
        if not self.optimizers:
            self.make(random)
        return self.optimizers[int(random.integers(0, len(self.optimizers)))]

    def step(self, random: np.random.Generator) -> None:
        low, full = self.pick(random)
        for _ in range(int(random.integers(1, 4))):
            some = random.random() < 0.2  # parameters without a gradient
            for a, b in zip(self.low.parameters(), self.full.parameters(), strict=True):
                a.grad = b.grad = None
                if some and random.random() < 0.5:
                    continue
                grad = random.standard_normal(a.shape).astype(np.float32)
                a.grad = torch.from_numpy(grad).to(a)
                b.grad = a.grad.float()
            if isinstance(low, amp.FP16_Optimizer):
                low.update_master_grads()
            low.step()
            full.step()
            self.steps += 1

    def wrap_again(self, random: np.random.Generator) -> None:
        """FP16_Optimizer around the optimizer that another wrapper is around; that one ends."""
        for number, (low, full) in enumerate(self.optimizers):
            if isinstance(low, amp.FP16_Optimizer):
                again = amp.FP16_Optimizer(low.optimizer, verbose=False)
                self.optimizers[number] = again, full

    def end(self, random: np.random.Generator) -> None:
        del self.optimizers[: int(random.integers(0, len(self.optimizers) + 1))]
        if random.random() < 0.5:
            gc.collect()

    def clear_state(self, random: np.random.Generator) -> None:
        low, full = self.pick(random)
        if isinstance(low, amp.FP16_Optimizer):
            return
        low.state.clear()
        full.state.clear()

    def copy(self, random: np.random.Generator) -> None:
        """Goes on with copies of the models, without their optimizers."""
        ways = (copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model)))
        self.low = ways[int(random.integers(0, 2))](self.low)
        self.full = copy.deepcopy(self.full)
        self.optimizers.clear()

    def copy_both(self, random: np.random.Generator) -> None:
        """Models and optimizers in one deepcopy."""
        self.optimizers = [o for o in self.optimizers if not isinstance(o[0], amp.FP16_Optimizer)]
        held = self.low, self.full, self.optimizers
        self.low, self.full, self.optimizers = copy.deepcopy(held)

    def load(self, random: np.random.Generator) -> None:
        """Float32 weights, with every optimizer alive."""
        scale = 2.0 ** int(random.integers(-4, 3))
        weights = {
            name: torch.from_numpy(random.standard_normal(p.shape).astype(np.float32) * scale)
            for name, p in self.full.named_parameters()
        }
        self.full.load_state_dict(weights)
        amp.load_float32_state_dict(self.low, weights)

    def go_back(self, random: np.random.Generator) -> None:
        """State dicts of before a step, the model's and one optimizer's, are loaded after it."""
        low, full = self.pick(random)
        if isinstance(low, amp.FP16_Optimizer):
            return
        low.init_state()
        both = (self.low, low), (self.full, full)
        saved = [copy.deepcopy([each.state_dict() for each in own]) for own in both]
        self.step(random)
        for own, state_dicts in zip(both, saved, strict=True):
            for each, state_dict in zip(own, state_dicts, strict=True):
                each.load_state_dict(state_dict)

    def checkpoint(self, random: np.random.Generator) -> None:
        """A directory of before a step is loaded after it, with or without the optimizer."""
        low, full = self.pick(random)
        alone = isinstance(low, amp.FP16_Optimizer) or random.random() < 0.5
        own = (self.low,) if alone else (self.low, low)
        saved = copy.deepcopy((self.full.state_dict(), full.state_dict()))
        with tempfile.TemporaryDirectory() as folder:
            amp.checkpoint.save(f"{folder}/c", *own)
            self.step(random)
            amp.checkpoint.load(f"{folder}/c", *own)
        self.full.load_state_dict(saved[0])
        if len(own) > 1:
            full.load_state_dict(saved[1])

    def write(self, random: np.random.Generator) -> None:
        """A script writes weights after the optimizers' end: they are what the next begins with."""
        self.optimizers.clear()
        with torch.no_grad():
            for a, b in zip(self.low.parameters(), self.full.parameters(), strict=True):
                a.copy_(torch.from_numpy(random.standard_normal(a.shape).astype(np.float32)))
                b.copy_(a)
        self.step(random)  # by a new one

    def average(self, random: np.random.Generator) -> None:
        averages = [amp.AveragedModel(model) for model in (self.low, self.full)]
        self.step(random)
        for each in averages:
            each.update()
        found, wanted = (each.float32_state_dict() for each in averages)
        for name, values in wanted.items():
            self.assert_close(found[name], values, name)
        with averages[0].swap():
            pass

    def check(self, after: str) -> None:
        found = amp.float32_state_dict(self.low)
        for name, wanted in self.full.named_parameters():
            self.assert_close(found[name], wanted.detach(), f"{after}: {name}")
            assert torch.equal(self.low.get_parameter(name).isnan(), wanted.isnan())


CALLS: dict[str, Callable[[Run, np.random.Generator], None]] = {
    "step": Run.step,
    "step again": Run.step,
    "make an optimizer": Run.make,
    "wrap again": Run.wrap_again,
    "end optimizers": Run.end,
    "clear a state": Run.clear_state,
    "copy the model": Run.copy,
    "copy both": Run.copy_both,
    "load": Run.load,
    "go back": Run.go_back,
    "checkpoint": Run.checkpoint,
    "write": Run.write,
    "average": Run.average,
}


@pytest.mark.filterwarnings("ignore:amp_mp. no parameter of this optimizer has a gradient")
@pytest.mark.slow
@pytest.mark.timeout(0)
@random_runs(200)
@given(
    dtype=st.sampled_from(["bfloat16", "float16"]),
    short=st.booleans(),
    prepared=st.booleans(),
    calls=st.lists(
        st.tuples(st.sampled_from(list(CALLS)), st.integers(0, 2**16)), min_size=3, max_size=16
    ),
)
def test_the_weights_go_float32s_way_whoever_steps_them(
    device: str, dtype: str, short: bool, prepared: bool, calls: list[tuple[str, int]]
) -> None:
    run = Run(device, dtype, short, prepared)
    for name, seed in [("step", 0), *calls, ("make an optimizer", 1), ("step", 2)]:
        if not prepared and name.startswith("copy"):
            continue  # a model that prepare has not seen takes no bits along
        CALLS[name](run, np.random.default_rng(seed))
        run.check(name)
