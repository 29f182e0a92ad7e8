"""amp.checkpoint.load at any moment: before the first step, later, twice, without an optimizer."""

from __future__ import annotations

import copy
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import LOW, PRESETS, make, masters, network, snapshot, train
from torch import Tensor, nn

import amp_mp as amp
from amp_mp.optim.state.original_values import awaits_original


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
    assert not any(awaits_original(param) for param in other[0].parameters())
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
    assert snapshot(*fresh) == snapshot(*pair) or preset in ("lean", "tiny", "micro")


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
        assert torch.equal(values, wanted[name]), name
    assert not any(awaits_original(param) for param in other.parameters())


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
