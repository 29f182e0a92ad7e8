"""Whatever users do around an optimizer, in any order: after every call the contract holds.

Random sequences of steps, overflows, writes, loads, copies and changes; contract.py is what the
weights, masters and states have to be after each, bit for bit, in every format.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from contract import Parameter, permuted, step_all
from helpers import DTYPES, array, assert_same
from hypothesis import assume, example, given
from hypothesis import strategies as st
from random_tests import random_runs
from rules import MASTERED, found_state, is_allowed
from torch import Tensor, nn

import amp_mp as amp

NUMBERS = {"lr": 1e-2, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1}
SHAPES = ((4, 32, 3, 1), (33,), (2, 64))


def write(p: Tensor, random: np.random.Generator) -> None:
    """One of the ways to write into a random slice of a parameter."""
    flat = p.detach()
    rows = p.shape[0]
    first = int(random.integers(0, rows))
    part = flat[first : first + 1 + int(random.integers(0, rows))]
    values = torch.from_numpy(random.standard_normal(part.shape).astype(np.float32)).to(p.device)
    kind = int(random.integers(0, 12))
    if kind == 0:
        part.zero_()
    elif kind == 1:
        part.mul_(0)
    elif kind == 2:
        part.clamp_(-0.05, 0.05)
    elif kind == 3:
        part.clamp_(min=0)
    elif kind == 4:
        part.mul_((values > 0).to(p.dtype))
    elif kind == 5:
        part.copy_(values)
    elif kind == 6:
        part.lerp_(values.to(p.dtype), 0.25)
    elif kind == 7:
        part.neg_()
    elif kind == 8:
        part.masked_fill_(values > 1, [torch.inf, -torch.inf, torch.nan][first % 3])
    elif kind == 9:
        p.data = p.data * 2
    elif kind == 10:
        part.copy_(part * 1.01)
    else:
        part.fill_(2.0 ** int(random.integers(-20, 16)))


class Run:
    """A model with its optimizer beside the contract's model of them."""

    def __init__(self, device: str, dtype: str, memory: str) -> None:
        generator = torch.Generator().manual_seed(1)
        self.device, self.layout = device, "rows"
        self.model = nn.Module()
        self.wanted: list[list[Parameter]] = [[]]
        for i, shape in enumerate(SHAPES):
            kind = "float32" if i == 2 else dtype
            self._new(f"p{i}", shape, kind, memory, generator, 0)
        self.groups = [{**NUMBERS, "seed": 7}]
        self.max_norm: float | None = None
        params = list(self.model.parameters())
        arguments = {**NUMBERS, "seed": 7, "check_overflow": True}
        self.optimizer = amp.optim.AdamW(params, **arguments, **MASTERED[memory])
        self.saved: Any = None
        self.versions: dict[int, int] = {}  # of the parameters, after the last call

    def _new(
        self, name: str, shape: tuple[int, ...], dtype: str, memory: str, generator: Any, group: int
    ) -> nn.Parameter:
        values = torch.randn(shape, generator=generator).to(DTYPES[dtype]).to(self.device)
        if self.layout != "rows" and len(shape) == 4:
            values = values.to(memory_format=torch.channels_last)
        param = nn.Parameter(values)
        self.model.register_parameter(name, param)
        number = sum(map(len, self.wanted))
        layout = self.layout if len(shape) == 4 else "rows"
        self.wanted[group].append(
            Parameter(shape, dtype, self._seen(param), memory, number, layout)
        )
        return param

    # Numbers in the order of memory.

    @staticmethod
    def _seen(tensor: Tensor) -> np.ndarray:
        flat = tensor.detach().as_strided((tensor.numel(),), (1,))
        return array(flat).copy()

    def pairs(self) -> list[tuple[nn.Parameter, Parameter, dict[str, Any]]]:
        params = [p for group in self.optimizer.param_groups for p in group["params"]]
        wanted = [(w, g) for ws, g in zip(self.wanted, self.groups, strict=True) for w in ws]
        return [(p, w, g) for p, (w, g) in zip(params, wanted, strict=True)]

    def look(self) -> None:
        """The user has written: what is in the parameters counts."""
        for param, wanted, _ in self.pairs():
            wanted.visible = self._seen(param)
            wanted.is_written |= param._version != self.versions.get(id(param))

    # Calls.

    def step(self, random: np.random.Generator, bad: float | None = None) -> None:
        grads = []
        for param, _, _ in self.pairs():
            param.grad = None
            if not param.requires_grad or random.random() < 0.1:
                grads.append(None)
                continue
            values = random.standard_normal(param.shape).astype(np.float32)
            grad = torch.empty_like(param).copy_(torch.from_numpy(values))
            if bad is not None:
                grad[(0,) * grad.dim()] = bad
            param.grad = grad
            grads.append(self._seen(grad))
        rows = [(w, g, grad) for (_, w, g), grad in zip(self.pairs(), grads, strict=True)]
        with np.errstate(all="ignore"):
            skipped = step_all(rows, self.max_norm)
        self.optimizer.step()
        assert self.optimizer.step_was_skipped == skipped

    def overflow(self, random: np.random.Generator) -> None:
        self.step(random, float(random.choice([np.inf, -np.inf, np.nan])))

    def write(self, random: np.random.Generator) -> None:
        with torch.no_grad():
            write(self.pairs()[int(random.integers(0, len(self.pairs())))][0], random)
        self.look()

    def edit(self, random: np.random.Generator) -> None:
        """Masters are read as the contract has them; what is written into them is stored."""
        chosen = [pair for pair in self.pairs() if random.random() < 0.6]
        fails, seen = random.random() < 0.2, []
        try:
            with self.optimizer.masters([param for param, _, _ in chosen]) as masters:
                for (_, wanted, _), master in zip(chosen, masters, strict=True):
                    assert_same(self._seen(master), wanted.master(), "a master as it is read")
                    if random.random() < 0.8:
                        write(master, random)
                    seen.append(self._seen(master))
                if fails:
                    raise KeyError("the block fails")
        except KeyError:
            return
        for (_, wanted, group), values in zip(chosen, seen, strict=True):
            wanted.edit(group["seed"], values)

    def save(self, random: np.random.Generator) -> None:
        states = [(w.layout, copy.deepcopy(w.state)) for _, w, _ in self.pairs()]
        self.saved = copy.deepcopy(
            (self.model.state_dict(), self.optimizer.state_dict(), states, self.groups)
        )

    def load_model(self, random: np.random.Generator) -> None:
        if self.saved is not None:
            self.model.load_state_dict(self.saved[0], strict=False)
            self.look()

    def load_optimizer(self, random: np.random.Generator) -> None:
        if self.saved is None:
            return
        _, state_dict, states, groups = copy.deepcopy(self.saved)
        if len(groups) != len(self.groups):
            with pytest.raises(ValueError, match=r"there are \d param_groups"):
                self.optimizer.load_state_dict(state_dict)
            return
        self._load(state_dict, [state for _, state in states], groups)

    def load_both(self, random: np.random.Generator) -> None:
        self.load_model(random)
        self.load_optimizer(random)

    def _load(self, state_dict: dict[str, Any], states: list[Any], groups: list[Any]) -> None:
        self.optimizer.load_state_dict(state_dict)
        self.groups = copy.deepcopy(groups)
        with np.errstate(all="ignore"):
            for (_, wanted, group), state in zip(self.pairs(), states, strict=True):
                wanted.load(state, group)

    def freeze(self, random: np.random.Generator) -> None:
        param = self.pairs()[int(random.integers(0, len(self.pairs())))][0]
        param.requires_grad_(not param.requires_grad)

    def add_param_group(self, random: np.random.Generator) -> None:
        if len(self.groups) > 2:
            return
        memory = self._memory(random)
        self.wanted.append([])
        generator = torch.Generator().manual_seed(int(random.integers(0, 100)))
        shape = SHAPES[int(random.integers(0, 2))]
        dtype = self.wanted[0][0].dtype
        name = f"p{len(list(self.model.parameters()))}"
        param = self._new(name, shape, dtype, memory, generator, len(self.wanted) - 1)
        numbers = {**NUMBERS, "lr": 3e-3, "seed": 7}
        group = {"params": [param], **numbers, **MASTERED[memory]}
        self.optimizer.add_param_group(group)
        self.groups.append(numbers)

    def _memory(self, random: np.random.Generator) -> str:
        """A preset for weights of the model's dtype."""
        known = [m for m in MASTERED if is_allowed(m, self.wanted[0][0].dtype)]
        return known[int(random.integers(0, len(known)))]

    def deepcopy(self, random: np.random.Generator) -> None:
        self.model, self.optimizer = copy.deepcopy((self.model, self.optimizer))

    def pickle(self, random: np.random.Generator) -> None:
        self.model, self.optimizer = pickle.loads(pickle.dumps((self.model, self.optimizer)))

    def turn(self, random: np.random.Generator) -> None:
        after = {"rows": "channels_last", "channels_last": "rows"}[self.layout]
        formats = {"rows": torch.contiguous_format, "channels_last": torch.channels_last}
        self.model.to(memory_format=formats[after])
        for param, wanted, _ in self.pairs():
            if len(wanted.shape) == 4:
                if after == "rows":
                    param.data = param.data.contiguous()
                wanted.visible = permuted(wanted.visible, wanted.shape, wanted.layout, after)
                wanted.layout = after
        self.layout = after

    def change_numbers(self, random: np.random.Generator) -> None:
        which = int(random.integers(0, len(self.groups)))
        change = [{"lr": 3e-3}, {"betas": (0.5, 0.9)}, {"weight_decay": 0.0}, {"lr": 0.0}]
        new = change[int(random.integers(0, 4))]
        self.optimizer.param_groups[which].update(new)
        self.groups[which] = {**self.groups[which], **new}

    def change_clip(self, random: np.random.Generator) -> None:
        self.max_norm = self.optimizer.max_grad_norm = [None, 0.5, 1e6][int(random.integers(0, 3))]

    def change_formats(self, random: np.random.Generator) -> None:
        """A new optimizer of other formats loads what the old one saves."""
        memory = self._memory(random)
        old = self.optimizer
        groups = [{"params": g["params"], **MASTERED[memory]} for g in old.param_groups]
        self.optimizer = amp.optim.AdamW(groups, check_overflow=True)
        self.optimizer.max_grad_norm = self.max_norm
        states = []
        for _, wanted, _ in self.pairs():
            states.append(wanted.state)
            wanted.memory = memory
        self._load(old.state_dict(), states, self.groups)

    # The contract.

    def check(self, after: str) -> None:
        found = amp.float32_state_dict(self.model, self.optimizer)
        names = {id(p): name for name, p in self.model.named_parameters()}
        self.versions = {id(p): p._version for p in self.model.parameters()}
        for number, (param, wanted, _) in enumerate(self.pairs()):
            what = f"after {after}: parameter {number}"
            assert_same(self._seen(param), wanted.visible, f"{what}: weight")
            with np.errstate(all="ignore"):
                master = wanted.master()
            assert_same(self._seen(found[names[id(param)]]), master, f"{what}: master")
            state = self.optimizer.state.get(param, {})
            assert bool(state) == (wanted.state is not None), f"{what}: state"
            if wanted.state is None:
                continue
            clock = wanted.state.clock
            assert state["step"].item() == clock.step, what
            for name, values, kind in (
                ("exp_avg", wanted.state.m, wanted.state.kinds[0]),
                ("exp_avg_sq", wanted.state.v, wanted.state.kinds[1]),
            ):
                flat = {
                    n: t.as_strided((t.numel(),), (1,)) if t.dim() else t for n, t in state.items()
                }
                assert_same(found_state(flat, name, kind), values, f"{what}: {name}")


CALLS: dict[str, Callable[[Run, np.random.Generator], None]] = {
    "step": Run.step,
    "step again": Run.step,
    "overflow": Run.overflow,
    "write": Run.write,
    "write again": Run.write,
    "edit masters": Run.edit,
    "edit masters again": Run.edit,
    "save": Run.save,
    "load the model": Run.load_model,
    "load the optimizer": Run.load_optimizer,
    "load both": Run.load_both,
    "freeze or unfreeze": Run.freeze,
    "add_param_group": Run.add_param_group,
    "deepcopy": Run.deepcopy,
    "pickle": Run.pickle,
    "to another layout": Run.turn,
    "other numbers": Run.change_numbers,
    "other clipping": Run.change_clip,
    "other formats": Run.change_formats,
}


@pytest.mark.filterwarnings("ignore:amp_mp. no parameter of this optimizer has a gradient")
@pytest.mark.slow
@pytest.mark.timeout(0)
@random_runs(300)
@given(
    dtype=st.sampled_from(["bfloat16", "float16"]),
    memory=st.sampled_from(list(MASTERED)),
    calls=st.lists(
        st.tuples(st.sampled_from(list(CALLS)), st.integers(0, 2**16)), min_size=3, max_size=14
    ),
)
@example(  # the master follows its parameter into the layout, and is written there
    dtype="bfloat16",
    memory="float32",
    calls=[("add_param_group", 0), ("to another layout", 0), ("edit masters", 1)],
)
def test_the_contract_holds_after_every_call(
    device: str, dtype: str, memory: str, calls: list[tuple[str, int]]
) -> None:
    assume(is_allowed(memory, dtype))
    run = Run(device, dtype, memory)
    for name, seed in [("step", 0), *calls, ("step", 1)]:
        CALLS[name](run, np.random.default_rng(seed))
        run.check(name)
