"""AveragedModel of sharded models.

The contract: whatever splits the model, and whatever the script does with it, each process's part
of the average, and of all that is read from it, has the bits of a whole model's average.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from around_sharding import error
from helpers import raw_bytes
from layouts import local, made_once, placed_as, positions
from ranks import LARGE, on_ranks
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import amp_mp as amp

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("distributed")]

LOW = torch.bfloat16
MEMORY = ["exact", "lean", "micro", "nano", "float32"]
SEQUENCES = 17 if LARGE else 2  # for each layout and number of processes


class Model(nn.Module):
    """Uneven over 2, 3 and 4 processes, with a tied weight, a frozen part and statistics."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embed = nn.Embedding(11, 6)
        self.up, self.down = nn.Linear(6, 24), nn.Linear(24, 6)
        self.norm = nn.LayerNorm(6)
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.few = nn.Linear(6, 1)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("seen", torch.zeros(3))

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embed(tokens)
        hidden = self.norm(hidden + self.down(torch.tanh(self.up(hidden))))
        return self.head(hidden + self.few(self.frozen(hidden)))


def whole() -> Model:
    return amp.prepare(Model(), LOW, keep_fp32_only=[])


def fsdp(model: Model, **options: Any) -> Model:
    fully_shard(model.up, **options)
    fully_shard([model.norm, model.frozen], **options)
    fully_shard(model, **options)
    return model


def hsdp(model: Model) -> Model:
    return fsdp(model, mesh=made_once((2, dist.get_world_size() // 2), ("replicas", "dp")))


def offloaded(model: Model) -> Model:
    return fsdp(model, offload_policy=CPUOffloadPolicy(pin_memory=False))


def tensor_parallel(model: Model, mesh: Any = None) -> Model:
    mesh = made_once((dist.get_world_size(),), ("tp",)) if mesh is None else mesh
    return parallelize_module(model, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})


def both(model: Model) -> Model:
    mesh = made_once((2, dist.get_world_size() // 2), ("dp", "tp"))
    return fsdp(tensor_parallel(model, mesh["tp"]), mesh=mesh["dp"])


LAYOUTS: dict[str, Callable[[Model], Model]] = {
    "whole": lambda model: model,
    "fsdp": fsdp,
    "hsdp": hsdp,
    "offloaded": offloaded,
    "tensor_parallel": tensor_parallel,
    "both": both,
}
CASES = [
    *((1, name) for name in ("whole", "fsdp", "tensor_parallel")),
    *((2, name) for name in ("fsdp", "offloaded", "tensor_parallel")),
    *((3, name) for name in ("fsdp", "tensor_parallel")),
    *((4, name) for name in ("fsdp", "hsdp", "tensor_parallel", "both")),
]


class Run:
    """A model, its optimizer and its average, as a script has them."""

    def __init__(self, layout: str, memory: str, options: dict[str, Any]) -> None:
        self.layout, self.memory, self.options = layout, memory, options
        self.model = LAYOUTS[layout](Model())
        amp.prepare(self.model, LOW, keep_fp32_only=[])
        self.optimizer = self.make_optimizer()
        self.averaged = amp.AveragedModel(self.model, self.optimizer, **options)

    def make_optimizer(self) -> Any:
        trained = [p for p in self.model.parameters() if p.requires_grad]
        return amp.optim.AdamW(trained, lr=0.02, betas=(0.9, 0.95), memory=self.memory)

    def step(self, seed: int) -> None:
        for index, param in enumerate(self.model.parameters()):
            if param.requires_grad and (seed + index) % 5:  # some have no gradient
                draw = torch.Generator().manual_seed(seed + index)
                param.grad = placed_as(param, torch.randn(param.shape, generator=draw).to(LOW))
        self.optimizer.step()
        self.optimizer.zero_grad()

    def write(self, seed: int) -> None:
        """What a script writes behind the optimizer's back."""
        with torch.no_grad():
            params = list(self.model.parameters())
            params[seed % len(params)].mul_(0.5)
            self.model.seen += 1

    def forward(self, _: int) -> None:
        """After it FSDP2's root is gathered."""
        with torch.no_grad():
            self.model(torch.arange(11))

    def update(self, _: int) -> None:
        self.averaged.update()

    def swap(self, _: int) -> None:
        tokens, before = torch.arange(11), [raw_bytes(local(p)) for p in self.shards()]
        versions = [p._version for p in self.model.parameters()]
        average = [raw_bytes(local(p)) for p in self.averaged.module.parameters()]
        with torch.no_grad():
            outside = self.model(tokens)  # FSDP2's root is gathered now
            with self.averaged.swap() as model:
                inside = model(tokens)
                held = [raw_bytes(local(p)) for p in self.shards()]
                advanced = zip(versions, model.parameters(), strict=True)
                assert all(p._version > version for version, p in advanced)
                model(tokens)
            again = self.model(tokens)
        assert held == average
        assert raw_bytes(again) == raw_bytes(outside)
        if average != before:
            assert raw_bytes(inside) != raw_bytes(outside)
        assert before == [raw_bytes(local(p)) for p in self.shards()]

    def shards(self) -> list[Tensor]:
        """The model's parameters, after FSDP2 has put its shards back."""
        for module in self.model.modules():
            if hasattr(module, "reshard"):
                module.reshard()
        return list(self.model.parameters())

    def copy(self, _: int) -> None:
        self.averaged = copy.deepcopy(self.averaged)
        self.averaged.follow(self.model, self.optimizer)

    def load_state_dict(self, _: int) -> None:
        """Into a new average, as a script resumes."""
        kept = copy.deepcopy(self.averaged.state_dict())
        self.averaged = amp.AveragedModel(self.model, self.optimizer, **self.options)
        self.averaged.load_state_dict(kept)

    def save(self, path: Path) -> None:
        amp.checkpoint.save(path, self.model, self.optimizer, average=self.averaged)

    def load(self, path: Path) -> None:
        amp.checkpoint.load(path, self.model, self.optimizer, average=self.averaged)

    def values(self) -> dict[str, Tensor]:
        """Everything that is read from an average, by name."""
        found = {f"float32 {n}": t for n, t in self.averaged.float32_state_dict().items()}
        found |= {f"state {n}": t for n, t in self.averaged.state_dict().items()}
        return found | {f"model {n}": p for n, p in self.model.named_parameters()}


def differences(run: Run, plain: Run) -> list[str]:
    """What is not, bit for bit, this process's part of a whole model's; in words."""
    run.shards()
    found, wanted = run.values(), plain.values()
    if found.keys() != wanted.keys():
        return [f"the names {sorted(found.keys() ^ wanted.keys())} are in one of them alone"]
    wrong = []
    for name, value in found.items():
        expected = wanted[name].detach().reshape(-1)[positions(value)]
        if raw_bytes(local(value).reshape(-1)) != raw_bytes(expected):
            wrong.append(f"{run.layout} on {dist.get_world_size()}: {name}")
        is_split = isinstance(value, DTensor) and value.numel() != local(value).numel()
        splits = run.layout in ("fsdp", "both") and dist.get_world_size() > 1
        if splits and not is_split and ("up.weight" in name or "up/weight" in name):
            wrong.append(f"{name} is whole on each process")
    return wrong


OPTIONS: list[dict[str, Any]] = [
    {"decay": 0.9},
    {"decay": 0.999, "warmup": True},
    {},
    {"decay": 0.5, "use_buffers": True},
]
ACTS = ["step", "step", "update", "update", "forward", "swap", "write", "copy", "load_state_dict"]


def sequences(layout: str, folder: str, seeds: range) -> list[str]:
    """Runs random sequences on a sharded model and on a whole one; returns where they differ."""
    wrong: list[str] = []
    for seed in seeds:
        draw = random.Random(seed)
        options = draw.choice(OPTIONS), draw.choice(MEMORY)
        run, plain = (Run(kind, options[1], options[0]) for kind in (layout, "whole"))
        acts = [draw.choice([*ACTS, "save", "load"]) for _ in range(14)]
        files = [Path(folder, f"{seed}{kind}") for kind in ("sharded", "whole")]
        for place, act in enumerate(acts):
            if act == "save":
                run.save(files[0])
                plain.save(files[1])
            elif act == "load" and "save" in acts[:place]:  # each from the other's half of the time
                run.load(files[draw.randrange(2)])
                plain.load(files[draw.randrange(2)])
            elif act != "load":
                for each in (run, plain):
                    getattr(each, act)(100 * place + seed)
            if wrong := differences(run, plain):
                return [f"seed {seed}, after {acts[: place + 1]}", *wrong]
    return wrong


@pytest.mark.parametrize(("world", "layout"), CASES)
def test_random_scripts_leave_the_bits_of_a_whole_model(
    world: int, layout: str, tmp_path: Path
) -> None:
    assert on_ranks(world, sequences, layout, str(tmp_path), range(SEQUENCES)) == [[]] * world


def saved(layout: str, path: str) -> None:
    run = Run(layout, "exact", {"decay": 0.9, "warmup": True})
    for seed in range(4):
        run.step(seed)
        run.update(seed)
    run.save(Path(path))


def loaded(layout: str, path: str) -> list[str]:
    """What differs from a whole run that went on without a file, in a new script's objects."""
    run, plain = (Run(kind, "exact", {"decay": 0.9, "warmup": True}) for kind in (layout, "whole"))
    for seed in range(4):
        plain.step(seed)
        plain.update(seed)
    run.load(Path(path))
    wrong = differences(run, plain)
    for seed in range(4, 7):
        for each in (run, plain):
            each.step(seed)
            each.update(seed)
    return wrong + differences(run, plain)


@pytest.mark.parametrize(("world", "layout"), [(1, "whole"), (3, "fsdp"), (4, "both")])
def test_an_average_goes_on_after_amp_checkpoint_on_other_processes(
    world: int, layout: str, tmp_path: Path
) -> None:
    on_ranks(world, saved, layout, f"{tmp_path}/step")
    for other, there in [(1, "whole"), (2, "fsdp"), (2, "tensor_parallel"), (4, "hsdp")]:
        assert on_ranks(other, loaded, there, f"{tmp_path}/step") == [[]] * other, (other, there)


class Stage(nn.Module):
    """A dense layer that all processes have, beside an expert of each."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.dense = nn.Linear(6, 6)
        torch.manual_seed(1 + dist.get_rank())
        self.expert = nn.Linear(6, 5 + dist.get_rank())


def experts(kind: str) -> list[str]:
    """Where the averages of experts are not those of the same module alone on its process."""
    runs = []
    for splits in (True, False):
        model = Stage()
        if splits:
            fully_shard(model.dense)
        if splits and kind == "DTensors":
            fully_shard(model.expert, mesh=made_once((2, 1), ("ep", "dp"))["dp"])
        amp.prepare(model, LOW, keep_fp32_only=[])
        groups = [
            {"params": model.dense.parameters()},
            {"params": model.expert.parameters(), "process_groups": dist.group.WORLD},
        ]
        if not splits:
            del groups[1]["process_groups"]
        optimizer = amp.optim.AdamW(groups, lr=0.02)
        averaged = amp.AveragedModel(model, optimizer, decay=0.9)
        for step in range(5):
            for index, param in enumerate(model.parameters()):
                seed = 10 * step + index + (100 * dist.get_rank() if index > 1 else 0)
                draw = torch.Generator().manual_seed(seed)
                param.grad = placed_as(param, torch.randn(param.shape, generator=draw).to(LOW))
            optimizer.step()
            averaged.update()
        with averaged.swap():
            inside = [raw_bytes(local(p)) for p in model.parameters()]
        assert inside == [raw_bytes(local(p)) for p in averaged.module.parameters()]
        runs.append(averaged.float32_state_dict())
    return [
        name
        for name, value in runs[0].items()
        if raw_bytes(local(value).reshape(-1))
        != raw_bytes(runs[1][name].reshape(-1)[positions(value)])
    ]


@pytest.mark.parametrize("kind", ["plain", "DTensors"])
def test_experts_of_each_process_have_averages_of_their_own(kind: str) -> None:
    assert on_ranks(2, experts, kind) == [[], []]


def what_is_sent(layout: str) -> dict[str, int]:
    run = Run(layout, "exact", {"decay": 0.9})
    run.step(0)
    with CommDebugMode() as mode:
        run.update(0)
        run.averaged.float32_state_dict()
        run.averaged.state_dict()
    return {str(name): count for name, count in mode.get_comm_counts().items() if count}


@pytest.mark.parametrize("layout", ["fsdp", "tensor_parallel"])
def test_an_update_sends_nothing(layout: str) -> None:
    assert on_ranks(2, what_is_sent, layout) == [{}, {}]


def refusals() -> dict[str, str]:
    whole_first = whole()
    early = amp.AveragedModel(whole_first)
    fsdp(whole_first)
    run = Run("fsdp", "exact", {"decay": 0.9})
    run.update(0)
    other = Run("whole", "exact", {"decay": 0.9})
    before = raw_bytes([local(p) for p in run.averaged.module.parameters()])
    tokens = torch.arange(11)
    found = {
        "sharded after it was made": error(early.update),
        "another model": error(run.averaged.update_parameters, other.model),
        "swap of another model": error(lambda: run.averaged.swap(other.model).__enter__()),
        "forward": error(run.averaged, tokens),
        "forward of a part": error(run.averaged.module.up, torch.ones(1, 6, dtype=LOW)),
    }
    with run.averaged.swap():
        found["a step in swap"] = error(run.step, 1)
        found["an update in swap"] = error(run.update, 1)
        found["a save in swap"] = error(run.save, Path("nowhere"))
    assert before == raw_bytes([local(p) for p in run.averaged.module.parameters()])
    run.step(2)
    run.update(2)
    return found


def test_what_cannot_be_averaged_is_refused_by_name() -> None:
    words = {
        "sharded after it was made": ["embed.weight", "is split", "is whole", "after fully_shard"],
        "another model": ["embed.weight", "is whole on each process, and its average is split"],
        "swap of another model": ["embed.weight", "is whole"],
        "forward": ["Model", "fully_shard", "with averaged.swap() as model"],
        "forward of a part": ["Linear", "fully_shard"],
        "a step in swap": ["AveragedModel.swap()"],
        "an update in swap": ["AveragedModel.swap()"],
        "a save in swap": ["AveragedModel.swap()"],
    }
    for found in on_ranks(2, refusals):
        assert found.keys() == words.keys()
        for case, texts in words.items():
            assert all(text in found[case] for text in texts), (case, found[case])


def teacher() -> bool:
    """A tensor-parallel average runs by itself, and gives a student's inputs their gradients."""
    run = Run("tensor_parallel", "exact", {"decay": 0.5})
    for seed in range(3):
        run.step(seed)
        run.update(seed)
    with run.averaged.swap() as model, torch.no_grad():
        inside = model(torch.arange(11))
    return torch.equal(run.averaged(torch.arange(11)), inside)


def test_a_tensor_parallel_average_runs_by_itself() -> None:
    assert on_ranks(2, teacher) == [True, True]
