"""prepare on models of fully_shard and parallelize_module, over two processes."""

from __future__ import annotations

from typing import Any

import prepare_sharded
import pytest
import torch
from around_sharding import even as two_layers
from around_sharding import net as network
from prepare_sharded import BF16, batch
from ranks import on_ranks
from torch import Tensor

import amp_mp as amp

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("distributed")]
Ranks = list[dict[str, Any]]
CASES = {
    case.__name__: case
    for case in (
        prepare_sharded.shard_then_prepare,
        prepare_sharded.writes_are_noticed,
        prepare_sharded.other_dtypes,
        prepare_sharded.refusals,
        prepare_sharded.tensor_parallel,
        prepare_sharded.loading,
        prepare_sharded.orders,
        prepare_sharded.float32_weights,
        prepare_sharded.masters,
        prepare_sharded.stages,
        prepare_sharded.measured_bytes,
    )
}
NORM = {"1.weight", "1.bias"}


def all_cases() -> dict[str, Any]:
    """What one process finds in each case."""
    return {name: case() for name, case in CASES.items()}


@pytest.fixture(scope="module")
def ranks() -> Ranks:
    """What each of two processes found in every case."""
    return on_ranks(2, all_cases)


def same_bits(a: dict[str, Tensor | None], b: dict[str, Tensor]) -> None:
    """Of all tensors in `a` that are there."""
    assert set(a) == set(b)
    for name, value in a.items():
        assert value is None or torch.equal(value, b[name]), name


def test_new_optimizers_go_on_with_every_bit_of_a_shard(ranks: Ranks) -> None:
    """80 steps of 1e-4, whatever float32 does within 1 %."""
    for found in (each["stages"] for each in ranks):
        assert "was prepared before it was sharded" in found.pop("sharded after a step")
        for name, moved in found.items():
            for param, values in moved.items():
                assert ((values + 0.008).abs() < 0.00008).all(), (name, param)


def test_a_sharded_model_is_prepared_in_place(ranks: Ranks) -> None:
    for rank, found in enumerate(each["shard_then_prepare"] for each in ranks):
        assert found["same objects"]
        assert found["attribute"] == "stays"
        assert found["before"]["3.weight"].shape == (1 - rank, 6), "one shard is empty"
        for name, before in found["before"].items():
            wanted = before if name in NORM else before.to(BF16)
            assert torch.equal(found["after"][name], wanted)
            assert found["after"][name].dtype == found["wrapper dtypes"][name] == wanted.dtype


def test_the_float32_shards_are_kept_until_the_first_step(ranks: Ranks) -> None:
    for found in (each["shard_then_prepare"] for each in ranks):
        for moment in ("originals", "after training"):
            kept = {n for n, value in found[moment].items() if value is not None}
            assert kept == set(found["before"]) - NORM
            same_bits(found[moment], found["before"])


@pytest.mark.usefixtures("_threads_are_left_as_they_were")
def test_a_sharded_model_computes_as_a_whole_one(ranks: Ranks) -> None:
    torch.set_num_threads(1)  # as the ranks have: torch's sums of two threads round otherwise
    twin = amp.prepare(network(), BF16)
    output = twin(batch())
    output.float().square().mean().backward()
    for found in (each["shard_then_prepare"] for each in ranks):
        assert torch.equal(found["output"], output)
        for name, param in twin.named_parameters():
            assert param.grad is not None
            assert torch.equal(found["gradients"][name], param.grad), name
        assert found["again"] == "", "nothing is left to be converted"


def test_a_shard_that_was_written_is_what_its_master_starts_from(ranks: Ranks) -> None:
    for found in (each["writes_are_noticed"] for each in ranks):
        assert found["dropped"]
        assert found["other"]
        assert torch.equal(found["master"], found["weight"].float())


def test_prepare_for_another_dtype_starts_from_the_float32_shards(ranks: Ranks) -> None:
    for found in (each["other_dtypes"] for each in ranks):
        same_bits(found["originals"], found["before"])
        for name, before in found["before"].items():
            assert torch.equal(found["after"][name], before if name in NORM else before.to(BF16))
            assert torch.equal(found["converted"][name], before.half())
        assert set(found["converted keeps"].values()) == {None}


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("ran", ["has run a forward", "right after fully_shard"]),
        ("gathered", ["model.0 has run", "gathered now"]),
        ("mixed", ["fully_shard([model[1]], reshard_after_forward=False)", "keep_fp32_only=[]"]),
        ("alone", ["convert the rest: 3. Make them", "fully_shard([model[3]]", "To convert all"]),
        ("part", ["model.weight belongs to a fully_shard unit", "whole model"]),
        ("late", ["Linear.weight", "Shard the float32 model first", "(7, 6)"]),
        ("late step", ["Linear.weight", "Shard the float32 model first", "(7, 6)"]),
    ],
)
def test_what_cannot_be_prepared_is_refused_by_name(
    ranks: Ranks, case: str, words: list[str]
) -> None:
    for found in (each["refusals"] for each in ranks):
        for word in words:
            assert word in found[case], found[case]


def test_a_refusal_changes_nothing_and_the_advice_works(ranks: Ranks) -> None:
    for found in (each["refusals"] for each in ranks):
        assert found["unchanged"]
        assert found["then"] == BF16


@pytest.mark.parametrize("when", ["after prepare", "after a forward"])
def test_loaded_float32_values_are_kept(ranks: Ranks, when: str) -> None:
    for found in (each["loading"] for each in ranks):
        kept = {name for name, value in found[when].items() if value is not None}
        assert kept == set(found["wanted"]) - NORM
        same_bits(found[when], found["wanted"])


@pytest.mark.parametrize("calls", prepare_sharded.orders_of_calls(), ids=" ".join)
def test_in_any_order_of_calls_masters_begin_with_every_bit(
    ranks: Ranks, calls: tuple[str, ...]
) -> None:
    """Sharded last, they are lost, and the first step says so. Assigned, weights are float32."""
    late = calls[-1] == "shard" and calls[-3:] != ("prepare", "assign", "shard")
    for found in (each["orders"] for each in ranks):
        assert ("Shard the float32 model first" in found[calls]) is late
        assert late or found[calls] == ""


def test_tensor_parallel_weights_become_low_precision_shards(ranks: Ranks) -> None:
    output = amp.prepare(two_layers(), BF16)(batch())
    for found in (each["tensor_parallel"] for each in ranks):
        same_bits(found["originals"], found["before"])
        assert all(value is not None for value in found["originals"].values())
        for name, before in found["before"].items():
            assert torch.equal(found["after"][name], before.to(BF16))
            assert found["dtypes"][name] == BF16
        torch.testing.assert_close(found["output"], output, rtol=2.0**-6, atol=2.0**-8)
    shapes = {n: tuple(v.shape) for n, v in ranks[0]["tensor_parallel"]["after"].items()}
    assert shapes == {"0.weight": (4, 6), "0.bias": (4,), "1.weight": (6, 4), "1.bias": (6,)}


def test_float32_state_dict_of_shards_has_dtensors(ranks: Ranks) -> None:
    for found in (each["float32_weights"] for each in ranks):
        assert found["kinds"]
        assert found["placed"]
        same_bits(found["found"], found["before"])
        same_bits(found["one by one"], found["before"])


def test_sharded_memory_says_what_fsdp2_holds_and_receives(ranks: Ranks) -> None:
    rows = amp.diagnose.sharded_memory(96 * 64, 2).rows
    wanted = {"float32": rows[0], "bfloat16": rows[2]}
    for found in (each["measured_bytes"] for each in ranks):
        for name, row in wanted.items():
            assert found[name] == {
                "all_gather": row.all_gather,
                "reduce": row.reduce,
                "weights": row.weights,
                "gradients": row.gradients,
            }


def test_the_first_masters_are_the_float32_shards(ranks: Ranks) -> None:
    for found in (each["masters"] for each in ranks):
        same_bits(found["lr 0.0"], found["before"])
        same_bits(found["loaded"], found["others"])


def test_masters_are_those_of_a_model_on_one_process(ranks: Ranks) -> None:
    """Both processes have the same batch, so that the mean of their gradients is exact."""
    twin = amp.prepare(network(), BF16)
    optimizer = amp.optim.AdamW(twin.parameters(), lr=0.01, weight_decay=0.0, memory="exact")
    for _ in range(3):
        twin(batch()).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    wanted = amp.float32_state_dict(twin, optimizer)
    for found in (each["masters"] for each in ranks):
        same_bits(found["whole 0.01"], wanted)


def test_meshes_of_two_dimensions() -> None:
    for rank in on_ranks(4, prepare_sharded.two_dimensions):
        for found in rank.values():
            same_bits(found["originals"], found["before"])
            assert all(value is not None for value in found["originals"].values())
            same_bits(found["after"], {n: v.to(BF16) for n, v in found["before"].items()})
            assert found["losses"][2] < found["losses"][0]
