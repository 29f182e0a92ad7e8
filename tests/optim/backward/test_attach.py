"""Gradients that are stepped and freed in the backward pass give the ordinary step's bits."""

from __future__ import annotations

import copy
import gc
import math
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from attached import LOW, SCALE, Tied, loss_of, model, state_of, train
from helpers import raw_bytes, through_a_file
from ranks import on_ranks
from rules import KINDS
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from torch.utils.weak import TensorWeakRef

import amp_mp as amp
from amp_mp.optim.base import stepper_of

# Release: the same bits.


@pytest.mark.parametrize(
    ("dtype", "memory"),
    [
        (torch.float32, None),
        (LOW, None),
        (LOW, "exact"),
        (LOW, "lean"),
        (LOW, "tiny"),
        (LOW, "micro"),
        (LOW, "nano"),
    ],
)
def test_released_gradients_make_the_ordinary_step_bit_for_bit(
    device: str, dtype: torch.dtype, memory: str | None
) -> None:
    found = []
    for release in (True, False):
        net = model(device, dtype)
        optimizer = amp.optim.AdamW(net.parameters(), lr=0.01, memory=memory)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        seen: list[str] = []
        optimizer.register_step_pre_hook(lambda *_, seen=seen: seen.append("before"))
        optimizer.register_step_post_hook(lambda *_, seen=seen: seen.append("after"))
        if release:
            optimizer.attach(net)
        for step in range(4):
            train(net, optimizer, 1, step)
            schedule.step()
        assert seen == ["before", "after"] * 4
        assert not optimizer.step_was_skipped
        assert (optimizer.grad_norm is None) == release
        found.append(state_of(net, optimizer))
    assert found[0] == found[1]


@pytest.mark.parametrize("name", KINDS)
def test_every_rule_steps_the_same_released(device: str, name: str) -> None:
    kind, arguments = getattr(amp.optim, name), {**KINDS[name], "check_overflow": name == "Adam"}
    found, norms = [], []
    for release in (True, False):
        net = model(device, LOW)
        groups = [{"params": [p]} for p in net.parameters()]
        groups[1]["lr"] = 0.003  # the numbers of a parameter's own group count
        optimizer = kind(groups, lr=0.01, **arguments)
        if release:
            optimizer.attach(net)
        train(net, optimizer, 3)
        found.append(state_of(net, optimizer))
        norms.append(optimizer.grad_norm)
    assert found[0] == found[1]
    assert norms[0] == norms[1]


def test_cached_casts_are_written_by_released_steps(apex: str) -> None:
    """float32 weights that autocast has cast: the next forward sees the new ones."""
    found = []
    for release in (True, False):
        net = model(apex)
        optimizer = amp.optim.AdamW(net.parameters(), lr=0.1)
        if release:
            optimizer.attach(net)
        train(net, optimizer, 3)
        found.append(raw_bytes([list(net.parameters()), loss_of(net, 9)]))
    assert found[0] == found[1]


def test_a_closure_runs_and_its_backward_steps(device: str) -> None:
    found = []
    for release in (True, False):
        net = model(device)
        optimizer = amp.optim.SGD(net.parameters(), lr=0.1)
        if release:
            optimizer.attach(net)

        def closure(net: nn.Module = net) -> Tensor:
            loss = loss_of(net, 0)
            loss.backward()
            return loss

        loss = optimizer.step(closure)
        found.append(raw_bytes([list(net.parameters()), loss]))
    assert found[0] == found[1]


@pytest.mark.filterwarnings("ignore:amp_mp. gradient release steps and frees nothing")
@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointed_modules_are_recomputed_before_their_parameters_move(
    device: str, reentrant: bool
) -> None:
    found = []
    for attached in (True, False):
        torch.manual_seed(0)
        net = nn.Sequential(*[nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(3)])
        net.to(device)
        optimizer = amp.optim.AdamW(net.parameters(), lr=0.01, check_overflow=True)
        if attached:
            optimizer.attach(net)
        for _ in range(2):
            x = torch.ones(4, 16, device=device, requires_grad=True)
            for block in net:
                x = checkpoint(block, x, use_reentrant=reentrant)
            x.square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append([state_of(net, optimizer), optimizer.grad_norm])
    assert found[0] == found[1]


def test_every_backward_steps(device: str) -> None:
    net, twin = model(device), model(device)
    optimizer = amp.optim.SGD(net.parameters(), lr=0.1, check_overflow=True)
    ordinary = amp.optim.SGD(twin.parameters(), lr=0.1, check_overflow=True)
    optimizer.attach(net)
    squares = 0.0
    for step in range(2):
        loss_of(net, step).backward()
        train(twin, ordinary, 1, step)
        squares += ordinary.grad_norm**2
    optimizer.step()
    assert state_of(net, optimizer) == state_of(twin, ordinary)
    assert optimizer.grad_norm == pytest.approx(math.sqrt(squares), rel=1e-12)


# Memory.


@pytest.mark.parametrize("measures", [False, True])
def test_there_is_never_more_than_one_gradient(device: str, measures: bool) -> None:
    """By the parameters and by the tensors themselves, also where others still refer to them."""
    torch.manual_seed(0)
    net = nn.Sequential(*[nn.Linear(n, n + 32) for n in range(32, 256, 32)]).to(device)
    params = list(net.parameters())
    seen: list[TensorWeakRef] = []
    peaks: list[int] = []

    def count(param: Tensor) -> None:
        assert param.grad is not None
        seen.append(TensorWeakRef(param.grad))
        held = sum(p.grad.nbytes for p in params if p.grad is not None)
        alive = sum(grad.nbytes for ref in seen if (grad := ref()) is not None)
        peaks.append(max(held, alive))

    for param in params:
        param.register_post_accumulate_grad_hook(count)  # before the optimizer's
    optimizer = amp.optim.AdamW(params, check_overflow=measures)
    optimizer.attach(net)
    for _ in range(2):
        net(torch.ones(4, 32, device=device)).sum().backward()
        assert all(p.grad is None for p in params)
        optimizer.step()
    assert len(peaks) == 2 * len(params)
    assert max(peaks) == max(p.nbytes for p in params)


# Parameters without hook, state, life.


def test_parameters_of_no_hook_are_stepped_at_the_end(device: str) -> None:
    """Outside of the model, unfrozen later, added later."""
    found = []
    for release in (True, False):
        net = model(device)
        outside = nn.Parameter(torch.ones(8, device=device))
        late = nn.Parameter(torch.ones(8, device=device))
        net.norm.weight.requires_grad_(False)
        optimizer = amp.optim.AdamW([*net.parameters(), outside], lr=0.01, check_overflow=True)
        if release:
            optimizer.attach(net)
        for step in range(4):
            if step == 1:
                net.norm.weight.requires_grad_(True)
            if step == 2:
                optimizer.add_param_group({"params": [late], "lr": 0.1})
            (loss_of(net, step) + (outside * late).square().mean()).backward()
            optimizer.step()
            late.grad = late.grad if step >= 2 else None
            optimizer.zero_grad()
            found.append((optimizer.grad_norm, optimizer.step_was_skipped))
        found.append(state_of(net, optimizer) + raw_bytes([outside, late]))
    assert found[:5] == found[5:]


def test_a_parameter_taken_out_of_its_group_is_left_alone(device: str) -> None:
    """Numbers of the others change with it, and so their random bits: as without attach."""
    found = []
    for release in (True, False):
        net = model(device, LOW)
        optimizer = amp.optim.AdamW(net.parameters(), lr=0.01, memory="lean")
        if release:
            optimizer.attach(net)
        train(net, optimizer, 1)
        left = optimizer.param_groups[0]["params"].pop(0)
        optimizer.state.pop(left)
        train(net, optimizer, 2, first=1)
        assert left.grad is not None
        found.append(state_of(net, optimizer))
    assert found[0] == found[1]


def test_a_resumed_run_equals_an_unbroken_one(device: str) -> None:
    def start() -> tuple[nn.Module, amp.optim.AdamW]:
        net = model(device, LOW)
        optimizer = amp.optim.AdamW(net.parameters(), lr=0.01, memory="tiny")
        optimizer.attach(net)
        return net, optimizer

    net, optimizer = start()
    train(net, optimizer, 2)
    weights, state = copy.deepcopy([net.state_dict(), optimizer.state_dict()])
    train(net, optimizer, 2, first=2)
    again, resumed = start()
    train(again, resumed, 1)  # attached, with state: what hooks have prepared must not survive
    again.load_state_dict(weights)
    resumed.load_state_dict(state)
    train(again, resumed, 2, first=2)
    assert state_of(again, resumed) == state_of(net, optimizer)


def test_state_put_in_by_hand_is_used(device: str) -> None:
    found = []
    for release in (True, False):
        net = model(device, LOW)
        optimizer = amp.optim.AdamW(net.parameters(), lr=0.01)
        if release:
            optimizer.attach(net)
        train(net, optimizer, 1)
        state = optimizer.state[net.last.weight]
        state["exp_avg"] = torch.full_like(state["exp_avg"], 0.5)
        train(net, optimizer, 1)
        found.append(state_of(net, optimizer))
    assert found[0] == found[1]


def test_removed_it_is_the_ordinary_optimizer(device: str) -> None:
    found = []
    for attached in (True, False):
        net = model(device)
        optimizer = amp.optim.AdamW(net.parameters(), lr=0.01)
        if attached:
            with optimizer.attach(net):
                train(net, optimizer, 1)
            attachment = optimizer.attach(net)
            attachment.remove()
            attachment.remove()
        else:
            train(net, optimizer, 1)
        loss_of(net, 1).backward()
        assert all(p.grad is not None for p in net.parameters())
        optimizer.step()
        found.append(state_of(net, optimizer))
    assert found[0] == found[1]


@pytest.mark.parametrize("how", ["pickle", "deepcopy"])
def test_copies_of_an_attached_optimizer_are_not_attached(device: str, how: str) -> None:
    net = model(device)
    optimizer = amp.optim.AdamW(net.parameters(), lr=0.01)
    optimizer.attach(net)
    train(net, optimizer, 1)
    if how == "deepcopy":
        twin, copied = copy.deepcopy((net, optimizer))
    else:
        twin, copied = through_a_file((net, optimizer))
    assert state_of(twin, copied) == state_of(net, optimizer)
    for param in twin.parameters():
        param.grad = None
    loss_of(twin, 1).backward()
    assert all(p.grad is not None for p in twin.parameters())
    copied.step()
    copied.attach(twin)
    train(net, optimizer, 1, first=1)
    assert state_of(twin, copied) == state_of(net, optimizer)


def test_a_model_keeps_no_optimizer_alive(device: str) -> None:
    net = model(device)
    optimizer = amp.optim.AdamW(net.parameters())
    optimizer.attach(net)
    ref = weakref.ref(optimizer)
    del optimizer
    gc.collect()
    assert ref() is None
    loss_of(net, 0).backward()
    assert all(p.grad is not None for p in net.parameters())


pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("distributed")]


class Conv(nn.Module):
    """Beside matrices a kernel in channels_last, whose bucket holds it in that order."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 16, 3, padding=1).to(memory_format=torch.channels_last)
        self.tail = Tied()
        self.tail.inner = nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        image = x.view(-1, 1, 8, 8).expand(-1, 3, -1, -1)
        return self.tail(self.conv(image).mean(1).flatten(1))


def train_replicas() -> list[Any]:
    """Three steps each with plain DDP and released; gradients, parameters and states of both."""
    rank, saved = dist.get_rank(), []
    for release, view in ((False, False), (True, False), (True, True)):
        torch.manual_seed(0)
        net = DistributedDataParallel(
            amp.prepare(Conv(), LOW), bucket_cap_mb=0.004, gradient_as_bucket_view=view
        )
        low = [p for p in net.parameters() if p.dtype == LOW]
        rest = [p for p in net.parameters() if p.dtype != LOW]
        scaler = amp.GradScaler("cpu", init_scale=SCALE)
        lean = amp.optim.AdamW(low, lr=0.01, memory="lean")
        plain = amp.optim.SGD(rest, lr=0.01, momentum=0.9)
        if release:
            for optimizer in (lean, plain):  # both on the one hook that there can be
                optimizer.attach(net, scaler=scaler)
        for step in range(3):
            if release and step == 2:  # removed, the hook is what DDP does without
                stepper_of(plain).release.remove()
                stepper_of(lean).release.remove()
                lean.attach(net, scaler=scaler)
            x = torch.randn(4, 64, generator=torch.Generator().manual_seed(9 * step + rank))
            if step == 1:  # gradients of two backwards, averaged with the second
                with net.no_sync():
                    scaler.scale(net(x.to(LOW)).float().square().mean()).backward()
            scaler.scale(net(x.to(LOW)).float().square().mean()).backward()
            saved.append(raw_bytes([p.grad for p in net.parameters()]))
            if not view:  # theirs still, not the bucket's
                assert all(p.grad.untyped_storage().nbytes() == p.nbytes for p in low)
            if step == 2:  # gradients by hand, which no hook has seen
                scaler.step(lean)
                scaler.update()
                for param in low:
                    param.grad.fill_(SCALE)
            for optimizer in (lean, plain):
                scaler.step(optimizer)
                optimizer.zero_grad()
            scaler.update()
            saved.append(lean.grad_norm)
        saved.append(raw_bytes([[p.detach() for p in net.parameters()],
                                lean.state_dict(), plain.state_dict()]))  # fmt: skip
    sparse = DistributedDataParallel(nn.Embedding(10, 4, sparse=True))
    optimizer = amp.optim.SGD(sparse.named_parameters(), lr=0.1)
    optimizer.attach(sparse)
    with pytest.raises(RuntimeError, match=r"module\.weight.*Sparse"):
        sparse(torch.tensor([1])).sum().backward()
    unused = DistributedDataParallel(Tied(), static_graph=True)
    optimizer = amp.optim.SGD(unused.named_parameters(), lr=0.1)
    optimizer.attach(unused)
    with pytest.raises(RuntimeError, match=r"module\.last\.weight.*no part in this backward"):
        unused(torch.ones(4, 64), True).square().sum().backward()
    wrong = DistributedDataParallel(nn.Linear(2, 2), find_unused_parameters=True)
    optimizer = amp.optim.SGD(wrong.parameters(), lr=0.1)
    with pytest.raises(ValueError, match="find_unused_parameters"):
        optimizer.attach(wrong)
    hooked = DistributedDataParallel(nn.Linear(2, 2))
    hooked.register_comm_hook(None, lambda state, bucket: None)
    optimizer = amp.optim.SGD(hooked.parameters(), lr=0.1)
    with pytest.raises(ValueError, match="communication hook of its own"):
        optimizer.attach(hooked)
    with pytest.raises(ValueError, match="holds a DistributedDataParallel"):
        optimizer.attach(nn.Sequential(hooked))
    return saved


def test_replicas_that_step_in_the_hook_equal_plain_ones_bit_for_bit() -> None:
    first, second = on_ranks(2, train_replicas)
    assert first == second
    count = len(first) // 3
    assert first[:count] == first[count : 2 * count] == first[2 * count :]
