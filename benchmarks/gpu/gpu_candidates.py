"""What gpu_step.py times: amp_mp's step in every format, and torch's. Others: gpu_peers.py.

Every step clips by the global norm. amp_mp's and torch's pipelines on float32 masters also unscale,
check for overflow and move the loss scale; the others keep no float32 master, take gradients that
carry no scale, and check nothing. A candidate's bytes are the fewest that its own operations move.
"""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from gpu_lists import ShapeList, parameters
from torch import nn

import amp_mp as amp

sys.path.append(str(Path(__file__).resolve().parents[1]))  # where step.py is
from step import MEASURE_BYTES, SCALE, STEP_BYTES, TORCH_BYTES

MAX_NORM = 1.0
LR = 1e-4
Run = Callable[[], object]
Verify = Callable[[], str]


@dataclass(frozen=True)
class Copy:
    """A model with its optimizer: a step, what is wrong after some ("" if nothing), the weights."""

    run: Run
    verify: Verify = lambda: ""
    params: tuple[nn.Parameter, ...] = ()


@dataclass(frozen=True)
class Candidate:
    """Something to time: made by `build(shapes, device)`, moves `moved(shapes)` bytes a step.

    small_only: for lists on which launches take longer than the bytes; large_only: for the others.
    link: the bytes that a step sends over the link to the host, both ways together.
    """

    name: str
    build: Callable[[ShapeList, str], Copy]
    moved: Callable[[ShapeList], float]
    small_only: bool = False
    large_only: bool = False
    link: Callable[[ShapeList], float] = lambda _: 0.0


# ---- bytes ---------------------------------------------------------------------------------------

# AdamW by foreach: decay 8, lerp 12, mul 8, addcmul 12, sqrt 8, div 8, add 8, addcdiv 16; the fused
# one moves 28 of TORCH_BYTES.
TORCH_FOREACH_BYTES = TORCH_BYTES - 28 + (8 + 12 + 8 + 12 + 8 + 8 + 8 + 16)
CHANGES_BYTES = 2 / 8  # a bit a weight, read and written
CLIP = 2 + 4  # clip_grad_norm_ of bfloat16 gradients: norm, multiplication
TORCH_BFLOAT16 = 2 + 4 + 8 + CLIP  # gradient; weight; both moments in bfloat16


def each(bytes_: float) -> Callable[[ShapeList], float]:
    """The same for every element."""
    return lambda shapes: bytes_ * shapes.elements


# ---- amp_mp --------------------------------------------------------------------------------------


def moves(params: list[nn.Parameter], wanted: bool = True) -> Verify:
    """Whether the weights have changed since now, as wanted, and are finite."""
    watched = params[len(params) // 2].detach().flatten()[:4096]
    before = watched.clone()

    def verify() -> str:
        if not bool(watched.isfinite().all()):
            return "weights are not finite"
        changed = not torch.equal(watched, before)
        if changed == wanted:
            return ""
        return "weights did not change" if wanted else "weights changed in a skipped step"

    return verify


def our_copy(
    memory: str, shapes: ShapeList, device: str, overflow: bool = False, offload: Any = None
) -> Copy:
    params = parameters(shapes, device, SCALE)
    if overflow:
        params[-1].grad.view(-1)[-1] = math.inf
    options: dict[str, Any] = {"memory": memory, "offload": offload}
    optimizer = amp.optim.AdamW(params, lr=LR, max_grad_norm=MAX_NORM, **options)
    # A scale that never moves where every step overflows: it would soon be 0.
    scale: dict[str, Any] = {"loss_scale": SCALE} if overflow else {"init_scale": SCALE}
    scaler = amp.GradScaler(device, **scale)
    scaler.scale(torch.ones((), device=device))

    def step() -> None:
        scaler.step(optimizer)
        scaler.update()

    moved = moves(params, wanted=not overflow)

    def verify() -> str:
        if optimizer.step_was_skipped != overflow:
            return "a step was skipped" if not overflow else "an overflow was not skipped"
        return moved()

    return Copy(step, verify, tuple(params))


def graph_copy(memory: str, shapes: ShapeList, device: str) -> Copy:
    """The same step, captured as a CUDA graph."""
    copy = our_copy(memory, shapes, device)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            copy.run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        copy.run()
    return Copy(graph.replay, copy.verify)


def watched_copy(memory: str, shapes: ShapeList, device: str) -> Copy:
    """The same step while an amp.Changes watches the weights."""
    copy = our_copy(memory, shapes, device)
    changes = amp.Changes(nn.ParameterList(copy.params))

    def verify() -> str:
        count = changes.count()
        wrong = [watched.name for watched in changes._watched.values() if watched.has_all_changed]
        if wrong:
            return f"{len(wrong)} sums are not those of the weights, the first of {wrong[0]}"
        return copy.verify() or ("" if count else "no change was noted")

    return Copy(copy.run, verify)


def measure_copy(dtype: torch.dtype, shapes: ShapeList, device: str) -> Copy:
    grads = [p.grad.to(dtype) for p in parameters(shapes, device, SCALE) if p.grad is not None]
    counted = amp._C.measure(grads)[-1]

    def verify() -> str:
        squares, largest, bad = counted.tolist()
        return "" if squares > 0 and 0 < largest < math.inf and bad == 0 else f"found {counted}"

    return Copy(functools.partial(amp._C.measure, grads), verify)


def ours() -> list[Candidate]:
    """amp_mp's, those that targets speak of first; then while changes are noted."""
    order: tuple[str, ...] = ("exact", "tiny", "lean", "micro", "nano", "float32")
    found = []
    for memory in order:
        moved = MEASURE_BYTES + STEP_BYTES[memory]
        found.append(
            Candidate(f"amp_mp {memory}", functools.partial(our_copy, memory), each(moved))
        )
    for at, memory in ((2, "exact"), (4, "lean")):
        found.insert(
            at,
            Candidate(
                f"amp_mp {memory}, changes",
                functools.partial(watched_copy, memory),
                each(MEASURE_BYTES + STEP_BYTES[memory] + CHANGES_BYTES),
                large_only=True,
            ),
        )
    for dtype, width in ((torch.bfloat16, 2), (torch.float16, 2), (torch.float32, 4)):
        name = f"amp_mp measure {str(dtype).removeprefix('torch.')}"
        found.append(Candidate(name, functools.partial(measure_copy, dtype), each(width)))
    skipped = functools.partial(our_copy, "exact", overflow=True)
    found.append(Candidate("amp_mp exact, overflow", skipped, each(MEASURE_BYTES)))
    for memory in ("exact", "tiny"):
        bytes_ = each(MEASURE_BYTES + STEP_BYTES[memory])
        build = functools.partial(graph_copy, memory)
        found.append(Candidate(f"amp_mp {memory}, graph", build, bytes_, small_only=True))
    for memory in ("lean", "exact"):
        found.append(
            Candidate(
                f"amp_mp {memory}, offload",
                functools.partial(our_copy, memory, offload="state"),
                each(MEASURE_BYTES + STEP_BYTES[memory]),
                large_only=True,
                link=each(STEP_BYTES[memory] - 2 - 2 * 2),  # all but gradient and weight
            )
        )
    return found


# ---- torch ---------------------------------------------------------------------------------------


def torch_copy(options: dict[str, bool], shapes: ShapeList, device: str) -> Copy:
    """Cast, unscale, clip, AdamW on float32 masters, cast back, with torch's GradScaler."""
    model = parameters(shapes, device, SCALE)
    masters = [nn.Parameter(p.detach().float()) for p in model]
    optimizer = torch.optim.AdamW(masters, lr=LR, **options)
    scaler = torch.amp.GradScaler(device, init_scale=SCALE)
    scaler.scale(torch.ones((), device=device))

    def step() -> None:
        for master, param in zip(masters, model, strict=True):
            assert param.grad is not None
            master.grad = param.grad.float()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(masters, MAX_NORM)
        scaler.step(optimizer)
        scaler.update()
        with torch.no_grad():
            torch._foreach_copy_(model, masters)

    return Copy(step, moves(model))


def plain_copy(make: Callable[[Any], Any], shapes: ShapeList, device: str) -> Copy:
    """An optimizer on bfloat16 weights after torch's clipping; no scale, no check, no master."""
    params = parameters(shapes, device, 1.0)
    optimizer = make(params)

    def step() -> None:
        torch.nn.utils.clip_grad_norm_(params, MAX_NORM)
        optimizer.step()

    return Copy(step, moves(params))


def plain(name: str, make: Callable[[Any], Any], moved: Callable[[ShapeList], float]) -> Candidate:
    return Candidate(name, functools.partial(plain_copy, make), moved)


BASE = "torch fused"


def torchs() -> list[Candidate]:
    fused, foreach = ({"fused": True}, {"foreach": True})
    low = functools.partial(torch.optim.AdamW, lr=LR, fused=True)
    return [
        Candidate(BASE, functools.partial(torch_copy, fused), each(TORCH_BYTES)),
        Candidate(
            "torch foreach", functools.partial(torch_copy, foreach), each(TORCH_FOREACH_BYTES)
        ),
        plain("torch bfloat16, no masters", low, each(TORCH_BFLOAT16)),
    ]
