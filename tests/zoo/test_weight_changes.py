"""A Llama of transformers that is trained on two processes, and one that only gets its changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers as hf
from helpers import raw_bytes
from language import ENDS, HALF, SIZES, next_token
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.fsdp import fully_shard

import amp_mp as amp

BF16 = torch.bfloat16
STEPS = 8


def llama(tied: bool) -> Any:
    torch.manual_seed(0)
    return hf.LlamaForCausalLM(
        hf.LlamaConfig(**SIZES, **HALF, **ENDS, tie_word_embeddings=tied, use_cache=False)
    )


def write(taken: dict[str, Any], file: Path) -> None:
    tensors = {}
    for name, (positions, values) in taken.items():
        tensors[f"{name}.positions"] = positions.cpu()
        tensors[f"{name}.values"] = values.cpu()
    save_file(tensors, file)


def read(file: Path) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    tensors = load_file(file)
    names = [key.removesuffix(".values") for key in tensors if key.endswith(".values")]
    return {name: (tensors[f"{name}.positions"], tensors[f"{name}.values"]) for name in names}


def train(tied: bool, dtype: torch.dtype | None, folder: str) -> float:
    """Writes a file for each step and process, and the whole weights at the end.

    Returns the largest share of the weights on this process that a step has changed.
    """
    model = llama(tied)
    for layer in model.model.layers:
        fully_shard([layer.input_layernorm, layer.post_attention_layernorm])
        fully_shard(layer)
    fully_shard(model.model.norm)
    fully_shard(model)
    amp.prepare(model, BF16)
    optimizer = amp.optim.AdamW(model.parameters(), lr=1e-5, max_grad_norm=1.0)
    changes, shares, rank = amp.Changes(model, dtype), [], dist.get_rank()
    for step in range(STEPS):
        source = torch.Generator().manual_seed(10 * step + rank)
        next_token(model, {"tokens": torch.randint(3, 96, (4, 24), generator=source)}).backward()
        optimizer.step()
        optimizer.zero_grad()
        shares.append(changes.share())
        write(changes.take(global_positions=True), Path(folder, f"{step}.{rank}.safetensors"))
    weights = {name: p.full_tensor() for name, p in model.named_parameters()}
    if rank == 0:
        torch.save(weights, Path(folder, "whole.pt"))
    return max(shares)


# gloo's threads abort a process that ends tidily after FSDP2, one run of four without amp_mp too.
SCRIPT = """
import os, torch, torch.distributed as dist
import torchvision_ops
torchvision_ops.install()
from test_weight_changes import train
dist.init_process_group("gloo")
share = train({tied}, {dtype}, {folder!r})
os.write(1, f"SHARE {{share}}\\n".encode())  # print's parts would mix with the other process's
dist.barrier()
os._exit(0)
"""


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("dtype", [None, BF16])
def test_files_of_changes_make_a_plain_llama_the_trainers(
    tied: bool, dtype: torch.dtype | None, tmp_path: Path, run_on: Any
) -> None:
    lines = run_on(2, SCRIPT.format(tied=tied, dtype=dtype, folder=str(tmp_path)))
    shares = [float(line.split()[1]) for line in lines if line.startswith("SHARE")]
    assert len(shares) == 2
    assert 0 < max(shares) < 0.5
    receiver: nn.Module = llama(tied)
    # With dtype=None the norms are handed over in float32, else in bfloat16, for what has them so.
    receiver = amp.prepare(receiver, BF16) if dtype is None else receiver.to(BF16)
    before = raw_bytes(dict(receiver.named_parameters()))
    for step in range(STEPS):
        for rank in range(2):
            amp.apply_changes(receiver, read(tmp_path / f"{step}.{rank}.safetensors"))
    named = dict(receiver.named_parameters())
    assert ("lm_head.weight" in named) == (not tied)
    whole = torch.load(tmp_path / "whole.pt")
    assert whole.keys() == named.keys()
    wanted = {name: value.to(named[name].dtype) for name, value in whole.items()}
    assert raw_bytes(named) == raw_bytes(wanted)
    assert raw_bytes(named) != before
