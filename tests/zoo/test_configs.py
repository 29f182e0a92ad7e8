"""The settings of docs/configs.md, read and made into optimizers by the packages' own code.

The Python blocks of that page, for timm, axolotl, ms-swift and Hydra, run in test_pages.py.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import hydra
import pytest
import torch
import torch.distributed.checkpoint as dcp
import yaml
from helpers import raw_bytes
from nemo_automodel.components.checkpoint.stateful_wrappers import OptimizerState
from nemo_automodel.components.config.loader import ConfigNode
from nemo_automodel.components.optim.optimizer import LRSchedulerConfig, build_optimizer_config
from nemo_automodel.recipes._typed_config import RecipeConfig
from omegaconf import OmegaConf
from timm.optim import create_optimizer_v2
from timm.utils import ParseKwargs
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map_only

import amp_mp as amp

PAGE = Path(__file__).resolve().parents[2] / "docs" / "configs.md"


def block(section: str, language: str) -> str:
    """The first block of a language in a section of the page."""
    text = PAGE.read_text().partition(f"\n## {section}\n")[2].partition("\n## ")[0]
    found = re.search(rf"^```{language}\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    assert found, section
    return found[1]


def network(dtype: torch.dtype = torch.bfloat16) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)).to(dtype)


def train(model: nn.Module, optimizer: Any, steps: range) -> Any:
    dtype = next(model.parameters()).dtype
    for step in steps:
        x = torch.randn(8, 32, generator=torch.Generator().manual_seed(step))
        model(x.to(dtype)).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    tensors = model.state_dict(), optimizer.state_dict()["state"]
    return raw_bytes(tree_map_only(DTensor, DTensor.to_local, tensors))


def by_automodel(model: nn.Module, **more: Any) -> Any:
    settings = yaml.safe_load(block("NeMo Automodel", "yaml"))["optimizer"]
    config = RecipeConfig(ConfigNode({"optimizer": {**settings, **more}}))
    (optimizer,) = config.optimizer.build(model)
    return optimizer


def test_automodel_steps_as_one_made_by_hand() -> None:
    ours, other = network(), network()
    optimizer = by_automodel(other)
    wanted = amp.optim.AdamW(
        ours.parameters(), lr=1e-5, betas=(0.9, 0.95), weight_decay=0.1, memory="lean"
    )
    assert train(other, optimizer, range(4)) == train(ours, wanted, range(4))
    assert "remainder8" in optimizer.state[other[0].weight]


def test_automodels_groups_and_schedule() -> None:
    model = network()
    optimizer = by_automodel(model, param_group_overrides=[{"pattern": "^0", "lr_mult": 0.1}])
    steps = SimpleNamespace(epoch_len=10, num_epochs=1, max_steps=None)
    (schedule,) = LRSchedulerConfig(lr_warmup_steps=2).build(optimizer, steps)
    rates = []
    for step in range(4):
        train(model, optimizer, range(step, step + 1))
        schedule.step(1)
        rates.append([group["lr"] for group in optimizer.param_groups])
    assert rates[1] == pytest.approx([1e-5, 1e-6])
    assert rates[3] < rates[2] < rates[1]


def test_automodels_checkpoint_goes_on_with_every_bit(tmp_path: Path) -> None:
    model = network()
    optimizer = by_automodel(model)
    train(model, optimizer, range(3))
    weights = {name: w.clone() for name, w in model.state_dict().items()}
    dcp.save({"optim": OptimizerState(model, optimizer)}, checkpoint_id=tmp_path)
    wanted = train(model, optimizer, range(3, 6))
    again = network()
    again.load_state_dict(weights)
    other = by_automodel(again)
    dcp.load({"optim": OptimizerState(again, other)}, checkpoint_id=tmp_path)
    assert train(again, other, range(3, 6)) == wanted


def resumes_sharded(folder: str) -> list[bool]:
    """Whether bfloat16 shards step as by hand, and go on with every bit; on each process."""

    def sharded() -> Any:
        model: Any = network()
        for unit in (model[0], model[2], model):
            fully_shard(unit, mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float32))
        return model

    model, by_hand = sharded(), sharded()
    optimizer = by_automodel(model)
    settings = {"lr": 1e-5, "betas": (0.9, 0.95), "weight_decay": 0.1, "memory": "lean"}
    other = amp.optim.AdamW(by_hand.parameters(), **settings)
    equal = train(model, optimizer, range(3)) == train(by_hand, other, range(3))
    parts = {"model": model.state_dict(), "optim": OptimizerState(model, optimizer)}
    dcp.save(parts, checkpoint_id=folder)
    wanted = train(model, optimizer, range(3, 6))
    again = sharded()
    resumed = by_automodel(again)
    dcp.load({"model": again.state_dict()}, checkpoint_id=folder)
    dcp.load({"optim": OptimizerState(again, resumed)}, checkpoint_id=folder)
    return [equal, train(again, resumed, range(3, 6)) == wanted]


SCRIPT = """
import json, os
import torchvision_ops
torchvision_ops.install()
import torch.distributed as dist
from test_configs import resumes_sharded
dist.init_process_group("gloo")
os.write(1, ("FOUND" + json.dumps(resumes_sharded({folder!r})) + "\\n").encode())
dist.barrier()
os._exit(0)
"""


def test_automodels_shards_step_and_resume(run_on: Any, tmp_path: Path) -> None:
    lines = run_on(2, SCRIPT.format(folder=str(tmp_path / "checkpoint")))
    found = [json.loads(line.removeprefix("FOUND")) for line in lines if line.startswith("FOUND")]
    assert found == [[True, True]] * 2


def test_what_automodel_makes_of_texts() -> None:
    """`none` is None, the default; quotes inside of quotes are a text."""
    assert by_automodel(network(), master="none").param_groups[0]["master"] == "split24"
    assert by_automodel(network(), master="'none'").param_groups[0]["master"] == "none"


def test_automodel_takes_a_class_of_the_name_muon_for_dions() -> None:
    """As the page warns; where this no longer holds, the page can show Muon."""
    made = build_optimizer_config(amp.optim.Muon, {"lr": 0.02})
    assert type(made).__name__ == "MuonConfig"


def test_nemo_rl_steps_as_one_made_by_hand() -> None:
    names: dict[str, Any] = {}
    exec(block("NeMo-RL", "python"), names)
    sys.modules["my_optimizer"] = module = ModuleType("my_optimizer")
    module.AdamW = names["AdamW"]  # type: ignore[attr-defined]
    config: Any = OmegaConf.to_container(OmegaConf.create(block("NeMo-RL", "yaml")), resolve=True)
    chosen = config["policy"]["optimizer"]
    ours, other = network(torch.float32), network(torch.float32)
    kind = hydra.utils.get_class(chosen["name"])
    optimizer = kind((p for p in other.parameters() if p.requires_grad), **chosen["kwargs"])
    wanted = amp.optim.AdamW(ours.parameters(), lr=5e-6, eps=1e-8, memory="lean")
    assert train(other, optimizer, range(4)) == train(ours, wanted, range(4))


def test_timms_command_and_its_groups() -> None:
    """Options as train.py's --opt-kwargs reads them, rates by layer, and Lookahead around it."""
    names: dict[str, Any] = {}
    exec(block("timm", "python"), names)
    found = SimpleNamespace()
    read = ParseKwargs(["--opt-kwargs"], "opt_kwargs", nargs="*")
    read(None, found, ["memory=lean", "cautious=True", "max_grad_norm=1e0"])  # type: ignore[arg-type]
    for name in ("ampadamw", "lookahead_ampadamw"):
        model = network()
        optimizer = create_optimizer_v2(model, name, lr=1e-3, weight_decay=0.1, **found.opt_kwargs)
        inner = getattr(optimizer, "_base_optimizer", optimizer)
        assert type(inner) is amp.optim.AdamW
        assert inner.max_grad_norm == 1.0
        assert {group["weight_decay"] for group in inner.param_groups} == {0.0, 0.1}
        assert all(group["cautious"] for group in inner.param_groups)
        before = model[0].weight.detach().clone()
        train(model, optimizer, range(2))
        assert not torch.equal(model[0].weight, before)
