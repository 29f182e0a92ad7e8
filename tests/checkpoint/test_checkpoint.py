"""amp.checkpoint: what one script saves another loads, in whatever format that one stores."""

from __future__ import annotations

import copy
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from helpers import raw_bytes
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict

import amp_mp as amp

LOW = torch.bfloat16
PRESETS = ("float32", "exact", "lean", "tiny")
# The largest relative error of a stored moment, and of its square: docs/formats.md.
MASTER_BITS = {"float32": 24, "exact": 24, "lean": 16, "tiny": 16}


def make(preset: str, dtype: torch.dtype | None = LOW, **options: Any) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 32), nn.LayerNorm(32), nn.Linear(32, 3))
    if dtype is not None:
        model = amp.prepare(model, dtype)
    return model, amp.optim.AdamW(model.parameters(), lr=1e-2, memory=preset, **options)


def train(model: nn.Module, optimizer: Any, steps: int, seed: int = 0) -> None:
    for step in range(steps):
        x = torch.randn(8, 64, generator=torch.Generator().manual_seed(seed + step))
        optimizer.zero_grad()
        model(x.to(next(model.parameters()).dtype)).float().square().mean().backward()
        optimizer.step()


def snapshot(model: nn.Module, optimizer: Any) -> dict[str, bytes]:
    found = {f"weight {name}": raw_bytes(p) for name, p in model.named_parameters()}
    for number, state in optimizer.state_dict()["state"].items():
        found |= {f"{number} {k}": raw_bytes(v) for k, v in state.items() if isinstance(v, Tensor)}
    return found


@pytest.mark.parametrize("preset", PRESETS)
def test_training_goes_on_as_if_it_had_never_stopped(preset: str, tmp_path: Path) -> None:
    model, optimizer = make(preset)
    train(model, optimizer, 3)
    amp.checkpoint.save(tmp_path / "c", model, optimizer, step=3)
    other, another = make(preset)
    train(other, another, 1, seed=9)
    assert amp.checkpoint.load(tmp_path / "c", other, another) == {"step": 3}
    assert snapshot(other, another) == snapshot(model, optimizer)
    train(model, optimizer, 2, seed=3)
    train(other, another, 2, seed=3)
    assert snapshot(other, another) == snapshot(model, optimizer)


@pytest.mark.parametrize(("saved", "wanted"), [*itertools.permutations((*PRESETS, "plain"), 2)])
def test_every_format_is_read_into_every_other(saved: str, wanted: str, tmp_path: Path) -> None:
    """plain: float32 parameters. The masters are as near as the coarser of two formats allows."""

    def made(kind: str) -> tuple[nn.Module, Any]:
        return make("exact", None) if kind == "plain" else make(kind)

    model, optimizer = made(saved)
    train(model, optimizer, 3)
    amp.checkpoint.save(tmp_path / "c", model, optimizer)
    other, another = made(wanted)
    amp.checkpoint.load(tmp_path / "c", other, another)
    before, after = (
        amp.float32_state_dict(*pair) for pair in ((model, optimizer), (other, another))
    )
    bits = min(MASTER_BITS.get(kind, 24) for kind in (saved, wanted))
    for name, values in before.items():
        bound = 0 if bits == 24 else 2.0**-bits
        # Below float32's range of normal numbers a split is exact to its last place.
        torch.testing.assert_close(after[name].float(), values.float(), rtol=bound, atol=1e-38)
    steps = {float(state["step"]) for state in another.state.values()}
    assert steps == {3.0}
    found, wished = another.torch_state_dict()["state"], optimizer.torch_state_dict()["state"]
    for number, state in wished.items():
        largest = float(state["exp_avg"].abs().max())
        torch.testing.assert_close(
            found[number]["exp_avg"], state["exp_avg"], rtol=0, atol=largest / 20
        )
        torch.testing.assert_close(
            found[number]["exp_avg_sq"], state["exp_avg_sq"], rtol=2.0**-7, atol=1e-30
        )
    train(other, another, 1)


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("names", [("model", "optim"), ("net", "o")])
def test_a_file_of_torch_adamw_gives_masters_and_moments(
    preset: str, names: tuple[str, str], tmp_path: Path
) -> None:
    model, _ = make("exact", None)
    theirs = torch.optim.AdamW(model.parameters(), lr=1e-2)
    train(model, theirs, 3)
    state = {
        names[0]: get_model_state_dict(model),
        names[1]: get_optimizer_state_dict(model, theirs),
    }
    dcp.save(state, checkpoint_id=tmp_path / "c")
    other, ours = make(preset)
    amp.checkpoint.load(tmp_path / "c", other, ours)
    masters = amp.float32_state_dict(other, ours)
    bound = 0 if MASTER_BITS[preset] == 24 else 2.0 ** -MASTER_BITS[preset]
    for name, values in model.state_dict().items():
        torch.testing.assert_close(masters[name], values, rtol=bound, atol=1e-38)
    state = ours.state[next(other.parameters())]
    assert float(state["step"]) == 3
    assert state["beta_powers"].tolist() == pytest.approx([0.9**3, 0.999**3], rel=1e-12)
    gradients = [torch.randn_like(p) for p in model.parameters()]
    for _ in range(2):
        for group in (model.parameters(), other.parameters()):
            for param, grad in zip(group, gradients, strict=True):
                param.grad = grad.to(param.dtype)
        theirs.step()
        ours.step()
    near = {"float32": 2e-4, "exact": 2e-4, "lean": 2e-3, "tiny": 5e-3}[preset]
    for name, values in amp.float32_state_dict(other, ours).items():
        assert float((values - model.state_dict()[name]).abs().max()) < near, name


def test_the_scheduler_and_what_else_was_named_are_loaded(tmp_path: Path) -> None:
    model, optimizer = make("lean")
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    train(model, optimizer, 1)
    scheduler.step()
    more = {"epoch": 2, "order": torch.arange(5), "run": {"name": "a", "seeds": [1, 2]}}
    amp.checkpoint.save(tmp_path / "c", model, optimizer, scheduler=scheduler, **more)
    other, another = make("lean")
    fresh = torch.optim.lr_scheduler.StepLR(another, 1)
    found = amp.checkpoint.load(tmp_path / "c", other, another, scheduler=fresh)
    assert fresh.last_epoch == 1
    assert another.param_groups[0]["lr"] == pytest.approx(1e-3)
    assert found["epoch"] == 2
    assert found["order"].tolist() == [0, 1, 2, 3, 4]
    assert found["run"] == more["run"]


def test_errors_name_what_is_wrong_and_change_nothing(tmp_path: Path) -> None:
    model, optimizer = make("exact")
    train(model, optimizer, 1)
    with pytest.raises(FileNotFoundError, match="nowhere"):
        amp.checkpoint.load(tmp_path / "nowhere", model, optimizer)
    amp.checkpoint.save(tmp_path / "c", model)
    before = snapshot(model, optimizer)
    with pytest.raises(ValueError, match="no optimizer"):
        amp.checkpoint.load(tmp_path / "c", model, optimizer)
    with pytest.raises(ValueError, match="no part named 'scheduler'"):
        amp.checkpoint.load(tmp_path / "c", model, scheduler=optimizer)
    wider = nn.Sequential(nn.Linear(64, 33), nn.LayerNorm(33), nn.Linear(33, 3))
    with pytest.raises(ValueError, match=r"model\.0\.\w+' has shape"):
        amp.checkpoint.load(tmp_path / "c", wider)
    with pytest.raises(ValueError, match=r"model\.2\.bias' .* not in the model"):
        amp.checkpoint.load(tmp_path / "c", nn.Sequential(*model[:2], nn.Linear(32, 3, bias=False)))
    with pytest.raises(TypeError, match="FP16_Optimizer"):
        amp.checkpoint.save(tmp_path / "d", model, amp.FP16_Optimizer(optimizer, verbose=False))
    stranger = amp.optim.SGD([nn.Parameter(torch.ones(3))], lr=1)
    with pytest.raises(ValueError, match="none of the model's parameters"):
        amp.checkpoint.save(tmp_path / "d", model, stranger)
    assert snapshot(model, optimizer) == before
    assert not (tmp_path / "d").exists()


def test_an_interrupted_save_leaves_the_last_checkpoint(tmp_path: Path) -> None:
    class Breaks:
        def __reduce__(self) -> Any:
            raise KeyboardInterrupt

    model, optimizer = make("exact")
    train(model, optimizer, 1)
    amp.checkpoint.save(tmp_path / "c", model, optimizer, step=1)
    with pytest.raises(BaseException):  # noqa: B017 (torch wraps it)
        amp.checkpoint.save(tmp_path / "c", model, optimizer, step=2, broken=Breaks())
    assert amp.checkpoint.load(tmp_path / "c", *make("exact")) == {"step": 1}
    amp.checkpoint.save(tmp_path / "c", model, optimizer, step=3)
    assert amp.checkpoint.load(tmp_path / "c", *make("exact")) == {"step": 3}


def test_a_compiled_or_distributed_model_has_the_names_of_the_plain_one(tmp_path: Path) -> None:
    model, optimizer = make("tiny")
    train(model, optimizer, 1)
    amp.checkpoint.save(tmp_path / "c", torch.compile(model), optimizer)
    other, another = make("tiny")
    amp.checkpoint.load(tmp_path / "c", other, another)
    assert snapshot(other, another) == snapshot(model, optimizer)


def test_groups_that_differ_are_refused_and_frozen_parameters_have_no_state(tmp_path: Path) -> None:
    model, _ = make("exact")
    model[0].requires_grad_(False)
    groups = [{"params": [*model[1].parameters()], "lr": 0.5}, {"params": [*model[2].parameters()]}]
    optimizer = amp.optim.AdamW(groups, lr=1e-2)
    train(model, optimizer, 1)
    amp.checkpoint.save(tmp_path / "c", model, optimizer)
    other = copy.deepcopy(model)
    swapped = amp.optim.AdamW(
        [{"params": [*other[1].parameters()]}, {"params": [*other[2].parameters()]}], lr=1
    )
    amp.checkpoint.load(tmp_path / "c", other, swapped)
    assert [group["lr"] for group in swapped.param_groups] == [0.5, 1e-2]
    together = amp.optim.AdamW([*other[1].parameters(), *other[2].parameters()], lr=1)
    with pytest.raises(ValueError, match="are in 2 param_groups of the checkpoint"):
        amp.checkpoint.load(tmp_path / "c", other, together)
