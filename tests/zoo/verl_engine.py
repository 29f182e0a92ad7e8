"""A tiny Llama in verl's FSDP engine, on a CPU with gloo. What test_verl.py starts imports this."""

from __future__ import annotations

import gc
import math
import os
import re
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import hydra
import torch
import torch.distributed as dist
import transformers as hf
import verl
from helpers import raw_bytes
from language import ENDS, HALF, LENGTH, SIZES
from pages import blocks
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from verl.plugin.platform import set_platform
from verl.plugin.platform.platform_cuda import PlatformCUDA

import amp_mp as amp
from amp_mp.sharding.shards import local_of

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "rl.md").read_text()


class Platform(PlatformCUDA):
    """verl's idea of a machine without GPU: its own platforms all have one."""

    device_name = "cpu"
    names = "memory_allocated", "memory_reserved", "empty_cache"
    device_module = SimpleNamespace(
        mem_get_info=lambda: (0, 0), **dict.fromkeys(names, lambda *_: 0)
    )

    def current_device(self) -> Any:
        return torch.device("cpu")


set_platform(Platform())  # before verl's engines are imported, which ask for the device then

from verl.trainer.config import CheckpointConfig  # noqa: E402
from verl.utils import tensordict_utils as verl_data  # noqa: E402
from verl.utils.config import omega_conf_to_dataclass  # noqa: E402
from verl.workers import config as verl_config  # noqa: E402
from verl.workers.engine.fsdp import transformer_impl  # noqa: E402

names: dict[str, Any] = {}
exec(next(block for block in blocks(PAGE) if "EngineRegistry" in block), names)


class FSDP1(FullyShardedDataParallel):
    """As verl makes it, but for what needs a GPU: each process has made the same model itself."""

    def __init__(self, *args: Any, sync_module_states: bool, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)


transformer_impl.FSDP = FSDP1


class Tried:
    """A model of its own, and overflows on one process."""

    overflows = False
    prepares: str | None = None  # the dtype that the shards are converted to

    def _build_module(self) -> Any:  # verl's wants trl 0.27
        torch.manual_seed(0)
        llama = hf.LlamaForCausalLM(self.model_config.hf_config)
        llama.model.register_buffer("bias", torch.linspace(-1, 1, 40))  # as a router has one
        return llama

    def _build_optimizer(self, module: Any) -> Any:
        if self.prepares is not None:
            amp.prepare(module, getattr(torch, self.prepares), keep_fp32_only=[])
        return super()._build_optimizer(module)

    def optimizer_step(self) -> float:
        if self.overflows and dist.get_rank() == 1:
            grads = [local_of(p.grad) for p in self.module.parameters() if p.grad is not None]
            [grad for grad in grads if grad.numel()][-1].view(-1)[-1] = float("inf")
        return super().optimizer_step()


class Engine(Tried, names["Engine"]):
    """The page's."""


class Plain(Tried, transformer_impl.FSDPEngineWithLMHead):
    """verl's own, where a test asks whether a step was skipped."""

    def optimizer_step(self) -> float:
        norm = super().optimizer_step()
        self.skipped = not math.isfinite(norm)
        return norm

    def lr_scheduler_step(self) -> float:
        return self.lr_scheduler.get_last_lr()[0] if self.skipped else super().lr_scheduler_step()


def engine_of(
    dtype: str,
    optimizer: str = "amp_mp.optim",
    scaler: Any = None,
    prepares: Any = None,
    strategy: str = "fsdp2",
    fsdp_size: int = -1,
    reshard_after_forward: bool = True,
    tied: bool = False,
    lr: float = 4e-3,
    **more: Any,
) -> Any:
    """scaler: in place of verl's, which wants a GPU. more: of verl's override_optimizer_config."""
    folder = Path(f"llama_{dist.get_rank()}")
    sizes = {**SIZES, **HALF, **ENDS, "tie_word_embeddings": tied}
    llama = hf.LlamaConfig(**sizes, architectures=["LlamaForCausalLM"])
    llama.save_pretrained(folder)
    model = verl_config.HFModelConfig(
        path=str(folder),
        load_tokenizer=False,
        override_config={"attn_implementation": "eager"},
        use_remove_padding=False,
        enable_gradient_checkpointing=False,
    )
    precision = {"param_dtype": dtype}
    sharding = verl_config.FSDPEngineConfig(
        strategy=strategy,
        fsdp_size=fsdp_size,
        reshard_after_forward=reshard_after_forward,
        use_torch_compile=False,
        mixed_precision=precision,
    )
    numbers = verl_config.FSDPOptimizerConfig(
        optimizer_impl=optimizer,
        optimizer="AdamW",
        lr=lr,
        total_training_steps=100,
        lr_warmup_steps=10,
        override_optimizer_config=more or None,
    )
    kind = Plain if optimizer == "torch.optim" else Engine
    engine = kind(model, sharding, numbers, CheckpointConfig())
    engine.prepares = prepares
    engine.initialize()
    assert (engine.scaler is not None) == (dtype == "fp16")
    if engine.scaler is not None:
        engine.scaler = scaler or ShardedGradScaler("cpu", init_scale=2.0**14, growth_interval=400)
    return engine


def optimizer_of_the_page() -> str:
    """What verl's build_optimizer makes with the settings that the page adds to verl's own."""
    found = re.search(r"^```text\n(actor_rollout_ref.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
    folder = Path(verl.__file__).parent / "trainer" / "config"
    with hydra.initialize_config_dir(str(folder), version_base=None):
        actor = hydra.compose("ppo_trainer", found[1].split()).actor_rollout_ref.actor
    sharding = omega_conf_to_dataclass(actor.fsdp_config)
    assert sharding.mixed_precision == {"param_dtype": "fp16"}
    params = [torch.nn.Parameter(torch.ones(2, dtype=torch.bfloat16))]
    made = verl_config.build_optimizer(params, omega_conf_to_dataclass(actor.optim))
    return repr(made).splitlines()[0]


def batch(step: int) -> Any:
    """Counting, from other numbers on each process."""
    source = torch.Generator().manual_seed(10 * step + dist.get_rank())
    starts = torch.randint(3, 90 - LENGTH, (4,), generator=source).tolist()
    rows = {
        "input_ids": [torch.arange(start, start + LENGTH) for start in starts],
        "position_ids": [torch.arange(LENGTH)] * 4,
        "loss_mask": [torch.ones(LENGTH, dtype=torch.int64)] * 4,
    }
    nested = {
        name: torch.nested.as_nested_tensor(found, layout=torch.jagged)
        for name, found in rows.items()
    }
    settings = {
        "use_dynamic_bsz": False,
        "micro_batch_size_per_gpu": 2,
        "use_remove_padding": False,
    }
    return verl_data.get_tensordict(nested, {**settings, "temperature": 1.0})


def loss_of(model_output: Any, data: Any, dp_group: Any) -> Any:
    return -model_output["log_probs"].values().float().mean() / 2, {}


def local_tensors(engine: Any) -> list[torch.Tensor]:
    """Of masters and states, the parts on this process."""
    states = [value for state in engine.optimizer.state.values() for value in state.values()]
    return [getattr(value, "_local_tensor", value) for value in states]


def bits_of(engine: Any) -> Any:
    weights = [local_of(param) for param in engine.module.parameters()]
    return raw_bytes([weights, local_tensors(engine)])


def train(engine: Any, steps: range, overflows: Any = ()) -> list[tuple[Any, ...]]:
    """For each step: loss, whether it was skipped, learning rate and loss scale."""
    found = []
    for step in steps:
        engine.overflows = step in overflows
        with engine.train_mode():
            loss = sum(engine.train_batch(batch(step), loss_of)["loss"])
        rate = engine.lr_scheduler_step()
        scale = engine.scaler.get_scale() if engine.scaler is not None else 1.0
        found.append((loss, engine.skipped, rate, scale))
    return found


def beside_torch(dtype: str) -> dict[str, Any]:
    """Steps with amp_mp's AdamW, with FSDP1 and amp.GradScaler too, and with torch's.

    "handed over": at each step the share of float16 or bfloat16 weights that a sampler gets.
    """
    steps, overflows = range(20), (3, 4, 11)
    ours = engine_of(dtype, memory="exact")
    changes = amp.Changes(ours.module, getattr(torch, {"fp16": "float16"}.get(dtype, "bfloat16")))
    rows, handed_over = [], []
    for step in steps:
        rows += train(ours, range(step, step + 1), overflows)
        handed_over.append(changes.share())
        changes.take()
    found = {"amp_mp": rows, "handed over": handed_over}
    fsdp1 = engine_of(dtype, strategy="fsdp", memory="exact")
    found["FSDP1"] = train(fsdp1, steps, overflows)
    if dtype == "fp16":
        scaler = amp.GradScaler("cpu", 2.0**14, growth_interval=400)
        scaled = engine_of(dtype, scaler=scaler, memory="exact")
        found["amp.GradScaler"] = train(scaled, steps, overflows)
    return {**found, "torch": train(engine_of(dtype, "torch.optim"), steps, overflows)}


@contextmanager
def other_memory() -> Iterator[None]:
    """Tensor.to and verl's functions as where there is a GPU: what is moved is another tensor."""

    def moved(tensor: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        return tensor.clone()

    with (
        mock.patch.object(torch.Tensor, "to", moved),
        mock.patch.object(transformer_impl, "get_device_name", return_value="cuda"),
    ):
        yield


def lends_its_memory(dtype: str, memory: str, prepares: Any) -> bool:
    """Whether the memory of what verl moves away is free, and no bit changes."""
    engine, stays = (engine_of(dtype, prepares=prepares, memory=memory) for _ in range(2))
    for step in range(4):
        for each in (engine, stays):
            train(each, range(step, step + 1))
        for device in ("cpu", "cuda"):
            were = [weakref.ref(tensor) for tensor in local_tensors(engine)]
            with other_memory():
                engine.to(device)
            gc.collect()
            assert were
            if any(ref() is not None for ref in were):
                return False
    return bits_of(engine) == bits_of(stays)


def resumes(dtype: str, memory: str, prepares: Any) -> bool:
    """Whether a run from verl's checkpoint has the bits of the one that wrote it."""
    engine = engine_of(dtype, prepares=prepares, memory=memory)
    train(engine, range(4), overflows=(2,))
    folder = os.path.abspath(f"{dtype}_{memory}")
    engine.save_checkpoint(folder)
    scale = engine.scaler.state_dict() if engine.scaler is not None else {}
    rows = train(engine, range(4, 8))
    again = engine_of(dtype, prepares=prepares, memory=memory)
    again.load_checkpoint(folder, del_local_after_load=False)
    if again.scaler is not None:
        again.scaler.load_state_dict(scale)  # verl's checkpoint lacks it
    return train(again, range(4, 8)) == rows and bits_of(again) == bits_of(engine)
