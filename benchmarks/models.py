"""Eleven kinds of models and a layer on a CPU: bfloat16 as a part of float32's time.

    OMP_NUM_THREADS=1 python benchmarks/models.py
    OMP_NUM_THREADS=1 python benchmarks/models.py --isa AVX2 --models UNet LSTM --rounds 60

A training step of `amp.prepare` with `amp.optim.AdamW` against one in float32 with torch's fused
AdamW; "one token" and the linear layers are forward passes without gradients. Everything is held to
an instruction set (held.py), in a process of its own. The arms take turns; a ratio is the median
over rounds, with the range of the middle half in parentheses. The time of one thread is CPU time,
which other processes disturb less.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from held import ISAS, outputs
from timing import quartiles
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 (torch's name)

import amp_mp as amp

sys.path.append(str(Path(__file__).resolve().parent.parent / "examples"))
from gpt import GPT, VOCABULARY


class Residual(nn.Module):
    """x plus what the layers make of it."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layers(x)


class Attention(nn.Module):
    """Self-attention over tokens [batch, length, width]."""

    def __init__(self, width: int, heads: int, causal: bool) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.qkv, self.out = nn.Linear(width, 3 * width, not causal), nn.Linear(width, width, False)

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.qkv(x).unflatten(-1, (3, self.heads, -1)).transpose(1, 3).unbind(2)
        found = F.scaled_dot_product_attention(*qkv, is_causal=self.causal)
        return self.out(found.transpose(1, 2).flatten(2))


class SwiGLU(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        hidden = width * 8 // 3 // 16 * 16
        self.gate, self.up = nn.Linear(width, hidden, False), nn.Linear(width, hidden, False)
        self.down = nn.Linear(hidden, width, False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class UNet(nn.Module):
    """Two levels, as in a diffusion model: GroupNorm, SiLU, a transposed convolution."""

    def __init__(self, c: int) -> None:
        super().__init__()
        self.begin, self.end = nn.Conv2d(3, c, 3, padding=1), nn.Conv2d(2 * c, 3, 3, padding=1)
        self.outer, self.after = self.block(c), self.block(2 * c)
        self.down, self.inner = nn.Conv2d(c, 2 * c, 2, 2), self.block(2 * c)
        self.up = nn.ConvTranspose2d(2 * c, c, 2, 2)

    @staticmethod
    def block(c: int) -> nn.Module:
        parts = (nn.GroupNorm(8, c), nn.SiLU(), nn.Conv2d(c, c, 3, padding=1))
        return Residual(*parts, nn.GroupNorm(8, c), nn.SiLU(), nn.Conv2d(c, c, 3, padding=1))

    def forward(self, x: Tensor) -> Tensor:
        outer = self.outer(self.begin(x))
        inner = self.up(self.inner(self.down(outer)))
        return self.end(self.after(torch.cat([outer, inner], 1)))


class Recurrent(nn.Module):
    def __init__(self, kind: Callable[..., nn.Module]) -> None:
        super().__init__()
        self.layers, self.head = kind(128, 128, 2, batch_first=True), nn.Linear(128, 32)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(x)[0])


def conv(i: int, o: int, size: int, stride: int = 1, groups: int = 1) -> list[nn.Module]:
    layer = nn.Conv2d(i, o, size, stride, size // 2, groups=groups, bias=False)
    return [layer, nn.BatchNorm2d(o)]


def resnet() -> nn.Module:
    def block(c: int) -> nn.Module:
        return Residual(*conv(c, c, 3), nn.ReLU(), *conv(c, c, 3))

    stages = [*conv(3, 32, 3), nn.ReLU(), block(32), *conv(32, 64, 3, 2), block(64)]
    stages += [*conv(64, 128, 3, 2), block(128), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return nn.Sequential(*stages, nn.Linear(128, 10))


def mobilenet() -> nn.Module:
    def block(c: int) -> nn.Module:
        middle = [*conv(4 * c, 4 * c, 3, groups=4 * c), nn.ReLU6()]
        return Residual(*conv(c, 4 * c, 1), nn.ReLU6(), *middle, *conv(4 * c, c, 1))

    stages = [*conv(3, 24, 3, 2), block(24), block(24), *conv(24, 48, 3, 2), block(48), block(48)]
    return nn.Sequential(*stages, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(48, 10))


def conv1d() -> nn.Module:
    layers: list[nn.Module] = [nn.Conv1d(16, 64, 5, padding=2)]
    for _ in range(4):
        layers += [Residual(nn.ReLU(), nn.Conv1d(64, 64, 5, padding=2))]
    return nn.Sequential(*layers, nn.Conv1d(64, 8, 1))


def vit() -> nn.Module:
    def block() -> list[nn.Module]:
        attention = Residual(nn.LayerNorm(192), Attention(192, 3, causal=False))
        mlp = (nn.LayerNorm(192), nn.Linear(192, 768), nn.GELU(), nn.Linear(768, 192))
        return [attention, Residual(*mlp)]

    patches = [nn.Conv2d(3, 192, 4, 4), nn.Flatten(2), nn.Unflatten(1, (192, 1))]
    blocks = [layer for _ in range(4) for layer in block()]
    return nn.Sequential(*patches, Tokens(), *blocks, nn.LayerNorm(192), nn.Linear(192, 10))


class Tokens(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.squeeze(2).transpose(1, 2)


def llama() -> nn.Module:
    def block() -> list[nn.Module]:
        attention = Residual(nn.RMSNorm(256), Attention(256, 4, causal=True))
        return [attention, Residual(nn.RMSNorm(256), SwiGLU(256))]

    blocks = [layer for _ in range(4) for layer in block()]
    return nn.Sequential(*blocks, nn.RMSNorm(256), nn.Linear(256, 512, False))


def mlp() -> nn.Module:
    hidden = [layer for _ in range(2) for layer in (nn.Linear(64, 64), nn.GELU())]
    return nn.Sequential(*hidden, nn.Linear(64, 8))


# By name: the model and the shape of its input.
MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "ResNet": (resnet, (8, 3, 32, 32)),
    "MobileNet": (mobilenet, (8, 3, 64, 64)),
    "conv1d": (conv1d, (8, 16, 512)),
    "UNet": (lambda: UNet(32), (4, 3, 32, 32)),
    "ViT": (vit, (8, 3, 32, 32)),
    "GPT": (lambda: GPT(4, 256, 2, 64), (32, 64)),  # the demo's
    "Llama-like": (llama, (4, 128, 256)),
    "LSTM": (lambda: Recurrent(nn.LSTM), (16, 32, 128)),
    "GRU": (lambda: Recurrent(nn.GRU), (16, 32, 128)),
    "MLP, 32 rows": (mlp, (32, 64)),
    "one token": (llama, (1, 1, 256)),
}
for rows in (1, 4, 8, 16):
    MODELS[f"Linear, {rows}"] = (lambda: nn.Linear(1024, 1024), (rows, 1024))


def stepper(name: str, ours: bool) -> Callable[[], None]:
    """A training step of a model, in float32 or prepared; or a forward pass."""
    torch.manual_seed(0)
    make, shape = MODELS[name]
    model = make()
    tokens = isinstance(model, GPT)
    x = torch.randint(VOCABULARY, shape) if tokens else torch.randn(shape)
    if ours:
        model, x = amp.prepare(model, torch.bfloat16), x if tokens else x.bfloat16()
        optimizer: torch.optim.Optimizer = amp.optim.AdamW(model.parameters(), lr=1e-4)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step() -> None:
        optimizer.zero_grad()
        model(x).float().square().mean().backward()
        optimizer.step()

    def infer() -> None:
        with torch.no_grad():
            model(x)

    return infer if name == "one token" or name.startswith("Linear") else step


def ratios(name: str, rounds: int) -> list[float]:
    """Our time over float32's, of each round; a turn takes 10 ms or a step."""
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    arms = [stepper(name, ours) for ours in (False, True)]
    found: list[float] = []
    calls = 1
    for number in range(-2, rounds):
        seconds = []
        for arm in arms:
            arm()  # the other one left its weights in the processor's cache
            start = clock()
            for _ in range(calls):
                arm()
            seconds.append((clock() - start) / calls)
        if number >= 0:
            found.append(seconds[1] / seconds[0])
        else:
            calls = max(1, min(200, int(0.01 / seconds[0])))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--isa", choices=ISAS, nargs="*", default=ISAS)
    parser.add_argument("--models", choices=MODELS, nargs="*", default=list(MODELS))
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        torch.set_num_threads(arguments.threads)
        for name in arguments.models:
            try:
                print(json.dumps(ratios(name, arguments.rounds)), flush=True)
            except RuntimeError as error:  # torch may not have this product here
                print(json.dumps(str(error).splitlines()[0]), flush=True)
        return
    child = [__file__, "--child", f"--rounds={arguments.rounds}", f"--threads={arguments.threads}"]
    columns = {}
    for title, printed in outputs(arguments.isa, *child, "--models", *arguments.models):
        found = [json.loads(line) for line in printed.splitlines()]
        columns[title] = [f"fails: {f}" if isinstance(f, str) else quartiles(f) for f in found]
    if not columns:
        return
    print("|", *(f"| {title}" for title in columns), "|")
    print("|---" * (1 + len(columns)) + "|")
    for name, *cells in zip(arguments.models, *columns.values(), strict=True):
        print(f"| {name} |", " | ".join(cells), "|")


if __name__ == "__main__":
    main()
