"""amp_mp's optimizers in verl's FSDP2 engine: its build_optimizer, steps, offload, checkpoints."""

from __future__ import annotations

import json
from typing import Any

import pytest

SCRIPT = """
import json, os
import torchvision_ops
torchvision_ops.install()
import torch
import torch.distributed as dist
dist.init_process_group("gloo")
from verl_engine import *
from verl_deltas import *
os.write(1, ("FOUND" + json.dumps({call}) + "\\n").encode())
dist.barrier()
os._exit(0)
"""


def found_on(run_on: Any, call: str) -> list[Any]:
    """What an expression with names of verl_engine and verl_deltas is on each of two processes."""
    lines = run_on(2, SCRIPT.format(call=call))
    found = [json.loads(line.removeprefix("FOUND")) for line in lines if line.startswith("FOUND")]
    assert len(found) == 2
    return found


def test_training_is_that_of_torchs_adamw(run_on: Any) -> None:
    """Process 1 alone has an inf in three steps: both skip them, and the schedule waits."""
    ranks = found_on(run_on, "[optimizer_of_the_page(), *map(beside_torch, ('fp16', 'bf16'))]")
    for made, *found in ranks:
        assert made.startswith("AdamW (memory='lean'")
        for rows, eps, scales in zip(found, (2.0**-11, 2.0**-8), (4, 1), strict=True):
            handed_over, wanted = rows.pop("handed over"), rows.pop("torch")
            for ours in rows.values():
                assert [row[1:] for row in ours] == [row[1:] for row in wanted]
                for (loss, *_), (torchs, *_) in zip(ours, wanted, strict=True):
                    assert loss == pytest.approx(torchs, rel=eps)  # weights may round otherwise
            skipped = [row[1] for row in wanted]
            assert [step for step, was in enumerate(skipped) if was] == [3, 4, 11]
            assert [share == 0 for share in handed_over] == [True, *skipped[1:]]  # from rate 0 on
            assert len({row[3] for row in wanted}) == scales
            assert wanted[-1][0] < 0.7 * wanted[0][0]
    first, second = ([[row[1:] for row in each["amp_mp"]] for each in found[1:]] for found in ranks)
    assert first == second


def test_offload_and_checkpoints_of_verl_keep_every_bit(run_on: Any) -> None:
    """Float32 shards, as verl makes them, and bfloat16 ones with masters."""
    runs = "('fp16', 'lean', None), ('bf16', 'exact', 'bfloat16')"
    ranks = found_on(run_on, f"[(lends_its_memory(*run), resumes(*run)) for run in ({runs})]")
    assert ranks == [[[True, True], [True, True]]] * 2


SKIPS = 3, 4, 11
# Each is trained for verl_deltas.SYNCS syncs; three at a time share the start of two processes.
SYNCED: dict[str, dict[str, Any]] = {
    "float32 shards": {
        "overflows": SKIPS,
        "reshard_after_forward": False,
        "evaluates": True,
    },
    "float32 shards at a small rate": {"overflows": SKIPS, "lr": 1e-6},
    "float16 with loss scaling": {"dtype": "fp16", "overflows": SKIPS},
    "bfloat16 shards with masters": {"overflows": SKIPS, "lr": 1e-5, "prepares": "bfloat16"},
    "tied embeddings and a buffer that changes": {"overflows": SKIPS, "tied": True, "buffer": True},
    "HSDP": {"fsdp_size": 1},
    "param_offload": {"overflows": SKIPS, "offload": True},
    "four steps a sync": {"overflows": SKIPS, "lr": 1e-5, "steps_a_sync": 4},
    "lost syncs, and a sender that begins anew": {"lr": 1e-5, "lost": (5, 8, 9), "anew": (12,)},
}


@pytest.mark.parametrize("first", [0, 3, 6])
def test_delta_sharded_gets_verls_own_entries_without_a_snapshot(first: int, run_on: Any) -> None:
    """Bit for bit and in order; a receiver that only gets them has the bits of a whole export."""
    names = list(SYNCED)[first : first + 3]
    runs = [{"dtype": "bf16", "memory": "lean", **SYNCED[name]} for name in names]
    both = found_on(run_on, f"[synced(**run) for run in {runs}]")
    for name, run, *found in zip(names, runs, *both, strict=True):
        for one in found:
            assert (one["differ"], one["receiver"]) == ([], []), name
        ours, verls = (
            [sum(pair) for pair in zip(*counts, strict=True)]
            for counts in ([one["ours"] for one in found], [one["verl's"] for one in found])
        )
        assert len(ours) == 60
        weights = found[0]["weights"]
        if "steps_a_sync" in run:
            assert all(map(int.__ge__, ours, verls))
            assert sum(ours) > sum(verls)
        elif "lost" in run:
            after = [sync + 1 for sync in run["lost"]]
            assert {ours[sync] for sync in after} == {weights}
            assert [sync for sync in range(60) if ours[sync] != verls[sync]] == after
            assert [sync for sync in range(60) if not ours[sync]] == [0, *run["anew"]]
        else:
            assert ours == verls
            none = [] if run.get("buffer") else [0, *run.get("overflows", ())]  # 0 has rate 0
            assert [sync for sync, count in enumerate(ours) if count == 0] == none
        share = max(verls) / weights
        assert 0.01 < share < 0.05 if run.get("lr") == 1e-6 else share > 0.1


def test_a_mistake_in_an_entry_is_seen(run_on: Any) -> None:
    for found in found_on(run_on, "mistakes()"):
        name = "1 model.embed_tokens.weight"
        said = {
            "none": [],
            "fewer parts": [f"{name}: form"],
            "name": [f"{name}: slots"],
            "shape": [f"{name}: slots"],
            "dtype": [f"{name}: dtype"],
            "counts": [f"{name}: counts"],
            "positions": [f"{name}: positions"],
            "int64": [f"{name}: positions"],
            "values": [f"{name}: values"],
            "float32": [f"{name}: dtype", f"{name}: values"],
            "group": [f"{name}: group"],
            "order": [f"{name}: slots"],
            "superset": [f"{name}: {what}" for what in ("counts", "positions", "values")],
            "receiver": found["process"] == 0,
            "receiver now": False,
        }
        assert {key: found[key] for key in said} == said
        assert found["one less"][0].endswith("in place of 22")
        assert [key for key in found if found[key] == "raises"] == [
            "verl's of 7 parts",
            "verl's as a list",
            "verl's group by name",
            "verl's int64",
        ]


def test_the_engine_refuses_delta_sharded_with_fsdp1(run_on: Any) -> None:
    assert all("needs strategy=fsdp2" in said for said in found_on(run_on, "refuses_fsdp1()"))
