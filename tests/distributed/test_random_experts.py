"""Any number of experts on any process, also none, and experts that move: as on one process."""

from __future__ import annotations

import math
import random
import warnings
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from layouts import NORM_ERROR, made_once, whole
from random_tests import examples
from ranks import on_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

import amp_mp as amp

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("distributed")]

ROWS, COLUMNS, LR = 4, 6, 0.01
# Whose parameters a param_group has: of one rank ("world", "mesh"), of one place in "ep", whose
# ranks have copies ("ep") or shards ("shards") of them, or of all ("copies", "fsdp").
KINDS = {2: ["world"], 4: ["world", "mesh", "ep", "shards"]}
OF_ALL = ["copies", "fsdp"]
OURS = ["SGD", "AdamW", "LAMB", "LARS", "NovoGrad", "Muon"]
WAYS = ["alone", "GradScaler", "unscale_", "FP16_Optimizer", "scale_loss"]


@dataclass
class Expert:
    group: int
    home: int  # a rank, or a place in "ep"; any, of what all have


@dataclass
class Script:
    """What all ranks do, and the process that has everything."""

    optimizer: str
    way: str
    kinds: list[str]  # of each param_group
    options: list[dict[str, Any]]  # of each param_group
    experts: list[Expert]  # and layers that all have
    steps: list[dict[int, Tensor | None]] = field(default_factory=list)  # gradients
    moves: list[dict[int, int]] = field(default_factory=list)  # experts to new homes


def script(seed: int, world: int) -> Script:
    choose = random.Random(seed)
    torch.manual_seed(seed)
    name = choose.choice([*OURS, "torch.SGD", "torch.AdamW"])
    way = choose.choice(WAYS[2:] if name.startswith("torch") else WAYS)
    kinds = [choose.choice(KINDS[world]) for _ in range(choose.randint(1, 2))]
    kinds += [choose.choice(OF_ALL) for _ in range(choose.randint(0, 2))]
    choose.shuffle(kinds)
    options: list[dict[str, Any]] = [{} for _ in kinds]
    for each in options:
        if name == "Muon":
            each["use_muon"] = choose.random() < 0.5
        if name in ("AdamW", "Muon"):
            each["hyperball"] = choose.random() < 0.5
    places = [1 if k in OF_ALL else 2 if k in ("ep", "shards") else world for k in kinds]
    experts = [
        Expert(group, home)
        for group, count in enumerate(places)
        for home in range(count)
        for _ in range(choose.choice([0, 0, 1, 2, 3]) if count > 1 else 1)
    ]
    found = Script(name, way, kinds, options, experts or [Expert(0, 0)])
    for _ in range(5):
        grads: dict[int, Tensor | None] = {}
        for number, each in enumerate(found.experts):  # numbers that bfloat16 has
            grads[number] = torch.randint(-8, 9, (ROWS, COLUMNS)) * 2.0 ** choose.randint(-3, 2)
            # A scaler refuses a step without any gradient, and FSDP2 has one in every step.
            if choose.random() < 0.15 and number > 0 and kinds[each.group] != "fsdp":
                grads[number] = None
        if choose.random() < 0.15:
            infinite = grads[choose.choice([*grads])]
            if infinite is not None:
                infinite[0, 0] = float("inf")
        found.steps.append(grads)
        some = [i for i, each in enumerate(found.experts) if places[each.group] > 1]
        some = [i for i in some if choose.random() < 0.3]
        found.moves.append({i: choose.randrange(places[found.experts[i].group]) for i in some})
    return found


class Side:
    """The layers of a rank, or of the process that has everything, and their training."""

    def __init__(self, given: Script, is_whole: bool) -> None:
        self.script = given
        self.is_whole = is_whole
        self.homes = [each.home for each in given.experts]
        torch.manual_seed(0)
        first = [torch.randn(ROWS, COLUMNS) for _ in given.experts]
        here = filter(self.is_here, range(len(given.experts)))
        self.layers = {number: self.layer(number, first[number]) for number in here}
        self.optimizer = self.make_optimizer()
        self.scaler = amp.GradScaler("cpu", init_scale=8.0)
        self.around: Any = None
        if given.way == "FP16_Optimizer":
            self.around = amp.FP16_Optimizer(self.optimizer, loss_scale="dynamic", verbose=False)

    def is_here(self, number: int) -> bool:
        kind = self.script.kinds[self.script.experts[number].group]
        if self.is_whole or kind in OF_ALL:
            return True
        here = dist.get_rank() if kind in ("world", "mesh") else mesh().get_local_rank("ep")
        return self.homes[number] == here

    def layer(self, number: int, weight: Tensor) -> Any:
        made = nn.Linear(COLUMNS, ROWS, bias=False)
        made.weight.data.copy_(weight)
        kind = self.script.kinds[self.script.experts[number].group]
        if self.is_whole or kind not in ("fsdp", "shards"):
            return made
        everyone = made_once((dist.get_world_size(),), ("all",))
        return fully_shard(made, mesh=everyone if kind == "fsdp" else mesh()["pp"])

    def params(self, group: int) -> list[Any]:
        experts = self.script.experts
        return [own.weight for i, own in self.layers.items() if experts[i].group == group]

    def make_optimizer(self) -> Any:
        given = self.script
        groups = []
        for number, kind in enumerate(given.kinds):
            own = {"params": self.params(number), **given.options[number]}
            named = {} if self.is_whole or kind in OF_ALL else {"process_groups": over(kind)}
            groups.append({**own, **named})
        if given.optimizer.startswith("torch."):
            return getattr(torch.optim, given.optimizer[6:])(groups, lr=LR)
        kind = getattr(amp.optim, given.optimizer)
        return kind(groups, lr=LR, max_grad_norm=None if given.way == "FP16_Optimizer" else 1.0)

    def step(self, grads: dict[int, Tensor | None]) -> float | None:
        """One iteration; returns the norm that is reported."""
        terms = [
            (own(torch.eye(COLUMNS)).float() * grad.T).sum()
            for number, own in self.layers.items()
            if (grad := grads[number]) is not None
        ]
        loss: Any = sum(terms, torch.zeros((), requires_grad=True))
        way, optimizer = self.script.way, self.optimizer
        norm = None
        if self.around is not None:
            self.around.backward(loss)
            norm = self.around.clip_master_grads(1.0)
            self.around.step()
            self.around.zero_grad()
            return norm
        if way == "alone":
            loss.backward()
            optimizer.step()
        elif way == "scale_loss":
            with amp.init(dtype=torch.bfloat16, loss_scale="dynamic") as handle:
                with handle.scale_loss(loss, optimizer) as scaled:
                    scaled.backward()
                optimizer.step()
        else:
            self.scaler.scale(loss).backward()
            if way == "unscale_":
                self.scaler.unscale_(optimizer)
            self.scaler.step(optimizer)
            self.scaler.update()
        optimizer.zero_grad()
        return getattr(optimizer, "grad_norm", None)

    def move(self, homes: dict[int, int], weights: dict[int, Tensor]) -> None:
        """Gives experts new homes, where they have no state yet."""
        for number, home in homes.items():
            if self.homes[number] == home:
                continue
            self.homes[number] = home
            if number in self.layers:
                self.optimizer.state.pop(self.layers.pop(number).weight, None)
            if self.is_here(number):
                self.layers[number] = self.layer(number, weights[number])
        self.layers = dict(sorted(self.layers.items()))
        for number, group in enumerate(self.optimizer.param_groups):
            group["params"] = self.params(number)


def mesh() -> DeviceMesh:
    return made_once((2, 2), ("pp", "ep"))


def over(kind: str) -> Any:
    """The process_groups of a param_group."""
    if kind == "world":
        return dist.group.WORLD
    return mesh() if kind == "mesh" else mesh()["ep"]


def wrong(given: Script) -> str:
    """What differs first from the process that has everything, in words."""
    first = ""
    own, everything = Side(given, False), Side(given, True)
    for number, (grads, homes) in enumerate(zip(given.steps, given.moves, strict=True)):
        found, _ = own.step(grads), everything.step(grads)
        there = [grad for grad in grads.values() if grad is not None]
        norm = torch.cat([g.double().flatten() for g in there]).norm().item() if there else 0.0
        right = pytest.approx(norm, rel=NORM_ERROR)
        if found is not None and math.isfinite(norm) and found != right:
            first = first or f"{given}: step {number} has the norm {found}, and not {norm}"
        weights = {i: each.weight.detach().clone() for i, each in everything.layers.items()}
        # A direction of Muon may be rounded to the other bfloat16.
        bound = LR * 2.0**-6 if given.optimizer == "Muon" else 2e-6
        for i, each in own.layers.items():
            if (apart := (whole(each.weight) - weights[i]).abs().max().item()) > bound:
                first = first or f"{given}: after step {number} weights of {i} are {apart} apart"
        for side in own, everything:
            side.move(homes, weights)
    return first


def all_wrong(seeds: range) -> list[tuple[int, str]]:
    # A rank's only experts may have had no token so far.
    warnings.filterwarnings("ignore", "amp_mp: no parameter of this optimizer has a gradient")
    world = dist.get_world_size()
    return [(seed, text) for seed in seeds if (text := wrong(script(seed, world)))]


@pytest.mark.parametrize("world", [2, 4])
def test_any_experts_on_any_process_train_as_on_one(world: int) -> None:
    """AMP_MP_EXAMPLES says how many."""
    for found in on_ranks(world, all_wrong, range(examples(25)), limit_s=60 + 2.0 * examples(25)):
        assert found == []


ADAMH, MUONH = ({"hyperball": True, "use_muon": is_muon} for is_muon in (False, True))


@pytest.mark.parametrize(
    ("kinds", "options"),
    [
        (["shards", "fsdp"], [ADAMH, MUONH]),
        (["shards", "fsdp", "fsdp"], [MUONH, ADAMH, MUONH]),
    ],
    ids=["a rule here alone", "a rule that comes first here alone"],
)
def test_each_rule_gathers_its_sums_as_the_others_do(
    kinds: list[str], options: list[dict[str, Any]]
) -> None:
    """Half of the ranks have no expert. Each rule with norms of updates gathers these by itself."""
    experts = [Expert(group, 0) for group in range(len(kinds))]
    grads = {
        number: torch.full((ROWS, COLUMNS), 1.0 + number).triu() for number in range(len(kinds))
    }
    given = Script("Muon", "alone", kinds, options, experts, [grads] * 2, [{}] * 2)
    assert on_ranks(4, wrong, given) == [""] * 4
