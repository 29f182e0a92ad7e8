"""Contract: processes with experts of their own train as one float32 model of all experts does.

Whatever the sequence of steps, nested losses, experts that go to other processes, writes behind
version counters, inner optimizers that write weights, saves, and loads on the same and on another
layout. torch steps the float32 model, on every process.
"""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from random_tests import examples
from ranks import on_ranks
from torch import Tensor, nn

import amp_mp as amp

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(0),
    pytest.mark.xdist_group("distributed"),
]

SHAPE = (6, 40)
CLIP = 2.0
# Ten steps of float32 arithmetic in another order, at weights of about 1: a lost remainder is half
# of 2^-8 there.
NEAR = 2e-5


def numbers(*names: Any) -> Tensor:
    """Multiples of 1/64 in [-1, 1): exact in bfloat16, and times any scale here."""
    generator = torch.Generator().manual_seed(random.Random(str(names)).randrange(2**31))
    return torch.randint(-64, 64, SHAPE, generator=generator) / 64


class Model(nn.Module):
    """A weight that all processes have, and those of this process's experts."""

    def __init__(self, owners: dict[int, int], dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype
        self.dense = nn.Parameter(numbers("dense").to(dtype))
        self.experts = nn.ParameterList()
        self.numbers: list[int] = []
        for number, owner in owners.items():
            if owner == dist.get_rank():
                self.add(number, numbers("expert", number))

    def add(self, number: int, values: Tensor) -> None:
        """Takes an expert."""
        self.experts.append(nn.Parameter(values.to(self.dtype)))
        self.numbers.append(number)

    def remove(self, number: int) -> None:
        """Gives one away."""
        at = self.numbers.index(number)
        kept = [p for i, p in enumerate(self.experts) if i != at]
        self.experts, self.numbers = (
            nn.ParameterList(kept),
            self.numbers[:at] + self.numbers[at + 1 :],
        )

    def named(self) -> dict[str, nn.Parameter]:
        """This process's parameters, by the names that the float32 model has."""
        experts = zip(self.numbers, self.experts, strict=True)
        return {"dense": self.dense, **{f"expert {n}": p for n, p in experts}}

    def groups(self) -> list[dict[str, Any]]:
        """As the documentation asks: a process without experts has an empty group."""
        own = {"params": list(self.experts), "process_groups": dist.group.WORLD}
        return [{"params": [self.dense]}, own]


class Writing(torch.optim.SGD):
    """Sharpness-aware minimisation: two calls that write the weights."""

    def first_step(self) -> None:
        """Goes up."""
        for param in self.param_groups[0]["params"]:
            self.state[param]["back"] = param.detach().clone()
            param.data.add_(param.detach().sign(), alpha=0.125)

    def second_step(self) -> None:
        """Goes back."""
        for param in self.param_groups[0]["params"]:
            param.data.copy_(self.state[param].pop("back"))


class Way:
    """A script's own lines: how it makes an optimizer, and one iteration."""

    keeps = True  # whether its optimizer is saved, and may get other parameters

    def __init__(self, model: Model, kind: str) -> None:
        self.model, self.kind = model, kind
        self.renew()

    def made(self, module: Any, **options: Any) -> Any:
        own = {"lr": 0.125, "momentum": 0.5} if self.kind == "SGD" else {"lr": 2.0**-6}
        return getattr(module, self.kind)(self.model.groups(), **own, **options)

    def renew(self) -> None:
        """Another optimizer for the model as it is."""
        self.optimizer = self.made(amp.optim, max_grad_norm=CLIP)

    def iterate(self, losses: list[Tensor]) -> float:
        """One iteration; returns the norm."""
        for loss in losses:
            loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(self.optimizer.grad_norm)


class Scaler(Way):
    """amp_mp's GradScaler."""

    def renew(self) -> None:
        """See Way."""
        super().renew()
        self.scaler = amp.GradScaler("cpu", init_scale=2.0**6)

    def iterate(self, losses: list[Tensor]) -> float:
        """See Way."""
        for loss in losses:
            self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        return float(self.optimizer.grad_norm)


class Handle(Way):
    """amp.init: a loss inside of another one's block, which goes backward last, or before."""

    inner_last = False

    def iterate(self, losses: list[Tensor]) -> float:
        """See Way."""
        handle = amp.init(device_type="cpu", dtype=torch.bfloat16, loss_scale=2.0**6)
        self.inner_last = not self.inner_last
        outer, *inner = losses
        with handle.scale_loss(outer, self.optimizer) as scaled:
            if self.inner_last:
                scaled.backward()
            for loss in inner:
                with handle.scale_loss(loss, self.optimizer) as own:
                    own.backward()
            if not self.inner_last:
                scaled.backward()
        self.optimizer.step()
        handle.deactivate()
        self.optimizer.zero_grad()
        return float(self.optimizer.grad_norm)


class Wrapper(Way):
    """FP16_Optimizer around an optimizer of amp_mp."""

    module: Any = amp.optim

    def renew(self) -> None:
        """See Way."""
        self.optimizer = amp.FP16_Optimizer(
            self.made(self.module), static_loss_scale=2.0**6, verbose=False
        )

    def iterate(self, losses: list[Tensor]) -> float:
        """See Way."""
        self.optimizer.zero_grad()
        for loss in losses:
            self.optimizer.backward(loss)
        norm = self.optimizer.clip_master_grads(CLIP)
        self.optimizer.step()
        return float(norm)


class AroundTorch(Wrapper):
    """FP16_Optimizer around torch's, whose masters are parameters of their own."""

    module, keeps = torch.optim, False


class AroundWriting(AroundTorch):
    """FP16_Optimizer around one that writes weights: the model follows before the forward pass."""

    def made(self, module: Any, **options: Any) -> Any:
        return Writing(self.model.groups(), lr=0.125, momentum=0.5)

    def write(self) -> None:
        """Up and back: what the model has in between."""
        low, masters = self.model.dense, self.optimizer.param_groups[0]["params"][0]
        before = masters.detach().clone()
        self.optimizer.first_step()
        seen = {name: p.detach().clone() for name, p in self.model.state_dict().items()}["dense"]
        top = before + 0.125 * before.sign()
        assert torch.equal(masters, top)
        assert torch.equal(seen, top.to(low.dtype))
        self.optimizer.second_step()
        assert torch.equal(amp.float32_of(low), before)


WAYS: dict[str, type[Way]] = {
    "fused": Way,
    "GradScaler": Scaler,
    "scale_loss": Handle,
    "FP16_Optimizer": Wrapper,
    "FP16_Optimizer, torch's": AroundTorch,
    "FP16_Optimizer, SAM": AroundWriting,
}


class Run:
    """A random sequence beside the float32 model of everything."""

    def __init__(self, seed: str, folder: Path) -> None:
        self.random = random.Random(seed)
        self.folder, self.count, self.done = folder, 0, list[str]()
        self.way_name = self.random.choice(list(WAYS))
        is_sam = self.way_name.endswith("SAM")
        self.kind = "SGD" if is_sam else self.random.choice(["SGD", "AdamW"])
        experts = range(self.random.randint(0, 4))
        self.owners = {n: self.random.randrange(dist.get_world_size()) for n in experts}
        dtype = self.random.choice([torch.bfloat16, torch.float16])
        self.model = Model(self.owners, dtype)
        self.way = WAYS[self.way_name](self.model, self.kind)
        self.full = {"dense": nn.Parameter(numbers("dense"))}
        self.full |= {f"expert {n}": nn.Parameter(numbers("expert", n)) for n in experts}
        self.open = {name: torch.zeros(SHAPE, dtype=torch.bool) for name in self.full}
        self.renew()

    def renew(self) -> None:
        """Another optimizer of torch's for the float32 model."""
        own = {"lr": 0.125, "momentum": 0.5} if self.kind == "SGD" else {"lr": 2.0**-6}
        self.torchs = getattr(torch.optim, self.kind)(list(self.full.values()), **own)

    def step(self) -> None:
        """One iteration of one to three losses; an expert may have no tokens."""
        self.count += 1
        parts = [
            {
                name: numbers(self.count, part, name)
                for name in self.full
                if self.random.random() < 0.8
            }
            for part in range(self.random.randint(1, 3))
        ]
        parts[0]["dense"] = numbers(self.count, "dense")  # each process has a gradient
        self.torchs.zero_grad()
        for part in parts:
            for name, values in part.items():
                (self.full[name] * values).sum().backward()
        wanted = torch.nn.utils.clip_grad_norm_(self.full.values(), CLIP)
        self.torchs.step()
        own, losses = self.model.named(), []
        for part in parts:
            terms = [(own[n].float() * x).sum() for n, x in part.items() if n in own]
            losses.append(sum(terms, self.model.dense.float().sum() * 0.0))
        assert self.way.iterate(losses) == pytest.approx(float(wanted), rel=1e-6)

    def write(self) -> None:
        """Behind the counters; then another optimizer begins with what was written."""
        self.count += 1
        name = self.random.choice(list(self.full))
        values, in_place = numbers(self.count, "written"), self.random.random() < 0.5
        if (param := self.model.named().get(name)) is not None and in_place:
            param.data.copy_(values)
        elif param is not None:
            param.data = values.to(param.dtype)
        full = self.full[name].detach()
        # A float32 master cannot tell that an element was written which had this value in low
        # precision, and goes on with all of its bits.
        same = (full - values).abs() <= 2.0**-8 * values.abs()
        if isinstance(self.way, AroundTorch):
            self.open[name] = same & ((full != values) | self.open[name])
        full.copy_(values)
        self.way.renew()
        self.renew()

    def move(self) -> None:
        """An expert goes to another process, which begins it anew."""
        if not self.owners:
            return
        self.count += 1
        number = self.random.choice(list(self.owners))
        before, after = self.owners[number], self.random.randrange(dist.get_world_size())
        values = numbers(self.count, "moved")
        self.owners[number] = after
        given = None
        if before == dist.get_rank():
            given = self.model.named()[f"expert {number}"]
            self.model.remove(number)
        if after == dist.get_rank():
            self.model.add(number, values)
        full = self.full[f"expert {number}"]
        full.data.copy_(values)
        if self.way.keeps and not isinstance(self.way, Wrapper):
            self.way.optimizer.param_groups[1]["params"] = list(self.model.experts)
            self.way.optimizer.state.pop(given, None)
            self.torchs.state.pop(full, None)
        else:
            self.way.renew()
            self.renew()

    def save_and_load(self) -> None:
        """What was saved comes back on each process, whatever is in the weights by then."""
        self.count += 1
        path = self.folder / f"{self.random.random()}"
        optimizer = self.way.optimizer if self.way.keeps else None
        inner = getattr(optimizer, "optimizer", optimizer)
        amp.checkpoint.save(path, self.model, inner)
        self.refuse_another_layout(path, has_optimizer=inner is not None)
        for param in self.model.parameters():
            param.data.fill_(7.0)
        is_new = self.random.random() < 0.5
        if inner is not None and is_new:
            self.way.renew()
            inner = getattr(self.way.optimizer, "optimizer", self.way.optimizer)
        amp.checkpoint.load(path, self.model, inner)
        if inner is None:
            self.way.renew()
            self.renew()

    def refuse_another_layout(self, path: Path, has_optimizer: bool) -> None:
        """Each process has the experts of the next one: an error on all, and nothing is changed."""
        world = dist.get_world_size()
        before = [list(self.owners.values()).count(rank) for rank in range(world)]
        after = [before[rank - 1] for rank in range(world)]
        several = sorted(before)[-2]  # experts.0 to this one are others on several processes
        if all(min(a, several) == min(b, several) for a, b in zip(before, after, strict=True)):
            return
        other = Model({n: (rank + 1) % world for n, rank in self.owners.items()}, self.model.dtype)
        optimizer = amp.optim.AdamW(other.groups())
        before = [param.detach().clone() for param in other.parameters()]
        for given in (None, optimizer) if has_optimizer else (None,):
            with pytest.raises((ValueError, RuntimeError), match="experts"):
                amp.checkpoint.load(path, other, given)
        assert all(map(torch.equal, before, other.parameters()))

    def compare(self) -> None:
        for name, param in self.model.named().items():
            found, wanted = amp.float32_of(param), self.full[name].detach()
            assert (found - wanted)[~self.open[name]].abs().max() <= NEAR, name

    def go(self) -> None:
        for _ in range(self.random.randint(4, 9)):
            kinds: list[Callable[[], None]] = [self.step] * 4
            kinds += [self.write, self.move, self.save_and_load]
            if isinstance(self.way, AroundWriting):
                kinds += [self.way.write]
            act = self.random.choice(kinds)
            self.done.append(act.__name__)
            act()
            self.compare()


def runs(seeds: list[str]) -> int:
    with tempfile.TemporaryDirectory() as own:
        folder = [own]
        dist.broadcast_object_list(folder)
        for seed in seeds:
            run = Run(seed, Path(folder[0]))
            try:
                run.go()
            except BaseException as error:
                error.add_note(
                    f"seed {seed!r}, {run.way_name}, {run.kind}, {run.owners}, {run.done}"
                )
                raise
        dist.barrier()
    return len(seeds)


@pytest.mark.parametrize("world", [2, 4])
def test_processes_with_experts_train_as_one_float32_model(world: int) -> None:
    count = examples(24) // 2
    seeds = [f"{world} {i}" for i in range(count)]
    assert on_ranks(world, runs, seeds, limit_s=60.0 + 2.0 * count) == [count] * world
