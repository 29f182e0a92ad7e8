"""The cache of weight casts: right where torch 2.13's is not, and never stale."""

from __future__ import annotations

import os
import resource
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from helpers import is_gpu
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import amp_mp as amp
from amp_mp import _C
from amp_mp.casting.op_table import install

LOW = torch.bfloat16
ROWS, SIZE = 64, 256  # large enough for a CPU to multiply in low precision
pytestmark = pytest.mark.usefixtures("cast_products")


@pytest.fixture(autouse=True)
def _nothing_is_kept_afterwards() -> Iterator[None]:
    yield
    amp.casting.uninstall()
    amp.casting.clear_cache()


@pytest.fixture(params=["torch", "apex"])
def cached(device: str, request: pytest.FixtureRequest) -> Callable[[], None]:
    """Puts a table in force when called: before that it is torch alone."""
    return lambda: install(request.param, device)


class WeightCasts(TorchDispatchMode):
    """Counts casts of matrices from float32 to low precision, which here are weights."""

    def __init__(self, shape: tuple[int, ...] = (SIZE, SIZE)) -> None:
        super().__init__()
        self.count, self.shape = 0, shape

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = func(*args, **(kwargs or {}))
        if func._schema.name == "aten::_to_copy" and result.dtype != torch.float32:
            self.count += tuple(args[0].shape) == self.shape
        return result


def linear_on(device: str, bias: bool = False) -> nn.Linear:
    return nn.Linear(SIZE, SIZE, bias=bias).to(device)


def rows_on(device: str) -> Tensor:
    return torch.randn(ROWS, SIZE, device=device)


def uncached(linear: nn.Linear, x: Tensor) -> Tensor:
    """What the layer must give with the weight it has now."""
    with torch.no_grad(), torch.autocast(x.device.type, enabled=False):
        return nn.functional.linear(x.to(LOW), linear.weight.to(LOW))


# Where torch fails.


def test_nested_regions_of_two_dtypes(device: str, cached: Callable[[], None]) -> None:
    linear, x = linear_on(device), rows_on(device)

    def nested() -> tuple[torch.dtype, torch.dtype]:
        with torch.autocast(device, torch.bfloat16):
            first = linear(x).dtype
            with torch.autocast(device, torch.float16):
                return first, linear(x).dtype

    with pytest.raises(RuntimeError):
        nested()
    cached()
    assert nested() == (torch.bfloat16, torch.float16)


def test_a_weight_updated_inside_a_region(device: str, cached: Callable[[], None]) -> None:
    def is_right() -> bool:
        linear, x = linear_on(device), rows_on(device)
        with torch.autocast(device, LOW):
            linear(x)
            with torch.no_grad():
                linear.weight.zero_()
            return bool((linear(x) == 0).all())

    assert not is_right(), "torch is stale here"
    cached()
    assert is_right()


def test_threads_with_different_dtypes(device: str, cached: Callable[[], None]) -> None:
    """torch's cache does not know the dtype: one thread gets the other's weight."""
    x = rows_on(device)

    def wrong() -> int:
        linear, failures = linear_on(device), []

        def work(dtype: torch.dtype) -> None:
            for _ in range(50):
                with torch.autocast(device, dtype):
                    meet.wait()
                    try:
                        found = linear(x).dtype
                    except RuntimeError:
                        found = None
                    meet.wait()
                if found != dtype:
                    failures.append(found)

        dtypes = (torch.float16, torch.bfloat16)
        meet = threading.Barrier(len(dtypes))
        with ThreadPoolExecutor(len(dtypes)) as pool:
            list(pool.map(work, dtypes))
        return len(failures)

    assert wrong() > 0, "torch mixes the dtypes"
    cached()
    assert wrong() == 0


def test_threads_that_write_their_weights_between_regions(
    device: str, cached: Callable[[], None]
) -> None:
    """The end of a region in one thread ends the copies of the others while they are being made."""
    cached()
    failures: list[str] = []

    def work() -> None:
        linear, x = linear_on(device), rows_on(device)
        for step in range(100):
            with torch.autocast(device, LOW):
                first, second = linear(x), linear(x)
            if not torch.equal(first, uncached(linear, x)) or not torch.equal(first, second):
                failures.append(f"step {step}")
            if step % 2:
                first.float().mean().backward()
            linear.weight.data.mul_(0.9)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: work(), range(4)))
    assert failures == []
    assert _C.casting.cached() == {}


# Never stale.


CHANGES: dict[str, Callable[[nn.Linear], Any]] = {
    "copy_ under no_grad": lambda m: m.weight.detach().copy_(torch.ones(SIZE, SIZE)),
    "load_state_dict": lambda m: m.load_state_dict({"weight": torch.ones(SIZE, SIZE)}),
    "load_state_dict, assign": lambda m: m.load_state_dict(
        {"weight": torch.ones_like(m.weight)}, assign=True
    ),
    "init": lambda m: nn.init.ones_(m.weight),
    "data replaced": lambda m: setattr(m.weight, "data", torch.ones_like(m.weight)),
    "vector_to_parameters": lambda m: nn.utils.vector_to_parameters(
        torch.ones(SIZE * SIZE, device=m.weight.device), m.parameters()
    ),
    "data written, then clear_cache": lambda m: (m.weight.data.fill_(1), amp.casting.clear_cache()),
}


def casting(device: str, keep_casts: bool) -> Iterator[str]:
    """Casts on, kept or not; everything as before afterwards."""
    with amp.init(device_type=device, dtype=LOW, loss_scale=1.0, keep_casts=keep_casts):
        yield device


@pytest.fixture
def keeping(device: str) -> Iterator[str]:
    yield from casting(device, True)


@pytest.fixture(params=[False, True], ids=["not kept", "kept"])
def either(device: str, request: pytest.FixtureRequest) -> Iterator[str]:
    yield from casting(device, request.param)


@pytest.mark.parametrize("change", CHANGES)
def test_no_stale_weight_after_a_change(either: str, change: str) -> None:
    """Those that a version counter or new memory tells of, and a cleared cache."""
    linear, x = linear_on(either), rows_on(either)
    linear(x)
    CHANGES[change](linear)
    assert torch.equal(linear(x), uncached(linear, x))
    assert bool((linear.weight == 1).all())


def test_no_stale_weight_where_something_else_shares_its_memory(either: str) -> None:
    linear, x = linear_on(either), rows_on(either)
    alias = linear.weight.data  # kept: FSDP2 does so, and what writes it is not counted
    linear(x)
    alias.zero_()
    assert bool((linear(x) == 0).all())


FUSED = {
    "torch AdamW": lambda p: torch.optim.AdamW(p, lr=0.5, fused=True),
    "torch Adam": lambda p: torch.optim.Adam(p, lr=0.5, fused=True),
    "torch SGD": lambda p: torch.optim.SGD(p, lr=0.5, fused=True),
    "torch Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.5, fused=True),
    "torch AdamW, foreach": lambda p: torch.optim.AdamW(p, lr=0.5, foreach=True),
    "amp AdamW": lambda p: amp.optim.AdamW(p, lr=0.5),
    "amp Adam, clipping": lambda p: amp.optim.Adam(p, lr=0.5, max_grad_norm=1.0),
    "amp SGD": lambda p: amp.optim.SGD(p, lr=0.5, momentum=0.9),
}


@pytest.mark.parametrize("kind", FUSED)
def test_no_stale_weight_after_a_step(either: str, kind: str) -> None:
    """torch's fused optimizers do not count their writes; ours write kept copies as well."""
    if kind == "torch Adagrad" and is_gpu(either):
        pytest.skip("torch has no fused Adagrad for CUDA")
    linear, x = linear_on(either), rows_on(either)
    optimizer = FUSED[kind](linear.parameters())
    for _ in range(3):
        optimizer.zero_grad()
        out = linear(x)
        assert torch.equal(out, uncached(linear, x))
        out.float().square().mean().backward()
        before = linear.weight.detach().clone()
        optimizer.step()
        assert not torch.equal(linear.weight, before)
    assert torch.equal(linear(x), uncached(linear, x))


def test_no_stale_weight_after_a_step_that_raised_half_way(apex: str) -> None:
    class Failing(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            self.param_groups[0]["params"][0].data.mul_(0.5)
            raise ArithmeticError

    linear, x = linear_on(apex), rows_on(apex)
    before = linear(x)
    with pytest.raises(ArithmeticError):
        Failing(linear.parameters()).step()
    assert torch.equal(linear(x), uncached(linear, x))
    assert not torch.equal(linear(x), before)


# No cast that could be spared.


@pytest.mark.parametrize("kind", [name for name in FUSED if name.startswith("amp")])
@pytest.mark.parametrize("scaled", [False, True])
def test_a_training_step_runs_no_weight_cast(device: str, kind: str, scaled: bool) -> None:
    """Counted with the profiler, in forward and step; backward casts gradients of that shape."""
    net = nn.Sequential(linear_on(device, bias=True), nn.ReLU(), linear_on(device, bias=True))
    optimizer, x = FUSED[kind](net.parameters()), rows_on(device)
    scaler = amp.GradScaler(device, init_scale=4.0, enabled=scaled)
    shapes = [list(p.shape) for p in net.parameters()]
    counts = []
    for _ in range(3):
        optimizer.zero_grad()
        profiler = torch.profiler.profile(record_shapes=True)
        with profiler as forward, amp.autocast(device, LOW, keep_casts=True):
            loss = net(x).float().square().mean()
        scaler.scale(loss).backward()
        with torch.profiler.profile(record_shapes=True) as step:
            scaler.step(optimizer)
            scaler.update()
        events = [*forward.events(), *step.events()]
        casts = [e for e in events if e.name == "aten::_to_copy" and e.input_shapes]
        counts.append(sum(list(e.input_shapes[0]) in shapes for e in casts))
    assert counts == [4, 0, 0]


@pytest.mark.parametrize("kept", [False, True])
def test_accumulation_and_timesteps_cast_a_weight_once(apex: str, kept: bool) -> None:
    """Input and hidden weight: once a forward pass, or once a step where casts are kept."""
    cell = nn.RNNCell(SIZE, SIZE).to(apex)
    optimizer = torch.optim.SGD(cell.parameters(), lr=0.1)
    kept_or_not = amp.init(device_type=apex, dtype=LOW, loss_scale=1.0, keep_casts=kept)
    with kept_or_not, WeightCasts() as casts:
        for step in range(1, 3):
            for _ in range(4):  # micro-batches
                hidden = torch.zeros(ROWS, SIZE, device=apex)
                for _ in range(5):
                    hidden = cell(rows_on(apex), hidden)
                amp.casting.backward(hidden.float().mean())
            assert casts.count == 2 * step * (1 if kept else 4)
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize("gradients", [False, True])
def test_a_region_casts_a_weight_once(
    device: str, cached: Callable[[], None], gradients: bool
) -> None:
    """As torch's does, also where gradients are off: the steps of a decoder are many."""
    linear, x = linear_on(device), rows_on(device)
    counts = []
    for _ in range(2):
        with torch.set_grad_enabled(gradients), WeightCasts() as casts:
            for _ in range(2):
                with torch.autocast(device, LOW):
                    for _ in range(5):
                        linear(x)
        counts.append(casts.count)
        cached()
    assert counts == [2, 2]


def test_kept_casts_are_for_regions_that_keep_them(device: str) -> None:
    """A library's own torch.autocast region does not share its user's promise."""
    linear, x = linear_on(device), rows_on(device)
    with torch.no_grad():
        with amp.autocast(device, LOW, keep_casts=True):
            before = linear(x)
        linear.weight.data.mul_(0.5)
        for region in (torch.autocast(device, LOW), amp.autocast(device, LOW)):
            with region:
                assert torch.equal(linear(x), uncached(linear, x))
        with amp.autocast(device, LOW, keep_casts=True), torch.autocast(device, LOW):
            assert torch.equal(linear(x), before), "what the user promised not to do"
            amp.casting.clear_cache()
            assert torch.equal(linear(x), uncached(linear, x))


def test_a_region_that_keeps_casts_compiles(device: str) -> None:
    linear, x = linear_on(device), rows_on(device)

    def inside(x: Tensor) -> Tensor:
        with amp.autocast(device, LOW, keep_casts=True):
            return linear(x)

    wanted = inside(x)
    assert torch.equal(torch.compile(inside, backend="aot_eager", fullgraph=True)(x), wanted)
    compiled = torch.compile(linear, backend="aot_eager", fullgraph=True)
    with amp.autocast(device, LOW, keep_casts=True):
        assert torch.equal(compiled(x), wanted)
    torch._dynamo.reset()


def test_a_region_that_keeps_casts_ends_as_it_began(device: str) -> None:
    """Also as a decorator, nested, and after an exception."""

    @amp.autocast(device, LOW, keep_casts=True)
    def set_inside() -> bool:
        return _C.casting.set_keeps_casts(True)

    def fail() -> None:
        with amp.autocast(device, LOW, keep_casts=True):
            with amp.autocast(device, LOW, keep_casts=True):
                pass
            assert set_inside()
            assert _C.casting.set_keeps_casts(True), "on until the outermost of them ends"
            raise ArithmeticError

    with pytest.raises(ArithmeticError):
        fail()
    assert not _C.casting.set_keeps_casts(False)
    assert set_inside()
    assert not _C.casting.set_keeps_casts(False)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_optimizer_writes_what_a_cast_would(device: str, dtype: torch.dtype) -> None:
    linear, x = linear_on(device), rows_on(device)
    optimizer = amp.optim.AdamW(linear.parameters(), lr=0.1)
    with amp.init(device_type=device, dtype=dtype, loss_scale=1.0, keep_casts=True) as handle:
        linear(x).float().mean().backward()
        optimizer.step()
        copy = handle.cache[linear.weight]
        assert copy.dtype == dtype
        assert torch.equal(copy, linear.weight.detach().to(dtype))


def test_a_graph_that_has_yet_to_go_backward_keeps_its_weights(either: str) -> None:
    first, second, x = linear_on(either), linear_on(either), rows_on(either)
    optimizer = amp.optim.SGD([*first.parameters(), *second.parameters()], lr=1.0)
    loss = second(first(x)).float().square().mean()
    amp.casting.backward(loss, retain_graph=True)
    wanted = first.weight.grad.clone()
    optimizer.step()
    optimizer.zero_grad()
    amp.casting.backward(loss)  # through the weights that it was computed with
    assert torch.equal(first.weight.grad, wanted)
    assert torch.equal(first(x), uncached(first, x))


def test_a_skipped_step_leaves_the_copies_right(keeping: str) -> None:
    linear, x = linear_on(keeping), rows_on(keeping)
    optimizer = amp.optim.SGD(linear.parameters(), lr=1.0, check_overflow=True)
    (linear(x).float().sum() * float("inf")).backward()
    optimizer.step()
    assert optimizer.step_was_skipped
    with WeightCasts() as casts:
        assert torch.equal(linear(x), uncached(linear, x))
    assert casts.count == 1, "the reference's own"


def test_the_step_of_another_optimizer_drops_what_it_did_not_write(either: str) -> None:
    linear, other = linear_on(either), linear_on(either)
    linear(rows_on(either))
    assert len(_C.casting.cached()) == 1
    torch.optim.SGD(other.parameters()).step()
    assert len(_C.casting.cached()) == 0


# Memory.


def resident() -> int:
    """Bytes of this process in memory."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="Linux tells memory in /proc")
def test_memory_is_flat_over_10_000_steps_with_models_made_and_dropped(either: str) -> None:
    x = torch.randn(32, SIZE, device=either)

    def train(steps: int) -> None:
        for step in range(steps):
            if step % 10 == 0:
                linear = linear_on(either)
                optimizer = torch.optim.SGD(linear.parameters(), lr=0.1)
            linear(x).float().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    train(1000)
    before = resident()
    train(10_000)  # 1,000 models; a copy of a weight has 128 KiB
    assert resident() - before < 16 * 2**20
    assert len(_C.casting.cached()) <= 1


def test_the_cache_does_not_keep_models_alive(either: str) -> None:
    for _ in range(200):
        linear_on(either)(rows_on(either))
    assert len(_C.casting.cached()) < 100
