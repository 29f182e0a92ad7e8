"""LoRA adapters of peft under FSDP2, on two processes: masters, saved files, dtypes of a unit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict
from safetensors.torch import load_file
from test_transformers_trainer import sentences, tiny_llama
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import amp_mp as amp

BF16 = torch.bfloat16
TOKENS = torch.stack([each["input_ids"] for each in sentences(16)])
Values = dict[str, Tensor]


def lora(base: nn.Module) -> nn.Module:
    torch.manual_seed(1)
    return get_peft_model(base, LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))


def sharded(model: nn.Module) -> nn.Module:
    """Each layer, and the rest."""
    for module in (*model.get_base_model().model.layers, model):
        fully_shard(module, mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float32))
    return model


def adapters(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def whole(tensors: dict[str, Any]) -> Values:
    return {
        name: getattr(each, "full_tensor", lambda each=each: each)().detach().clone()
        for name, each in tensors.items()
    }


def train(model: nn.Module, optimizer: Any, tokens: Tensor, steps: int = 40) -> None:
    for _ in range(steps):
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def made(model: nn.Module) -> amp.optim.AdamW:
    return amp.optim.AdamW(adapters(model).values(), lr=1e-4, memory="exact")


def masters(model: nn.Module, optimizer: amp.optim.AdamW) -> Values:
    with optimizer.masters(adapters(model)) as found:
        return whole(found)


def compare(folder: Path) -> None:
    """Forty steps of 1e-4, with masters and without, beside a float32 run of the whole batch."""
    mine = TOKENS.chunk(2)[dist.get_rank()]
    model = lora(tiny_llama())
    first = whole(adapters(model))
    train(model, torch.optim.AdamW(adapters(model).values(), lr=1e-4), TOKENS)
    wanted = whole(adapters(model))

    def part(found: Values) -> float:
        """How far they are from the float32 run's, beside the way that those have gone."""
        apart, way = (
            sum(float((values[n].float() - wanted[n]).square().sum()) for n in wanted)
            for values in (found, first)
        )
        return (apart / way) ** 0.5

    model = sharded(lora(tiny_llama()).to(BF16))
    train(model, torch.optim.AdamW(adapters(model).values(), lr=1e-4), mine)
    # Steps of 1e-4 are lost in weights above 2^-5, most of lora_A: half their spacing is 2^-13.
    without = part(whole(adapters(model)))
    assert without > 0.5, without

    model = amp.prepare(sharded(lora(tiny_llama())), BF16)
    optimizer = made(model)
    train(model, optimizer, mine)
    found = masters(model, optimizer)
    # On its way a gradient is rounded less often than 32 times, by at most 2^-8 each time.
    assert part(found) < 2**-3, part(found)
    save(model, found, folder)


def save(model: nn.Module, values: Values, folder: Path) -> None:
    """The file has the masters, and a model that loads it goes on with them."""
    model.save_pretrained(folder, state_dict=values, is_main_process=dist.get_rank() == 0)
    dist.barrier()
    file = load_file(folder / "adapter_model.safetensors")
    for name, value in values.items():
        assert torch.equal(file[name.replace(".default", "")], value), name
    for name, weight in get_peft_model_state_dict(model).items():
        assert torch.equal(weight.full_tensor(), file[name].to(BF16)), name
    again = sharded(PeftModel.from_pretrained(tiny_llama(), folder, is_trainable=True))
    amp.prepare(again, BF16)
    for name, value in masters(again, made(again)).items():
        assert torch.equal(value, values[name]), name


def bases() -> None:
    """Masters begin with the adapters' float32 values, whatever the base was before sharding."""
    for base in (tiny_llama(), tiny_llama().to(BF16), amp.prepare(tiny_llama(), BF16)):
        model = sharded(lora(base))
        before = whole(adapters(model))
        assert {value.dtype for value in before.values()} == {torch.float32}
        amp.prepare(model, BF16)
        found = masters(model, made(model))
        assert all(torch.equal(found[name], value) for name, value in before.items())


def trained_norms() -> None:
    """In units with float32 adapters torch refuses them; prepared, all have one dtype."""

    def model() -> nn.Module:
        found = lora(tiny_llama().to(BF16))
        for name, param in found.named_parameters():
            param.requires_grad_(param.requires_grad or "layernorm" in name)
        return sharded(found)

    refused = ""
    try:
        model()(input_ids=TOKENS)
    except AssertionError as error:
        refused = str(error)
    assert "FSDP expects uniform original parameter dtype" in refused
    prepared = amp.prepare(model(), BF16, keep_fp32_only=[])
    optimizer = made(prepared)
    before = masters(prepared, optimizer)
    train(prepared, optimizer, TOKENS, steps=2)  # lora_A's first gradient is 0, as lora_B is
    moved = masters(prepared, optimizer)
    assert all(not torch.equal(moved[name], value) for name, value in before.items())


def test_adapters_under_fsdp2(run_on: Any, tmp_path: Path) -> None:
    script = f"""
import os, pathlib
import torchvision_ops
torchvision_ops.install()
import torch.distributed as dist
import test_peft_sharded as cases
dist.init_process_group("gloo")
cases.bases()
cases.trained_norms()
cases.compare(pathlib.Path({str(tmp_path / "adapters")!r}))
dist.barrier()
os.write(1, b"DONE\\n")
os._exit(0)
"""
    assert run_on(2, script).count("DONE") == 2
