"""checkpoint.load refuses what a step could not go on with before it writes the first byte."""

from __future__ import annotations

import itertools
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from checkpoints import PRESETS, make, network, train
from everything import error_of, everything
from mutations import mutated_directory
from tiers import full, in_turn, tiered
from torch import nn

import amp_mp as amp

TARGETS: dict[str, tuple[Any, dict[str, Any]]] = {
    "AdamW": (torch.optim.AdamW, {}),
    "Adam": (torch.optim.Adam, {"amsgrad": True}),
    "NAdam": (torch.optim.NAdam, {}),
    "RAdam": (torch.optim.RAdam, {}),
    "Adamax": (torch.optim.Adamax, {}),
    "Adadelta": (torch.optim.Adadelta, {}),
    "Adagrad": (torch.optim.Adagrad, {}),
    "RMSprop": (torch.optim.RMSprop, {"momentum": 0.9}),
    "SGD": (torch.optim.SGD, {"momentum": 0.9}),
    "ASGD": (torch.optim.ASGD, {}),
    "Rprop": (torch.optim.Rprop, {}),
    "Adafactor": (torch.optim.Adafactor, {}),
}
SOURCES: dict[str, tuple[Any, dict[str, Any]]] = {
    **TARGETS,
    "amp SGD": (amp.optim.SGD, {"momentum": 0.9}),
    "amp AdamW": (amp.optim.AdamW, {}),
    "amp RMSprop": (amp.optim.RMSprop, {}),
    "amp Lion": (amp.optim.Lion, {}),
}
OWN = {"amp SGD": ("SGD",), "amp AdamW": ("AdamW",), "amp RMSprop": ("RMSprop",)}
# Those that keep all that the other keeps, and read it as torch's own load_state_dict does.
ALIKE = {("AdamW", "Adam"), ("Adam", "AdamW"), ("RAdam", "AdamW"), ("AdamW", "RAdam")}
ALIKE |= {("Adam", "RAdam"), ("NAdam", "AdamW"), ("NAdam", "RAdam"), ("RMSprop", "SGD")}
ALIKE |= {("amp AdamW", "RAdam"), ("RAdam", "Adam"), ("NAdam", "Adam"), ("amp AdamW", "Adam")}


def made(kind: str, model: nn.Module | None = None) -> tuple[nn.Module, Any]:
    model = network() if model is None else model
    make_it, options = SOURCES[kind]
    return model, make_it(model.parameters(), lr=1e-2, **options)


def pair_of(name: str) -> tuple[nn.Module, Any]:
    """A preset's, or torch's AdamW."""
    return made("AdamW") if name == "torch" else make(name)


def written(path: Path, kind: str, steps: int = 2) -> Path:
    pair = made(kind)
    train(*pair, steps)
    amp.checkpoint.save(path / "c", *pair)
    return path / "c"


class Files:
    """Directories that tests load from, and leave as they are; written when first asked for."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.made: dict[Any, Path] = {}

    def of(self, write: Callable[..., Path], name: str, *args: Any, **values: Any) -> Path:
        """What write(folder, *args, **values) returned; the arguments belong to the name."""
        if name not in self.made:
            self.made[name] = write(self.folder / name, *args, **values)
        return self.made[name]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    return Files(tmp_path_factory.mktemp("checkpoints"))


def refused(path: Path, model: nn.Module, optimizer: Any, words: str, **more: Any) -> None:
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    before = everything(model, optimizer, scheduler, *more.values())
    with pytest.raises((ValueError, RuntimeError), match=words):
        amp.checkpoint.load(path, model, optimizer, **more)
    assert everything(model, optimizer, scheduler, *more.values()) == before
    train(model, optimizer, 1)


@pytest.mark.parametrize(
    ("steps", "target"),
    tiered(
        itertools.product((0, 2), TARGETS), [(0, "AdamW"), *((2, t) for t in list(TARGETS)[::2])]
    ),
)
def test_a_file_loads_and_steps_or_changes_nothing(steps: int, target: str, files: Files) -> None:
    for source in SOURCES:
        path = files.of(written, f"{source}, {steps} steps", source, steps)
        model, optimizer = made(target)
        train(model, optimizer, steps, seed=7)
        before = everything(model, optimizer)
        error = error_of(amp.checkpoint.load, path, model, optimizer)
        same = target in (source, *OWN.get(source, ()))
        if error is not None:
            assert "nothing was loaded" in str(error)
            assert everything(model, optimizer) == before
            assert not same, error
        else:
            assert same or (source, target) in ALIKE or steps == 0, (source, target)
        train(model, optimizer, 1)


@pytest.mark.parametrize("target", ["AdamW", "Adagrad", "RMSprop", "NAdam"])
def test_a_file_of_sgd_is_refused_by_name(target: str, tmp_path: Path) -> None:
    words = f"has '.*{target} needs it: another optimizer saved it .for '0.weight'.; nothing was"
    for source in ("SGD", "amp SGD"):
        model, optimizer = made(target)
        refused(written(tmp_path / source, source), model, optimizer, words)


def changed(path: Path, **values: Any) -> Path:
    """A directory of torch's with other values in its param_group or in a parameter's state."""
    model, optimizer = made("AdamW")
    train(model, optimizer, 2)
    from torch.distributed.checkpoint.state_dict import get_state_dict

    weights, state = get_state_dict(model, optimizer)
    for name, value in values.items():
        if name in state["param_groups"][0]:
            state["param_groups"][0][name] = value
        else:
            state["state"]["2.bias"][name] = value
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=path / "c")
    return path / "c"


Wrong = dict[str, tuple[dict[str, Any], str]]
WRONG_SETTINGS: Wrong = {
    "amsgrad": ({"amsgrad": torch.ones(3)}, "amsgrad"),
    "lr": ({"lr": None}, "lr"),
    "rate of two": ({"lr": torch.ones(2)}, "lr"),
    "betas": ({"betas": (0.9, 1.5)}, "betas"),
    "betas of one": ({"betas": (0.9,)}, "betas"),
    "eps": ({"eps": "small"}, "eps"),
    "weight_decay": ({"weight_decay": -1.0}, "weight_decay"),
    "maximize": ({"maximize": torch.ones(3)}, "maximize"),
}
WRONG_STATES: Wrong = {
    "negative steps": ({"step": torch.tensor(-1.0)}, "'step'.* '2.bias'"),
    "NaN steps": ({"step": torch.tensor(float("nan"))}, "'step'.* '2.bias'"),
    "steps of text": ({"step": "two"}, "'step'.* '2.bias'"),
    "no moment": ({"exp_avg": None}, "'exp_avg'.* '2.bias'"),
    "text as moment": ({"exp_avg": "x"}, "'exp_avg'.* '2.bias'"),
    "shape": ({"exp_avg_sq": torch.ones(4)}, "'exp_avg_sq'.* '2.bias'"),
}


@pytest.mark.parametrize(
    ("case", "target"),
    [*in_turn(WRONG_SETTINGS, PRESETS), *in_turn(WRONG_STATES, ["torch", *PRESETS])],
)
def test_a_damaged_value_is_refused_by_name(case: str, target: str, files: Files) -> None:
    values, words = (WRONG_SETTINGS | WRONG_STATES)[case]
    path = files.of(changed, case, **values)
    model, optimizer = pair_of(target)
    train(model, optimizer, 1, seed=9)
    refused(path, model, optimizer, f"({words}).*nothing was loaded")


@pytest.mark.parametrize("kind", [kind for kind in TARGETS if kind != "SGD"])  # it has one entry
def test_the_table_has_what_torchs_optimizers_keep(kind: str, tmp_path: Path) -> None:
    """Each entry is missed by its name where a file lacks it."""
    from torch.distributed.checkpoint.state_dict import get_state_dict

    model, optimizer = made(kind)
    train(model, optimizer, 1)
    weights, state = get_state_dict(model, optimizer)
    whole = state["state"]["0.weight"]
    assert whole
    for entry in whole:
        state["state"]["0.weight"] = {name: whole[name] for name in whole if name != entry}
        dcp.save({"model": weights, "optimizer": state}, checkpoint_id=tmp_path / entry)
        words = f"'{entry}' as None, and {kind} needs it.*nothing was loaded"
        refused(tmp_path / entry, *made(kind), words)


class Fails(nn.Linear):
    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        super().load_state_dict(*args, **kwargs)
        if self.fails:
            self.fails = False
            raise RuntimeError("not mine")

    fails = False


@pytest.mark.parametrize("target", ["torch", "float32", "exact", "lean", "micro", "nano"])
@pytest.mark.parametrize("failing", ["module", "scheduler", "milestones"])
def test_an_object_that_refuses_its_state_leaves_all_as_it_was(
    failing: str, target: str, tmp_path: Path
) -> None:
    pair = made("AdamW")
    other, scaler = Fails(3, 3), torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(torch.ones(()))
    schedule = torch.optim.lr_scheduler.StepLR(pair[1], 1)
    train(*pair, 2)
    schedule.step()
    parts = {"other": other, "scaler": scaler, "schedule": schedule}
    saved = {**parts, "schedule": {"milestones": 1}} if failing == "milestones" else parts
    amp.checkpoint.save(tmp_path / "c", *pair, **saved)
    model, optimizer = pair_of(target)
    train(model, optimizer, 1, seed=9)
    torch.manual_seed(3)
    fails, new = Fails(3, 3), torch.amp.GradScaler("cpu", init_scale=4.0)
    new.scale(torch.ones(()))
    plan = torch.optim.lr_scheduler.SequentialLR(
        optimizer,
        [
            torch.optim.lr_scheduler.StepLR(optimizer, 1),
            torch.optim.lr_scheduler.StepLR(optimizer, 2),
        ],
        milestones=[2],
    )
    fails.fails = failing == "module"
    more = {"other": fails, "scaler": new, "schedule": plan}
    before = everything(model, optimizer, *more.values())
    with pytest.raises(Exception, match=r"not mine|_schedulers"):
        amp.checkpoint.load(tmp_path / "c", model, optimizer, **more)
    assert everything(model, optimizer, *more.values()) == before
    train(model, optimizer, 1)
    plan.step()


@pytest.mark.parametrize("kind", [*PRESETS, "torch"])
def test_entries_of_the_state_that_are_no_parameters(kind: str, tmp_path: Path) -> None:
    """State dicts keep them, as torch's do; a checkpoint has no place for them and says so."""
    model, optimizer = pair_of(kind)
    train(model, optimizer, 1)
    optimizer.state["my_counter"] = 7
    found = optimizer.state_dict()
    assert found["state"]["my_counter"] == 7
    optimizer.load_state_dict(found)
    assert optimizer.state["my_counter"] == 7
    before = everything(model, optimizer)
    with pytest.raises(
        ValueError, match=r"optimizer\.state has 'my_counter', which is not a parameter"
    ):
        amp.checkpoint.save(tmp_path / "c", model, optimizer)
    assert not (tmp_path / "c").exists()
    assert everything(model, optimizer) == before
    train(model, optimizer, 1)
    if kind != "torch":
        for call in (optimizer.torch_state_dict, optimizer.memory_report, optimizer.init_state):
            call()
        amp.float32_state_dict(model, optimizer)


def test_names_of_parameters_in_groups_count_in_any_order(tmp_path: Path) -> None:
    """A checkpoint knows parameters by the model's names, whatever order groups have them in."""
    model = network()
    optimizer = amp.optim.AdamW(model.named_parameters(), lr=1e-2)
    train(model, optimizer, 1)
    amp.checkpoint.save(tmp_path / "c", model, optimizer)
    other = network()
    ours = amp.optim.AdamW(list(other.named_parameters())[::-1], lr=1e-2)
    amp.checkpoint.load(tmp_path / "c", other, ours)
    for name, param in other.named_parameters():
        own = optimizer.state[model.get_parameter(name)]
        assert torch.equal(ours.state[param]["exp_avg"], own["exp_avg"])
    names = [name for name, _ in other.named_parameters()]
    assert ours.param_groups[0]["param_names"] == names[::-1]


IN_A_CASE, CASES = 20, 50
CLEAR = ("nothing was loaded", "it is not a checkpoint")


@pytest.mark.parametrize("case", [c if c < 10 else full(c) for c in range(CASES)])
@pytest.mark.filterwarnings("ignore:amp_mp")
def test_mutated_directories(case: int, tmp_path: Path) -> None:
    """200 in `make test`, 1,000 in `make test-all`."""
    kinds = ("torch", *PRESETS)
    source, target = kinds[case % len(kinds)], kinds[case // len(kinds) % len(kinds)]
    target = "torch" if source == "torch" and case % (2 * len(kinds)) else target
    saved = pair_of(source)
    train(*saved, 2)
    plan = torch.optim.lr_scheduler.MultiStepLR(saved[1], [2, 5])
    amp.checkpoint.save(tmp_path / "c", *saved, plan=plan, step=3)
    model, optimizer = pair_of(target)
    train(model, optimizer, 1, seed=9)
    own = torch.optim.lr_scheduler.MultiStepLR(optimizer, [3, 4])
    refused = 0
    for seed in range(case * IN_A_CASE, (case + 1) * IN_A_CASE):
        path = mutated_directory(random.Random(seed), tmp_path / "c", tmp_path / str(seed))
        before = everything(model, optimizer, own)
        error = error_of(amp.checkpoint.load, path, model, optimizer, plan=own)
        if error is not None:
            refused += 1
            assert any(words in str(error) for words in CLEAR), (seed, source, target, error)
            assert everything(model, optimizer, own) == before, (seed, source, target, error)
        else:
            model, optimizer = pair_of(target)
            own = torch.optim.lr_scheduler.MultiStepLR(optimizer, [3, 4])
        train(model, optimizer, 1)
        shutil.rmtree(path)
    assert refused > IN_A_CASE // 4


def test_what_a_hook_of_the_user_makes_of_the_state_is_checked(tmp_path: Path) -> None:
    """load checks the file itself before; a hook may write into what was checked."""
    path = written(tmp_path, "amp AdamW")
    model, optimizer = made("amp AdamW")

    def damage(_: Any, found: dict[str, Any]) -> None:
        found["state"][0]["step"] = torch.tensor(-3.0)

    hook = optimizer.register_load_state_dict_pre_hook(damage)
    refused(path, model, optimizer, "'step' of parameter 0 must be a whole number from 0 on")
    hook.remove()
    amp.checkpoint.load(path, model, optimizer)
