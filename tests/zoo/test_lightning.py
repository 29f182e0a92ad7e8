"""amp_mp in Lightning: automatic and manual optimization, precisions, clipping, checkpoints."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
from helpers import raw_bytes
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import amp_mp as amp

BF16 = torch.bfloat16
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
pytestmark = pytest.mark.filterwarnings("ignore")


class Net(lightning.LightningModule):
    """A small regression. prepared: where the model is prepared, a hook of Lightning's, or None."""

    def __init__(
        self, prepared: str | None = None, automatic: bool = True, kind: Any = None, **options: Any
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.automatic_optimization = automatic
        self.options, self.prepared, self.kind = options, prepared, kind or amp.optim.AdamW
        self.net = nn.Sequential(nn.Linear(16, 32), nn.LayerNorm(32), nn.GELU(), nn.Linear(32, 1))
        self.losses: list[float] = []
        self.clip: float | None = None
        if prepared == "__init__":
            amp.prepare(self, BF16)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        if self.prepared == "configure_optimizers":
            amp.prepare(self, BF16)
        return self.kind(self.parameters(), **{"lr": 1e-2, **self.options})

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        (x,) = batch
        out = self.net(x.to(self.net[0].weight.dtype)).float()
        loss = nn.functional.mse_loss(out, x.float().mean(1, keepdim=True))
        if not self.automatic_optimization:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            if self.clip is not None:
                self.clip_gradients(optimizer, self.clip, "norm")
            optimizer.step()
        self.losses.append(loss.item())
        return loss

    def dtypes(self) -> list[torch.dtype]:
        """Of the first matrix and of the norm."""
        return [self.net[0].weight.dtype, self.net[1].weight.dtype]


def data() -> DataLoader:
    generator = torch.Generator().manual_seed(1)
    return DataLoader(TensorDataset(torch.randn(256, 16, generator=generator)), batch_size=32)


def fit(
    net: Net, precision: Any = "32-true", checkpoint: Any = None, epochs: int = 4, **given: Any
) -> lightning.Trainer:
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False}
    trainer = lightning.Trainer(
        **quiet,
        **{"max_epochs": epochs, "accelerator": "cpu", "precision": precision},
        **{"enable_checkpointing": False, **given},
    )
    trainer.fit(net, data(), ckpt_path=checkpoint)
    return trainer


@pytest.mark.parametrize("automatic", [True, False])
def test_a_prepared_model_gets_the_bits_of_a_plain_loop(automatic: bool) -> None:
    net = Net("__init__", automatic, memory="lean", max_grad_norm=0.1)
    fit(net, epochs=1)
    plain = Net("__init__")
    optimizer = amp.optim.AdamW(plain.parameters(), lr=1e-2, memory="lean", max_grad_norm=0.1)
    for (x,) in data():
        out = plain.net(x.to(BF16)).float()
        nn.functional.mse_loss(out, x.mean(1, keepdim=True)).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert raw_bytes(net.state_dict()) == raw_bytes(plain.state_dict())


@pytest.mark.parametrize("automatic", [True, False])
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_it_learns(precision: str, automatic: bool) -> None:
    prepared = "__init__" if precision == "32-true" else None
    net = Net(prepared, automatic, max_grad_norm=1.0)
    fit(net, precision)
    assert net.losses[-1] < net.losses[0] / 4
    assert net.dtypes()[0] == (BF16 if prepared else torch.float32)


def test_a_resumed_run_has_the_bits_of_one_that_never_stopped(tmp_path: Path) -> None:
    half, through, resumed = (Net("__init__", memory="lean") for _ in range(3))
    fit(half, epochs=2).save_checkpoint(tmp_path / "half.ckpt")
    fit(through)
    fit(resumed, checkpoint=tmp_path / "half.ckpt")
    assert len(resumed.losses) == len(through.losses) // 2
    assert raw_bytes(resumed.state_dict()) == raw_bytes(through.state_dict())


def test_lightnings_clipping_of_prepared_models() -> None:
    ours, theirs = Net("__init__", max_grad_norm=0.1), Net("__init__")
    fit(ours, epochs=1)
    fit(theirs, epochs=1, gradient_clip_val=0.1)
    assert ours.losses == pytest.approx(theirs.losses, rel=0.05)


@pytest.mark.parametrize("precision", ["bf16-mixed", "16-mixed"])
@pytest.mark.parametrize("automatic", [True, False])
def test_lightning_clips_under_mixed_precision(precision: str, automatic: bool) -> None:
    """As the optimizer does. (torch.optim.AdamW(fused=True) it refuses.)"""
    first, second = Net(None, automatic, max_grad_norm=0.1), Net(None, automatic)
    fit(first, precision, epochs=1)
    second.clip = 0.1
    fit(second, precision, epochs=1, **({"gradient_clip_val": 0.1} if automatic else {}))
    assert first.losses == pytest.approx(second.losses, rel=1e-3)


@pytest.mark.parametrize(
    ("prepared", "norm"), [("__init__", BF16), ("configure_optimizers", torch.float32)]
)
def test_bf16_true_converts_what_was_prepared_before(prepared: str, norm: torch.dtype) -> None:
    net = Net(prepared)
    fit(net, "bf16-true")
    assert net.dtypes() == [BF16, norm]
    assert net.losses[-1] < net.losses[0] / 4
