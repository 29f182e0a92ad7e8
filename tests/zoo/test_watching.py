"""What tools see of a run: averages of weights, TensorBoard, torch.profiler."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from test_lightning import Net, fit
from timm.utils import ModelEmaV2, ModelEmaV3
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.tensorboard import SummaryWriter

import amp_mp as amp

BF16 = torch.bfloat16
DECAY, STEPS = 0.999, 100


def trained_beside(make: Callable[[nn.Module, Any], tuple[Any, Callable[[], Any]]]) -> float:
    """How far the average's weight moved after its first update, relative to one in float32.

    make: returns what gives the averaged weight, and what updates it.
    """
    torch.manual_seed(0)
    model = amp.prepare(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 1)), BF16)
    optimizer = amp.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
    weight, update = make(model, optimizer)
    for step in range(STEPS):
        x = torch.randn(64, 64)
        out = model(x.to(BF16)).float()
        nn.functional.mse_loss(out, x.mean(1, keepdim=True)).backward()
        optimizer.step()
        optimizer.zero_grad()
        update()
        if step == 0:  # torch's first update copies the weights
            start = weight().detach().float().clone()
            exact = start.clone()
        else:
            exact.lerp_(amp.float32_state_dict(model, optimizer)["0.weight"], 1 - DECAY)
    way = exact - start
    return ((weight().float() - start) * way).sum().item() / way.square().sum().item()


def of_torch(model: nn.Module, _: Any) -> Any:
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(DECAY))
    return lambda: average.module[0].weight, lambda: average.update_parameters(model)


def of_timm(kind: Any, **given: Any) -> Callable[..., Any]:
    def make(model: nn.Module, _: Any) -> Any:
        average = kind(model, decay=DECAY, **given)
        return lambda: average.module[0].weight, lambda: average.update(model)

    return make


def of_amp_mp(model: nn.Module, optimizer: Any) -> Any:
    average = amp.AveragedModel(model, optimizer, decay=DECAY)
    return lambda: average.float32_state_dict()["0.weight"], average.update


AVERAGES = {
    "torch's AveragedModel": (of_torch, "stands"),
    "timm's ModelEmaV2": (of_timm(ModelEmaV2), "stands"),
    "timm's ModelEmaV3, not stochastic": (of_timm(ModelEmaV3, stochastic_rounding=False), "stands"),
    "timm's ModelEmaV3": (of_timm(ModelEmaV3), "noisy"),
    "timm's ModelEmaV3 in float32": (of_timm(ModelEmaV3, dtype=torch.float32), "moves"),
    "amp.AveragedModel": (of_amp_mp, "moves"),
}


@pytest.mark.parametrize("name", AVERAGES)
def test_which_averages_stand_still(name: str) -> None:
    make, wanted = AVERAGES[name]
    moved = trained_beside(make)
    print(name, moved)
    least, most = {"stands": (-0.05, 0.25), "noisy": (0.5, 1.5), "moves": (0.95, 1.05)}[wanted]
    assert least < moved < most


class Averaged(EMAWeightAveraging):
    """Keeps the averages of a weight after each step."""

    found: list[torch.Tensor]

    def on_train_batch_end(self, *args: Any) -> None:
        super().on_train_batch_end(*args)
        weight = self._average_model.module.net[0].weight
        self.found = [*getattr(self, "found", []), weight.detach().clone()]


@pytest.mark.parametrize(("prepared", "same"), [("__init__", 0.9), (None, 0.1)])
def test_lightnings_average_stands_still_over_bfloat16(prepared: str | None, same: float) -> None:
    average, net = Averaged(decay=DECAY), Net(prepared)
    net.options["lr"] = 1e-3
    fit(net, callbacks=[average])
    share = (average.found[0] == average.found[-1]).float().mean().item()
    print(share)
    assert share > same if prepared else share < same


def test_lines_in_tensorboard(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = amp.prepare(nn.Linear(16, 1), BF16)
    optimizer = amp.optim.AdamW(model.parameters(), max_grad_norm=1.0)
    with SummaryWriter(str(tmp_path)) as writer:
        for _ in range(5):
            model(torch.randn(8, 16, dtype=BF16)).float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            report = optimizer.last_report()
            for name in ("grad_norm", "max_abs", "loss_scale", "skipped"):
                writer.add_scalar(f"amp_mp/{name}", float(getattr(report, name)), report.number)
    events = EventAccumulator(str(tmp_path)).Reload()
    assert len(events.Tags()["scalars"]) == 4
    norms = events.Scalars("amp_mp/grad_norm")
    assert [event.step for event in norms] == [1, 2, 3, 4, 5]
    assert norms[-1].value == pytest.approx(optimizer.grad_norm)


def test_a_step_in_a_trace(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = amp.prepare(nn.Sequential(*(nn.Linear(16, 16) for _ in range(8))), BF16)
    optimizer = amp.optim.AdamW(model.parameters(), max_grad_norm=1.0)
    for _ in range(2):
        model(torch.randn(8, 16, dtype=BF16)).float().square().mean().backward()
        with torch.profiler.profile() as profile:
            optimizer.step()
        optimizer.zero_grad()
    names = {event.key: event.count for event in profile.key_averages()}
    print(names)
    assert names["Optimizer.step#AdamW.step"] == 1
    assert sum(names.values()) < 10
