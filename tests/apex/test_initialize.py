"""amp.initialize: the levels, what it gives back, what it refuses, and models that it converts."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from apex_levels import LOW, Weight, backward, batch, network, train
from helpers import through_a_file
from torch import nn

import amp_mp
from amp_mp.apex import amp
from amp_mp.apex.opt_levels import DTYPE, LEVELS

LEVEL_NAMES = sorted(LEVELS)


def sgd(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), **{"lr": 0.1, **options})


def start(model: Any, optimizer: Any = None, opt_level: str = "O2", **options: Any) -> Any:
    return amp.initialize(model, optimizer, opt_level=opt_level, verbosity=0, **options)


# What comes back.


@pytest.mark.parametrize("level", LEVEL_NAMES)
def test_the_same_objects_come_back_in_the_same_containers(level: str) -> None:
    model = network()
    assert start(model, opt_level=level) is model
    models, optimizer = [network(), network()], None
    assert start(models, opt_level=level) is models
    models = [network(), network()]
    optimizers = [sgd(each) for each in models]
    found = start(models, optimizers, level)
    assert found[0] is models
    assert found[1] is optimizers
    model = network()
    optimizer = sgd(model)
    groups = optimizer.param_groups
    found = start(model, optimizer, level)
    assert found[0] is model
    assert found[1] is optimizer
    assert optimizer.param_groups is groups


def test_a_disabled_initialize_changes_nothing() -> None:
    model = network()
    optimizer = sgd(model)
    assert start(model, optimizer, enabled=False) == (model, optimizer)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    loss = model(batch()[0]).sum()
    with amp.scale_loss(loss, optimizer) as same:
        assert same is loss
    assert amp.state_dict() == {}


@pytest.mark.parametrize("low", LOW)
@pytest.mark.parametrize("level", LEVEL_NAMES)
def test_dtypes_of_each_level(level: str, low: torch.dtype) -> None:
    model = network()
    optimizer = sgd(model)
    start(model, optimizer, level, dtype=low)
    converted = level in ("O2", "O3")
    wanted = [low if converted else torch.float32] * 2
    norm = [torch.float32 if level != "O3" else low] * 2
    assert [p.dtype for p in model.parameters()] == [*wanted, *norm, *wanted]
    inside = []
    model[0].register_forward_hook(lambda _module, args, out: inside.append(args[0].dtype))
    assert model(batch()[0].double() if level == "O2" else batch()[0]).dtype == torch.float32
    assert inside == [low if converted else torch.float32]
    params = list(amp.master_params(optimizer))
    assert {p.dtype for p in params} == {low if level == "O3" else torch.float32}
    assert torch.is_autocast_enabled("cpu") == (level == "O1")
    scale = amp.state_dict()["loss_scaler0"]["loss_scale"]
    dynamic = level in ("O1", "O2") and low == torch.float16
    assert scale == (2.0**16 if dynamic else 1.0)


def test_the_variable_chooses_the_low_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    assert start(network())[0].weight.dtype == torch.float16
    monkeypatch.setenv(DTYPE, "bfloat16")
    assert start(network())[0].weight.dtype == torch.bfloat16
    assert start(network(), dtype=torch.float16)[0].weight.dtype == torch.float16
    assert start(network(), cast_model_type=torch.float16)[0].weight.dtype == torch.float16
    monkeypatch.setenv(DTYPE, "float8")
    with pytest.raises(ValueError, match=DTYPE):
        start(network())


@pytest.mark.parametrize(
    ("options", "scale", "norm"),
    [
        ({"loss_scale": "128.0"}, 128.0, torch.float32),
        ({"loss_scale": 4, "keep_batchnorm_fp32": "False"}, 4.0, torch.bfloat16),
        ({"loss_scale": "dynamic", "keep_batchnorm_fp32": "True"}, 2.0**16, torch.float32),
        ({"loss_scale": "dynamic", "max_loss_scale": 2.0**10}, 2.0**10, torch.float32),
        ({"loss_scale": "dynamic", "min_loss_scale": 2.0**18}, 2.0**18, torch.float32),
        ({"loss_scale": amp_mp.scaling.Static(2.0)}, 2.0, torch.float32),
    ],
)
def test_overrides_may_be_words(options: Any, scale: float, norm: torch.dtype) -> None:
    model = start(network(), dtype=torch.bfloat16, **options)
    assert amp.state_dict()["loss_scaler0"]["loss_scale"] == scale
    assert model[1].weight.dtype == norm


def test_outputs_are_cast_in_containers_as_asked() -> None:
    class Two(nn.Linear):
        def forward(self, x: Any, *, named: Any) -> Any:  # type: ignore[override]
            assert x[0].dtype == named["y"].dtype == torch.bfloat16
            assert x[1].dtype == torch.int64
            assert isinstance(named["z"], np.ndarray)
            return {"out": super().forward(x[0]), "ids": x[1]}

    given = [torch.ones(1, 2), torch.ones(1, dtype=torch.int64)]
    for asked, wanted in ((None, torch.float32), (torch.float16, torch.float16)):
        model = start(Two(2, 2), dtype=torch.bfloat16, cast_model_outputs=asked)
        out = model(given, named={"y": torch.ones(1), "z": np.ones(1)})
        assert (out["out"].dtype, out["ids"].dtype) == (wanted, torch.int64)


def test_verbosity_says_what_was_chosen(capsys: pytest.CaptureFixture[str]) -> None:
    amp.initialize(network(), opt_level="O2", loss_scale="128.0")
    text = capsys.readouterr().out
    for word in ("O2", "float16", "loss_scale 128.0", "master_weights True"):
        assert word in text
    start(network())
    assert capsys.readouterr().out == ""


# What it refuses.


REFUSED: dict[type[Exception], list[tuple[dict[str, Any], str]]] = {
    RuntimeError: [
        ({"opt_level": "02"}, "letter O"),
        ({"opt_level": "O4"}, "'O4'"),
        ({"opt_level": "O1", "cast_model_type": torch.float16}, "cast_model_type=torch.float16"),
        ({"opt_level": "O1", "keep_batchnorm_fp32": True}, "keep_batchnorm_fp32=True"),
        ({"opt_level": "O1", "master_weights": False}, "master_weights=False"),
        ({"opt_level": "O2", "patch_torch_functions": True}, "patch_torch_functions=True"),
        (
            {"cast_model_type": torch.float16, "dtype": torch.bfloat16},
            "cast_model_type=torch.float16 contradicts dtype=torch.bfloat16",
        ),
    ],
    ValueError: [
        ({"keep_batchnorm_fp32": "yes"}, "keep_batchnorm_fp32.*'yes'"),
        ({"loss_scale": "static"}, "loss_scale.*static"),
        ({"loss_scale": -1}, "loss_scale.*-1"),
        ({"num_losses": 0}, "num_losses.*0"),
        ({"dtype": torch.float32}, "dtype.*torch.float32"),
        ({"cast_model_outputs": "half"}, "cast_model_outputs.*'half'"),
        ({"min_loss_scale": 8.0, "max_loss_scale": 4.0}, "min_loss_scale=8.0"),
    ],
}


@pytest.mark.parametrize(
    ("error", "options", "words"),
    [(error, *row) for error, rows in REFUSED.items() for row in rows],
)
def test_options_that_are_refused_change_nothing(error: Any, options: Any, words: str) -> None:
    model = network()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(error, match=words):
        start(model, sgd(model), **options)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())


def test_models_and_optimizers_that_it_does_not_take() -> None:
    model = network()
    with pytest.raises(TypeError, match=r"models must be a torch.nn.*Module.*found int"):
        start(3)
    with pytest.raises(TypeError, match=r"optimizers must be a torch.*found list"):
        start(model, [[sgd(model)]])
    for level in ("O0", "O2", "O3"):
        with pytest.raises(RuntimeError, match=r"0.weight is torch.float16 already; .*'" + level):
            start(network().half(), opt_level=level)
    with pytest.raises(RuntimeError, match="found a DataParallel"):
        start(nn.DataParallel(network()))
    wrapped = amp_mp.FP16_Optimizer(sgd(model), verbose=False)
    with pytest.raises(RuntimeError, match="found an FP16_Optimizer"):
        start(model, wrapped)
    with pytest.raises(RuntimeError, match="models: the same module is given twice"):
        start([model, model])
    optimizer = sgd(model)
    with pytest.raises(RuntimeError, match=r"SGD was given to amp.initialize before"):
        start(model, [optimizer, optimizer])
    start(model, optimizer, "O0")
    with pytest.raises(RuntimeError, match=r"SGD was given to amp.initialize before"):
        start(network(), optimizer, "O0")


def test_a_later_initialize_begins_anew() -> None:
    model = network()
    start(model, sgd(model), "O1", num_losses=3)
    assert torch.is_autocast_enabled("cpu")
    amp._amp_state.loss_scalers[0].loss_scaler.scale = 4.0
    other = network()
    start(other, sgd(other), "O0", loss_scale="dynamic")
    assert not torch.is_autocast_enabled("cpu")
    assert amp.state_dict() == {"loss_scaler0": {"loss_scale": 2.0**16, "unskipped": 0}}


@pytest.mark.parametrize("name", ["nothing", "wrap", "OptimWrapper", "compat"])
def test_names_that_are_left_out_say_why(name: str) -> None:
    with pytest.raises(AttributeError, match=f"'amp_mp.apex.amp' has no attribute '{name}'"):
        getattr(amp, name)


@pytest.mark.parametrize("level", LEVEL_NAMES)
def test_a_model_that_is_not_to_be_cast(level: str) -> None:
    """What Apex's O0 and O1 pass for a model that stays as it is."""
    model, x = network(), batch()[0]
    wanted = model(x)
    start(model, sgd(model), level, cast_model_type=False)
    assert amp._amp_state.opt_properties is not None
    assert amp._amp_state.opt_properties.cast_model_type is None
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    if level != "O1":
        assert torch.equal(model(x), wanted)


@pytest.mark.parametrize("low", LOW)
@pytest.mark.parametrize(
    ("level", "options"),
    [("O1", {}), ("O1", {"cast_model_type": False}), ("O2", {"cast_model_type": False})],
)
def test_a_model_in_low_precision_is_taken_as_it_is(
    level: str, options: dict[str, Any], low: torch.dtype
) -> None:
    """Trainable or not; O2 has masters of what is trained."""
    model, frozen = Weight(torch.tensor([2.0, -3.0]).to(low)), network().to(low)
    optimizer = sgd(model, lr=2.0**-12)
    models, _ = start([model, frozen], optimizer, level, dtype=low, loss_scale=8.0, **options)
    assert {p.dtype for each in models for p in each.parameters()} == {low}
    for _ in range(2):
        optimizer.zero_grad()
        backward(model(torch.tensor([1.0, 2.0]).to(low)), optimizer)
        (param,) = amp.master_params(optimizer)
        assert param.grad is not None
        assert param.grad.tolist() == [1.0, 2.0]
        optimizer.step()
    (param,) = amp.master_params(optimizer)
    exact = torch.tensor([2.0 - 2.0**-11, -3.0 - 2.0**-10])
    if level == "O2":
        assert torch.equal(param, exact)
        assert torch.equal(model.state_dict()["w"], exact)
    else:
        assert model.state_dict()["w"].dtype == low


# Models of O2.


@pytest.mark.parametrize("low", LOW)
def test_state_dict_is_the_masters_and_load_fills_them(low: torch.dtype) -> None:
    """Values that low precision cannot hold come through, whether masters are there or not."""
    values = torch.tensor([1.0 + 2.0**-20, -3.0 - 2.0**-18])
    model = Weight(values.clone())
    optimizer = sgd(model)
    start(model, optimizer, dtype=low)
    for _ in range(2):
        saved = {f"module.{k}": v for k, v in model.state_dict().items()}
        assert torch.equal(saved["module.w"], values)
        assert torch.equal(nn.ModuleDict({"module": model}).state_dict()["module.w"], values)
        assert torch.equal(next(amp.master_params(optimizer)), values)  # makes the masters
    with torch.no_grad():
        model.w.mul_(2.0)  # the parameter is where the next step starts from
    assert torch.equal(model.state_dict()["w"], values.to(low).float() * 2)
    model.load_state_dict({"w": values + 1})
    assert torch.equal(model.w, (values + 1).to(low))
    assert torch.equal(next(amp.master_params(optimizer)), values + 1)
    with torch.no_grad():
        model.w.zero_()
    backward(model(torch.zeros(2)), optimizer)
    optimizer.step()
    assert torch.equal(next(amp.master_params(optimizer)), torch.zeros(2))


def test_copies_and_pickles_of_a_model_cast_as_it_does() -> None:
    model = network()
    optimizer = sgd(model)
    start(model, optimizer, dtype=torch.bfloat16)
    train(model, optimizer, 2)
    model.eval()
    wanted = model(batch()[0])
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), through_a_file(model)):
        found = other(batch()[0])
        assert found.dtype == torch.float32
        assert torch.equal(found, wanted)
        state = other.state_dict()
        assert {v.dtype for v in state.values() if v.is_floating_point()} == {torch.float32}
        with torch.no_grad():
            other[0].weight.zero_()  # it is not the model's
    assert torch.equal(model(batch()[0]), wanted)


@pytest.mark.parametrize("low", LOW)
@pytest.mark.parametrize("level", LEVEL_NAMES)
def test_save_and_resume_bit_for_bit(level: str, low: torch.dtype) -> None:
    """With what an unchanged script saves: three state dicts."""

    def fresh() -> tuple[Any, Any]:
        model = network()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01, eps=1e-4)
        return start(model, optimizer, level, dtype=low)

    model, optimizer = fresh()
    train(model, optimizer, 4)
    states = [copy.deepcopy(each.state_dict()) for each in (model, optimizer, amp)]
    saved = through_a_file(states, weights_only=True)
    wanted = train(model, optimizer, 4, seed=7)
    resumed, its_optimizer = fresh()
    for each, state in zip((resumed, its_optimizer, amp), saved, strict=True):
        each.load_state_dict(state)
    assert train(resumed, its_optimizer, 4, seed=7) == wanted
    pairs = zip(model.state_dict().values(), resumed.state_dict().values(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
