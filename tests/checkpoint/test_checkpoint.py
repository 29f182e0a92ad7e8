"""amp.checkpoint: what one script saves another loads, in whatever format that one stores."""

from __future__ import annotations

import copy
import itertools
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import rules
import torch
import torch.distributed.checkpoint as dcp
from checkpoints import LOW, MASTER_BITS, PRESETS, make, masters, network, snapshot, train
from helpers import raw_bytes
from tiers import tiered
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict

import amp_mp as amp

KINDS = rules.cases(PRESETS, [LOW, torch.float16])
# Float32 parameters, whose moments are formats' too.
KINDS += [("exact", None), ("micro", None), ("nano", None)]
NAMES = [f"{preset} {str(dtype).removeprefix('torch.')}" for preset, dtype in KINDS]


# Of the 16 kinds each is read into two others and from two.
READ = [(a, NAMES[(n + m) % len(KINDS)]) for n, a in enumerate(NAMES) for m in (1, 4)]


@pytest.mark.parametrize(("before", "after"), tiered(itertools.product(NAMES, NAMES), READ))
def test_every_format_is_read_into_every_other(before: str, after: str, tmp_path: Path) -> None:
    saved, wanted = (KINDS[NAMES.index(name)] for name in (before, after))
    """The masters are as near as the coarser of the two formats allows, all parameters included."""
    model, optimizer = make(*saved)
    train(model, optimizer, 3)
    amp.checkpoint.save(tmp_path / "c", model, optimizer)
    other, another = make(*wanted)
    amp.checkpoint.load(tmp_path / "c", other, another)
    before, after = masters(model, optimizer), masters(other, another)
    for name, values in before.items():
        # Norms are float32 in all of these models.
        low = [MASTER_BITS[p] for p, dtype in (saved, wanted) if dtype is not None]
        bits = 24 if name.startswith("1.") else min(low, default=24)
        # Twice as far where a split would have rounded the value to another weight than the file's.
        bound, least = (0.0, 1e-38) if bits == 24 else (2.0 ** -(bits - (saved != wanted)), 1e-38)
        if torch.float16 in (saved[1], wanted[1]) and saved != wanted:
            # A remainder adds 16 or 8 bits to float16's 11, but none below its last place: 2^-24
            # of numbers below 2^-14.
            least = 2.0 ** -(24 + {24: 16, 16: 8, 11: 8, 8: 0}[bits])
        torch.testing.assert_close(after[name].float(), values.float(), rtol=bound, atol=least)
    steps = {float(state["step"]) for state in another.state.values()}
    assert steps == {3.0}
    found, wished = another.torch_state_dict()["state"], optimizer.torch_state_dict()["state"]
    for number, state in wished.items():
        # m8: 3/64 of the largest of 32, and bfloat16 2^-7. log8: an eighth of the number, and a
        # floor of 2^-26 of the scale, which is at most 64/31 of the largest.
        largest, most = (float(state[n].abs().max()) for n in ("exp_avg", "exp_avg_sq"))
        torch.testing.assert_close(
            found[number]["exp_avg"], state["exp_avg"], rtol=2.0**-7, atol=3 * largest / 64
        )
        compact = wanted[0] in ("micro", "nano", "masterless") and saved != wanted
        rtol, atol = (1 / 8, 2.0**-26 * 64 / 31 * most) if compact else (2.0**-7, 1e-30)
        torch.testing.assert_close(
            found[number]["exp_avg_sq"], state["exp_avg_sq"], rtol=rtol, atol=atol
        )
    train(other, another, 1)


def in_data_parallel(model: Any, way: str) -> Any:
    if "part" in way:
        model[0] = nn.DataParallel(model[0])
    if "compiled" in way:
        model = torch.compile(model)
    return nn.DataParallel(model) if "whole" in way else model


WAYS = ["whole", "part", "whole, part, compiled"]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("alone", [False, True])
def test_data_parallel_is_not_in_the_names(way: str, alone: bool, tmp_path: Path) -> None:
    """The file is that of the plain model, and either loads the other's, masters included."""
    model, optimizer = make("lean")
    train(model, optimizer, 2)
    around = in_data_parallel(copy.deepcopy(model), way)
    second = amp.optim.AdamW(around.parameters(), lr=1e-2, memory="lean")
    second.load_state_dict(optimizer.state_dict())
    given = ([model], [around]) if alone else ([model, optimizer], [around, second])
    keys = []
    for name, each in zip(("plain", "around"), given, strict=True):
        amp.checkpoint.save(tmp_path / name, *each)
        keys.append(dcp.FileSystemReader(tmp_path / name).read_metadata().state_dict_metadata)
    assert keys[0].keys() == keys[1].keys()
    wanted = raw_bytes(list(amp.float32_state_dict(model).values()))
    for name, is_around in (("plain", True), ("around", False), ("around", True)):
        other, another = make("lean")
        other = in_data_parallel(other, way) if is_around else other
        amp.checkpoint.load(tmp_path / name, other, *([] if alone else [another]))
        assert raw_bytes(list(amp.float32_state_dict(other).values())) == wanted
        if not alone:
            assert raw_bytes(another.state_dict()) == raw_bytes(optimizer.state_dict())


@pytest.mark.parametrize("wanted", ["contiguous", "channels_last"])
@pytest.mark.parametrize("saved", ["contiguous", "channels_last"])
def test_groups_follow_the_layout_of_the_parameter(saved: str, wanted: str, tmp_path: Path) -> None:
    """32 neighbours in memory share a scale; in another layout they are other elements."""

    def made(layout: str) -> tuple[nn.Module, Any]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(32, 4, 2), nn.Conv2d(4, 4, 4), nn.Linear(32, 64))
        if layout == "channels_last":
            model.to(memory_format=torch.channels_last)
            model[2].weight = nn.Parameter(model[2].weight.detach().clone().t().clone().t())
        amp.prepare(model, LOW)
        optimizer = amp.optim.AdamW(model.parameters(), lr=1e-2, memory="micro")
        for param in model.parameters():
            rows = torch.arange(param.shape[0]).view(-1, *[1] * (param.dim() - 1))
            param.grad = (torch.randn(param.shape) * 4.0 ** (rows % 16)).to(LOW)
        optimizer.step()
        return model, optimizer

    model, optimizer = made(saved)
    amp.checkpoint.save(tmp_path / "c", model, optimizer)
    other, another = made(wanted)
    amp.checkpoint.load(tmp_path / "c", other, another)
    assert snapshot(other) == snapshot(model)
    assert saved != wanted or snapshot(other, another) == snapshot(model, optimizer)
    found, wished = another.torch_state_dict()["state"], optimizer.torch_state_dict()["state"]
    for number, state in wished.items():
        for name in ("exp_avg", "exp_avg_sq"):
            values = state[name]
            off = (found[number][name] - values).abs()
            largest = values.flatten(1).abs().amax(1) if values.dim() > 1 else values.abs()
            if wanted == "channels_last" and values.dim() == 2:
                largest = values.abs().max()[None].expand(len(values))  # groups are of columns
            largest = largest.view(-1, *[1] * (values.dim() - 1))
            # m8: a step of the largest. log8: a step of the number itself, and the floor.
            floor = 2.0**-26 * 64 / 31 * largest
            bound = 3 / 64 * largest if name == "exp_avg" else values / 8 + floor
            assert bool((off <= bound).all()), (number, name)


def optimizer_of(model: nn.Module) -> Any:
    return amp.optim.SGD(model.parameters(), lr=1.0)


lr_scheduler = torch.optim.lr_scheduler
SCHEDULERS: dict[str, Any] = {
    "StepLR": lambda o: lr_scheduler.StepLR(o, 2),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [2, 3, 5]),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 1.0, total_steps=9),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.ConstantLR(o, 0.5, 2), lr_scheduler.MultiStepLR(o, [1, 2])], [3]
    ),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0),
}


def rates(optimizer: Any, scheduler: Any, steps: int) -> list[float]:
    found = []
    for _ in range(steps):
        for param in optimizer.param_groups[0]["params"]:
            param.grad = torch.zeros_like(param)
        optimizer.step()
        scheduler.step(*([1.0] if "Plateau" in type(scheduler).__name__ else []))
        found.append(float(optimizer.param_groups[0]["lr"]))
    return found


@pytest.mark.parametrize("kind", SCHEDULERS)
def test_schedulers_go_on_where_they_were(kind: str, tmp_path: Path) -> None:
    model = network()
    optimizer = optimizer_of(model)
    scheduler = SCHEDULERS[kind](optimizer)
    rates(optimizer, scheduler, 2)
    amp.checkpoint.save(tmp_path / "c", model, optimizer, scheduler=scheduler)
    wanted = rates(optimizer, scheduler, 5)
    other = network()
    another = optimizer_of(other)
    fresh = SCHEDULERS[kind](another)
    amp.checkpoint.load(tmp_path / "c", other, another, scheduler=fresh)
    assert rates(another, fresh, 5) == wanted
    assert len(set(wanted)) > 1


def test_containers_keep_their_keys_and_kinds(tmp_path: Path) -> None:
    counts = {1: "one", "two": {2.5: [torch.arange(3), {}]}, (3, 4): [1, [2, {"x": None}]]}
    more = {"counts": counts, "none": None, "empty": {}, "order": OrderedDict(b=1, a=(1, 2))}
    more["optimizer.x"] = 3  # no part of the optimizer's
    amp.checkpoint.save(tmp_path / "c", network(), **more)
    found = amp.checkpoint.load(tmp_path / "c", network())
    numbers = found["counts"]["two"][2.5].pop(0)
    assert numbers.tolist() == [0, 1, 2]
    counts["two"][2.5].pop(0)  # type: ignore[index]
    assert found == more
    assert type(found["order"]) is OrderedDict


@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize("kind", [amp.GradScaler, torch.amp.GradScaler])
def test_a_grad_scaler_goes_on_also_where_it_is_off(
    kind: Any, enabled: bool, tmp_path: Path
) -> None:
    model, optimizer = make("exact", torch.float16)
    scaler = kind("cpu", init_scale=8.0, growth_interval=2, enabled=enabled)
    for _ in range(3):
        optimizer.zero_grad()
        scaler.scale(model(torch.ones(4, 64).half()).float().mean()).backward()
        scaler.step(optimizer)
        scaler.update()
    amp.checkpoint.save(tmp_path / "c", model, optimizer, scaler=scaler)
    fresh = kind("cpu", init_scale=2.0, enabled=enabled)
    amp.checkpoint.load(tmp_path / "c", *make("exact", torch.float16), scaler=fresh)
    assert fresh.state_dict() == scaler.state_dict()
    assert not enabled or fresh.get_scale() == 16.0


def test_a_second_model_and_its_optimizer_are_loaded_whatever_their_order(tmp_path: Path) -> None:
    pair, second = make("tiny"), make("lean")
    for each in (pair, second):
        train(*each, 2)
    amp.checkpoint.save(tmp_path / "c", *pair, critic=second[0], opt_critic=second[1])
    other, another = make("tiny"), make("lean")
    amp.checkpoint.load(tmp_path / "c", *other, opt_critic=another[1], critic=another[0])
    assert snapshot(*other) == snapshot(*pair)
    assert snapshot(*another) == snapshot(*second)
    assert len(another[1].state) == 6


def test_a_copy_of_the_model_is_not_taken_for_the_model(tmp_path: Path) -> None:
    model, optimizer = make("exact")
    ema = copy.deepcopy(model)
    train(model, optimizer, 1)
    amp.checkpoint.save(tmp_path / "c", model, optimizer, ema=ema, a=ema.state_dict())
    other, another = make("exact")
    train(other, another, 3, seed=7)
    found = amp.checkpoint.load(tmp_path / "c", other, another, ema=copy.deepcopy(ema))
    assert snapshot(other, another) == snapshot(model, optimizer)
    assert torch.equal(found["a"]["0.weight"], ema[0].weight)
    dcp.save(
        {"net": get_model_state_dict(model), "ema": get_model_state_dict(ema)},
        checkpoint_id=tmp_path / "d",
    )
    before = snapshot(other)
    with pytest.raises(ValueError, match=r"under 'ema\.', 'net\.', and none of them is named 'mod"):
        amp.checkpoint.load(tmp_path / "d", other)
    assert snapshot(other) == before


class Counts(nn.Module):
    """A module with a buffer of integers, one of low precision, and extra state of any kind."""

    def __init__(self, extra: Any) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.register_buffer("seen", torch.tensor([0, 0]))
        self.register_buffer("mean", torch.zeros(3, dtype=LOW))
        self.extra = extra

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        self.extra = state


@pytest.mark.parametrize("extra", [torch.arange(4), "text", {"a": {1: 2}}, {}, [1, {}], None])
def test_buffers_and_extra_state_of_modules_are_loaded(extra: Any, tmp_path: Path) -> None:
    model = nn.Sequential(Counts(extra))
    model[0].seen += 5
    model[0].mean += 0.1
    amp.checkpoint.save(tmp_path / "c", model)
    other = nn.Sequential(Counts(torch.zeros(2)))
    amp.checkpoint.load(tmp_path / "c", other)
    assert other[0].seen.tolist() == [5, 5]
    assert torch.equal(other[0].mean, model[0].mean)
    same = torch.equal(other[0].extra, extra) if isinstance(extra, torch.Tensor) else None
    assert other[0].extra == extra if same is None else same


@pytest.mark.parametrize("before", ["fresh", "stepped", "loaded twice", "init_state"])
@pytest.mark.parametrize("preset", PRESETS)
def test_what_was_there_before_does_not_matter(preset: str, before: str, tmp_path: Path) -> None:
    pair = make(preset, max_grad_norm=1.0)
    train(*pair, 3)
    amp.checkpoint.save(tmp_path / "c", *pair)
    other = make(preset, max_grad_norm=1.0)
    if before == "stepped":
        train(*other, 4, seed=30)
    elif before == "init_state":
        other[1].init_state()
    elif before == "loaded twice":
        amp.checkpoint.load(tmp_path / "c", *other)
        train(*other, 2, seed=9)
    amp.checkpoint.load(tmp_path / "c", *other)
    assert snapshot(*other) == snapshot(*pair)
    for each in (pair, other):
        train(*each, 2, seed=3)
    assert snapshot(*other) == snapshot(*pair)


@pytest.mark.parametrize("preset", PRESETS)
def test_a_checkpoint_of_before_the_first_step_is_at_step_0(preset: str, tmp_path: Path) -> None:
    pair = make(preset)
    amp.checkpoint.save(tmp_path / "c", *pair)
    other = make(preset)
    train(*other, 2)
    amp.checkpoint.load(tmp_path / "c", *other)
    assert {float(state["step"]) for state in other[1].state.values()} == {0.0}
    fresh = make(preset)
    for each in (pair, other, fresh):
        train(*each, 2)
    assert snapshot(*other) == snapshot(*pair)
    # Saving made masters before the first forward; those of 24 bits round some weights otherwise.
    assert snapshot(*fresh) == snapshot(*pair) or preset in ("lean", "tiny", "micro", "nano")


@pytest.mark.parametrize("saved", [*PRESETS, "plain"])
@pytest.mark.parametrize("stepped", [False, True])
def test_a_model_without_its_optimizer_keeps_the_masters_for_the_next(
    saved: str, stepped: bool, tmp_path: Path
) -> None:
    """plain: float32 parameters. stepped: the file is of after a step."""
    pair = make("exact", None) if saved == "plain" else make(saved)
    train(*pair, 3 if stepped else 0)
    amp.checkpoint.save(tmp_path / "c", *pair)
    wanted = masters(*pair)
    other = amp.prepare(nn.Sequential(*network()), LOW)
    other[0].weight.data.zero_()
    amp.checkpoint.load(tmp_path / "c", other)
    if saved != "plain":
        for name, value in pair[0].state_dict().items():
            assert torch.equal(other.state_dict()[name], value), name
    optimizer = amp.optim.AdamW(other.parameters(), memory="float32")
    optimizer.init_state()
    for name, values in masters(other, optimizer).items():
        # 24 bits half way between two weights are a float32 number less as float32 master.
        torch.testing.assert_close(values, wanted[name], rtol=2.0**-23, atol=0)
    assert "original" not in optimizer.memory_report().bytes


def test_a_file_without_masters_drops_the_values_that_prepare_kept(tmp_path: Path) -> None:
    amp.checkpoint.save(tmp_path / "c", network().to(LOW))
    other = amp.prepare(network(), LOW)  # rounds to the same weights
    amp.checkpoint.load(tmp_path / "c", other)
    optimizer = amp.optim.AdamW(other.parameters())
    optimizer.init_state()
    for name, values in masters(other, optimizer).items():
        assert torch.equal(values, network().to(LOW).state_dict()[name].float()), name


@pytest.mark.parametrize(
    ("saving", "loading"), [*itertools.product(["plain", "compiled"], repeat=2)]
)
@pytest.mark.parametrize("with_optimizer", [True, False])
def test_compiled_models_have_the_names_of_plain_ones(
    saving: str, loading: str, with_optimizer: bool, tmp_path: Path
) -> None:
    def wrapped(model: nn.Module, how: str) -> Any:
        return model if how == "plain" else torch.compile(model)

    model, optimizer = make("tiny")
    train(model, optimizer, 1)
    amp.checkpoint.save(tmp_path / "c", wrapped(model, saving), optimizer)
    other, another = make("tiny")
    given = [another] if with_optimizer else []
    amp.checkpoint.load(tmp_path / "c", wrapped(other, loading), *given)
    assert snapshot(other) == snapshot(model)
    assert not with_optimizer or snapshot(other, another) == snapshot(model, optimizer)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.body, self.head = (
            nn.Embedding(9, 32),
            nn.Linear(32, 32),
            nn.Linear(32, 9),
        )
        self.head.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(self.embedding(x)))  # type: ignore[no-any-return]


@pytest.mark.parametrize(("saved", "wanted"), [*itertools.product(["exact", "plain"], repeat=2)])
def test_tied_weights_are_one_master(saved: str, wanted: str, tmp_path: Path) -> None:
    def made(kind: str) -> tuple[nn.Module, Any]:
        model = Tied() if kind == "plain" else amp.prepare(Tied(), LOW)
        return model, amp.optim.AdamW(model.parameters(), lr=1e-2)

    def steps(model: nn.Module, optimizer: Any) -> None:
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.arange(9)).float().square().mean().backward()
            optimizer.step()

    pair, other = made(saved), made(wanted)
    steps(*pair)
    amp.checkpoint.save(tmp_path / "c", *pair)
    amp.checkpoint.load(tmp_path / "c", *other)
    before, after = masters(*pair), masters(*other)
    assert all(torch.equal(after[name], values) for name, values in before.items())
    if saved == wanted:
        for each in (pair, other):
            steps(*each)
        assert snapshot(*other) == snapshot(*pair)


def test_frozen_parameters_and_those_without_gradient_yet(tmp_path: Path) -> None:
    def made() -> tuple[nn.Module, Any]:
        model = network()
        model[0].requires_grad_(False)
        amp.prepare(model, LOW)
        return model, amp.optim.AdamW(model.parameters(), lr=1e-2, memory="lean")

    pair = made()
    pair[0][2].weight.grad = torch.ones_like(pair[0][2].weight)
    pair[1].step()
    amp.checkpoint.save(tmp_path / "c", *pair)
    other = made()
    train(*other, 2)
    amp.checkpoint.load(tmp_path / "c", *other)
    assert snapshot(*other) == snapshot(*pair)
    steps = [float(other[1].state[p]["step"]) for p in other[0][2].parameters()]
    assert steps == [1, 0]
    assert not other[1].state.get(other[0][0].weight)
    for model, optimizer in (pair, other):
        model[0].requires_grad_(True)
        train(model, optimizer, 2)
    assert snapshot(*other) == snapshot(*pair)


def test_a_layer_that_the_file_lacks_keeps_its_weights_and_its_state(tmp_path: Path) -> None:
    pair = make("exact")
    train(*pair, 2)
    amp.checkpoint.save(tmp_path / "c", *pair)
    model = amp.prepare(nn.Sequential(*network(), nn.Linear(3, 3)), LOW)
    optimizer = amp.optim.AdamW(model.parameters(), lr=1e-2)
    twin = copy.deepcopy(model)
    for _ in range(2):
        amp.checkpoint.load(tmp_path / "c", model, optimizer, strict=False)
        values = amp.float32_state_dict(model, optimizer)
        for name, master in masters(*pair).items():
            assert torch.equal(values[name], master)
        fresh = amp.optim.AdamW(twin.parameters())
        assert torch.equal(values["3.weight"], masters(twin, fresh)["3.weight"])
    train(model, optimizer, 2)
    before = {k: v.clone() for k, v in optimizer.state[model[3].weight].items()}
    amp.checkpoint.load(tmp_path / "c", model, optimizer, strict=False)
    after = optimizer.state[model[3].weight]
    assert all(torch.equal(after[k], v) for k, v in before.items())
    assert float(after["step"]) == 2
    amp.checkpoint.save(tmp_path / "d", model, optimizer)
    amp.checkpoint.load(tmp_path / "d", *pair, strict=False)
    for name, master in masters(*pair).items():
        assert torch.equal(master, amp.float32_state_dict(model, optimizer)[name])


def test_a_part_with_more_of_the_models_names_is_not_taken_for_the_model(tmp_path: Path) -> None:
    small, large = nn.Sequential(nn.Linear(2, 2)), nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    amp.checkpoint.save(tmp_path / "c", small, teacher=large.state_dict())
    last = copy.deepcopy(large[1].weight)
    amp.checkpoint.load(tmp_path / "c", large, strict=False)
    assert torch.equal(large[0].weight, small[0].weight)
    assert torch.equal(large[1].weight, last)
