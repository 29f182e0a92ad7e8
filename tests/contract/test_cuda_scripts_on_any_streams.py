"""A script on any streams, ordered by wait_stream, gives the bits of the same script on one stream.

Scripts are drawn by a seed: what is trained and how, the operations of each iteration, and which of
three streams each of them runs on. A stream waits for the one of the operation before it, as torch
demands, and gradients are recorded on the streams that use them before they are dropped. Beside
that any stream takes memory at any time, as one that reads the next batch. amp_mp promises that
what it allocates itself needs no more than this.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from random import Random
from typing import Any

import pytest
import torch
from streams import hold_up, late, take_memory
from tiers import tiered
from torch import Tensor, nn

import amp_mp as amp

DEVICE = "cuda"
SCRIPTS = range(40)
ITERATIONS = 5
KINDS = ("scaled", "released", "wrapped", "handle", "replayed backward", "replayed")
MEMORY = ("float32", "exact", "lean", "tiny")
Operation = Callable[[], object]


class Training:
    """What a script trains: drawn once, with one operation a method."""

    def __init__(self, chance: Random) -> None:
        torch.manual_seed(chance.randrange(1000))
        self.kind = kind = chance.choice(KINDS)
        low = kind in ("wrapped", "handle") or chance.random() < 0.5
        self.dtype = chance.choice([torch.float16, torch.bfloat16]) if low else torch.float32
        layers = nn.Sequential(nn.Linear(8, 40), nn.Tanh(), nn.Linear(40, 4)).to(DEVICE)
        self.model = amp.prepare(layers, self.dtype) if low else layers
        self.inner = self.optimizer = self.make_optimizer(chance)
        policy = chance.choice([None, "Backoff", "LogMax"])
        self.scaler = amp.GradScaler(DEVICE, 2.0**8, growth_interval=2, loss_scale=policy)
        self.averaged = amp.AveragedModel(self.model, self.optimizer, decay=0.9)
        self.batch = torch.zeros(6, 8, device=DEVICE, dtype=self.dtype)
        self.told: list[Any] = []
        self.handle: Any = None
        if kind == "wrapped":
            dynamic = chance.random() < 0.5
            self.optimizer = amp.FP16_Optimizer(
                self.inner, verbose=False, dynamic_loss_scale=dynamic, check_overflow=True
            )
        elif kind == "handle":
            self.handle = amp.init(device_type=DEVICE, dtype=self.dtype, loss_scale="dynamic")
        elif kind == "released":
            clip = chance.choice(["parameter", "previous"])
            self.inner.attach(self.model, scaler=self.scaler, clip=clip)
        self.graph = torch.cuda.CUDAGraph()

    def make_optimizer(self, chance: Random) -> Any:
        params = self.model.parameters()
        if self.kind in ("scaled", "wrapped", "handle") and chance.random() < 0.3:
            return torch.optim.SGD(params, lr=1e-2, momentum=0.9)
        rate = torch.tensor(1e-2, device=DEVICE) if chance.random() < 0.5 else 1e-2
        norm = chance.choice([None, 0.5])
        if chance.random() < 0.2:
            return amp.optim.LAMB(params, lr=rate, max_grad_norm=norm)
        return amp.optim.AdamW(params, lr=rate, max_grad_norm=norm, memory=chance.choice(MEMORY))

    def read(self, number: int) -> None:
        source = torch.Generator().manual_seed(number)
        batch = torch.randn(6, 8, generator=source)
        if number % 4 == 3:
            batch[0, 0] = float("inf")
        self.batch.copy_(batch)

    def loss(self) -> Tensor:
        return self.model(self.batch).float().square().mean()

    def backward(self) -> None:
        loss = self.loss()
        if self.kind == "wrapped":
            self.optimizer.backward(loss)
        elif self.handle is not None:
            with self.handle.scale_loss(loss, self.optimizer) as scaled:
                scaled.backward()
        else:
            self.scaler.scale(loss).backward()

    def step(self) -> None:
        if self.kind == "wrapped" or self.handle is not None:
            self.optimizer.step()
        else:
            self.scaler.step(self.optimizer)

    def clip(self) -> None:
        if self.kind == "wrapped":
            self.optimizer.clip_master_grads(0.5)
        else:
            nn.utils.clip_grad_norm_(self.model.parameters(), 0.5)

    def zero_grad(self, to_none: bool) -> None:
        own = [p for group in self.inner.param_groups for p in group["params"]]
        for p in [*self.model.parameters(), *own]:
            if p.grad is not None:
                for stream in self.streams:
                    p.grad.record_stream(stream)
        self.optimizer.zero_grad(set_to_none=to_none)

    def ask(self) -> None:
        if isinstance(self.inner, torch.optim.SGD):
            self.told.append(self.scaler.get_scale())
        else:
            self.told.append((self.inner.last_report(wait=True), self.scaler.get_scale()))

    def save(self) -> None:
        found = [self.optimizer.state_dict(), self.model.state_dict(), self.averaged.state_dict()]
        self.told.append([t.cpu() for t in tensors_in(found)])

    def capture(self) -> None:
        """The backward pass, or the whole iteration, on a stream of torch's own."""
        self.zero_grad(True)
        with torch.cuda.graph(self.graph):
            self.backward()
            if self.kind == "replayed":
                self.step()
                self.scaler.update()

    def operations(self, chance: Random) -> Iterator[Operation]:
        """Those of all iterations, in their order."""
        scaler, sometimes = self.scaler, lambda: chance.random() < 0.4
        replays = self.kind.startswith("replayed")
        own_scale = self.kind == "wrapped" or self.handle is not None
        for number in range(ITERATIONS):
            yield partial(self.read, number)
            if replays and number == 2:
                yield self.capture
            if replays and number >= 2:
                yield self.graph.replay
            else:
                to_none = replays or sometimes()
                yield partial(self.zero_grad, to_none)
                for _ in range(1 + sometimes()):
                    yield self.backward
            if self.kind != "replayed" or number < 2:
                if self.kind == "wrapped":
                    yield from [self.clip] * sometimes()
                elif self.kind in ("scaled", "replayed backward") and sometimes():
                    yield partial(scaler.unscale_, self.optimizer)
                    yield from [self.clip] * sometimes()
                yield self.step
                yield from [] if own_scale else [scaler.update]
            yield from [self.averaged.update] * sometimes()
            yield from [self.ask] * sometimes()
            yield from [self.save] * sometimes()
        yield self.ask
        yield self.save

    streams: list[Any]


def tensors_in(found: Any) -> Iterator[Tensor]:
    if isinstance(found, Tensor):
        yield found
    elif isinstance(found, dict | list | tuple):
        for each in found.values() if isinstance(found, dict) else found:
            yield from tensors_in(each)


def told_by(script: int, streams: list[Any]) -> list[Any]:
    """What the script learns, with its operations on these three streams."""
    chance = Random(script)
    training = Training(chance)
    training.streams = streams
    last = torch.cuda.current_stream()
    try:
        for operation in training.operations(chance):
            stream = chance.choice(streams)
            stream.wait_stream(last)
            last = stream
            with torch.cuda.stream(stream):
                if operation in (training.step, training.graph.replay):
                    hold_up()
                operation()
            if chance.random() < 0.5:
                with torch.cuda.stream(chance.choice(streams)):
                    take_memory()
        torch.cuda.synchronize()
    finally:
        if training.handle is not None:
            training.handle._deactivate()
    return training.told


@pytest.mark.filterwarnings("ignore:amp_mp. torch.optim.SGD updates low-precision weights")
@pytest.mark.parametrize(
    "script", tiered(SCRIPTS, SCRIPTS[:6]), ids=lambda script: f"cuda-{script}"
)
def test_the_streams_of_a_script_do_not_show_in_its_bits(script: int) -> None:
    here = torch.cuda.current_stream()
    wanted = told_by(script, [here] * 3)
    with late(script):
        found = told_by(script, [here, torch.cuda.Stream(), torch.cuda.Stream()])
    assert len(found) == len(wanted)
    for number, (a, b) in enumerate(zip(found, wanted, strict=True)):
        if not isinstance(a, list):
            assert a == b, number
            continue
        for x, y in zip(a, b, strict=True):
            torch.testing.assert_close(x, y, rtol=0, atol=0, equal_nan=True)
