"""The folders of slime's disk delta that docs/rl.md writes, read by the format's description."""

from __future__ import annotations

import json
import struct
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import zstandard
from helpers import raw_bytes
from language import next_token
from pages import blocks
from test_weight_changes import BF16, llama
from torch.distributed.fsdp import fully_shard

import amp_mp as amp

PAGE = Path(__file__).resolve().parents[2] / "docs" / "rl.md"
INDEX = "model.safetensors.index.json"
STEPS = [1, 1, 0, 1, 3, 1, 1]  # before each sync
SKIPPED, ALL = 3, 5  # a sync after a skipped step, and one of every weight


def train(tied: bool, dtype: torch.dtype | None, folder: str) -> None:
    """Writes the whole weights beside each version, 0 and 1 before any step."""
    model = llama(tied)
    for layer in model.model.layers:
        fully_shard([layer.input_layernorm, layer.post_attention_layernorm])
        fully_shard(layer)
    fully_shard(model.model.norm)
    fully_shard(model)
    amp.prepare(model, BF16)
    optimizer = amp.optim.AdamW(model.parameters(), lr=1e-4)
    changes, rank = amp.Changes(model, dtype), dist.get_rank()

    def save(version: int) -> None:
        whole = {name: param.detach().full_tensor() for name, param in model.named_parameters()}
        given = {name: weight.to(dtype or weight.dtype) for name, weight in whole.items()}
        if rank == 0:
            torch.save(given, Path(folder, f"{version}.pt"))

    save(0)
    names = {"policy": model, "changes": changes, "rank": rank, "world": dist.get_world_size()}
    names |= {"torch": torch, "dist": dist}
    exec(next(block for block in blocks(PAGE.read_text()) if "weight_v" in block), names)
    save(1)
    for sync, steps in enumerate(STEPS):
        for step in range(steps):
            source = torch.Generator().manual_seed(100 * sync + 10 * step + rank)
            loss = next_token(model, {"tokens": torch.randint(3, 96, (4, 24), generator=source)})
            (loss * (float("inf") if sync == SKIPPED else 1)).backward()
            optimizer.step()
            optimizer.zero_grad()
        if sync == ALL:
            changes.mark_all()
        names["version"] = names["publish"](Path("weights"), names["version"])
        save(sync + 2)


SCRIPT = """
import os, torch, torch.distributed as dist
import torchvision_ops
torchvision_ops.install()
from test_disk_delta import train
dist.init_process_group("gloo")
train({tied}, {dtype}, {folder!r})
dist.barrier()
os._exit(0)
"""


def tensors_of(file: Path) -> tuple[dict[str, bytes], dict[str, str]]:
    """The bytes of each tensor of a safetensors file, and its metadata."""
    data = file.read_bytes()
    (length,) = struct.unpack_from("<Q", data)
    header = json.loads(data[8 : 8 + length])
    metadata, body = header.pop("__metadata__", {}), data[8 + length :]
    assert {about["dtype"] for about in header.values()} <= {"U8"}
    return {name: body[slice(*about["data_offsets"])] for name, about in header.items()}, metadata


class Host:
    """The checkpoint that slime's SGLang keeps on a host: its version, and each tensor's bytes."""

    def __init__(self, weights: dict[str, torch.Tensor]) -> None:
        self.version = 0
        self.tensors = {name: bytearray(raw_bytes(each)[2]) for name, each in weights.items()}

    def pull(self, folder: Path) -> int:
        """Takes it to the folder's version; how many bytes have been written."""
        index = json.loads((folder / INDEX).read_text())
        about = index["metadata"]
        if int(about["base_version"]) != self.version:
            raise RuntimeError(f"version {self.version} is not the base")
        forms = about["delta_encoding"], about["compression_format"], about["checksum_format"]
        assert forms == ("overwrite", "zstd", "adler32")
        found, written = {}, 0
        for file in sorted(folder.glob("*.safetensors")):
            tensors, digests = tensors_of(file)
            for name, compressed in tensors.items():
                delta = zstandard.ZstdDecompressor().decompress(compressed)
                (count,) = struct.unpack_from("<I", delta)
                places = struct.unpack_from(f"<{count}I", delta, 4)
                data = delta[4 + 4 * count :]
                assert len(data) == count == len(set(places))
                whole = self.tensors[name]
                for place, byte in zip(places, data, strict=True):
                    whole[place] = byte
                if f"{zlib.adler32(whole):08x}" != digests[name]:
                    raise RuntimeError(f"{name} has another checksum")
                found[name], written = file.name, written + count
        assert found == index["weight_map"]
        self.version = int(about["version"])
        assert folder.name == f"weight_v{about['version']}" == f"weight_v{self.version:06d}"
        return written


@pytest.mark.parametrize(("tied", "dtype"), [(True, None), (False, BF16)])
def test_a_host_that_pulls_each_version_has_the_trainers_bytes(
    tied: bool, dtype: torch.dtype | None, tmp_path: Path, run_on: Any
) -> None:
    run_on(2, SCRIPT.format(tied=tied, dtype=dtype, folder=str(tmp_path)))
    folders = sorted(tmp_path.joinpath("weights").iterdir())
    assert len(folders) == len(STEPS) + 1
    base = torch.load(tmp_path / "0.pt")
    assert ("lm_head.weight" in base) == (not tied)
    host, late, wrong = Host(base), Host(base), Host(base)
    written = []
    for version, folder in enumerate(folders, 1):
        written.append(host.pull(folder))
        wanted = torch.load(tmp_path / f"{version}.pt")
        assert host.version == version
        assert host.tensors == {name: raw_bytes(each)[2] for name, each in wanted.items()}
    whole = sum(map(len, host.tensors.values()))
    none = [0, 1 + STEPS.index(0), 1 + SKIPPED]
    assert [count == 0 for count in written] == [index in none for index in range(len(written))]
    assert written[1 + ALL] == whole
    assert all(count < whole for index, count in enumerate(written) if index != 1 + ALL)

    with pytest.raises(RuntimeError, match="version 0 is not the base"):
        late.pull(folders[1])
    late.pull(folders[0])
    late.pull(folders[1])
    late.version = 1
    late.pull(folders[1])  # a second time does no harm
    name = next(iter(json.loads((folders[1] / INDEX).read_text())["weight_map"]))
    places = [i for i, byte in enumerate(host.tensors[name]) if byte == wrong.tensors[name][i]]
    wrong.tensors[name][places[0]] ^= 1
    wrong.pull(folders[0])
    with pytest.raises(RuntimeError, match="another checksum"):
        wrong.pull(folders[1])
