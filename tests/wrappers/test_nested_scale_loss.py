"""scale_loss inside of scale_loss: every loss is divided once, by its own scale.

The reference is float32 torch without a loss scale. Small whole numbers and powers of two are exact
in every format here, so all gradients are compared bit for bit.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from handles import Start, scaled_backward
from helpers import raw_bytes
from random_tests import examples
from torch import Tensor, nn

import amp_mp as amp
from amp_mp.scaling import Backoff

pytestmark = pytest.mark.filterwarnings("ignore:amp_mp. gradients have been")

Make = Callable[[Any], torch.optim.Optimizer]
SGD: dict[str, Make] = {
    "torch": lambda params: torch.optim.SGD(params, lr=0.125),
    "ours": lambda params: amp.optim.SGD(params, lr=0.125),
}
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


class StopError(Exception):
    """What a test raises inside of a block."""


def times(weights: Sequence[Tensor], factors: Sequence[float]) -> Tensor:
    """A loss whose gradients are the factors."""
    parts = [(w.float() * x).sum() for w, x in zip(weights, factors, strict=True)]
    return sum(parts, torch.zeros((), device=weights[0].device))


def weights_on(device: str, dtype: torch.dtype, count: int) -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(3, dtype=dtype, device=device)) for _ in range(count)]


def first_of(grads: Sequence[Tensor | None]) -> list[float | None]:
    """The gradients' only number, which all elements have."""
    for grad in grads:
        assert grad is None or (grad == grad[0]).all()
    return [None if grad is None else grad.detach()[0].item() for grad in grads]


def gradients(weights: Sequence[Tensor]) -> list[float | None]:
    return first_of([weight.grad for weight in weights])


def fail(handle: Any, loss: Tensor, optimizer: Any, first: Callable[[], None] = list) -> None:
    """A block that raises when `first` is done and the loss has gone backward."""
    with handle.scale_loss(loss, optimizer) as scaled:
        first()
        scaled.backward()
        raise StopError


@pytest.fixture(params=SGD)
def make(request: pytest.FixtureRequest) -> Make:
    """SGD of torch or of amp_mp."""
    return SGD[request.param]


# Where the outer loss goes backward: before the inner block, after it, or on both sides of it.
PLACES = ["before", "after", "both"]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("place", PLACES)
def test_a_loss_inside_of_another_ones_block(
    start: Start, device: str, make: Make, dtype: torch.dtype, place: str
) -> None:
    handle = start(dtype=torch.float16, loss_scale=Backoff(init_scale=2.0**4))
    weights = weights_on(device, dtype, 2)
    optimizer = make(weights)
    outer = times(weights, [1, 2])
    with handle.scale_loss(outer, optimizer) as scaled:
        if place != "after":
            scaled.backward(retain_graph=True)
        with handle.scale_loss(times(weights, [3, 4]), optimizer) as inner:
            inner.backward()
        if place != "before":
            scaled.backward()
    assert gradients(weights) == ([5, 8] if place == "both" else [4, 6])
    optimizer.step()
    wanted = [0.375, 0] if place == "both" else [0.5, 0.25]
    assert first_of(weights) == wanted


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("place", PLACES)
def test_gradients_from_before_are_added_once(
    start: Start, device: str, make: Make, dtype: torch.dtype, place: str
) -> None:
    handle = start(dtype=torch.float16, loss_scale=Backoff(init_scale=2.0**4))
    weights = weights_on(device, dtype, 3)
    optimizer = make(weights)
    with handle.scale_loss(times(weights, [1, 1, 1]), optimizer) as scaled:
        scaled.backward()
    with handle.scale_loss(times(weights[:1], [2]), optimizer) as scaled:
        if place != "after":
            scaled.backward(retain_graph=True)
        with handle.scale_loss(times(weights[:2], [4, 4]), optimizer) as inner:
            inner.backward()
        if place != "before":
            scaled.backward()
    assert gradients(weights) == [9 if place == "both" else 7, 5, 1]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("order", ["ab", "ba", "aba", "bab", "a"])
@pytest.mark.parametrize("scales", [(2.0**4, 2.0**4), (2.0**9, 2.0), (2.0, 2.0**9)])
def test_an_outer_loss_goes_backward_inside_of_the_inner_block(
    start: Start,
    device: str,
    make: Make,
    scales: tuple[float, float],
    order: str,
    dtype: torch.dtype,
) -> None:
    """As in `with scale_loss(first) as a, scale_loss(second) as b:`; order: of a and b."""
    weights = weights_on(device, dtype, 3)
    handle = start(dtype=torch.float16, loss_scale=Backoff(init_scale=2.0))
    optimizer = handle.wrap_optimizer(make(weights), num_loss=3)
    for scaler, scale in zip(optimizer.loss_scalers, (2.0**3, *scales), strict=True):
        scaler.scale = scale
    with optimizer.scale_loss(times(weights, [1, 1, 1])) as before:
        before.backward()
    factors = {"a": [2, 3, 0], "b": [5, 0, 7]}
    first, second = (times(weights, factors[x]) for x in "ab")
    with optimizer.scale_loss(first) as a, optimizer.scale_loss(second) as b:
        for each in order:
            {"a": a, "b": b}[each].backward(retain_graph=True)
    assert gradients(weights) == [1 + sum(factors[x][i] for x in order) for i in range(3)]


def test_the_same_loss_in_the_inner_block_goes_backward_as_either(
    start: Start, device: str, make: Make
) -> None:
    weights = weights_on(device, torch.float32, 2)
    handle = start(dtype=torch.float16, loss_scale=Backoff(init_scale=2.0))
    optimizer = handle.wrap_optimizer(make(weights), num_loss=3)
    for scaler, scale in zip(optimizer.loss_scalers, (2.0, 2.0**9, 2.0**4), strict=True):
        scaler.scale = scale
    for order in itertools.product("abc", repeat=2):
        loss = times(weights, [1, 2])
        with (
            optimizer.scale_loss(loss) as a,
            optimizer.scale_loss(loss) as b,
            optimizer.scale_loss(loss) as c,
        ):
            for each in order:
                {"a": a, "b": b, "c": c}[each].backward(retain_graph=True)
        assert gradients(weights) == [2, 4], order
        optimizer.zero_grad()


@pytest.mark.parametrize("second", [2.0**4, 2.0**9])
def test_two_scaled_losses_in_one_backward(
    start: Start, device: str, make: Make, second: float
) -> None:
    """Their gradients arrive as one sum, which only a common scale divides."""
    weights = weights_on(device, torch.float32, 2)
    handle = start(dtype=torch.float16, loss_scale=Backoff(init_scale=2.0))
    optimizer = handle.wrap_optimizer(make(weights), num_loss=2)
    for scaler, scale in zip(optimizer.loss_scalers, (2.0**4, second), strict=True):
        scaler.scale = scale

    def both() -> None:
        with (
            optimizer.scale_loss(times(weights, [1, 2])) as a,
            optimizer.scale_loss(times(weights, [3, 4])) as b,
        ):
            (a + b).backward()

    if second == 2.0**4:
        both()
        assert gradients(weights) == [4, 6]
        return
    with pytest.raises(RuntimeError, match=r"scales 512 and 16, .* call backward for each"):
        both()
    assert gradients(weights) == [None, None]


@pytest.mark.parametrize("dtype", DTYPES)
def test_an_outer_loss_that_fails_to_go_backward_inside_of_the_inner_block(
    start: Start, device: str, make: Make, dtype: torch.dtype
) -> None:
    """What has arrived of it counts, as in torch; the inner loss is its own."""
    weights = weights_on(device, dtype, 2)
    handle = start(dtype=torch.float16, loss_scale=Backoff(init_scale=2.0))
    optimizer = handle.wrap_optimizer(make(weights), num_loss=2)
    for scaler, scale in zip(optimizer.loss_scalers, (2.0**4, 2.0**9), strict=True):
        scaler.scale = scale
    fails = weights[0].float() * 1

    def refuse(_: Tensor) -> None:
        raise StopError

    fails.register_hook(refuse)
    loss = fails.sum() + times(weights, [0, 3])
    with optimizer.scale_loss(loss) as a, optimizer.scale_loss(times(weights, [5, 7])) as b:
        b.backward(retain_graph=True)
        with pytest.raises(StopError):
            a.backward()
        b.backward()
    first, second = gradients(weights)
    assert (first, second) in [(10, 14), (10, 17)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("when", ["in the inner block", "after the inner block"])
def test_gradients_are_cleared_inside_of_nested_blocks(
    start: Start, device: str, make: Make, when: str, set_to_none: bool, dtype: torch.dtype
) -> None:
    handle = start(dtype=torch.float16, loss_scale=Backoff(init_scale=2.0**4))
    for goes_before in (True, False):
        weights = weights_on(device, dtype, 2)
        optimizer = make(weights)
        scaled_backward(handle, times(weights, [1, 1]), optimizer)
        with handle.scale_loss(times(weights, [2, 0]), optimizer) as outer:
            if goes_before:
                outer.backward(retain_graph=True)
            with handle.scale_loss(times(weights, [3, 4]), optimizer) as inner:
                if when == "in the inner block":
                    optimizer.zero_grad(set_to_none=set_to_none)
                inner.backward()
            if when == "after the inner block":
                optimizer.zero_grad(set_to_none=set_to_none)
            outer.backward()
        assert gradients(weights) == ([5, 4] if when == "in the inner block" else [2, 0])


@pytest.mark.parametrize("sparse", ["outer", "inner", "both"])
@pytest.mark.parametrize("place", PLACES)
def test_sparse_gradients_of_an_embedding(sparse: str, place: str) -> None:
    weight = nn.Parameter(torch.ones(3, 1))
    optimizer = torch.optim.SGD([weight], lr=0.125)
    rows = torch.tensor([0, 2])

    def loss(name: str) -> Tensor:
        return nn.functional.embedding(rows, weight, sparse=sparse in (name, "both")).sum()

    with amp.init(device_type="cpu", dtype=torch.float16, loss_scale=2.0**4) as handle:
        scaled_backward(handle, loss("inner"), optimizer)
        with handle.scale_loss(loss("outer"), optimizer) as scaled:
            if place != "after":
                scaled.backward(retain_graph=True)
            scaled_backward(handle, loss("inner"), optimizer)
            if place != "before":
                scaled.backward()
    assert weight.grad is not None
    wanted = 4.0 if place == "both" else 3.0
    assert weight.grad.to_dense().flatten().tolist() == [wanted, 0, wanted]


@pytest.mark.parametrize("outer", ["torch", "ours"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_two_optimizers_that_share_a_weight(
    start: Start, device: str, make: Make, dtype: torch.dtype, outer: str
) -> None:
    handle = start(dtype=torch.float16, loss_scale=Backoff(init_scale=2.0**4))
    own, shared, others = weights = weights_on(device, dtype, 3)
    first, second = SGD[outer]([own, shared]), make([shared, others])
    with handle.scale_loss(times([own, shared], [1, 2]), first) as scaled:
        scaled.backward()
        with handle.scale_loss(times([shared, others], [3, 4]), second) as inner:
            inner.backward()
    assert gradients(weights) == [1, 5, 4]


def test_one_loss_in_a_block_for_each_optimizer(start: Start, device: str, make: Make) -> None:
    handle = start(dtype=torch.float16, loss_scale=Backoff(init_scale=2.0**4))
    weights = weights_on(device, torch.float32, 2)
    first, second = (make([weight]) for weight in weights)
    loss = times(weights, [1, 2])
    with (
        handle.scale_loss(loss, first) as scaled,
        handle.scale_loss(loss, second),
    ):
        scaled.backward()  # both optimizers' scale is the handle's
    assert gradients(weights) == [1, 2]
    assert "backward" not in vars(loss)


@pytest.mark.parametrize("dtype", DTYPES)
def test_losses_with_scales_of_their_own(
    start: Start, device: str, make: Make, dtype: torch.dtype
) -> None:
    weights = weights_on(device, dtype, 2)
    handle = start(dtype=torch.float16, loss_scale=Backoff(init_scale=2.0))
    optimizer = handle.wrap_optimizer(make(weights), num_loss=3)
    for scaler, scale in zip(optimizer.loss_scalers, (2.0**9, 2.0, 2.0**5), strict=True):
        scaler.scale = scale
    for _ in range(2):
        first, second, third = (times(weights, [x, x + 1]) for x in (1, 3, 5))
        with optimizer.scale_loss(first) as a:
            with optimizer.scale_loss(second) as b:
                b.backward()
                with optimizer.scale_loss(third) as c:
                    c.backward()
            a.backward()
        losses = (a, first), (b, second), (c, third)
        assert [(x / loss).item() for x, loss in losses] == [2.0**9, 2.0, 2.0**5]
        assert gradients(weights) == [9, 12]
        optimizer.step()
        optimizer.zero_grad()


def test_nested_losses_before_a_step_count_once(start: Start, device: str, make: Make) -> None:
    handle = start(dtype=torch.float16, loss_scale=Backoff(init_scale=4.0, step_window=2))
    (weight,) = weights_on(device, torch.float32, 1)
    optimizer = make([weight])
    for wanted in (4, 8, 8, 16):
        scaled_backward(handle, times([weight], [1]), optimizer)
        with handle.scale_loss(times([weight], [1]), optimizer) as scaled:
            scaled_backward(handle, times([weight], [1]), optimizer)
            scaled.backward()
        optimizer.step()
        optimizer.zero_grad()
        assert handle.loss_scaler.scale == wanted


def test_an_overflow_before_nested_losses_skips_the_step(
    start: Start, device: str, make: Make
) -> None:
    handle = start(dtype=torch.float16, loss_scale=Backoff(init_scale=4.0))
    (weight,) = weights_on(device, torch.float32, 1)
    optimizer = make([weight])
    scaled_backward(handle, times([weight], [float("inf")]), optimizer)
    with handle.scale_loss(times([weight], [1]), optimizer) as scaled:
        for _ in range(2):
            scaled_backward(handle, times([weight], [1]), optimizer)
        scaled.backward()
    optimizer.step()
    assert weight[0].item() == 1
    assert handle.loss_scaler.scale == 2


@pytest.mark.parametrize("losses", ["one handle", "two losses"])
@pytest.mark.parametrize("bad", ["outer", "inner"])
def test_an_overflow_skips_one_step_and_lowers_its_own_scale(
    start: Start, device: str, make: Make, losses: str, bad: str
) -> None:
    handle = start(dtype=torch.float16, loss_scale=Backoff(init_scale=2.0**4))
    (weight,) = weights_on(device, torch.float32, 1)
    optimizer: Any = make([weight])
    scalers, given = [handle.loss_scaler] * 2, (optimizer,)
    source = handle
    if losses == "two losses":
        source = optimizer = handle.wrap_optimizer(optimizer, num_loss=2)
        scalers, given = optimizer.loss_scalers, ()
    before = raw_bytes(weight)
    for factors in ({bad: float("inf")}, {}):
        optimizer.zero_grad()
        outer, inner = (times([weight], [factors.get(x, 1.0)]) for x in ("outer", "inner"))
        with source.scale_loss(outer, *given) as a:
            a.backward()
            with source.scale_loss(inner, *given) as b:
                b.backward()
        optimizer.step()
        assert (raw_bytes(weight) == before) == bool(factors)
    assert weight[0].item() == 0.75
    wanted = {"outer": [8.0, 16.0], "inner": [16.0, 8.0]}[bad]
    assert [s.scale for s in scalers] == ([8.0, 8.0] if losses == "one handle" else wanted)


@pytest.mark.parametrize("dtype", DTYPES)
def test_an_inner_loss_that_fails_leaves_the_outer_one(
    start: Start, device: str, make: Make, dtype: torch.dtype
) -> None:
    handle = start(dtype=torch.float16, loss_scale=Backoff(init_scale=2.0**4))
    weights = weights_on(device, dtype, 2)
    optimizer = make(weights)
    with handle.scale_loss(times(weights, [1, 2]), optimizer) as scaled:
        scaled.backward()
        with pytest.raises(StopError):
            fail(handle, times(weights, [3, 4]), optimizer)
    assert gradients(weights) == [1, 2]


@pytest.mark.parametrize("dtype", DTYPES)
def test_an_outer_loss_that_fails_takes_the_inner_one_with_it(
    start: Start, device: str, make: Make, dtype: torch.dtype
) -> None:
    handle = start(dtype=torch.float16, loss_scale=Backoff(init_scale=2.0**4))
    weights = weights_on(device, dtype, 2)
    optimizer = make(weights)
    scaled_backward(handle, times(weights, [1, 2]), optimizer)

    def inner() -> None:
        scaled_backward(handle, times(weights, [3, 4]), optimizer)

    with pytest.raises(StopError):
        fail(handle, times(weights, [5, 6]), optimizer, inner)
    assert gradients(weights) == [1, 2]


@pytest.mark.parametrize("delay", [False, True])
def test_apexs_blocks_with_masters(device: str, make: Make, delay: bool) -> None:
    model = nn.Module()
    for name in ("first", "second"):
        (weight,) = weights_on(device, torch.float16, 1)
        model.register_parameter(name, weight)
    optimizer = make(model.parameters())
    options = {"opt_level": "O2", "cast_model_type": False, "verbosity": 0}
    amp.apex.amp.initialize(model, optimizer, **options, loss_scale="dynamic", num_losses=2)
    for scaler, scale in zip(amp.apex.amp._amp_state.loss_scalers, (2.0**4, 2.0**8), strict=True):
        scaler.loss_scaler.scale = scale
    weights = [*model.parameters()]
    scale_loss = amp.apex.amp.scale_loss
    for _ in range(2):
        with scale_loss(times(weights, [1, 2]), optimizer) as a:
            a.backward(retain_graph=True)
            with scale_loss(times(weights, [3, 4]), optimizer, 1, delay_unscale=delay) as b:
                b.backward()
            a.backward()
        found = [m.grad for m in amp.apex.amp.master_params(optimizer)]
        assert first_of(found) == [5, 8]
        optimizer.step()
        optimizer.zero_grad()


# At random.


@dataclass
class Loss:
    """A loss under way, and the gradients that its block has added."""

    factors: list[int]
    added: list[int] = field(default_factory=lambda: [0] * 3)
    scaled: Any = None
    has_begun: bool = False  # see Twins.begin
    was_cleared: bool = False  # inside of its block

    def add(self, more: list[int]) -> None:
        self.added = [a + b for a, b in zip(self.added, more, strict=True)]

    def backward(self) -> None:
        self.scaled.backward(retain_graph=True)
        self.add(self.factors)


class Twins:
    """Weights of two optimizers, and the gradients that they have without a loss scale."""

    def __init__(self, device: str, draw: random.Random, owned: tuple[list[int], ...]) -> None:
        self.draw, self.owned, self.delays = draw, owned, False
        self.model = nn.ParameterList(weights_on(device, draw.choice(DTYPES), 1)[0] for _ in "123")
        self.weights = [*self.model]
        self.wanted = [0] * 3
        self.under_way: list[Loss] = []
        self.optimizers = [SGD[draw.choice([*SGD])]([self.weights[i] for i in x]) for x in owned]

    def block(self, loss: Tensor, optimizers: list[Any], scale: float, depth: int) -> Any:
        """The script's line for a loss."""
        raise NotImplementedError

    def gradients(self) -> list[float]:
        """Those of the weights; 0 for none."""
        return [x or 0 for x in gradients(self.weights)]

    def train(self) -> None:
        """A block and what is inside of it."""
        self.wanted = [a + b for a, b in zip(self.wanted, self.run_block(), strict=True)]

    def clear(self, number: int) -> None:
        """One optimizer's gradients, before blocks inside of one another have any."""
        self.optimizers[number].zero_grad(self.draw.random() < 0.5)
        for each in self.under_way:
            each.was_cleared = True
        for i in self.owned[number]:
            self.wanted[i] = 0
            for each in self.under_way:
                each.added[i] = 0

    def run_block(self, outer: Sequence[int] = ()) -> list[int]:
        """A block with losses and blocks inside of it; returns the gradients that it adds.

        It may fail, which takes back what it and the blocks inside have added to its optimizers'
        weights. Losses of blocks around it go backward inside of it, too, and stay. outer: the
        optimizers of the block around it.
        """
        draw = self.draw
        numbers = draw.choice([[0], [1], [0, 1]])
        owned = sorted({i for n in numbers for i in self.owned[n]})
        places = draw.sample(owned, draw.randint(1, len(owned)))
        loss = Loss(factors=[draw.randint(1, 3) if i in places else 0 for i in range(3)])
        optimizers = [self.optimizers[n] for n in numbers]
        self.delays = {*numbers} <= {*outer} and draw.random() < 0.3  # the outer one collects it
        tensor = times([self.weights[i] for i in places], [loss.factors[i] for i in places])
        self.under_way.append(loss)
        depth = len(self.under_way)
        try:
            with self.block(tensor, optimizers, 2.0 ** draw.randint(0, 5), depth) as loss.scaled:
                for _ in range(draw.randint(1, 3)):
                    if depth < 3 and draw.random() < 0.5:
                        loss.add(self.run_block(numbers))
                    elif draw.random() < 0.3 and sum(x.has_begun for x in self.under_way) < 2:
                        self.clear(draw.randrange(2))
                    else:
                        which = draw.randrange(depth)
                        self.under_way[which].backward()
                        self.begin(which + 1)
                if draw.random() < 0.1 and not loss.was_cleared:
                    raise StopError
        except StopError:
            for i in owned:
                loss.added[i] = 0
        self.under_way.pop()
        self.begin(depth - 1)
        return loss.added

    def begin(self, depth: int) -> None:
        """A loss goes backward or its block ends: those around have put away what they have."""
        for each in self.under_way[:depth]:
            each.has_begun = True


class OfHandle(Twins):
    """The optimizers share a weight."""

    def __init__(self, device: str, draw: random.Random, handle: Any) -> None:
        super().__init__(device, draw, ([0, 1], [1, 2]))
        self.handle = handle

    def block(self, loss: Tensor, optimizers: list[Any], scale: float, _: int) -> Any:
        """See Twins."""
        self.handle.loss_scaler.scale = scale
        return self.handle.scale_loss(loss, optimizers)


class OfApex(Twins):
    """O2: low-precision weights have masters, and a loss may be delayed."""

    def __init__(self, device: str, draw: random.Random) -> None:
        super().__init__(device, draw, ([0, 1], [2]))
        options = {"opt_level": "O2", "cast_model_type": False, "verbosity": 0, "num_losses": 3}
        amp.apex.amp.initialize(self.model, self.optimizers, loss_scale="dynamic", **options)

    def block(self, loss: Tensor, optimizers: list[Any], scale: float, depth: int) -> Any:
        """See Twins."""
        of_apex = amp.apex.amp
        of_apex._amp_state.loss_scalers[depth - 1].loss_scaler.scale = scale
        return of_apex.scale_loss(loss, optimizers, depth - 1, delay_unscale=self.delays)

    def gradients(self) -> list[float]:
        """Those of the masters."""
        params = [p for each in self.optimizers for p in amp.apex.amp.master_params(each)]
        return [x or 0 for x in gradients(params)]


def test_any_nest_of_blocks_gives_the_gradients_of_plain_training(
    start: Start, device: str
) -> None:
    handle = start(dtype=torch.float16, loss_scale=Backoff(1, 2.0**8))
    for seed in range(examples(60)):
        twins = OfHandle(device, random.Random(f"nest {seed}"), handle)
        for _ in range(3):
            twins.train()
            assert twins.gradients() == twins.wanted, seed


@pytest.mark.filterwarnings("ignore:amp_mp. no parameter of this optimizer has a gradient")
def test_any_nest_of_apexs_blocks_does_too(device: str) -> None:
    for seed in range(examples(60)):
        twins = OfApex(device, random.Random(f"apex {seed}"))
        for _ in range(3):
            twins.train()
            assert twins.gradients() == twins.wanted, seed
