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
os.write(1, ("FOUND" + json.dumps({call}) + "\\n").encode())
dist.barrier()
os._exit(0)
"""


def found_on(run_on: Any, call: str) -> list[Any]:
    """What an expression with functions of verl_engine is on each of two processes."""
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
    runs = "('fp16', 'lean', None), ('bf16', 'exact', torch.bfloat16)"
    ranks = found_on(run_on, f"[(lends_its_memory(*run), resumes(*run)) for run in ({runs})]")
    assert ranks == [[[True, True], [True, True]]] * 2
