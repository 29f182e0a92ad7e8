"""Bytes that training with fully_shard takes and sends, a process, from the formats' widths.

No measurement tells beforehand what a thousand processes will hold. It is no example, because users
ask for their own models, and because the widths are what an optimizer of the package really makes.
"""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from amp_mp import optim
from amp_mp.optim.state.stored_formats import MASTER_ENTRIES
from amp_mp.text_table import aligned

VERDICT_BYTES = 3 * 8  # sum of squares, largest |g|, number of inf and NaN, as float64


@dataclass(frozen=True)
class Recipe:
    """How a model is trained with fully_shard.

    weights: dtype of the shards. computes: dtype of the gathered weights, the policy's
    param_dtype. memory: the optimizer's preset.
    """

    name: str
    weights: torch.dtype
    computes: torch.dtype
    memory: str


RECIPES = (
    Recipe("float32 shards, param_dtype=bfloat16", torch.float32, torch.bfloat16, "float32"),
    Recipe('the same, memory="lean"', torch.float32, torch.bfloat16, "lean"),
    *(
        Recipe(f'bfloat16 shards, memory="{memory}"', torch.bfloat16, torch.bfloat16, memory)
        for memory in ("exact", "lean", "tiny", "micro", "nano", "masterless")
    ),
)


@dataclass(frozen=True)
class RankBytes:
    """Bytes of one process, by recipe.

    weights, gradients, masters, states: its shards' bytes between backward and zero_grad.
    host: the part of masters and states that offload="state" keeps in memory of the host.
    gathered: the whole weights of the largest unit. all_gather, reduce: what the process receives
    in a step for weights and gradients. verdict: what it receives so that all processes find the
    same norm and overflow.
    """

    recipe: Recipe
    weights: float
    gradients: float
    masters: float
    states: float
    host: float
    gathered: float
    all_gather: float
    reduce: float
    verdict: float

    @property
    def held(self) -> float:
        """The sum of weights, gradients, masters, states and the largest gathered unit."""
        kept = self.masters + self.states - self.host
        return self.weights + self.gradients + kept + self.gathered


@dataclass(frozen=True)
class ShardedMemory:
    """What `sharded_memory` found, a row for each recipe; printed, a table in GiB."""

    parameters: int
    ranks: int
    replicas: int
    rows: tuple[RankBytes, ...]

    def __str__(self) -> str:
        header = ["", "weights", "gradients", "masters", "states", "host", "gathered", "held"]
        header.append("received")
        rows = []
        for row in self.rows:
            sent = row.all_gather + row.reduce + row.verdict
            own = [getattr(row, name) for name in header[1:-1]]
            rows.append([row.recipe.name, *(f"{each / 2**30:.2f}" for each in (*own, sent))])
        replicas = f" in {self.replicas} replicas" if self.replicas > 1 else ""
        title = f"{self.parameters:,} parameters on {self.ranks} processes{replicas}, GiB each"
        return f"{title}\n{aligned(header, rows)}"


def sharded_memory(
    parameters: int | nn.Module,
    ranks: int,
    *,
    optimizer: str = "AdamW",
    replicas: int = 1,
    largest_unit: int = 0,
    reduce_dtype: torch.dtype = torch.float32,
    reshard_after_forward: bool = True,
    keys: int = 1,
    recipes: Sequence[Recipe] = RECIPES,
    **options: Any,
) -> ShardedMemory:
    """Bytes that a process holds and receives in a training step with fully_shard, by recipe.

    Counted from the formats of docs/formats.md, as if every parameter were in a weight
    matrix whose rows are multiples of 32; activations and temporary buffers are not counted. FSDP2
    gathers the next unit while one computes, so that `gathered` may be there twice.

    Every collective is counted as a ring: each of n processes receives (n - 1) / n of what an
    all-gather makes or a reduce-scatter takes, and twice that of what an all-reduce takes. A step
    has an all-gather of all weights in forward, another in backward if units are resharded, a
    reduce-scatter of all gradients over the shards and an all-reduce of the shard over replicas.

    Args:
        parameters: the number of the model's parameters, or the model. ranks: processes in all.
        optimizer: the name of one of amp_mp.optim.
        replicas: HSDP's copies of the model; ranks / replicas processes share one.
        largest_unit: parameters of the largest module that fully_shard was called with.
        reduce_dtype: the policy's reduce_dtype, in which gradients are sent.
        reshard_after_forward: as for fully_shard.
        keys: distinct groups of mesh dimensions that parameters are split over.
        options: other arguments of the optimizer: which states it has (momentum), and offload.

    Raises ValueError naming the argument for numbers that are not positive, replicas that do not
    divide ranks, and an optimizer that amp_mp does not have.
    """
    if isinstance(parameters, nn.Module):
        parameters = sum(param.numel() for param in parameters.parameters())
    for name, value in (("parameters", parameters), ("ranks", ranks), ("replicas", replicas)):
        if value < 1:
            raise ValueError(f"{name} must be positive, found {value}")
    if ranks % replicas:
        raise ValueError(f"replicas must divide ranks, found {replicas} of {ranks}")
    if optimizer not in optim.__all__ or not hasattr(getattr(optim, optimizer), "step"):
        raise ValueError(f"optimizer must be the name of one of amp_mp.optim, found {optimizer!r}")
    shards = ranks // replicas
    local, others = parameters / shards, (shards - 1) / shards
    rows = []
    for recipe in recipes:
        width, computed = recipe.weights.itemsize, recipe.computes.itemsize
        master, states = _measured(recipe, optimizer, options)
        gathers = 2 if reshard_after_forward else 1
        scattered, reduced = others * parameters, 2 * (replicas - 1) / replicas * local
        rows.append(
            RankBytes(
                recipe,
                weights=local * width,
                gradients=local * width,  # FSDP2 casts them to the shard's dtype
                masters=local * master,
                states=local * states,
                host=local * (master + states) if options.get("offload") else 0,
                gathered=largest_unit * computed if shards > 1 else 0,
                all_gather=gathers * others * parameters * computed,
                reduce=(scattered + reduced) * reduce_dtype.itemsize,
                verdict=(shards - 1) * VERDICT_BYTES * keys,
            )
        )
    return ShardedMemory(parameters, ranks, replicas, tuple(rows))


@torch.inference_mode(False)
def _measured(recipe: Recipe, optimizer: str, options: Mapping[str, Any]) -> tuple[float, float]:
    """Bytes an element of the master, and of all states, as the optimizer itself chooses them."""
    param: Tensor = nn.Parameter(torch.zeros(32, 32, dtype=recipe.weights, device="cpu"))
    with warnings.catch_warnings():  # of a decay that "micro" rounds badly: nothing is trained
        warnings.filterwarnings("ignore", "amp_mp: squares stored")
        made = getattr(optim, optimizer)([param], lr=1.0, memory=recipe.memory, **options)
    made.init_state()
    found = made.memory_report().per_parameter
    master = sum(found.pop(entry, 0) for entry in MASTER_ENTRIES)
    return master, sum(each for kind, each in found.items() if kind not in ("weight", "step"))
