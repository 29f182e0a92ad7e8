"""Short trainings: every rule in every format, and every wrapper around optimizers in each format.

digest.py digests those of the rules. `make same-bits` runs all with two versions of the package
(write_bits.py). So this file uses public names alone, and only those that older versions have, too.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import cache, partial
from typing import Any

import torch
from helpers import DTYPES, random, through_a_file
from rules import OF_MATRICES, RULES, SQUARES, STORAGES, is_allowed
from torch import Tensor, nn

import amp_mp as amp

Found = dict[str, Tensor]  # by name
Case = tuple[str, str, Callable[[], Found]]  # what trains, in which format, and the training

SHAPES = ((1030, 32), (37, 1), (33, 31))
FORMATS = (*STORAGES, "none", "float16")
# Optimizers with the defaults of their arguments, all of which RULES give.
BY_DEFAULT = {
    f"{name}()": (kind, {})
    for name in amp.optim.__all__
    if isinstance(kind := getattr(amp.optim, name), type)
    and issubclass(kind, torch.optim.Optimizer)
    and kind is not amp.optim.FusedOptimizer
}


# ---- rules ---------------------------------------------------------------------------------------


@cache
def drawn(seed: int) -> list[Tensor]:
    """A tensor of each dtype and shape."""
    return [
        torch.from_numpy(random(rows * columns, seed)).view(rows, columns).to(dtype)
        for dtype in DTYPES.values()
        for rows, columns in SHAPES
    ]


class Training:
    """Weights of every dtype, which one optimizer steps and clips."""

    def __init__(self, rule: str, format: str) -> None:
        kind, numbers = (RULES | OF_MATRICES | BY_DEFAULT)[rule]
        self.make = partial(kind, **stored_in(format, kind, numbers), max_grad_norm=1.0)
        self.format = format
        self.params = [nn.Parameter(weight.clone()) for weight in self.drawn(0)]
        self.optimizer = self.make(self.params)

    def step(self, seed: int, overflow: bool = False) -> None:
        for param, grad in zip(self.params, self.drawn(seed), strict=True):
            param.grad = grad.clone().fill_(torch.inf) if overflow else grad
        self.optimizer.step()

    def drawn(self, seed: int) -> list[Tensor]:
        """Those tensors of `drawn` whose dtype the format takes."""
        return [tensor for tensor in drawn(seed) if is_allowed(self.format, tensor.dtype)]

    def resume(self) -> None:
        """Goes on with other parameters and another optimizer, which loads this one's state."""
        saved = through_a_file(self.optimizer.state_dict())
        self.params = [nn.Parameter(param.detach().clone()) for param in self.params]
        self.optimizer = self.make(self.params)
        self.optimizer.load_state_dict(saved)

    def tensors(self) -> Found:
        """Weights and states."""
        found = {}
        for param in self.params:
            dtype, shape = str(param.dtype).removeprefix("torch."), tuple(param.shape)
            for name, value in {"weight": param, **self.optimizer.state[param]}.items():
                found[f"{name} of {dtype} {shape}"] = value
        return found


def stored_in(format: str, kind: Any, numbers: dict[str, Any]) -> dict[str, Any]:
    """The numbers, and the arguments for one of FORMATS."""
    if format == "none":
        return {**numbers, "master": "none", "rounding": "stochastic"}
    return {**numbers, **(STORAGES.get(format) or halves(kind, numbers))}


def halves(kind: Any, numbers: dict[str, Any]) -> dict[str, str]:
    """Every state in float16 whose format may be chosen; squares as their roots."""
    weight = nn.Parameter(torch.ones(2, 2))
    weight.grad = torch.ones(2, 2)
    optimizer = kind([weight], **numbers)
    optimizer.step()
    choosable = inspect.signature(kind).parameters
    free = [n for n in optimizer.state[weight] if n in choosable and not numbers.get("centered")]
    return {name: "float16_root" if name in SQUARES else "float16" for name in free}


def of_rule(rule: str, format: str) -> Found:
    training = Training(rule, format)
    training.step(1)
    training.step(2)
    found = named("after 2 steps", training.tensors())
    training.step(3, overflow=True)
    found["step_was_skipped after an overflow"] = torch.tensor(training.optimizer.step_was_skipped)
    training.resume()
    training.step(4)
    found["grad_norm of the last step"] = torch.tensor(float(training.optimizer.grad_norm))
    return found | named("after loading and a step", training.tensors())


# ---- wrappers ------------------------------------------------------------------------------------

Step = Callable[[Callable[[], Tensor]], None]  # with the function that computes the loss
Loop = tuple[Step, list[Any]]  # and what has a state dict beside the model


def plain(model: nn.Module, optimizer: Any, ends: ExitStack) -> Loop:
    def step(loss: Callable[[], Tensor]) -> None:
        optimizer.zero_grad()
        loss().backward()
        optimizer.step()

    return step, [optimizer]


def fp16_optimizer(model: nn.Module, optimizer: Any, ends: ExitStack) -> Loop:
    start = {"init_scale": 2.0**10}
    wrapper = amp.FP16_Optimizer(
        optimizer, dynamic_loss_scale=True, dynamic_loss_args=start, verbose=False
    )

    def step(loss: Callable[[], Tensor]) -> None:
        wrapper.zero_grad()
        for _ in range(2):  # losses that add up
            wrapper.backward(loss())
        wrapper.clip_master_grads(0.5)
        wrapper.step()

    return step, [wrapper]


def grad_scaler(model: nn.Module, optimizer: Any, ends: ExitStack) -> Loop:
    scaler = amp.GradScaler("cpu", init_scale=2.0**10)

    def step(loss: Callable[[], Tensor]) -> None:
        optimizer.zero_grad()
        scaler.scale(loss()).backward()
        scaler.step(optimizer)
        scaler.update()

    return step, [optimizer, scaler]


def scale_loss(model: nn.Module, optimizer: Any, ends: ExitStack) -> Loop:
    dtype = next(model.parameters()).dtype
    low = torch.bfloat16 if dtype == torch.float32 else dtype
    handle = ends.enter_context(amp.init(device_type="cpu", dtype=low, loss_scale="dynamic"))

    def step(loss: Callable[[], Tensor]) -> None:
        optimizer.zero_grad()
        for _ in range(2):  # losses that add up
            with handle.scale_loss(loss(), optimizer) as scaled_loss:
                scaled_loss.backward()
        optimizer.step()

    return step, [optimizer, handle]


def release(model: nn.Module, optimizer: Any, ends: ExitStack) -> Loop:
    optimizer.attach(model)
    return plain(model, optimizer, ends)


def averaged_model(model: nn.Module, optimizer: Any, ends: ExitStack) -> Loop:
    average = amp.AveragedModel(model, optimizer, decay=0.9)
    plain_step, _ = plain(model, optimizer, ends)

    def step(loss: Callable[[], Tensor]) -> None:
        plain_step(loss)
        average.update()

    return step, [optimizer, average]


def masters(model: nn.Module, optimizer: Any, ends: ExitStack) -> Loop:
    plain_step, _ = plain(model, optimizer, ends)

    def step(loss: Callable[[], Tensor]) -> None:
        plain_step(loss)
        with optimizer.masters() as edited:
            for master in edited:
                master.mul_(0.999)

    return step, [optimizer]


WRAPPERS: dict[str, Callable[[nn.Module, Any, ExitStack], Loop]] = {
    "prepare": plain,
    "FP16_Optimizer": fp16_optimizer,
    "GradScaler": grad_scaler,
    "handle.scale_loss": scale_loss,
    "attach()": release,
    "AveragedModel": averaged_model,
    "optimizer.masters": masters,
}
WRAPPED: dict[str, tuple[Any, dict[str, Any]]] = {
    "AdamW": (amp.optim.AdamW, {"lr": 0.01}),
    "SGD": (amp.optim.SGD, {"lr": 0.05, "momentum": 0.9}),
    "LAMB": (amp.optim.LAMB, {"lr": 0.01}),
    "Muon": (amp.optim.Muon, {"lr": 0.01}),
}
TORCHS = {
    "torch's AdamW": (torch.optim.AdamW, {"lr": 0.01, "eps": 1e-4}),  # float16 has no 1e-8
    "torch's SGD": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9}),
}
AROUND_TORCHS = ("FP16_Optimizer", "GradScaler", "handle.scale_loss")


def made(kind: Any, format: str | None, numbers: dict[str, Any], model: nn.Module) -> Any:
    """An optimizer of the model; format: one of FORMATS, None for torch's."""
    if format is None:
        return kind(model.parameters(), **numbers)
    params = model if kind is amp.optim.Muon else model.parameters()
    return kind(params, **stored_in(format, kind, numbers), max_grad_norm=1.0)


Make = Callable[[nn.Module], Any]


def of_wrapper(wrapper: Callable[..., Loop], make: Make, format: str = "") -> Found:
    found: Found = {}
    for name, dtype in DTYPES.items():
        if not is_allowed(format, dtype):
            continue
        with ExitStack() as ends:
            trained = trained_by(wrapper, make, dtype, ends)
        found |= {f"{name} {key}": tensor for key, tensor in trained.items()}
    return found


def trained_by(
    wrapper: Callable[..., Loop], make: Make, dtype: torch.dtype, ends: ExitStack
) -> Found:
    """Two steps, one with an overflow, and one after state dicts were saved and loaded."""
    model = network(dtype)
    step, holders = wrapper(model, make(model), ends)
    for number in (1, 2):
        step(partial(loss_of, model, number))
    found = named("after 2 steps", in_state_dicts([model, *holders]))
    step(lambda: loss_of(model, 3) * torch.inf)
    found |= named("after an overflow", in_state_dicts([model, *holders]))
    saved = copy.deepcopy([holder.state_dict() for holder in (model, *holders)])

    resumed = network(dtype)
    optimizer = make(resumed)
    step, holders = wrapper(resumed, optimizer, ends)
    for holder, state_dict in zip((resumed, *holders), saved, strict=True):
        holder.load_state_dict(state_dict)
    step(partial(loss_of, resumed, 4))
    found |= named("after loading and a step", in_state_dicts([resumed, *holders]))
    if isinstance(optimizer, amp.optim.FusedOptimizer):
        in_float32 = amp.float32_state_dict(resumed, optimizer)
        found |= named("in float32", in_state_dicts(in_float32))
    return found


def network(dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 33), nn.LayerNorm(33), nn.Linear(33, 5, bias=False))
    return model if dtype == torch.float32 else amp.prepare(model, dtype)


def loss_of(model: nn.Module, seed: int) -> Tensor:
    x = torch.from_numpy(random(16 * 64, seed)).view(16, 64)
    return model(x.to(next(model.parameters()).dtype)).float().square().mean()


def in_state_dicts(value: Any, name: str = "") -> Found:
    """Tensors and numbers of state dicts, those of param_groups left out."""
    if isinstance(value, Tensor):
        return {name: value}
    if isinstance(value, int | float):
        return {name: torch.tensor([float(value)], dtype=torch.float64)}
    if hasattr(value, "state_dict"):
        return in_state_dicts(value.state_dict(), type(value).__name__)
    items = value.items() if isinstance(value, dict) else ()
    items = enumerate(value) if isinstance(value, list | tuple) else items
    found: Found = {}
    for key, each in items:
        if key != "param_groups":
            found |= in_state_dicts(each, f"{name}/{key}" if name else str(key))
    return found


# ---- all of them ---------------------------------------------------------------------------------


def named(when: str, tensors: Found) -> Found:
    """Copies, under names that say when."""
    return {f"{name} {when}": tensor.detach().clone() for name, tensor in tensors.items()}


def cases() -> Iterator[Case]:
    for rule in RULES | OF_MATRICES | BY_DEFAULT:
        for format in FORMATS:
            yield rule, format, partial(of_rule, rule, format)
    for name, wrapper in WRAPPERS.items():
        for wrapped, (kind, numbers) in WRAPPED.items():
            for format in FORMATS:
                make = partial(made, kind, format, numbers)
                yield f"{name}, {wrapped}", format, partial(of_wrapper, wrapper, make, format)
        for wrapped, (kind, numbers) in TORCHS.items() if name in AROUND_TORCHS else ():
            make = partial(made, kind, None, numbers)
            yield f"{name}, {wrapped}", "float32", partial(of_wrapper, wrapper, make)
