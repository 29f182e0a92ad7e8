"""What rounding cuts off from a weight stays with it until the parameter is freed.

Scripts that make a new optimizer for each stage, step one weight by two optimizers, wrap, load and
copy, each beside float32.
"""

from __future__ import annotations

import copy
import gc
import io
import itertools
import pickle
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import raw_bytes, through_a_file
from rules import MASTERED, cases, is_allowed
from tiers import in_turn, paired, tiered
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import amp_mp as amp

LOW = [torch.bfloat16, torch.float16]
BF16 = torch.bfloat16
LR = 1e-4
Maker = Callable[[Any], Any]


def pair(device: str, dtype: torch.dtype = BF16) -> tuple[nn.Module, nn.Module]:
    """A float32 model, and the same in low precision."""
    torch.manual_seed(0)
    full = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32, bias=False)).to(device)
    return full, amp.prepare(copy.deepcopy(full), dtype)


def step(model: nn.Module, optimizer: Any, sign: float = 1.0) -> None:
    """A step whose updates are far below the weights' rounding."""
    for param in model.parameters():
        param.grad = torch.full_like(param, sign)
    if isinstance(optimizer, amp.FP16_Optimizer):
        optimizer.update_master_grads()
    optimizer.step()


def values(model: nn.Module) -> Tensor:
    return torch.cat([each.flatten() for each in amp.float32_state_dict(model).values()])


def assert_as_float32(
    full: nn.Module, low: nn.Module, before: Tensor, storage: str = "", part: float = 0.01
) -> None:
    """Each element has gone float32's way within 1 %, and what the storage rounds at random."""
    wanted, found = values(full) - before, values(low) - before
    assert (wanted.abs() > 20 * LR).all()
    noise = noise_of(values(full)) if "nano" in storage else 0.0
    assert ((found - wanted).abs() <= part * wanted.abs() + noise).all()


def noise_of(numbers: Tensor, steps: int = 80) -> Tensor:
    """Six deviations of sums of roundings to split20's places, half a place or less each."""
    return 6 * 0.5 * steps**0.5 * places(numbers)


def places(numbers: Tensor) -> Tensor:
    """How far two neighbours of split20 are apart, also a few updates further."""
    return torch.exp2(torch.frexp(numbers.abs() + 80 * LR).exponent - 12.0)


def draw_anew(optimizer: Any, seed: int) -> None:
    """Other random bytes than an optimizer's before, which counted the same steps."""
    for group in optimizer.param_groups:
        if "seed" in group:
            group["seed"] = seed


# A new optimizer on weights that were trained before.

CLASSES: dict[str, Maker] = {
    "SGD": partial(amp.optim.SGD, lr=LR),
    "AdamW": partial(amp.optim.AdamW, lr=LR, weight_decay=0.0),
    "Lion": partial(amp.optim.Lion, lr=LR, weight_decay=0.0),
}


def around(kind: Maker) -> Maker:
    return lambda params: amp.FP16_Optimizer(kind(params), verbose=False)


WRAPPED: dict[str, Maker] = {
    "FP16_Optimizer of torch": around(partial(torch.optim.AdamW, lr=LR, weight_decay=0.0)),
    "FP16_Optimizer of amp": around(CLASSES["AdamW"]),
    "LARC": lambda params: amp.apex.parallel.LARC(CLASSES["AdamW"](params), clip=False),
}


@pytest.mark.parametrize(("storage", "dtype"), cases(MASTERED, LOW))
@pytest.mark.parametrize("kind", CLASSES)
def test_stages_with_new_optimizers_go_float32s_way(
    device: str, kind: str, storage: str, dtype: torch.dtype
) -> None:
    full, low = pair(device, dtype)
    before = values(full)
    for stage in range(40):
        for model in (full, low):
            own = {**MASTERED[storage], "seed": stage} if model is low else {}
            optimizer = CLASSES[kind](model.parameters(), **own)
            for _ in range(2):
                step(model, optimizer)
    assert_as_float32(full, low, before, storage)


def cleared(model: nn.Module, optimizer: Any) -> Any:
    optimizer.state.clear()
    return optimizer


def deleted(model: nn.Module, optimizer: Any) -> Any:
    for param in model.parameters():
        del optimizer.state[param]
    return optimizer


def reset_as_relora(model: nn.Module, optimizer: Any) -> Any:
    for param in model.parameters():
        optimizer.state[param] = {}
    return optimizer


def thawed(model: nn.Module, optimizer: Any) -> Any:
    model.requires_grad_(False)
    gone = weakref.ref(optimizer)
    del optimizer
    assert gone() is None
    model.requires_grad_(True)
    return CLASSES["SGD"](model.parameters())


def moved(model: nn.Module, optimizer: Any) -> Any:
    device = next(model.parameters()).device
    model.to(memory_format=torch.channels_last).to("cpu")
    return CLASSES["SGD"](model.to(device).parameters())


def forgotten(model: nn.Module, optimizer: Any) -> Any:
    amp.optim.forget(optimizer)
    return optimizer


def forgotten_for_another(model: nn.Module, optimizer: Any) -> Any:
    """As verl's offload: the weights go elsewhere and come back."""
    amp.optim.forget(optimizer)
    for param in model.parameters():
        param.data = param.data.clone()
    return CLASSES["SGD"](model.parameters())


AFTER: dict[str, Callable[[nn.Module, Any], Any]] = {
    "forget": forgotten,
    "forget, and a new optimizer": forgotten_for_another,
    "state.clear()": cleared,
    "del state[p]": deleted,
    "state[p] = {}": reset_as_relora,
    "frozen in between": thawed,
    "moved and back": moved,
}


@pytest.mark.parametrize("storage", MASTERED)
@pytest.mark.parametrize("after", AFTER)
def test_a_state_that_is_taken_away_leaves_the_bits(device: str, after: str, storage: str) -> None:
    full, low = pair(device)
    before = values(full)
    optimizers = [
        CLASSES["SGD"](full.parameters()),
        CLASSES["SGD"](low.parameters(), **MASTERED[storage]),
    ]
    for stage in range(40):
        for model in (full, low):
            draw_anew(optimizers[0], stage)
            for _ in range(2):
                step(model, optimizers[0])
            optimizers.append(AFTER[after](model, optimizers.pop(0)))
    assert_as_float32(full, low, before, storage)


@pytest.mark.parametrize("storage", MASTERED)
@pytest.mark.parametrize("way", ["state.clear()", "an empty state is loaded"])
def test_a_written_weight_whose_state_is_taken_away_is_what_was_written(
    device: str, way: str, storage: str
) -> None:
    _, low = pair(device)
    optimizer = CLASSES["AdamW"](low.parameters(), **MASTERED[storage])
    for _ in range(3):
        step(low, optimizer)
    with torch.no_grad():
        for param in low.parameters():
            param.mul_(0.5)
    if way == "state.clear()":
        optimizer.state.clear()
    else:
        optimizer.load_state_dict({**optimizer.state_dict(), "state": {}})
    for name, value in amp.float32_state_dict(low, optimizer).items():
        assert torch.equal(value, low.get_parameter(name).float()), name


@pytest.mark.parametrize("second", ["AdamW", "FP16_Optimizer of torch", "FP16_Optimizer of amp"])
@pytest.mark.parametrize("first", ["FP16_Optimizer of torch", "FP16_Optimizer of amp"])
def test_masters_of_a_wrapper_after_another_optimizers_steps(
    device: str, first: str, second: str
) -> None:
    _, low = pair(device)
    optimizer = EVERY[first](low.parameters())
    step(low, optimizer)
    step(low, EVERY[second](low.parameters()))
    before = values(low)
    with optimizer.masters() as masters:
        for master in masters:
            master.mul_(0.5)
    assert torch.equal(values(low), 0.5 * before)


@pytest.mark.parametrize(("storage", "dtype"), cases(MASTERED, LOW))
def test_another_layout_leaves_the_bits_of_written_weights(
    device: str, storage: str, dtype: torch.dtype
) -> None:
    """Below a power of two a remainder beside float16 reaches beyond what rounds to the weight."""
    torch.manual_seed(0)
    full = nn.Conv2d(8, 8, 3, bias=False).to(device)
    found = []
    for layouts in ([torch.contiguous_format], [torch.channels_last, torch.contiguous_format]):
        model = amp.prepare(copy.deepcopy(full), dtype)
        optimizer = amp.optim.SGD(
            model.parameters(), lr=LR, check_overflow=True, **MASTERED[storage]
        )
        step(model, optimizer)
        kept = model.weight.detach().clone()
        with torch.no_grad():
            model.weight.copy_(torch.exp2(model.weight.float().abs().log2().round()))
        for layout in layouts:
            model.to(memory_format=layout)
            step(model, optimizer, float("inf"))  # which is skipped
        with torch.no_grad():
            model.weight.copy_(kept)
        found.append(amp.float32_of(model.weight, optimizer))
    assert torch.equal(*found)


EVERY: dict[str, Maker] = {
    **CLASSES,
    **WRAPPED,
    **{f"SGD {m}": partial(amp.optim.SGD, lr=LR, **own) for m, own in MASTERED.items()},
}


@pytest.mark.parametrize(("first", "dtype"), in_turn(EVERY, LOW))
def test_any_optimizer_goes_on_from_any_other(device: str, first: str, dtype: torch.dtype) -> None:
    """Each of the others after the first, which is made anew every second stage."""
    for second in EVERY:
        if not is_allowed(*first.split(), *second.split(), dtype):
            continue
        full, low = pair(device, dtype)
        start, total = values(full), 0
        for stage, kind in enumerate((first, second) * 8):
            before, weights = values(low), raw_bytes(low.state_dict())
            optimizer = EVERY[kind](low.parameters())
            draw_anew(optimizer, stage)
            # To make one changes nothing. Half a unit is a float32 number less as float32 master;
            # a split's remainder beside float16 has steps of 2^-40 near 0.
            atol = 2.0**-41 if dtype == torch.float16 else 0
            torch.testing.assert_close(values(low), before, rtol=2.0**-23, atol=atol)
            assert raw_bytes(low.state_dict()) == weights
            for _ in range(2):
                step(low, optimizer)
                total += 1
        # LARC multiplies an AdamW's gradients alone, so every step here moves by LR.
        moved = values(low) - start
        noise = noise_of(start, total) if "nano" in first + second else 0.0
        assert ((moved + total * LR).abs() <= 0.02 * total * LR + noise).all(), second


def test_an_average_goes_on_with_the_true_bits(device: str) -> None:
    full, low = pair(device)
    averages = [amp.AveragedModel(model, decay=0.9) for model in (full, low)]
    start = averages[0].float32_state_dict()
    for _ in range(20):
        for model, averaged in zip((full, low), averages, strict=True):
            step(model, CLASSES["SGD"](model.parameters()))
            averaged.update()
    wanted, found = (averaged.float32_state_dict() for averaged in averages)
    for name, value in wanted.items():
        moved = value - start[name]
        assert ((found[name] - start[name] - moved).abs() <= 0.01 * moved.abs()).all(), name


def test_a_weight_that_is_written_between_two_optimizers_is_what_the_second_begins_with(
    device: str,
) -> None:
    """Also without the remainders of before: a trial that starts again is the trial."""
    trials = []
    for _ in range(2):
        model = trials[0][0] if trials else amp.prepare(nn.Linear(8, 8).to(device), BF16)
        torch.manual_seed(1)
        model.reset_parameters()
        optimizer = CLASSES["AdamW"](model.parameters())
        for _ in range(5):
            step(model, optimizer)
        trials.append((model, values(model)))
    assert torch.equal(trials[0][1], trials[1][1])


# Several optimizers of one weight.


# A float32 master, a remainder of two bytes, one of one byte, masters of a wrapper of torch's.
OWNERS = ["SGD float32", "SGD exact", "SGD lean", "FP16_Optimizer of torch"]


@pytest.mark.parametrize(
    ("first", "second"),
    tiered(itertools.product(EVERY, EVERY), [*itertools.product(OWNERS, OWNERS)]),
)
def test_two_optimizers_see_what_the_other_left(device: str, first: str, second: str) -> None:
    """Alternately, both alive; each step moves every weight by LR.

    split20 takes the nearest to what the other left, and rounds its own to one of two neighbours.
    """
    _, low = pair(device)
    start = values(low)
    noise = 1.6 * places(start) if "nano" in first + second else 0.0
    optimizers = [EVERY[kind](low.parameters()) for kind in (first, second)]
    for number in range(40):
        before = values(low)
        step(low, optimizers[number % 2])
        assert ((values(low) - before + LR).abs() <= 0.1 * LR + noise).all(), number
    if "nano" in first + second:
        noise = noise_of(start, 40) + 20 * 0.6 * places(start)
    assert ((values(low) - start + 40 * LR).abs() <= 0.01 * 40 * LR + noise).all()


@pytest.mark.parametrize("keeps", [True, False])  # the first wrapper
def test_wrapping_an_optimizer_twice_goes_on(device: str, keeps: bool) -> None:
    """As in a notebook whose cell is run again."""
    full, low = pair(device)
    before = values(full)
    inner = torch.optim.SGD(low.parameters(), lr=LR)
    plain = torch.optim.SGD(full.parameters(), lr=LR)
    wrappers = []
    for _ in range(3):
        optimizer = amp.FP16_Optimizer(inner, verbose=False)
        if keeps:
            wrappers.append(optimizer)
        assert len(optimizer.fp16_groups[0]) == 3
        for _ in range(10):
            step(low, optimizer)
            step(full, plain)
        del optimizer
        gc.collect()
    assert_as_float32(full, low, before)


# Loads.


@pytest.mark.parametrize("steps", [0, 1])
@pytest.mark.parametrize("saved", [torch.float16, torch.float64, torch.float32])
def test_a_load_keeps_what_float32_can_hold(device: str, saved: torch.dtype, steps: int) -> None:
    _, low = pair(device)
    for _ in range(steps):
        step(low, CLASSES["SGD"](low.parameters()))
    gc.collect()
    torch.manual_seed(5)
    given = {
        n: torch.randn_like(p, dtype=torch.float64).to(saved) for n, p in low.named_parameters()
    }
    low.load_state_dict(given)
    found = amp.float32_state_dict(low)
    for name, value in given.items():
        assert torch.equal(found[name], value.float()), name
        off, least = (each.double() - value for each in (low.get_parameter(name), value.to(BF16)))
        assert (off.abs() <= least.abs()).all(), name  # rounded to nearest
    optimizer = amp.optim.SGD(low.parameters(), lr=0.0, memory="float32")
    step(low, optimizer)
    for name, param in low.named_parameters():
        # What lies half way between two weights goes with the one that the first format chose.
        off = optimizer.state[param]["master"] - given[name].float()
        assert (off.abs() <= steps * 2.0**-23 * given[name].float().abs()).all(), name


class InWrapper(nn.Module):
    """A library's wrapper, whose state dict has the names of what is inside."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.inside = module
        self.register_state_dict_post_hook(self._rename)
        self.register_load_state_dict_pre_hook(self._add)

    @staticmethod
    def _rename(module: nn.Module, state_dict: Any, prefix: str, _: Any) -> None:
        for name in [n for n in state_dict if n.startswith(f"{prefix}inside.")]:
            state_dict[prefix + name.removeprefix(f"{prefix}inside.")] = state_dict.pop(name)

    @staticmethod
    def _add(module: nn.Module, state_dict: Any, prefix: str, *_: Any) -> None:
        for name in [n for n in state_dict if n.startswith(prefix)]:
            state_dict[f"{prefix}inside.{name.removeprefix(prefix)}"] = state_dict.pop(name)


NAMES: dict[str, Callable[[nn.Module], nn.Module]] = {
    "plain": lambda m: m,
    "checkpoint_wrapper": lambda m: nn.Sequential(*map(checkpoint_wrapper, m)),
    "torch.compile": torch.compile,
    "module.": nn.DataParallel,
    "another wrapper": lambda m: nn.Sequential(*map(InWrapper, m)),
}


def adam(model: nn.Module, memory: str) -> list[Any]:
    return [amp.optim.AdamW(model.parameters(), lr=0.01, memory=memory)]


OPTIMIZERS: dict[str, Callable[[nn.Module], list[Any]]] = {
    "one": lambda m: adam(m, "exact"),
    "float32 masters": lambda m: adam(m, "float32"),
    "FP16_Optimizer": lambda m: [WRAPPED["FP16_Optimizer of torch"](m.parameters())],
    "one for each parameter": lambda m: [amp.optim.AdamW([p], lr=0.01) for p in m.parameters()],
}


@pytest.mark.parametrize(
    ("wrapper", "optimizers", "prepared"), paired(NAMES, OPTIMIZERS, [True, False])
)
def test_float32_weights_are_loaded_under_any_names(
    device: str, wrapper: str, optimizers: str, prepared: bool
) -> None:
    full, low = pair(device)
    inside = low if prepared else copy.deepcopy(full).to(BF16)
    model = NAMES[wrapper](inside)
    known = OPTIMIZERS[optimizers](model)
    for optimizer in known:
        step(model, optimizer)
    given = {name: torch.randn_like(each).float() for name, each in model.state_dict().items()}
    amp.load_float32_state_dict(model, given)
    assert raw_bytes(amp.float32_state_dict(model)) == raw_bytes(given)
    for optimizer in known:
        for group in optimizer.param_groups:
            group["lr"] = group["weight_decay"] = 0.0
        step(model, optimizer)
    assert raw_bytes(amp.float32_state_dict(model)) == raw_bytes(given)
    if isinstance(known[0], amp.optim.AdamW):
        for param in model.parameters():
            (state,) = (o.state[param] for o in known if param in o.state)
            assert ("master" in state) == (optimizers == "float32 masters")


class Saves(nn.Linear):
    def __init__(self, extra: Any) -> None:
        super().__init__(4, 4)
        self.extra, self.loaded = extra, None

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        self.loaded = state


@pytest.mark.parametrize("extra", [{"a": 1}, 7, None, io.BytesIO(b"x"), torch.ones(2, dtype=BF16)])
def test_extra_state_stays_what_it_is(device: str, extra: Any) -> None:
    model = amp.prepare(nn.Sequential(Saves(extra), nn.Linear(4, 2)).to(device), BF16)
    for found in (amp.float32_state_dict(model), amp.AveragedModel(model).float32_state_dict()):
        kept = found["0._extra_state"]
        if isinstance(extra, Tensor):
            assert torch.equal(kept, extra.float())
        elif isinstance(extra, io.BytesIO):
            assert kept.getvalue() == b"x"
        else:
            assert kept == extra
    amp.load_float32_state_dict(model, amp.float32_state_dict(model))
    assert model[0].loaded is not None or extra is None


# Copies, moves, and the end.

COPIES: dict[str, Callable[[nn.Module], nn.Module]] = {
    "deepcopy": copy.deepcopy,
    "pickle": through_a_file,
    "prepared again": lambda m: amp.prepare(m, BF16),
    "to": lambda m: m.to(memory_format=torch.channels_last),
}


@pytest.mark.parametrize("storage", MASTERED)
@pytest.mark.parametrize("name", COPIES)
def test_a_copy_after_steps_has_the_bits(device: str, name: str, storage: str) -> None:
    _, low = pair(device)
    optimizer = amp.optim.SGD(low.parameters(), lr=LR, **MASTERED[storage])
    step(low, optimizer)
    wanted = values(low)
    copied = COPIES[name](low)
    assert torch.equal(values(copied), wanted)
    step(copied, amp.optim.SGD(copied.parameters(), lr=0.0, **MASTERED[storage]))
    assert torch.equal(values(copied), wanted)
    if copied is not low:  # the copy's bits are its own
        step(copied, amp.optim.SGD(copied.parameters(), lr=LR, **MASTERED[storage]))
        assert torch.equal(values(low), wanted)


@pytest.mark.parametrize(
    ("kind", "dtype"), [c for c in itertools.product(EVERY, LOW) if is_allowed(*c[0].split(), c[1])]
)
def test_stages_of_copies_of_a_model_never_prepared(
    device: str, kind: str, dtype: torch.dtype
) -> None:
    """A self-play script copies its model after each stage and goes on with the copy."""
    full = pair(device)[0]
    low = copy.deepcopy(full).to(dtype)
    load = dict(full.named_parameters())
    with torch.no_grad():
        for name, param in low.named_parameters():
            load[name].copy_(param)
    before = values(full)
    for stage in range(40):
        for model in (full, low):
            optimizer = (CLASSES["SGD"] if model is full else EVERY[kind])(model.parameters())
            draw_anew(optimizer, stage)
            for _ in range(2):
                step(model, optimizer)
        earlier, low = low, copy.deepcopy(low)
        wanted = values(low)
        step(earlier, CLASSES["SGD"](earlier.parameters()))  # the bits of the copy are its own
        assert torch.equal(values(low), wanted)
    assert_as_float32(full, low, before, kind, part=0.02)


def test_the_other_dtype_after_steps_keeps_the_float32_values(device: str) -> None:
    _, low = pair(device)
    step(low, CLASSES["SGD"](low.parameters()))
    wanted = values(low)
    amp.prepare(low, torch.float16)
    assert torch.equal(values(low), wanted)
    assert next(low.parameters()).dtype == torch.float16


def test_to_empty_and_a_load_after_steps_keep_the_loaded_values(device: str) -> None:
    full, low = pair(device)
    step(low, CLASSES["SGD"](low.parameters()))
    given = {name: each.detach().clone() for name, each in full.state_dict().items()}
    low.to_empty(device=device)
    low.load_state_dict(given)
    assert raw_bytes(amp.float32_state_dict(low)) == raw_bytes(given)


@pytest.mark.parametrize("storage", MASTERED)
def test_the_state_shows_the_bits_and_no_others_are_kept(device: str, storage: str) -> None:
    """Bytes per parameter in training are those of the state; afterwards the bits alone stay."""
    _, low = pair(device)
    optimizer = CLASSES["AdamW"](low.parameters(), **MASTERED[storage])
    step(low, optimizer)
    report = optimizer.memory_report()
    assert "original" not in report.bytes
    second = [n for n in report.bytes if n.startswith(("master", "remainder"))]
    bits = sum(report.bytes[name] for name in second)
    states = list(optimizer.state.values())
    kept = [weakref.ref(state[name]) for name in second for state in states if name in state]
    moments = [weakref.ref(s[n]) for s in optimizer.state.values() for n in s if n not in second]
    del optimizer, report, states
    gc.collect()
    assert all(each() is None for each in moments)
    later = amp.optim.SGD(low.parameters(), lr=LR)
    assert later.memory_report().bytes.get("original", 0) == bits
    amp.drop_masters(low)
    gc.collect()
    assert all(each() is None for each in kept)
    assert "original" not in later.memory_report().bytes
    assert torch.equal(
        values(low), torch.cat([p.detach().float().flatten() for p in low.parameters()])
    )


def test_bits_end_with_their_weight(device: str) -> None:
    _, low = pair(device)
    optimizer = CLASSES["AdamW"](low.parameters())
    step(low, optimizer)
    kept = [weakref.ref(state["remainder16"]) for state in optimizer.state.values()]
    assert kept
    del optimizer, low
    gc.collect()
    assert all(each() is None for each in kept)


@pytest.mark.parametrize("kind", ["SGD", "FP16_Optimizer of torch"])
def test_dropping_the_bits_of_a_model_in_training_leaves_its_optimizer(
    device: str, kind: str
) -> None:
    full, low = pair(device)
    before = values(full)
    optimizers = [CLASSES["SGD"](full.parameters()), EVERY[kind](low.parameters())]
    for _ in range(40):
        for model, optimizer in zip((full, low), optimizers, strict=True):
            step(model, optimizer)
        amp.drop_masters(low)
    step(full, optimizers[0])
    step(low, optimizers[1])
    assert_as_float32(full, low, before)


def test_a_failed_load_of_the_optimizer_leaves_the_bits(device: str) -> None:
    _, low = pair(device)
    optimizer = CLASSES["AdamW"](low.parameters())
    step(low, optimizer)
    saved = copy.deepcopy(optimizer.state_dict())
    step(low, optimizer)
    wanted = values(low)

    def refuse(*_: Any) -> None:
        raise KeyError("refused")

    optimizer.register_load_state_dict_post_hook(refuse)
    with pytest.raises(KeyError, match="refused"):
        optimizer.load_state_dict(saved)
    assert torch.equal(values(low), wanted)
    twin = copy.deepcopy(low)
    for model in (low, twin):
        step(model, CLASSES["SGD"](model.parameters()))
    assert torch.equal(values(low), values(twin))


def test_a_failed_checkpoint_load_leaves_the_bits(device: str, tmp_path: Path) -> None:
    """Another object refuses its part after model and optimizer were loaded."""
    _, low = pair(device)
    optimizer = CLASSES["AdamW"](low.parameters())
    step(low, optimizer)
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer)
    amp.checkpoint.save(tmp_path / "c", low, optimizer, scheduler=scheduler)
    step(low, optimizer)
    wanted = values(low)
    refusing = torch.nn.Linear(2, 2)
    with pytest.raises((ValueError, RuntimeError)):
        amp.checkpoint.load(tmp_path / "c", low, optimizer, scheduler=refusing)
    assert torch.equal(values(low), wanted)
    twin = copy.deepcopy(low)
    for model in (low, twin):
        step(model, CLASSES["AdamW"](model.parameters()))
    assert torch.equal(values(low), values(twin))
    step(low, optimizer)  # the one whose load has failed
    moved = values(low) - values(twin)
    assert ((moved + optimizer.param_groups[0]["lr"]).abs() < 0.2 * LR).all()


def test_an_optimizer_with_a_scripts_own_state_is_copied(device: str) -> None:
    _, low = pair(device)
    optimizer = CLASSES["AdamW"](low.parameters())
    step(low, optimizer)
    optimizer.state["of a script"] = 7
    for copied, again in (
        copy.deepcopy((low, optimizer)),
        pickle.loads(pickle.dumps((low, optimizer))),
    ):
        step(copied, again)
        assert again.state["of a script"] == 7
        assert ((values(copied) - values(low) + LR).abs() < 0.2 * LR).all()


def deep_copied(model: nn.Module, optimizer: Any) -> tuple[nn.Module, Any]:
    return copy.deepcopy((model, optimizer))


def pickled(model: nn.Module, optimizer: Any) -> tuple[nn.Module, Any]:
    return pickle.loads(pickle.dumps((model, optimizer)))


def loaded(model: nn.Module, optimizer: Any) -> tuple[nn.Module, Any]:
    amp.load_float32_state_dict(model, amp.float32_state_dict(model))
    return model, optimizer


def in_turns(model: nn.Module, optimizer: Any) -> tuple[nn.Module, Any]:
    step(model, CLASSES["AdamW"](model.parameters(), memory="float32"))
    return model, optimizer


@pytest.mark.parametrize("memory", ["exact", "lean", "float32"])
@pytest.mark.parametrize("between", [deep_copied, pickled, loaded, in_turns])
@pytest.mark.parametrize("through", ["a write", "masters()"])
def test_a_write_to_some_elements_leaves_the_others_their_bits(
    device: str, memory: str, between: Callable[..., Any], through: str
) -> None:
    """After a copy, a load and another's step the optimizer's own entry is not the weight's."""
    _, low = pair(device)
    optimizer: Any = amp.optim.SGD(low.parameters(), lr=LR, memory=memory)
    step(low, optimizer)
    low, optimizer = between(low, optimizer)
    before = values(low)
    if through == "a write":
        with torch.no_grad():
            for param in low.parameters():
                param[0] = 0.25
    else:
        with optimizer.masters(list(low.parameters())) as masters:
            for master in masters:
                master[0] = 0.25
    step(low, optimizer, 0.0)
    found = amp.float32_state_dict(low, optimizer)
    written = {name: torch.zeros(value.shape) for name, value in found.items()}
    for mask in written.values():
        mask[0] = 1
    is_written = torch.cat([mask.flatten() for mask in written.values()]).bool().to(device)
    own = torch.cat([value.flatten() for value in found.values()])
    bound = 2.0**-15 if memory == "lean" else 0.0  # of a weight: split24, next to half a unit
    assert bool(((own - before).abs() <= bound * before.abs())[~is_written].all())
    assert bool((own[is_written] - 0.25).abs().max() <= 2.0**-10)  # half of bfloat16's last place


def own_state(optimizer: Any, model: nn.Module) -> None:
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


def torchs_state(optimizer: Any, model: nn.Module) -> None:
    optimizer.load_state_dict(copy.deepcopy(optimizer.torch_state_dict()))


@pytest.mark.parametrize("memory", ["exact", "lean", "float32"])
@pytest.mark.parametrize("load", [own_state, torchs_state])
def test_what_an_optimizer_shows_of_a_weight_that_another_has_stepped(
    device: str, memory: str, load: Callable[..., None]
) -> None:
    """Its state dict has the weight's present bits, and a load of it, or of torch's, keeps them."""
    _, low = pair(device)
    first = amp.optim.SGD(low.parameters(), lr=LR, memory=memory)
    step(low, first)
    second = amp.optim.AdamW(low.parameters(), lr=LR, memory="float32")
    for _ in range(3):
        step(low, second)
        first.state_dict()
    before = values(low)
    load(first, low)
    bound = 2.0**-15 if memory == "lean" else 0.0
    assert bool(((values(low) - before).abs() <= bound * before.abs()).all())


@pytest.mark.parametrize(("storage", "dtype"), cases(MASTERED, LOW))
def test_weights_that_are_not_row_major_begin_with_their_float32_values(
    device: str, storage: str, dtype: torch.dtype
) -> None:
    wide = nn.Conv2d(4, 8, 3, bias=False).to(device, memory_format=torch.channels_last)
    model = amp.prepare(copy.deepcopy(wide), dtype)
    optimizer = amp.optim.SGD(model.parameters(), lr=0.0, **MASTERED[storage])
    model.weight.grad = torch.ones_like(model.weight)
    optimizer.step()
    bound = 0.0 if storage in ("exact", "float32") else 2.0**-15  # of split24 beside bfloat16
    bound = max(bound, 2.0**-16 if dtype == torch.float16 else 0.0)
    found = amp.float32_of(model.weight, optimizer)
    assert bool(((found - wide.weight).abs() <= bound * wide.weight.abs() + 2.0**-40).all())
    assert model.weight.is_contiguous(memory_format=torch.channels_last)
