"""amp.scale_loss: masters' gradients, several losses, overflows, and what goes wrong.

Exact comparisons use small integers and powers of two, which every format here holds.
"""

from __future__ import annotations

import copy
import math
from functools import partial
from typing import Any

import pytest
import torch
from apex_levels import LOW, Weight, backward, network, train
from helpers import NO_GRADIENT, warns
from tiers import paired
from torch import Tensor, nn

import amp_mp
from amp_mp.apex import amp, optimizers
from amp_mp.apex.parallel import LARC

LEVELS = ["O0", "O1", "O2", "O3"]
OPTIMIZERS = {
    "torch": torch.optim.SGD,
    "amp_mp": amp_mp.optim.SGD,
    "apex": optimizers.FusedSGD,
}
MESSAGE = "Gradient overflow.  Skipping step, loss scaler {} reducing loss scale to {}\n"


def started(
    level: str = "O2",
    low: torch.dtype = torch.float16,
    kind: str = "torch",
    values: tuple[float, ...] = (1.0, 2.0),
    **options: Any,
) -> tuple[Any, Any]:
    model = Weight(torch.tensor(values))
    optimizer = OPTIMIZERS[kind](model.parameters(), lr=0.5)
    options = {"loss_scale": "dynamic", "verbosity": 0, **options}
    return amp.initialize(model, optimizer, opt_level=level, dtype=low, **options)


def grads(optimizer: Any) -> list[list[float] | None]:
    found = [p.grad for p in amp.master_params(optimizer)]
    return [None if g is None else g.tolist() for g in found]


# Gradients.


@pytest.mark.parametrize(
    ("level", "low", "scale", "kind"), paired(LEVELS, LOW, ["dynamic", 1.0, 128.0], OPTIMIZERS)
)
def test_clipping_between_loss_and_step(
    level: str, low: torch.dtype, scale: Any, kind: str
) -> None:
    model, optimizer = started(level, low, kind, loss_scale=scale, max_loss_scale=64.0)
    optimizer.zero_grad()
    backward(model(torch.tensor([3.0, 4.0])), optimizer)
    assert grads(optimizer) == [[3.0, 4.0]]
    norm = torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), 2.5)
    assert norm == 5.0
    optimizer.step()
    stepped = next(amp.master_params(optimizer)).float()
    torch.testing.assert_close(stepped, torch.tensor([0.25, 1.0]), rtol=0, atol=2e-2)
    assert torch.equal(model.w.float(), stepped.to(model.w.dtype).float())


class Mixed(nn.Module):
    """A float32 and a float16 weight, whose gradients are what the other is given."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Parameter(torch.tensor([1.0, 2.0]))
        self.low = nn.Parameter(torch.tensor([4.0, 8.0], dtype=torch.float16))

    def forward(self, for_wide: Tensor, for_low: Tensor) -> Tensor:
        """A number."""
        return (self.wide * for_wide).sum() + (self.low.float() * for_low).sum()


FUSED = {
    **OPTIMIZERS,
    "unmaterialized": partial(optimizers.FusedSGD, materialize_master_grads=False),
    "FusedAdam": optimizers.FusedAdam,
    "FusedLAMB": partial(optimizers.FusedLAMB, max_grad_norm=None),
}


@pytest.mark.parametrize(
    ("level", "kind", "loss_scale", "num_losses"), paired(LEVELS, FUSED, ["dynamic", 4.0], [1, 2])
)
def test_gradients_that_a_script_reads_are_the_true_ones(
    level: str, kind: str, loss_scale: Any, num_losses: int
) -> None:
    """After each block and after the step; of O2's low weights those of the masters alone."""
    model = Mixed()
    optimizer = FUSED[kind](model.parameters(), lr=0.25)
    options = {"loss_scale": loss_scale, "num_losses": num_losses, "cast_model_type": False}
    amp.initialize(model, optimizer, opt_level=level, verbosity=0, **options)
    scalers = amp._amp_state.loss_scalers
    for scaler, scale in zip(scalers, (4.0, 16.0), strict=False):
        scaler._loss_scale = scale
    wide, low = torch.tensor([1.0, -2.0]), torch.tensor([3.0, 5.0])
    for _ in range(2):
        optimizer.zero_grad()
        for losses in (1.0, 2.0):
            scaler = scalers[int(losses) - 1 if num_losses == 2 else 0]
            backward(model(wide, low), optimizer, scalers.index(scaler))
            assert grads(optimizer) == [(wide * losses).tolist(), (low * losses).tolist()]
            times = scaler.loss_scale() if level == "O2" else losses
            assert model.low.grad is not None
            assert model.low.grad.tolist() == (low * times).tolist()
        optimizer.step()
        assert grads(optimizer) == [
            (wide * 2).tolist(),
            None if level == "O2" else (low * 2).tolist(),
        ]


@pytest.mark.parametrize("wraps", [False, True])
def test_a_handle_leaves_true_gradients_to_the_optimizers_of_apex(wraps: bool) -> None:
    model = Mixed()
    optimizer = optimizers.FusedSGD(model.parameters(), lr=0.25)
    with amp.init(dtype=torch.float16, device_type="cpu", loss_scale=8.0) as handle:
        wrapped = handle.wrap_optimizer(optimizer) if wraps else None
        for _ in range(2):
            optimizer.zero_grad()
            loss = model(torch.ones(2), torch.ones(2))
            with (
                wrapped.scale_loss(loss)
                if wrapped
                else handle.scale_loss(loss, optimizer) as scaled
            ):
                scaled.backward()
            assert grads(optimizer) == [[1.0, 1.0]] * 2
            (wrapped or optimizer).step()
            assert grads(optimizer) == [[1.0, 1.0]] * 2
    assert (model.wide.tolist(), model.low.tolist()) == ([0.5, 1.5], [3.5, 7.5])


@pytest.mark.parametrize("delay", [False, True])
@pytest.mark.parametrize("level", LEVELS)
def test_losses_with_their_own_scales_add_up(level: str, delay: bool) -> None:
    """Three losses, three scales, with and without leaving gradients scaled in between."""
    model, optimizer = started(level, num_losses=3)
    for i, scaler in enumerate(amp._amp_state.loss_scalers):
        scaler.loss_scaler.scale = 2.0 ** (3 * i + 1)
    optimizer.zero_grad()
    for i in range(3):
        loss = model(torch.tensor([1.0, -2.0]) * 2**i)
        backward(loss, optimizer, i, delay_unscale=delay and i < 2)
    assert grads(optimizer) == [[7.0, -14.0]]
    optimizer.step()
    assert next(amp.master_params(optimizer)).tolist() == [1 - 3.5, 2 + 7.0]


@pytest.mark.parametrize("level", LEVELS)
def test_delayed_gradients_stay_scaled_in_the_model(level: str) -> None:
    """So that a reduction of `.grad` between processes sees all of them."""
    model, optimizer = started(level, loss_scale=8.0)
    for _ in range(2):
        with amp.scale_loss(model(torch.ones(2)), optimizer, delay_unscale=True) as scaled:
            assert scaled.item() == 24.0
            scaled.backward()
    assert model.w.grad.tolist() == [16.0, 16.0]
    with pytest.raises(RuntimeError, match=r"carry the loss scale 8.0.*delay_unscale=False"):
        optimizer.step()
    backward(model(torch.ones(2)), optimizer)
    assert grads(optimizer) == [[3.0, 3.0]]
    optimizer.zero_grad()
    backward(model(torch.ones(2)), optimizer, delay_unscale=True)
    optimizer.zero_grad()  # gives the loss up
    backward(model(torch.ones(2)), optimizer)
    assert grads(optimizer) == [[1.0, 1.0]]


def test_true_gradients_from_before_a_delayed_loss_stay_true() -> None:
    for level in LEVELS:
        model, optimizer = started(level, loss_scale=8.0)
        backward(model(torch.ones(2)), optimizer)
        backward(model(torch.ones(2)), optimizer, delay_unscale=True)
        backward(model(torch.ones(2)), optimizer)
        assert grads(optimizer) == [[3.0, 3.0]]


@pytest.mark.parametrize("level", LEVELS)
def test_model_zero_grad_is_enough_after_a_step(level: str) -> None:
    model, optimizer = started(level, loss_scale=8.0)
    for _ in range(2):
        model.zero_grad()
        backward(model(torch.ones(2)), optimizer)
        assert grads(optimizer) == [[1.0, 1.0]]
        optimizer.step()


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_zero_grad_clears_masters_and_model(kind: str) -> None:
    """Also FusedSGD's, which writes zeros into float32 parameters."""
    model, optimizer = started(kind=kind)
    backward(model(torch.ones(2)), optimizer)
    assert model.w.grad is not None
    optimizer.zero_grad()
    assert model.w.grad is None
    assert grads(optimizer) == [None]


# Overflows.


@pytest.mark.parametrize("low", LOW)
@pytest.mark.parametrize("level", LEVELS)
def test_an_overflow_skips_one_step_and_lowers_its_own_scale(
    level: str, low: torch.dtype, capsys: pytest.CaptureFixture[str]
) -> None:
    model, optimizer = started(level, low, num_losses=2, verbosity=1, max_loss_scale=16.0)
    capsys.readouterr()
    model.zero_grad()
    for _ in range(2):  # two overflows before a step skip one
        backward(model(torch.tensor([math.inf, 1.0])), optimizer, 1)
    backward(model(torch.ones(2)), optimizer, 0)
    optimizer.step()
    assert capsys.readouterr().out == MESSAGE.format(1, 8.0)
    assert model.w.tolist() == [1.0, 2.0]
    wanted = [{"loss_scale": 16.0, "unskipped": 1}, {"loss_scale": 8.0, "unskipped": 0}]
    assert list(amp.state_dict().values()) == wanted
    model.zero_grad()
    backward(model(torch.ones(2)), optimizer, 1)
    assert grads(optimizer) == [[1.0, 1.0]]
    optimizer.step()
    assert model.w.tolist() == [0.5, 1.5]
    assert amp.state_dict()["loss_scaler1"] == {"loss_scale": 8.0, "unskipped": 1}


def test_an_overflow_of_one_loss_skips_the_optimizers_it_was_given() -> None:
    models = [Weight(torch.ones(2)) for _ in range(2)]
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.5) for m in models]
    amp.initialize(models, optimizers, opt_level="O2", num_losses=2, verbosity=0, loss_scale=2.0)
    backward(models[0](torch.tensor([math.inf, 1.0])), optimizers[0], 0)
    backward(models[1](torch.ones(2)), optimizers[1], 1)
    for optimizer in optimizers:
        optimizer.step()
    assert [m.w.tolist() for m in models] == [[1.0, 1.0], [0.5, 0.5]]
    for optimizer in optimizers:
        optimizer.zero_grad()
    backward(models[0](torch.ones(2)) + models[1](torch.ones(2)), optimizers, 0)
    assert [grads(each) for each in optimizers] == [[[1.0, 1.0]], [[1.0, 1.0]]]


def test_schedulers_from_before_and_after_initialize() -> None:
    model = Weight(torch.ones(2))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    before = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    amp.initialize(model, optimizer, opt_level="O2", verbosity=0, loss_scale=4.0)
    after = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    for _ in range(2):
        optimizer.zero_grad()
        backward(model(torch.ones(2)), optimizer)
        optimizer.step()
        before.step()
        after.step()
    assert optimizer.param_groups[0]["lr"] == 1 / 16
    assert model.w.tolist() == [1 - 1.25, 1 - 1.25]


# Closures.


@pytest.mark.parametrize(("level", "loss_scale"), [("O1", "dynamic"), ("O2", 1.0), ("O0", 128.0)])
def test_closures_are_refused_where_losses_are_scaled(level: str, loss_scale: Any) -> None:
    model = Weight(torch.ones(2))
    optimizer = torch.optim.LBFGS(model.parameters())
    options = {"loss_scale": loss_scale, "verbosity": 0}
    amp.initialize(model, optimizer, opt_level=level, dtype=torch.float16, **options)
    for call in (lambda: optimizer.step(sum), lambda: optimizer.step(closure=sum)):
        with pytest.raises(RuntimeError, match=r"closure.*use amp_mp.FP16_Optimizer"):
            call()
    assert model.w.tolist() == [1.0, 1.0]


def test_a_closure_where_nothing_is_scaled() -> None:
    target = torch.tensor([3.0, -1.0])
    model = Weight(torch.zeros(2))
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=6)
    amp.initialize(model, optimizer, opt_level="O0", verbosity=0)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = (model.w - target).square().sum()
        backward(loss, optimizer)
        return loss

    assert optimizer.step(closure).item() == 10.0
    assert optimizer.step(closure).item() < 0.1


# Parameters.


class Parts(nn.Module):
    """Two weights, of which a loss may use one."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = Weight(torch.ones(2)), Weight(torch.ones(2))


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("level", LEVELS)
def test_losses_without_gradients_for_some_parameters(level: str, kind: str) -> None:
    model = Parts()
    model.b.w.requires_grad_(False)
    optimizer = OPTIMIZERS[kind](model.parameters(), lr=0.5)
    options = {"verbosity": 0, "loss_scale": 4.0, "num_losses": 2, "dtype": torch.bfloat16}
    amp.initialize(model, optimizer, opt_level=level, **options)
    backward(model.a(torch.ones(2)), optimizer)
    optimizer.step()
    assert (model.a.w.tolist(), model.b.w.tolist()) == ([0.5, 0.5], [1.0, 1.0])
    model.b.w.requires_grad_(True)  # it gets a master now
    for loss_id, part in enumerate((model.a, model.b)):
        backward(part(torch.full((2,), 2.0)), optimizer, loss_id)
    masters = list(amp.master_params(optimizer))
    assert {p.dtype for p in masters} == {torch.bfloat16 if level == "O3" else torch.float32}
    optimizer.step()
    wanted = [-0.5 if level == "O2" else -1.0] * 2
    assert (model.a.w.tolist(), model.b.w.tolist()) == (wanted, [0.0, 0.0])


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_an_added_group_gets_masters(kind: str) -> None:
    model = Parts()
    optimizer = OPTIMIZERS[kind](model.a.parameters(), lr=0.5)
    amp.initialize(model, optimizer, opt_level="O2", verbosity=0, loss_scale=4.0)
    backward(model.a(torch.ones(2)), optimizer)
    optimizer.add_param_group({"params": model.b.parameters(), "lr": 0.25})
    assert {p.dtype for p in amp.master_params(optimizer)} == {torch.float32}
    backward(model.b(torch.ones(2)), optimizer)
    optimizer.step()
    assert (model.a.w.tolist(), model.b.w.tolist()) == ([0.5, 0.5], [0.75, 0.75])


def test_larc_around_an_initialised_optimizer() -> None:
    found = []
    for level in ("O0", "O2"):
        model, inner = started(level, torch.bfloat16, loss_scale=8.0)
        optimizer = LARC(inner)
        optimizer.zero_grad()
        backward(model(torch.tensor([3.0, 4.0])), optimizer)
        optimizer.step()
        found.append(next(amp.master_params(optimizer)).detach())
    assert torch.equal(*found)


# What goes wrong.


def test_an_exception_inside_of_the_block() -> None:
    for level in LEVELS:
        model, optimizer = started(level, loss_scale=4.0)
        backward(model(torch.ones(2)), optimizer)
        block = amp.scale_loss(model(torch.ones(2)), optimizer)
        block.__enter__().backward()
        error = ZeroDivisionError()
        assert not block.__exit__(type(error), error, None)  # it goes on
        assert grads(optimizer) == [[1.0, 1.0]]
        assert torch.is_autocast_enabled("cpu") == (level == "O1")
        backward(model(torch.ones(2)), optimizer)
        assert grads(optimizer) == [[2.0, 2.0]]


@pytest.mark.parametrize("level", LEVELS)
def test_a_forgotten_backward_changes_nothing(level: str) -> None:
    model, optimizer = started(level, loss_scale=4.0)
    with warns(NO_GRADIENT, level == "O2"):
        with amp.scale_loss(model(torch.ones(2)), optimizer):
            pass
        optimizer.step()
    assert model.w.tolist() == [1.0, 2.0]


def test_backward_without_scale_loss_is_an_error_where_masters_would_miss_it() -> None:
    model, optimizer = started(values=(1.0, 2.0))
    model(torch.ones(2)).backward()
    with pytest.raises(RuntimeError, match="group 0 has a gradient that did not come through"):
        optimizer.step()
    assert model.w.tolist() == [1.0, 2.0]
    model.zero_grad()
    optimizer.step()


def test_backward_on_the_unscaled_loss_warns() -> None:
    model, optimizer = started(loss_scale=4.0)
    loss = model(torch.ones(2))
    with pytest.warns(UserWarning, match="unscaled loss"), amp.scale_loss(loss, optimizer):
        loss.backward()


def test_arguments_that_are_refused() -> None:
    model, optimizer = started()
    loss = model(torch.ones(2))
    other = torch.optim.SGD(network().parameters(), lr=1.0)
    for error, words, arguments in (
        (ValueError, "loss_id.*num_losses=1.*found 1", (optimizer, 1)),
        (RuntimeError, "SGD was not given to amp.initialize", (other,)),
        (TypeError, "optimizer must be.*found Linear", (nn.Linear(1, 1),)),
        (NotImplementedError, "delay_overflow_check", (optimizer, 0, None, False, True)),
    ):
        with pytest.raises(error, match=words), amp.scale_loss(loss, *arguments):
            pass
    amp._amp_state.opt_properties = None
    with pytest.raises(RuntimeError, match="initialize was not called"):
        backward(loss, optimizer)


# Snapshots of the scales.


def test_state_dict_counts_and_resumes_as_apex_does() -> None:
    """Doubled at every 2000th step without overflow, counted from the last change."""
    model, optimizer = started("O0", num_losses=2)
    first = amp._amp_state.loss_scalers[0]
    first.loss_scaler.load_state_dict({**first.loss_scaler.state_dict(), "step_window": 3})
    found = []
    for overflow in "..!..." + ".!.":
        model.zero_grad()
        backward(model(torch.tensor([math.inf if overflow == "!" else 1.0, 1.0])), optimizer)
        optimizer.step()
        state = amp.state_dict()["loss_scaler0"]
        found.append((math.log2(state["loss_scale"]), state["unskipped"]))
        amp.load_state_dict(copy.deepcopy(dict(amp.state_dict())))  # changes nothing
    ups = [(16, 1), (16, 2), (15, 0), (15, 1), (15, 2), (16, 0)]
    assert found == [*ups, (16, 1), (15, 0), (15, 1)]
    destination: dict[str, Any] = {"mine": 1}
    assert amp.state_dict(destination) is destination
    assert list(destination) == ["mine", "loss_scaler0", "loss_scaler1"]


def test_snapshots_of_something_else() -> None:
    started(num_losses=2)
    entry = {"loss_scale": 8.0, "unskipped": 5}
    before = amp.state_dict()
    with pytest.raises(RuntimeError, match=r"unexpected keys \['model'\]"):
        amp.load_state_dict({"loss_scaler0": entry, "model": {}})
    with pytest.raises(RuntimeError, match=r"no loss scale in \['loss_scaler1'\]"):
        amp.load_state_dict({"loss_scaler0": entry, "loss_scaler1": {"loss_scale": math.nan}})
    assert amp.state_dict() == before
    with pytest.warns(UserWarning, match="has 3 loss scalers, and num_losses.*is 2"):
        amp.load_state_dict({f"loss_scaler{i}": entry for i in range(3)})
    assert list(amp.state_dict().values()) == [entry, entry]
    train_model = network()
    optimizer = torch.optim.SGD(train_model.parameters(), lr=0.1)
    amp.initialize(train_model, optimizer, opt_level="O2", loss_scale=64.0, verbosity=0)
    amp.load_state_dict({"loss_scaler0": entry})  # a static scale takes it as well
    assert amp.state_dict() == {"loss_scaler0": {"loss_scale": 8.0, "unskipped": 0}}
    assert all(math.isfinite(x) for x in train(train_model, optimizer, 2))


# Two optimizers with one weight.


@pytest.mark.parametrize("delay", [False, True])
@pytest.mark.parametrize("loss_scale", [8.0, 1.0])
@pytest.mark.parametrize("level", LEVELS)
def test_a_weight_of_two_optimizers_gets_each_loss_once(
    level: str, loss_scale: float, delay: bool
) -> None:
    model = Weight(torch.ones(2))
    both = [torch.optim.SGD(model.parameters(), lr=0.5) for _ in range(2)]
    options = {"verbosity": 0, "loss_scale": loss_scale, "dtype": torch.bfloat16}
    amp.initialize(model, both, opt_level=level, **options)
    for i in range(3):
        backward(model(torch.tensor([1.0, 2.0])), both, delay_unscale=delay and i < 2)
    assert [grads(each) for each in both] == [[[3.0, 6.0]]] * 2
    block = amp.scale_loss(model(torch.ones(2)), both)
    error = ZeroDivisionError()
    block.__enter__()
    assert not block.__exit__(type(error), error, None)
    assert [grads(each) for each in both] == [[[3.0, 6.0]]] * 2


@pytest.mark.parametrize("level", LEVELS)
def test_a_script_gives_an_overflow_up_by_clearing_the_model(level: str) -> None:
    """As `if overflow: model.zero_grad(); continue`, which steps no optimizer."""
    model, optimizer = started(level, loss_scale="dynamic")
    for power in (15.0, 14.0):
        backward(model(torch.tensor([math.inf, 1.0])), optimizer)
        assert amp.state_dict()["loss_scaler0"]["loss_scale"] == 2.0**power
        model.zero_grad()
    backward(model(torch.ones(2)), optimizer)
    optimizer.step()
    assert model.w.tolist() == [0.5, 1.5]
