"""sharded_memory: bytes a process, compared with what real optimizers hold."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import amp_mp as amp
from amp_mp.diagnose.rank_bytes import RECIPES, RankBytes, Recipe

ROWS, COLUMNS = 96, 64
ELEMENTS = ROWS * COLUMNS


def trained(recipe: Recipe, optimizer: str, **options: Any) -> dict[str, int]:
    """Bytes after a step of one plain weight, by kind: the whole of what one shard would hold."""
    model = nn.Linear(COLUMNS, ROWS, bias=False)
    if recipe.weights == torch.bfloat16:
        amp.prepare(model, torch.bfloat16)
    kind = getattr(amp.optim, optimizer)
    made = kind(model.parameters(), lr=0.1, memory=recipe.memory, **options)
    model(torch.ones(4, COLUMNS, dtype=recipe.weights)).sum().backward()
    made.step()
    found: dict[str, int] = made.memory_report().bytes
    return found


@pytest.mark.parametrize(
    ("optimizer", "options"),
    [
        ("AdamW", {}),
        ("SGD", {"momentum": 0.9}),
        ("SGD", {}),
        ("Lion", {}),
        ("Adagrad", {}),
        ("Adadelta", {}),
        ("NAdam", {}),
        ("RAdam", {}),
    ],
    ids=["AdamW", "momentum", "SGD", "Lion", "Adagrad", "Adadelta", "NAdam", "RAdam"],
)
@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.name)
def test_a_process_holds_its_share_of_what_an_optimizer_holds(
    recipe: Recipe, optimizer: str, options: dict[str, Any]
) -> None:
    held = trained(recipe, optimizer, **options)
    masters = sum(n for kind, n in held.items() if kind.startswith(("master", "remainder")))
    states = sum(held.values()) - held["weight"] - held["grad"] - masters - held["step"]
    for ranks, replicas in ((1, 1), (8, 1), (8, 4)):
        shards = ranks // replicas
        (row,) = amp.diagnose.sharded_memory(
            ELEMENTS, ranks, replicas=replicas, optimizer=optimizer, recipes=[recipe], **options
        ).rows
        assert row.weights * shards == held["weight"]
        assert row.gradients * shards == held["grad"]
        assert row.masters * shards == masters
        assert row.states * shards == states


def by_name(**arguments: Any) -> dict[str, RankBytes]:
    rows = amp.diagnose.sharded_memory(1000, **arguments).rows
    return {row.recipe.name: row for row in rows}


def test_the_sum_of_all_processes_is_one_and_the_largest_unit_is_whole_everywhere() -> None:
    alone, many = by_name(ranks=1, largest_unit=100), by_name(ranks=10, largest_unit=100)
    for name, row in many.items():
        assert row.gathered == 200, "bfloat16"
        assert alone[name].gathered == 0, "nothing is sharded"
        assert 10 * (row.held - row.gathered) == pytest.approx(alone[name].held)


def test_what_a_process_receives() -> None:
    for row in by_name(ranks=1).values():
        assert row.all_gather == row.reduce == row.verdict == 0
    for row in by_name(ranks=10).values():
        assert row.all_gather == pytest.approx(2 * 0.9 * 1000 * 2)
        assert row.reduce == pytest.approx(0.9 * 1000 * 4)
        assert row.verdict == 9 * 24
    for row in by_name(ranks=10, reshard_after_forward=False, reduce_dtype=torch.bfloat16).values():
        assert row.all_gather == pytest.approx(0.9 * 1000 * 2)
        assert row.reduce == pytest.approx(0.9 * 1000 * 2)
    for row in by_name(ranks=20, replicas=2, keys=2).values():
        assert row.all_gather == pytest.approx(2 * 0.9 * 1000 * 2)
        assert row.reduce == pytest.approx(0.9 * 1000 * 4 + 2 * 0.5 * 100 * 4)
        assert row.verdict == 2 * 9 * 24


def test_it_prints_a_row_for_each_recipe() -> None:
    text = str(amp.diagnose.sharded_memory(8 * 2**30, 8, replicas=2))
    first, header, *rows = text.splitlines()
    assert first == f"{8 * 2**30:,} parameters on 8 processes in 2 replicas, GiB each"
    assert header.split() == [
        "weights",
        "gradients",
        "masters",
        "states",
        "host",
        "gathered",
        "held",
        "received",
    ]
    assert len(rows) == len(RECIPES)
    assert rows[0].split()[-8:-1] == ["8.00", "8.00", "0.00", "16.00", "0.00", "0.00", "32.00"]


def test_offloaded_masters_and_states_are_on_the_host() -> None:
    """lean: 1 byte of a master, 4 of states; 2 of weights and 2 of gradients stay."""
    found = amp.diagnose.sharded_memory(1 << 20, 1, offload="state", betas=(0.9, 0.99))
    lean = found.rows[3]
    assert (lean.host, lean.held) == (5 << 20, 4 << 20)
    with pytest.raises(ValueError, match="offload must be None"):
        amp.diagnose.sharded_memory(1 << 20, 1, offload="cpu")


def test_where_a_script_calls_it_makes_no_difference() -> None:
    wanted = amp.diagnose.sharded_memory(1 << 20, 8)
    with torch.inference_mode(), torch.device("meta"):
        assert amp.diagnose.sharded_memory(1 << 20, 8) == wanted


def test_nothing_is_trained_so_that_no_decay_is_warned_of() -> None:
    by_name(ranks=2, betas=(0.9, 0.995))  # memory="micro" warns of it


def test_a_model_counts_as_its_number_of_parameters() -> None:
    told = amp.diagnose.sharded_memory(torch.nn.Linear(1000, 1000, bias=False), 8)
    assert told == amp.diagnose.sharded_memory(10**6, 8)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"parameters": 0, "ranks": 1}, "parameters must be positive, found 0"),
        ({"parameters": 1, "ranks": 0}, "ranks must be positive, found 0"),
        ({"parameters": 1, "ranks": 4, "replicas": 3}, "replicas must divide ranks"),
        ({"parameters": 1, "ranks": 1, "optimizer": "AdamX"}, "optimizer must be .* 'AdamX'"),
        ({"parameters": 1, "ranks": 1, "optimizer": "MemoryReport"}, "optimizer must be"),
    ],
)
def test_wrong_arguments_are_refused_by_name(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        amp.diagnose.sharded_memory(**arguments)
