"""Optimizers inside of FP16_Optimizer that write parameters beside their steps, as SAM does."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import raw_bytes, warns
from torch import Tensor, nn
from wrapping import LOW

import amp_mp as amp

RATE, SCALE = 0.25, 8.0


class Sam(torch.optim.SGD):
    """As published: up to the worst weights nearby, and back for the step."""

    @torch.no_grad()
    def first_step(self) -> None:
        for p in self.param_groups[0]["params"]:
            self.state[p]["before"] = p.data.clone()
            p.add_(p.grad, alpha=0.5 / p.grad.norm().item())
        self.zero_grad()

    @torch.no_grad()
    def second_step(self) -> None:
        for p in self.param_groups[0]["params"]:
            p.data = self.state[p]["before"]
        super().step()

    def step(self, closure: Any = None) -> None:
        if closure is None:
            return super().step()
        self.first_step()
        closure()
        return self.second_step()


class ScheduleFree(torch.optim.Optimizer):
    """Has two sets of weights, one to train and one to evaluate, as its name says too seldom."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"trains": True})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in self.param_groups[0]["params"]:
            slow = self.state[p].setdefault("slow", p.clone())
            slow.sub_(p.grad, alpha=RATE)
            p.lerp_(slow, 0.5)

    @torch.no_grad()
    def _exchange(self, trains: bool, share: float) -> None:
        if self.param_groups[0]["trains"] != trains:
            for p in self.param_groups[0]["params"]:
                p.lerp_(self.state[p]["slow"], share)
        self.param_groups[0]["trains"] = trains

    def eval(self) -> None:
        self._exchange(False, -1.0)

    def train(self) -> None:
        self._exchange(True, 0.5)

    def _backup(self) -> None:  # as Lookahead does it, without a word to any version counter
        for p in self.param_groups[0]["params"]:
            p.data.copy_(self.state[p]["slow"])


def network(device: str) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4)).to(device)


def rounded(model: nn.Module, dtype: torch.dtype) -> dict[str, Tensor]:
    return {name: value.to(dtype) for name, value in model.state_dict().items()}


class Float32:
    """The optimizer on float32 weights, with the gradients of what they round to."""

    def __init__(self, kind: Any, device: str, dtype: torch.dtype, way: str) -> None:
        self.model, self._low = network(device), network(device).to(dtype)
        self.inner = kind(self.model.parameters(), **({"lr": RATE} if kind is Sam else {}))
        self.dtype = dtype
        if way == "bare":  # its masters begin with the rounded weights
            self.model.load_state_dict(rounded(self.model, dtype))

    def backward(self, x: Tensor) -> float:
        self._low.load_state_dict(rounded(self.model, self.dtype))
        self._low.zero_grad()
        loss = self._low(x).float().square().mean()
        (loss * SCALE).backward()
        for low, p in zip(self._low.parameters(), self.model.parameters(), strict=True):
            assert low.grad is not None
            grad = low.grad.float() / SCALE
            p.grad = grad if p.grad is None else p.grad + grad
        return loss.item()


class Around:
    """The same under FP16_Optimizer, or with masters of Apex's O2."""

    def __init__(self, kind: Any, device: str, dtype: torch.dtype, way: str = "wrapper") -> None:
        self.model = network(device)
        self.inner = kind(self.model.parameters(), **({"lr": RATE} if kind is Sam else {}))
        self.way, self.dtype = way, dtype
        if way == "O2":
            options: Any = {"loss_scale": SCALE, "verbosity": 0, "dtype": dtype}
            amp.apex.amp.initialize(self.model, self.inner, opt_level="O2", **options)
            return
        if way == "bare":
            self.model.to(dtype)
        else:
            amp.prepare(self.model, dtype)
        self.optimizer = amp.FP16_Optimizer(self.inner, static_loss_scale=SCALE, verbose=False)

    @property
    def target(self) -> Any:
        """On which a script calls what the inner optimizer alone has."""
        return self.inner if self.way in ("inner", "O2") else self.optimizer

    def backward(self, x: Tensor) -> float:
        loss = self.model(x).float().square().mean()
        if self.way != "O2":
            self.optimizer.backward(loss)
        else:
            with amp.apex.amp.scale_loss(loss, self.inner) as scaled:
                scaled.backward()
        return loss.item()

    def assert_same(self, twin: Float32) -> None:
        masters = self.inner.param_groups[0]["params"]
        assert raw_bytes(masters) == raw_bytes([*twin.model.parameters()])
        wanted = rounded(twin.model, self.dtype)
        assert raw_bytes([*self.model.parameters()]) == raw_bytes([*wanted.values()])


@pytest.fixture
def _no_level() -> Any:
    """Ends a level of amp.initialize."""
    yield
    amp.apex.amp.initialize(nn.Linear(1, 1), enabled=False)


@pytest.mark.usefixtures("_no_level")
@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize("way", ["wrapper", "inner", "bare", "O2", "closure"])
def test_sam_trains_as_in_float32(device: str, dtype: torch.dtype, way: str) -> None:
    """Its second gradients are those of the weights to which the first step has moved."""
    twin, around = Float32(Sam, device, dtype, way), Around(Sam, device, dtype, way)
    for step in range(3):
        x = torch.randn(16, 8, device=device).to(dtype)
        first, wanted = around.backward(x), twin.backward(x)
        assert first == wanted, step
        twin.inner.first_step()
        wanted = twin.backward(x)
        twin.inner.second_step()
        twin.inner.zero_grad()
        if way == "closure":
            second = []
            around.optimizer.step(lambda: second.append(around.backward(x)))  # noqa: B023
            around.optimizer.zero_grad()
        else:
            around.target.first_step()
            second = [around.backward(x)]
            around.target.second_step()
            around.target.zero_grad()
        assert second == [wanted], step
    around.model(x)
    around.assert_same(twin)


@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize("way", ["wrapper", "inner", "bare"])
def test_a_run_saved_with_the_weights_to_evaluate_goes_on(
    device: str, dtype: torch.dtype, way: str
) -> None:
    twin = Float32(ScheduleFree, device, dtype, way)
    around = Around(ScheduleFree, device, dtype, way)
    for step in range(4):
        x = torch.randn(16, 8, device=device).to(dtype)
        around.backward(x)
        around.optimizer.step()
        around.optimizer.zero_grad()
        twin.backward(x)
        twin.inner.step()
        twin.inner.zero_grad()
        around.target.eval()
        twin.inner.eval()
        if step == 1:
            saved = copy.deepcopy([around.model.state_dict(), around.optimizer.state_dict()])
            around = Around(ScheduleFree, device, dtype, way)
            around.model.load_state_dict(saved[0])
            around.optimizer.load_state_dict(saved[1])
        around.model(x)
        around.assert_same(twin)
        around.target.train()
        twin.inner.train()
    around.model(x)
    around.assert_same(twin)


def checkpointed(model: nn.Module, folder: str) -> dict[str, Tensor]:
    amp.checkpoint.save(folder, model)
    fresh = amp.prepare(network("cpu"), next(model.parameters()).dtype)
    amp.checkpoint.load(folder, fresh)
    return fresh.state_dict()


def changed(model: nn.Module, changes: amp.Changes) -> dict[str, Tensor]:
    fresh = {name: torch.zeros_like(value) for name, value in model.state_dict().items()}
    for name, (positions, values) in changes.take().items():
        fresh[name].view(-1)[positions] = values
    return fresh


READERS: dict[str, Callable[..., dict[str, Tensor]]] = {
    "state_dict": lambda m, **_: m.state_dict(),
    "deepcopy": lambda m, **_: dict(copy.deepcopy(m).named_parameters()),
    "pickle": lambda m, **_: dict(pickle.loads(pickle.dumps(m)).named_parameters()),
    "float32_state_dict": lambda m, **_: amp.float32_state_dict(m),
    "AveragedModel": lambda m, **_: amp.AveragedModel(m).float32_state_dict(),
    "Changes": lambda m, changes, **_: changed(m, changes),
    "checkpoint": lambda m, tmp_path, **_: checkpointed(m, tmp_path),
}


@pytest.mark.parametrize("reader", READERS)
def test_a_written_master_is_what_is_read(device: str, reader: str, tmp_path: Any) -> None:
    """And stays the master after that, and its copy has both."""
    around = Around(Sam, device, torch.bfloat16)
    changes = amp.Changes(around.model)
    with torch.no_grad():
        for master in around.optimizer.param_groups[0]["params"]:
            master.add_(1)
    wanted = [p.detach().clone() for p in around.optimizer.param_groups[0]["params"]]
    found = READERS[reader](around.model, changes=changes, tmp_path=str(tmp_path / "c"))
    for value, master in zip(found.values(), wanted, strict=True):
        assert torch.equal(value, master.to(value.dtype))
    if reader in ("deepcopy", "pickle"):
        assert all(map(torch.equal, map(amp.float32_of, found.values()), wanted))
    around.model(torch.zeros(1, 8, device=device).bfloat16())
    around.optimizer.state_dict()
    assert all(map(torch.equal, around.optimizer.param_groups[0]["params"], wanted))


def test_the_average_is_in_the_model_until_its_block_ends(device: str) -> None:
    around = Around(Sam, device, torch.bfloat16)
    average = amp.AveragedModel(around.model)
    with torch.no_grad():
        around.optimizer.param_groups[0]["params"][0].add_(1)
    written = around.optimizer.param_groups[0]["params"][0].bfloat16()
    x = torch.ones(1, 8, device=device).bfloat16()
    with average.swap():
        assert torch.equal(around.model(x), average(x))
    around.model(x)
    assert torch.equal(around.model[0].weight, written)


@pytest.mark.parametrize("calls", ["a container", "a copy", "another after a block"])
def test_a_written_master_reaches_whatever_model_is_called(device: str, calls: str) -> None:
    model = network(device)
    if calls == "a container":
        amp.prepare(nn.ModuleList([model]), torch.float16)
    else:
        amp.prepare(model, torch.float16)
    if calls == "a copy":
        model = copy.deepcopy(model)
    sgd = torch.optim.SGD(model.parameters(), lr=RATE)
    optimizer = amp.FP16_Optimizer(sgd, verbose=False)
    with optimizer.masters(model[2].bias):
        pass
    with torch.no_grad():
        sgd.param_groups[0]["params"][-1].fill_(3)
    model(torch.zeros(1, 8, device=device).half())
    assert (model[2].bias == 3).all()


def test_a_passed_on_method_begins_with_what_was_written_into_the_model(device: str) -> None:
    """And what it writes through `.data` arrives, though no version counter tells of it."""
    around = Around(ScheduleFree, device, torch.float16, "bare")
    around.backward(torch.randn(4, 8, device=device).half())
    around.optimizer.step()
    with torch.no_grad():
        around.model[2].bias.fill_(3)
    around.optimizer.eval()
    master = around.inner.param_groups[0]["params"][-1]
    slow = around.inner.state[master]["slow"]
    assert torch.equal(master, torch.full_like(master, 3).lerp(slow, -1.0))
    around.optimizer._backup()
    assert torch.equal(around.model[2].bias, slow.half())


def test_a_loss_of_weights_that_have_not_got_the_masters_warns(device: str) -> None:
    """Nobody has told amp_mp of this model."""
    around = Around(Sam, device, torch.float16, "bare")
    x = torch.randn(4, 8, device=device).half()
    around.backward(x)
    around.inner.first_step()
    with warns("the master of parameter 0 of group 0 was written"):
        around.backward(x)
    around.inner.second_step()
    around.optimizer.zero_grad()
    around.backward(x)


def test_methods_alone_are_passed_on(device: str) -> None:
    """Attributes tell torch and others what an optimizer does itself."""

    class Inner(Sam):
        rho = 0.5

        def broken(self) -> None:
            return self.nothing_of_this_name  # type: ignore[attr-defined]

        def __deepcopy__(self, memo: Any) -> Any:
            return self

    class Wrapper(amp.FP16_Optimizer):
        @property
        def ratio(self) -> float:
            return self.nothing_of_that_name  # type: ignore[no-any-return]

    inner = Inner(network(device).half().parameters(), lr=RATE)
    for optimizer in (Wrapper(inner, verbose=False), amp.apex.parallel.LARC(inner)):
        assert hasattr(optimizer, "first_step")
        assert not any(hasattr(optimizer, name) for name in ("rho", "eval", "_amp_stash"))
        with pytest.raises(AttributeError, match="nothing_of_this_name"):
            optimizer.broken()
        with pytest.raises(
            AttributeError, match="'ratio'" if "LARC" in repr(optimizer) else "that"
        ):
            _ = optimizer.ratio
    with pytest.raises(RuntimeError, match="serialized using state_dict"):
        copy.deepcopy(Wrapper(Inner(network(device).half().parameters(), lr=RATE), verbose=False))


def test_an_overflow_is_not_passed_on(device: str) -> None:
    """SAM would go back to weights of the step before."""
    around = Around(Sam, device, torch.float16)
    around.optimizer = amp.FP16_Optimizer(
        Sam(around.model.parameters(), lr=RATE), dynamic_loss_scale=True, verbose=False
    )
    before = raw_bytes([*around.model.parameters()])
    around.backward(torch.randn(4, 8, device=device).half())
    with pytest.raises(RuntimeError, match="first_step: the last backward overflowed"):
        around.optimizer.first_step()
    around.optimizer.step()
    around.optimizer.zero_grad()
    assert around.optimizer.loss_scale == 2.0**31
    assert raw_bytes([*around.model.parameters()]) == before
