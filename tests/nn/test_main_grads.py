"""attach_main_grads: the gradients of low-precision parameters add up in float32."""

from __future__ import annotations

import copy
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import raw_bytes, through_a_file
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import amp_mp as amp
from amp_mp import _C

LOW = (torch.bfloat16, torch.float16)
BFLOAT16 = torch.bfloat16


class Net(nn.Module):
    """Linear layers, one used twice, one tied to an embedding; a norm in low precision."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.twice = nn.Linear(8, 8)
        self.norm = nn.LayerNorm(8)
        self.last = nn.Linear(8, 11, bias=False)
        self.last.weight = self.embedding.weight

    def forward(self, tokens: Tensor, checkpointed: bool | None = None) -> Tensor:
        """checkpointed: recompute the middle, reentrant if True."""
        x = self.embedding(tokens)
        if checkpointed is None:
            x = self.middle(x)
        else:
            x = checkpoint(self.middle, x, use_reentrant=checkpointed)
        return self.last(x)

    def middle(self, x: Tensor) -> Tensor:
        return self.norm(self.twice(self.twice(x).tanh()))


def net(device: str, dtype: torch.dtype = BFLOAT16) -> Net:
    torch.manual_seed(1)
    return Net().to(device, dtype)


def loss_of(model: nn.Module, step: int = 0, **options: Any) -> Tensor:
    device = next(model.parameters()).device
    tokens = torch.randint(11, (4, 6), generator=torch.Generator().manual_seed(step)).to(device)
    return model(tokens, **options).float().square().mean()


def gradients(model: nn.Module) -> dict[str, Tensor]:
    found = {name: p.grad for name, p in model.named_parameters()}
    assert all(g is not None and g.dtype == torch.float32 for g in found.values())
    return {name: g.clone() for name, g in found.items() if g is not None}


def assert_close(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    """Up to float32's rounding, which the order of sums decides."""
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-7, msg=name)


@pytest.mark.parametrize("dtype", LOW)
def test_64_micro_batches_equal_the_exact_sum(dtype: torch.dtype, device: str) -> None:
    count, rows = 64, 16
    layer = nn.Linear(24, 32).to(device, dtype)
    xs = torch.randn(count, rows, 24, device=device).to(dtype)
    ys = torch.randn(count, rows, 32, device=device).to(dtype)

    def accumulate() -> list[Tensor]:
        layer.zero_grad()
        for x, y in zip(xs, ys, strict=True):
            layer(x).backward(y)
        return [p.grad.double() for p in layer.parameters() if p.grad is not None]

    plain = accumulate()
    with amp.attach_main_grads(layer):
        found = accumulate()
    x, y = xs.double().flatten(0, 1), ys.double().flatten(0, 1)
    exact = [y.t() @ x, y.sum(0)]
    # Exact products, n = count * rows of them in a float32 sum in whatever order: each sum is off
    # by at most n u / (1 - n u) of the sum of magnitudes, u = 2^-24 (Higham, 2002, chapter 3).
    n_u = count * rows * 2.0**-24
    sizes = [y.abs().t() @ x.abs(), y.abs().sum(0)]
    for got, rounded, want, size in zip(found, plain, exact, sizes, strict=True):
        assert ((got - want).abs() <= n_u / (1 - n_u) * size).all()
        assert (rounded - want).norm() > 500 * (got - want).norm()


@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad_starts_anew(set_to_none: bool, device: str) -> None:
    model = net(device)
    with amp.attach_main_grads(model):
        loss_of(model).backward()
        once = gradients(model)
        loss_of(model).backward()
        assert_close(gradients(model), {name: 2 * g for name, g in once.items()})
        before = model.twice.weight.grad
        model.zero_grad(set_to_none)
        loss_of(model).backward()
        assert_close(gradients(model), once)
        assert (model.twice.weight.grad is before) != set_to_none


@pytest.mark.parametrize("had_one", [True, False], ids=["beside a gradient", "first"])
def test_a_weight_frozen_after_the_forward_gets_no_gradient(had_one: bool, device: str) -> None:
    """As without attaching: torch adds to what requires a gradient when it arrives."""
    model = net(device)
    with amp.attach_main_grads(model):
        if had_one:
            loss_of(model).backward()
        loss = loss_of(model, 1)
        before = None if model.twice.weight.grad is None else model.twice.weight.grad.clone()
        model.twice.requires_grad_(False)
        loss.backward()
        assert (before is None) == (model.twice.weight.grad is None)
        assert before is None or torch.equal(before, model.twice.weight.grad)
        assert model.norm.weight.grad is not None


@pytest.mark.parametrize("reentrant", [True, False])
def test_recomputation_gives_the_same_gradients(reentrant: bool, device: str) -> None:
    model = net(device)
    with amp.attach_main_grads(model):
        for step in (0, 1):
            loss_of(model, step).backward()
        wanted = gradients(model)
        model.zero_grad()
        for step in (0, 1):
            loss_of(model, step, checkpointed=reentrant).backward()
        assert_close(gradients(model), wanted)


def test_a_tied_weight_gets_the_gradients_of_all_its_uses(device: str) -> None:
    model = net(device)
    double = copy.deepcopy(model).double()
    loss_of(double).backward()
    with amp.attach_main_grads(model):
        loss_of(model).backward()
        for name, grad in gradients(model).items():
            wanted = double.get_parameter(name).grad
            assert wanted is not None
            # The values differ by bfloat16's rounding; a use left out would be off by more.
            assert (grad - wanted).norm() < 0.03 * wanted.norm(), name


def test_only_what_is_asked_for_is_accumulated(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = nn.Linear(3, 2).to(device, BFLOAT16)
    x = torch.ones(4, 3, device=device, dtype=BFLOAT16, requires_grad=True)
    products = []
    native = _C.accumulate_weight_grad_
    monkeypatch.setattr(
        _C, "accumulate_weight_grad_", lambda *args: (products.append(args), native(*args))
    )
    with amp.attach_main_grads(layer):
        loss = layer(x).float().sum()
        loss.backward(retain_graph=True)
        loss.backward(retain_graph=True)
        assert (layer.weight.grad == 8).all()
        products.clear()
        (grad_x,) = torch.autograd.grad(loss, x, retain_graph=True)
        loss.backward(inputs=[x], retain_graph=True)
        assert not products
        (grad,) = torch.autograd.grad(loss, layer.weight, retain_graph=True)
        assert grad.dtype == torch.float32
        assert (grad == 4).all()
        assert (layer.weight.grad == 8).all()
        loss.backward(inputs=[layer.weight])
        assert (layer.weight.grad == 12).all()
        assert torch.equal(x.grad, 3 * grad_x)
        products.clear()
        layer.weight.requires_grad_(False)
        layer(x).float().sum().backward()
        with torch.no_grad():
            layer(x)
        assert not products
        assert (layer.weight.grad == 12).all()
        assert (layer.bias.grad == 12).all()


def test_hooks_fire_once_and_see_what_torch_shows(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = net(device)
    weight = model.twice.weight
    written: list[bool] = []  # for each product, whether it went straight into the gradient
    native = _C.accumulate_weight_grad_

    def look(grad: Tensor, *args: Any) -> None:
        written.append(grad is weight.grad)
        native(grad, *args)

    monkeypatch.setattr(_C, "accumulate_weight_grad_", look)
    with amp.attach_main_grads(model):
        loss_of(model, 0).backward()
        first = gradients(model)["twice.weight"]
        loss_of(model, 1).backward()
        second = gradients(model)["twice.weight"] - first
        on_default = device == "cpu" or torch.cuda.current_stream() == torch.cuda.default_stream()
        assert any(written) == on_default  # autograd adds it elsewhere
        written.clear()
        model.zero_grad()
        seen: list[Tensor] = []
        handle = weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
        loss_of(model, 0).backward()
        loss_of(model, 1).backward()
        assert_close({"0": seen[0], "1": seen[1]}, {"0": first, "1": first + second})
        handle.remove()
        model.zero_grad()
        weight.register_hook(lambda grad: (seen.append(grad), 2 * grad)[1])
        loss_of(model, 0).backward()
        loss_of(model, 1).backward()
        assert_close({"0": seen[2], "1": seen[3]}, {"0": first, "1": second})
        assert_close(gradients(model), {"twice.weight": 2 * (first + second)})
        assert len(seen) == 4
        assert written == [False] * len(written) != []


def test_remove_puts_everything_back(device: str) -> None:
    model = net(device)
    loss_of(model).backward()
    before = {name: p.grad for name, p in model.named_parameters()}
    handle = amp.attach_main_grads(model)
    assert_close(gradients(model), {name: g.float() for name, g in before.items()})
    with handle:
        assert model.twice.forward.__func__ is not nn.Linear.forward
    handle.remove()
    assert "forward" not in model.twice.__dict__
    for name, param in model.named_parameters():
        assert param.grad_dtype == BFLOAT16
        assert torch.equal(param.grad, before[name])
    with amp.attach_main_grads(model):
        loss_of(model).backward()
    assert {p.grad.dtype for p in model.parameters()} == {BFLOAT16}


def test_copies_and_pickles_are_plain_models() -> None:
    model = net("cpu")
    with amp.attach_main_grads(model):
        copies = [copy.deepcopy(model), through_a_file(model)]
        for other in copies:
            loss_of(other).backward()
            assert other.twice.weight.grad.dtype == BFLOAT16
            assert other.twice.forward.__self__ is other.twice


@pytest.mark.parametrize("copied", [copy.deepcopy, through_a_file], ids=["deepcopy", "file"])
def test_a_copy_may_be_attached_itself(copied: Any) -> None:
    """Its gradients are then those of the attached original, bit for bit."""
    model = net("cpu")
    with amp.attach_main_grads(model):
        other = copied(model)
        for _ in range(3):
            loss_of(model).backward()
        with amp.attach_main_grads(other):
            with pytest.raises(RuntimeError, match="attached already"):
                amp.attach_main_grads(other)
            for _ in range(3):
                loss_of(other).backward()
            found, wanted = gradients(other), gradients(model)
            assert found.keys() == wanted.keys()
            for name, grad in found.items():
                assert grad.dtype == torch.float32
                assert torch.equal(grad, wanted[name]), name
        assert "forward" not in other.twice.__dict__


def test_a_wrong_model_is_refused_and_left_alone() -> None:
    layer = nn.Linear(4, 4).to(BFLOAT16)
    with pytest.raises(TypeError, match=r"model must be a torch.nn.Module, found .*Parameter"):
        amp.attach_main_grads(layer.weight)  # type: ignore[arg-type]
    with amp.attach_main_grads(layer), pytest.raises(RuntimeError, match="attached already"):
        amp.attach_main_grads(nn.Sequential(layer))
    odd = nn.Sequential(layer, nn.Linear(2, 2, dtype=BFLOAT16, device="meta"))
    with pytest.raises(ValueError, match=r"model\.1\.weight is a Parameter on meta; only plain"):
        amp.attach_main_grads(odd)
    assert layer.weight.grad_dtype == BFLOAT16


def mlp(device: str, dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 1))
    return amp.prepare(model.to(device), dtype) if dtype in LOW else model.to(device)


def train(model: nn.Module, optimizer: Any, scaler: Any, steps: int, parts: int) -> list[float]:
    """The losses, step by step; each step is made of several micro-batches."""
    weight = next(model.parameters())
    generator, losses = torch.Generator().manual_seed(3), []
    for _ in range(steps):
        losses.append(0.0)
        for _ in range(parts):
            x = torch.randn(16, 8, generator=generator).to(weight.device)
            out = model(x.to(weight.dtype)).float()
            loss = nn.functional.mse_loss(out, x[:, :2].prod(1, keepdim=True).tanh()) / parts
            scaler.scale(loss).backward()
            losses[-1] += loss.item()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return losses


def clip_first(scaler: Any, model: nn.Module) -> Any:
    step = scaler.step

    def clip_and_step(optimizer: torch.optim.Optimizer) -> None:
        scaler.unscale_(optimizer)
        assert nn.utils.clip_grad_norm_(model.parameters(), 0.5).isfinite()
        step(optimizer)

    scaler.step = clip_and_step
    return scaler


@pytest.mark.parametrize("clip", [True, False])
@pytest.mark.parametrize("module", [amp, torch.amp], ids=["amp_mp", "torch"])
@pytest.mark.parametrize("dtype", LOW)
def test_training_follows_float32(dtype: torch.dtype, module: Any, clip: bool, device: str) -> None:
    def run(dtype: torch.dtype) -> list[float]:
        model = mlp(device, dtype)
        memory = {"memory": "exact"} if dtype in LOW else {}
        optimizer = amp.optim.AdamW(model.parameters(), lr=1e-2, **memory)
        scaler = module.GradScaler(device, init_scale=2.0**10)
        with amp.attach_main_grads(model):
            train_scaler = clip_first(scaler, model) if clip else scaler
            return train(model, optimizer, train_scaler, steps=25, parts=4)

    found, wanted = run(dtype), run(torch.float32)
    assert sum(wanted[-5:]) < 0.5 * sum(wanted[:5])
    for a, b in zip(found, wanted, strict=True):
        assert abs(a - b) < 0.05 * b


def test_an_attached_optimizer_makes_the_same_steps(device: str) -> None:
    def run(attach: bool) -> Any:
        model = mlp(device, BFLOAT16)
        optimizer = amp.optim.AdamW(model.parameters(), memory="exact", check_overflow=True)
        with amp.attach_main_grads(model):
            if attach:
                optimizer.attach(model)
            train(model, optimizer, amp.GradScaler(enabled=False), steps=3, parts=1)
        return raw_bytes([model.state_dict(), optimizer.state_dict()])

    assert run(True) == run(False)


def test_fp16_optimizer_hands_float32_gradients_to_its_masters(device: str) -> None:
    model = mlp(device, torch.float16)
    optimizer = amp.FP16_Optimizer(torch.optim.SGD(model.parameters(), lr=0.1), verbose=False)
    with amp.attach_main_grads(model):
        x = torch.ones(4, 8, device=device, dtype=torch.float16)
        optimizer.backward(model(x).float().square().mean())
        masters = optimizer.param_groups[0]["params"]
        for master, param in zip(masters, model.parameters(), strict=True):
            assert param.grad is not None
            assert param.grad.dtype == torch.float32
            scale = optimizer.loss_scale
            torch.testing.assert_close(master.grad, param.grad / scale, rtol=1e-6, atol=0)


@pytest.mark.parametrize("low", [BFLOAT16, None], ids=["low-precision", "float32"])
@pytest.mark.parametrize("table", ["apex", "torch.autocast"])
def test_casting_runs_as_it_does_without(
    table: str, low: torch.dtype | None, request: pytest.FixtureRequest, device: str
) -> None:
    if table == "apex":
        request.getfixturevalue("apex")
    layer = nn.Linear(64, 48).to(device, low or torch.float32)
    for rows in (2, 4096):  # on a CPU Apex's table leaves the small product in float32
        x = torch.randn(rows, 64, device=device, requires_grad=True)
        results = []
        for attach in (False, True):
            layer.zero_grad()
            x.grad = None
            handle = amp.attach_main_grads(layer) if attach else None
            with torch.autocast(device, BFLOAT16):
                out = layer(x)
                amp.casting.backward(out.float().sin().sum())
            results.append([out, x.grad, layer.weight.grad, layer.bias.grad])
            if handle is not None:
                handle.remove()
        (out, grad_x, *rounded), (same_out, same_grad_x, *found) = results
        assert torch.equal(out, same_out)
        assert torch.equal(grad_x, same_grad_x)
        for a, b in zip(found, rounded, strict=True):
            assert a.dtype == torch.float32
            torch.testing.assert_close(a.to(b.dtype), b, rtol=2.0**-7, atol=1e-2)


def test_threads_that_share_a_weight_lose_nothing() -> None:
    layer = nn.Linear(512, 512, bias=False).to(BFLOAT16)
    x = torch.ones(64, 512, dtype=BFLOAT16)

    def work() -> None:
        for _ in range(20):
            layer(x).backward(x)

    with amp.attach_main_grads(layer):
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(lambda _: work(), range(4)))
        assert (layer.weight.grad == 4 * 20 * 64).all()


@pytest.mark.slow
def test_compiled_models_keep_float32_gradients() -> None:
    layer = nn.Linear(4, 3).to(BFLOAT16)
    x = torch.ones(2, 4, dtype=BFLOAT16)
    with amp.attach_main_grads(layer):
        compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
        for _ in range(2):
            compiled(x).sum().backward()
        assert layer.weight.grad is not None
        assert layer.weight.grad.dtype == torch.float32
        assert (layer.weight.grad == 4).all()


def test_distributed_data_parallel_is_refused(tmp_path: Path) -> None:
    layer = nn.Linear(4, 4).to(BFLOAT16)
    init = f"file://{tmp_path}/rendezvous"
    torch.distributed.init_process_group("gloo", init_method=init, rank=0, world_size=1)
    try:
        wrapped = DistributedDataParallel(layer)
        with pytest.raises(ValueError, match=r"model\.0 is a DistributedDataParallel, whose"):
            amp.attach_main_grads(nn.Sequential(wrapped))
        x = torch.ones(2, 4, dtype=BFLOAT16)
        with amp.attach_main_grads(layer):
            with torch.no_grad():
                wrapped(x)
            with pytest.raises(RuntimeError, match="takes no float32 gradients"):
                wrapped(x)
    finally:
        torch.distributed.destroy_process_group()
    assert layer.weight.grad_dtype == BFLOAT16
