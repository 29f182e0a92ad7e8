"""A run that changes its layout, its number of processes or both, again and again: the same bits.

Every optimizer, bfloat16 and float16 weights, param_groups, tied and frozen parameters, and
parameters without a gradient.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from layouts import (
    REPLICATED,
    Bag,
    differences,
    disagreements,
    local,
    placed_as,
    set_grads,
    shard,
)
from layouts import digests as digests_of
from ranks import LARGE, on_ranks
from rules import RULES, cases
from torch import Tensor, nn

import amp_mp as amp
from amp_mp.optim.base import stepper_of
from amp_mp.sharding.shards import is_dtensor

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("distributed")]

# Rows of 64 are two groups of 32, which two processes cut between the groups. The convolution of
# (64, 8, 2, 2) has rows of 32, whose scales are (64, 1).
SHAPES = [(96, 64), (33, 96), (64, 8, 2, 2), (8, 6, 32), (1, 64), (33,), (4, 64), (1,)]
# Without a norm of whole tensors and without groups that a layout cuts, all layouts give one bit.
CHAIN = [("fsdp", 2), ("columns fsdp", 4), ("fsdp", 1), ("hsdp", 4), ("columns", 2), ("fsdp", 4)]


class Model(Bag):
    """Bag with a parameter of two names, one that is frozen, and one without gradients."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__(SHAPES, dtype)
        self.tied = self.p3
        self.frozen = nn.Parameter(torch.ones(8, 64, dtype=dtype), requires_grad=False)
        self.late = nn.Parameter(torch.ones(8, 64, dtype=dtype))
        self.last = nn.Parameter(torch.ones(3, dtype=dtype))

    def parallelize(self, mesh: Any, kind: str) -> None:
        super().parallelize(mesh, kind)
        self.frozen.requires_grad_(False)
        self.tied = self.p3


def made(rule: str, memory: str, dtype: torch.dtype, layout: str | None = None) -> Any:
    """A model and its optimizer, whose first two parameters have a group of their own."""
    model: Any = Model(dtype)
    model = model if layout is None else shard(model, layout)
    kind, options = RULES[rule]
    params = list(model.parameters())
    groups = [{"params": params[2:]}, {"params": params[:2], "lr": 0.02}]
    options = {"initial_accumulator_value": 0.1, **options} if "adagrad" in rule else options
    return model, kind(groups, **{**options, "memory": memory, "seed": 3})


def steps(model: Any, optimizer: Any, numbers: range) -> None:
    for step in numbers:
        params = list(model.parameters())
        set_grads(params, 100 * step)
        model.frozen.grad = None
        if step < 4:
            model.late.grad = None
        optimizer.step()


def run(rule: str, memory: str, dtype: torch.dtype, layout: str, number: int, path: str) -> Any:
    """One stage of the chain: loads the last one, two steps, saves; what differs from one process.

    Returns the differences and digests of what this process has.
    """
    model, optimizer = made(rule, memory, dtype, layout)
    if number:
        amp.checkpoint.load(f"{path}{number - 1}", model, optimizer)
    steps(model, optimizer, range(2 * number, 2 * number + 2))
    amp.checkpoint.save(f"{path}{number}", model, optimizer)
    params = list(model.parameters())
    if stepper_of(optimizer).group_rules()[0].is_layerwise:  # sums of shards are rounded otherwise
        return [], digests_of(params, optimizer)
    plain, plain_optimizer = made(rule, memory, dtype)
    steps(plain, plain_optimizer, range(2 * number + 2))
    plain_optimizer.init_state()
    return (
        differences(params, optimizer, list(plain.parameters()), plain_optimizer),
        digests_of(params, optimizer),
    )


CASES = [
    ("adamw", "micro", torch.float16),
    ("adamw", "nano", torch.bfloat16),
    ("sgd", "lean", torch.bfloat16),
    ("lion", "tiny", torch.bfloat16),
    ("lamb", "exact", torch.bfloat16),
    ("novograd", "lean", torch.bfloat16),
    ("adagrad", "micro", torch.bfloat16),
    ("amsgrad adamw", "exact", torch.bfloat16),
]
LONG = cases(RULES, ("exact", "tiny", "micro", "nano"), (torch.bfloat16, torch.float16))


@pytest.mark.parametrize(("rule", "memory", "dtype"), LONG if LARGE else CASES[:2])
def test_a_chain_of_layouts_has_the_bits_of_one_process(
    rule: str, memory: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    for number, (layout, world) in enumerate(CHAIN):
        ranks = on_ranks(world, run, rule, memory, dtype, layout, number, f"{tmp_path}/")
        assert [found for found, _ in ranks] == [[]] * world, (layout, number)
        assert disagreements([digest for _, digest in ranks]) == []


def load_norm(layout: str, path: str, memory: str, rule: str) -> list[str]:
    """Bits of the state that was saved, whatever the layout."""
    model, optimizer = made(rule, memory, torch.bfloat16, layout)
    amp.checkpoint.load(path, model, optimizer)
    plain, plain_optimizer = made(rule, memory, torch.bfloat16)
    steps(plain, plain_optimizer, range(3))
    plain_optimizer.init_state()
    pairs = [list(each.parameters()) for each in (model, plain)]
    return differences(pairs[0], optimizer, pairs[1], plain_optimizer)


@pytest.mark.parametrize("rule", ["novograd", "lamb", "lars", "larc"])
@pytest.mark.parametrize(
    ("layout", "world"),
    [("fsdp", 2), ("columns fsdp", 4), ("hsdp", 4)] if LARGE else [("fsdp", 2)],
)
def test_states_of_layerwise_rules_are_loaded_bit_for_bit(
    rule: str, layout: str, world: int, tmp_path: Path
) -> None:
    """`layer` of NovoGrad too. After loading, norms are added in another order."""
    model, optimizer = made(rule, "lean", torch.bfloat16)
    steps(model, optimizer, range(3))
    amp.checkpoint.save(tmp_path / "c", model, optimizer)
    assert on_ranks(world, load_norm, layout, f"{tmp_path}/c", "lean", rule) == [[]] * world


def cut(layout: str, path: str) -> Any:
    """Groups that do not fit the cut become bfloat16 and ue8m8; returns what is wrong.

    ue8m8 has all levels of log8.
    """
    model, optimizer = made("adamw", "micro", torch.bfloat16, layout)
    amp.checkpoint.load(f"{path}/a", model, optimizer)
    plain, plain_optimizer = made("adamw", "micro", torch.bfloat16)
    steps(plain, plain_optimizer, range(3))
    plain_optimizer.init_state()
    wanted = plain_optimizer.torch_state_dict()["state"]
    found = optimizer.torch_state_dict()["state"]
    numbers = [p for group in optimizer.param_groups for p in group["params"]]
    plain_params = {p: n for n, p in plain.named_parameters()}
    wrong = []
    for number, param in enumerate(numbers):
        if number not in wanted:
            continue
        exact = wanted[number]["exp_avg"]
        off = (local(found[number]["exp_avg"]) - local(placed_as(param, exact))).abs()
        cut_groups = "exp_avg_m8" not in optimizer.state[param]
        bound = 2.0**-7 * local(placed_as(param, exact)).abs() if cut_groups else 0 * off
        name = plain_params[[p for g in plain_optimizer.param_groups for p in g["params"]][number]]
        if not bool((off <= bound).all()):
            wrong.append(f"{name}: {float(off.max())} off")
        for entry in ("exp_avg_sq", "weight"):
            a = param if entry == "weight" else found[number][entry]
            b = plain.get_parameter(name) if entry == "weight" else wanted[number][entry]
            if not torch.equal(local(a), local(placed_as(param, b.detach()))):
                wrong.append(f"{name}: {entry}")
    steps(model, optimizer, range(3, 5))
    amp.checkpoint.save(f"{path}/{layout}", model, optimizer)
    formats = {n: "exp_avg_m8" in optimizer.state.get(p, {}) for n, p in model.named_parameters()}
    return wrong, formats, digests_of(list(model.parameters()), optimizer)


@pytest.mark.parametrize(("layout", "world"), [("rows", 2), ("rows", 4), ("rows fsdp", 4)])
def test_groups_that_processes_cut_are_converted(layout: str, world: int, tmp_path: Path) -> None:
    model, optimizer = made("adamw", "micro", torch.bfloat16)
    steps(model, optimizer, range(3))
    amp.checkpoint.save(tmp_path / "a", model, optimizer)
    ranks = on_ranks(world, cut, layout, str(tmp_path))
    assert [wrong for wrong, _, _ in ranks] == [[]] * world
    assert len({repr(formats) for _, formats, _ in ranks}) == 1
    # (96, 64) by two is cut between groups, by four within them; (33, 96) within them always.
    assert ranks[0][1]["p0"] == ((layout, world) != ("rows", 4))
    assert not ranks[0][1]["p1"]
    assert disagreements([digest for _, _, digest in ranks]) == []
    amp.checkpoint.load(tmp_path / layout, model, optimizer)
    assert {float(state["step"]) for state in optimizer.state.values()} == {5.0, 1.0}


def templates(path: str, layout: str) -> list[str]:
    """How many elements of each state this process reads, in words where it is not its shard."""
    from amp_mp.checkpoint import optimizer_part
    from amp_mp.checkpoint.contents import Contents

    model, _ = made("adamw", "micro", torch.bfloat16, layout)
    params = dict(model.named_parameters())
    contents = Contents(path, params)
    found = []
    for name, param in params.items():
        for entry, value in optimizer_part.template(contents, name, param).items():
            assert isinstance(value, Tensor)
            count = local(param).numel() // (32 if entry.endswith("_scale") else 1)
            count *= 2 if entry.endswith("_ue8m8") else 1  # bytes
            if entry not in REPLICATED and local(value).numel() != count:
                found.append(f"{name} {entry}")
            assert is_dtensor(value) == (local(value).numel() == count and is_dtensor(param)) or (
                entry in REPLICATED
            )
    return found


def test_every_process_reads_its_shards_and_no_more(tmp_path: Path) -> None:
    model, optimizer = made("adamw", "micro", torch.bfloat16)
    steps(model, optimizer, range(1))
    amp.checkpoint.save(tmp_path / "c", model, optimizer)
    for layout, world in (("fsdp", 2), ("fsdp", 4), ("columns fsdp", 4), ("hsdp", 4)):
        assert on_ranks(world, templates, str(tmp_path / "c"), layout) == [[]] * world
    # "rows" cuts dimension 1: rows of 96, and the convolution's, within groups.
    codes = ("exp_avg_m8", "exp_avg_sq_log8")
    whole = {f"{n} {e}{end}" for n in ("p1", "p2") for e in codes for end in ("", "_scale")}
    assert set(on_ranks(2, templates, str(tmp_path / "c"), "rows")[0]) == whole
