"""amp.Changes notes exactly the weights whose bits steps change, and all of what others write.

The oracle is a second copy of the weights and torch.ne of their bits. The receivers here only ever
get changes, and have to be the trainer bit for bit.
"""

from __future__ import annotations

import copy
import io
import itertools
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from rules import RULES, STORAGES, cases, is_allowed
from tiers import paired, pairs, tiered
from torch import Tensor, nn

import amp_mp as amp

LOW = [torch.bfloat16, torch.float16]
BF16 = torch.bfloat16
# Whole tiles of 256, a tile and a part of one, one element, rows for groups.
SHAPES = [(2, 256), (67, 5), (1,), (48, 96), (4099,)]
MUON = {"lr": 1e-2, "others": {"lr": 1e-3}}
# A loop notes around the rule: rules of two states, of one and of whole layers have loops of their
# own; those of directions are in test_muon.
RULES_OF_LOOPS = ["adamw", "sgd", "lamb"]


class Weights(nn.Module):
    """Parameters of these shapes, of a few sizes, so that steps change some and leave others."""

    def __init__(self, shapes: list[tuple[int, ...]], device: str, dtype: torch.dtype) -> None:
        super().__init__()
        source = torch.Generator().manual_seed(1)
        for index, shape in enumerate(shapes):
            values = torch.randn(shape, generator=source) * 4.0 ** -torch.randint(
                0, 5, shape, generator=source
            )
            self.register_parameter(f"w{index}", nn.Parameter(values.to(device, dtype)))


def bits(tensor: Tensor) -> Tensor:
    """A tensor's bits, so that 0 and -0 differ, and a NaN equals itself."""
    words = {2: torch.int16, 4: torch.int32, 8: torch.int64, 1: torch.uint8}
    return tensor.detach().view(words[tensor.element_size()])


def snapshot(model: nn.Module, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    """Copies of the weights, float32 ones rounded to the dtype."""
    found = {}
    for name, param in model.named_parameters():
        value = param.detach()
        found[name] = (value.to(dtype) if dtype and value.dtype == torch.float32 else value).clone()
    return found


def differing(before: dict[str, Tensor], after: dict[str, Tensor]) -> dict[str, Tensor]:
    """Where torch.ne finds other bits, flat in the parameter's own shape."""
    return {n: torch.ne(bits(before[n]), bits(after[n])).reshape(-1) for n in after}


def check(taken: dict[str, Any], wanted: dict[str, Tensor], now: dict[str, Tensor]) -> None:
    """Whether positions and values are these, and parameters without a change are left out."""
    assert taken.keys() == {name for name, where in wanted.items() if where.any()}
    for name, (positions, values) in taken.items():
        assert positions.dtype == torch.int32
        assert torch.equal(positions.long(), wanted[name].nonzero().flatten()), name
        assert values.dtype == now[name].dtype
        assert torch.equal(bits(values), bits(now[name].reshape(-1)[positions.long()])), name


def give_gradients(model: nn.Module, seed: int, scale: float = 1.0) -> None:
    source = torch.Generator().manual_seed(seed)
    for param in model.parameters():
        param.grad = (torch.randn(param.shape, generator=source) * scale).to(param)


def overflow(model: nn.Module) -> None:
    param = next(model.parameters())
    assert param.grad is not None
    param.grad.view(-1)[-1] = torch.inf


def train(
    model: nn.Module, optimizer: Any, receiver: nn.Module, dtype: torch.dtype | None = None
) -> None:
    """Steps, of which one is skipped, and takes after one, two and three of them."""
    changes = amp.Changes(model, dtype)
    assert changes.take() == {}
    assert changes.count() == 0
    assert changes.share() == 0.0
    wanted: dict[str, Tensor] = {}
    for number in range(6):
        before = snapshot(model, dtype)
        give_gradients(model, number, 0.0 if number == 4 else 1.0)
        if number == 1:
            overflow(model)
        optimizer.step()
        now = snapshot(model, dtype)
        found = differing(before, now)
        if number == 1:
            assert not any(where.any() for where in found.values())
        wanted = {n: where | wanted.get(n, where) for n, where in found.items()}
        assert changes.count() == sum(int(where.sum()) for where in wanted.values())
        if number in (0, 2, 5):
            taken = changes.take()
            check(taken, wanted, now)
            amp.apply_changes(receiver, taken)
            assert not any(w.any() for w in differing(snapshot(receiver), now).values())
            assert changes.take() == {}
            assert changes.count() == 0
            wanted = {}


@pytest.mark.parametrize(
    ("rule", "memory", "dtype"),
    tiered(cases(RULES, STORAGES, LOW), pairs(RULES_OF_LOOPS, STORAGES, LOW, allowed=is_allowed)),
)
def test_bits_are_those_of_torch_ne(
    device: str, rule: str, memory: str, dtype: torch.dtype
) -> None:
    model = Weights(SHAPES, device, dtype)
    kind, numbers = RULES[rule]
    optimizer = kind(model.parameters(), check_overflow=True, **{**numbers, **STORAGES[memory]})
    train(model, optimizer, copy.deepcopy(model))


@pytest.mark.parametrize(
    ("memory", "dtype"), paired(["exact", "lean", "float32", "nano"], LOW, allowed=is_allowed)
)
def test_muon(device: str, memory: str, dtype: torch.dtype) -> None:
    model = Weights([(64, 48), (256,), (33, 70)], device, dtype)
    optimizer = amp.optim.Muon(model, check_overflow=True, memory=memory, **MUON)
    train(model, optimizer, copy.deepcopy(model))


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
@pytest.mark.parametrize("dtype", LOW)
def test_weights_without_masters(device: str, rounding: str, dtype: torch.dtype) -> None:
    model = Weights(SHAPES, device, dtype)
    options: dict[str, Any] = {"master": "none", "rounding": rounding, "momentum": 0.9}
    optimizer = amp.optim.SGD(model.parameters(), lr=0.01, check_overflow=True, **options)
    train(model, optimizer, copy.deepcopy(model))


@pytest.mark.parametrize(
    ("rule", "dtype"), tiered(itertools.product(RULES, LOW), pairs(RULES_OF_LOOPS, LOW))
)
def test_float32_weights_change_where_their_rounding_does(
    device: str, rule: str, dtype: torch.dtype
) -> None:
    model = Weights(SHAPES, device, torch.float32)
    kind, numbers = RULES[rule]
    optimizer = kind(model.parameters(), check_overflow=True, **{**numbers, "lr": 1e-5})
    train(model, optimizer, Weights(SHAPES, device, torch.float32).to(dtype), dtype)


@pytest.mark.parametrize("keep_casts", [False, True])
def test_a_loop_with_casts(device: str, keep_casts: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.Linear(64, 4)).to(device)
    optimizer = amp.optim.AdamW(model.parameters(), lr=1e-5)
    changes, sampler = amp.Changes(model, BF16), copy.deepcopy(model).to(BF16)
    for _number in range(3):
        with amp.autocast(dtype=BF16, device_type=device, keep_casts=keep_casts):
            model(torch.randn(8, 32, device=device)).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        before = snapshot(sampler)
        taken = changes.take()
        check(taken, differing(before, snapshot(model, BF16)), snapshot(model, BF16))
        amp.apply_changes(sampler, taken)
    assert not any(w.any() for w in differing(snapshot(sampler), snapshot(model, BF16)).values())


def test_float32_weights_of_prepare_are_handed_over_whole(device: str) -> None:
    """Where one weight of a norm has changed; the others of its dtype are not named."""
    model = amp.prepare(nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)).to(device), BF16)
    optimizer = amp.optim.AdamW(model.parameters(), lr=1e-3)
    changes, receiver = amp.Changes(model), copy.deepcopy(model)
    give_gradients(model, 0)
    model[1].bias.grad = None
    optimizer.step()
    taken = changes.take()
    assert "1.bias" not in taken
    assert torch.equal(taken["1.weight"].values, model[1].weight.detach())
    assert torch.equal(taken["1.weight"].positions, torch.arange(8, device=device).int())
    amp.apply_changes(receiver, taken)
    assert not any(w.any() for w in differing(snapshot(receiver), snapshot(model)).values())
    assert changes.take() == {}


# Whoever steps.

WRAPPED: dict[str, Callable[[nn.Module], Any]] = {
    "torch's AdamW": lambda m: torch.optim.AdamW(m.parameters(), lr=1e-3),
    "torch's SGD": lambda m: torch.optim.SGD(m.parameters(), lr=1e-2, momentum=0.9),
    "AdamW": lambda m: amp.optim.AdamW(m.parameters(), lr=1e-3),
    "Lion, tiny": lambda m: amp.optim.Lion(m.parameters(), lr=1e-3, memory="tiny"),
}


@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize("kind", WRAPPED)
def test_fp16_optimizer(device: str, kind: str, dtype: torch.dtype) -> None:
    model = Weights(SHAPES, device, dtype)
    optimizer = amp.FP16_Optimizer(
        WRAPPED[kind](model), dynamic_loss_scale=True, dynamic_loss_args={"init_scale": 1.0},
        verbose=False,
    )  # fmt: skip

    class Stepping:
        def step(self) -> None:
            optimizer.update_master_grads()
            optimizer.step()

    train(model, Stepping(), copy.deepcopy(model))


@pytest.mark.parametrize("memory", ["exact", "lean", "float32"])
def test_steps_during_the_backward_pass(device: str, memory: str) -> None:
    torch.manual_seed(0)
    model = amp.prepare(nn.Sequential(nn.Linear(40, 70), nn.Linear(70, 3)).to(device), BF16)
    optimizer = amp.optim.AdamW(model.parameters(), lr=1e-3, memory=memory)
    optimizer.attach(model)
    changes, receiver = amp.Changes(model), copy.deepcopy(model)
    for _number in range(4):
        before = snapshot(model)
        model(torch.randn(16, 40, device=device, dtype=BF16)).float().square().mean().backward()
        optimizer.step()
        taken = changes.take()
        check(taken, differing(before, snapshot(model)), snapshot(model))
        amp.apply_changes(receiver, taken)
    assert not any(w.any() for w in differing(snapshot(receiver), snapshot(model)).values())


@pytest.mark.parametrize("dtype", LOW)
def test_averages(device: str, dtype: torch.dtype) -> None:
    """A sampler that has the averages: each update notes which it changes."""
    model = Weights(SHAPES, device, dtype)
    optimizer = amp.optim.AdamW(model.parameters(), lr=1e-2)
    averaged = amp.AveragedModel(model, decay=0.9)
    changes, receiver = amp.Changes(averaged.module), copy.deepcopy(averaged.module)
    for number in range(4):
        give_gradients(model, number)
        optimizer.step()
        before = snapshot(averaged.module)
        averaged.update()
        now = snapshot(averaged.module)
        taken = changes.take()
        check(taken, differing(before, now), now)
        amp.apply_changes(receiver, taken)
    own = amp.Changes(model)
    with averaged.swap(), pytest.raises(RuntimeError, match="swap"):
        own.take()
    assert own.take() == {}  # the weights have the bytes of before


def test_several_optimizers_and_new_ones(device: str) -> None:
    model = Weights(SHAPES, device, BF16)
    params = list(model.parameters())
    changes, receiver = amp.Changes(model), copy.deepcopy(model)
    for number in range(6):
        optimizer = [
            amp.optim.AdamW(params[:2], lr=1e-3),
            amp.optim.SGD(params, lr=1e-2),
            amp.optim.Lion(params[1:], lr=1e-3, memory="nano"),
        ][number % 3]
        before = snapshot(model)
        give_gradients(model, number)
        optimizer.step()
        taken = changes.take()
        check(taken, differing(before, snapshot(model)), snapshot(model))
        amp.apply_changes(receiver, taken)


@pytest.mark.parametrize("layout", ["channels_last", "transposed"])
@pytest.mark.parametrize("written", [False, True])
def test_positions_are_in_the_order_of_rows(device: str, layout: str, written: bool) -> None:
    model = Weights([(6, 5, 3, 7)] if layout == "channels_last" else [(24, 50)], device, BF16)
    if layout == "channels_last":
        model.to(memory_format=torch.channels_last)
    else:
        model.w0.data = model.w0.data.t().contiguous().t()
    optimizer = amp.optim.AdamW(model.parameters(), lr=1e-3)
    changes, receiver = amp.Changes(model), Weights([tuple(model.w0.shape)], device, BF16)
    other = copy.deepcopy(model)
    assert not model.w0.is_contiguous()
    assert not other.w0.is_contiguous()
    before = snapshot(model)
    give_gradients(model, 0)
    optimizer.step()
    wanted = differing(before, snapshot(model))
    if written:
        model.w0.data.add_(1)
        wanted["w0"].fill_(True)
    taken = changes.take()
    check(taken, wanted, snapshot(model))
    for each in (receiver, other):
        amp.apply_changes(each, taken)
        assert torch.equal(bits(each.w0.contiguous()), bits(model.w0.contiguous()))


# Whoever else writes.


def write_numpy(model: nn.Module) -> None:
    if model.w0.device.type == "cuda":
        model.w0.data[0, 3] = 7
    else:
        model.w0.detach().view(torch.int16).numpy()[0, 3] = 7


def load(model: nn.Module) -> None:
    state = copy.deepcopy(model.state_dict())
    state["w0"][1, 5] = 9
    model.load_state_dict(state)


def assign(model: nn.Module) -> None:
    state = copy.deepcopy(model.state_dict())
    state["w0"][1, 5] = 9
    model.load_state_dict(state, assign=True)


def replace(model: nn.Module) -> None:
    model.w0 = nn.Parameter(model.w0.detach() + 1)


def masters(model: nn.Module) -> None:
    optimizer = amp.optim.AdamW(model.parameters(), lr=1e-3)
    optimizer.init_state()
    with optimizer.masters([model.w0]) as (master,):
        master[0, 0] += 1


def torchs_step(model: nn.Module) -> None:
    model.w0.grad = torch.ones_like(model.w0)
    torch.optim.SGD([model.w0], lr=0.5).step()


@torch.no_grad()
def in_place(model: nn.Module) -> None:
    model.w0[0, 1].add_(1)


def put_data(model: nn.Module) -> None:
    model.w0.data = model.w0.data * 2


WRITES: dict[str, Callable[[nn.Module], Any]] = {
    "in place": in_place,
    "data": lambda m: m.w0.data[1, 2].add_(1),
    "data, signs": lambda m: m.w0.data.neg_(),
    "data, order": lambda m: m.w0.data.copy_(m.w0.data.flip(1)),
    "data, one bit": lambda m: m.w0.data.view(torch.int16)[1, 255].bitwise_xor_(1),
    "data, two words": lambda m: m.w0.data[0, :2].copy_(m.w0.data[0, :2].flip(0)),
    "data, clamped": lambda m: m.w0.data.clamp_(-0.01, 0.01),
    "p.data =": put_data,
    "NumPy": write_numpy,
    "load_state_dict": load,
    "load_state_dict, assign": assign,
    "another parameter": replace,
    "masters": masters,
    "torch's optimizer": torchs_step,
}


@pytest.mark.parametrize("steps", [0, 2])  # after what was written
@pytest.mark.parametrize("write", WRITES)
def test_what_others_write_counts_as_the_whole_tensor(device: str, write: str, steps: int) -> None:
    model = Weights(SHAPES, device, BF16)
    optimizer = amp.optim.AdamW(model.parameters(), lr=1e-3)
    changes, receiver = amp.Changes(model), copy.deepcopy(model)
    give_gradients(model, 0)
    optimizer.step()
    amp.apply_changes(receiver, changes.take())
    before = snapshot(model)
    WRITES[write](model)
    assert differing(before, snapshot(model))["w0"].any()
    for number in range(steps):
        give_gradients(model, 1 + number)
        amp.optim.AdamW(model.parameters(), lr=1e-3).step()
    taken = changes.take()
    wanted = differing(before, snapshot(model))
    assert torch.equal(taken["w0"].positions, torch.arange(512, device=device).int())
    for name in ("w1", "w2", "w3", "w4"):  # those that were stepped alone
        found = torch.zeros_like(wanted[name])
        if name in taken:
            found[taken[name].positions.long()] = True
        assert not (wanted[name] & ~found).any()
        replaced = write == "load_state_dict, assign"  # all parameters are other objects
        assert steps == 2 or found.all() == found.any() == replaced
    amp.apply_changes(receiver, taken)
    assert not any(w.any() for w in differing(snapshot(receiver), snapshot(model)).values())
    assert changes.take() == {}


def test_moved_and_cast_models(device: str) -> None:
    model = Weights(SHAPES, device, BF16)
    changes = amp.Changes(model)
    for dtype in (torch.float16, BF16):
        model.to(dtype)
        taken = changes.take()
        assert all(taken[n].values.dtype == dtype for n, _ in model.named_parameters())
        assert changes.count() == 0
        before = snapshot(model)
        give_gradients(model, 0)
        amp.optim.SGD(model.parameters(), lr=1e-2).step()
        check(changes.take(), differing(before, snapshot(model)), snapshot(model))


def test_copies_begin_with_everything(device: str) -> None:
    model = Weights(SHAPES, device, BF16)
    changes = amp.Changes(model)
    stream = io.BytesIO()
    pickle.dump((model, changes), stream)
    stream.seek(0)
    for other, own in (copy.deepcopy((model, changes)), pickle.load(stream)):
        assert own.model is other
        assert own.share() == 1.0
        assert all(len(t.positions) == p.numel() for t, p in zip(
            own.take().values(), other.parameters(), strict=True
        ))  # fmt: skip
        before = snapshot(other)
        give_gradients(other, 0)
        amp.optim.SGD(other.parameters(), lr=1e-2).step()
        check(own.take(), differing(before, snapshot(other)), snapshot(other))
    assert changes.take() == {}
    changes.mark_all()
    assert changes.count() == sum(p.numel() for p in model.parameters())
    assert changes.share() == 1


def test_a_receiver_of_changes_is_the_trainer_after_200_steps(device: str) -> None:
    """With skipped steps, a write and a schedule of rates in between, taken at random times."""
    random = np.random.default_rng(0)
    model = Weights(SHAPES, device, BF16)
    optimizer = amp.optim.AdamW(model.parameters(), lr=1e-3, max_grad_norm=1.0, memory="lean")
    scaler = amp.GradScaler(device, init_scale=1024.0)
    changes, receiver = amp.Changes(model), copy.deepcopy(model)
    shares = []
    for number in range(200):
        optimizer.param_groups[0]["lr"] = 1e-3 * 0.97**number
        give_gradients(model, number, 1024.0)
        if number % 13 == 5:
            overflow(model)
        if number == 77:
            model.w3.data.mul_(0.5)
        scaler.scale(torch.zeros((), device=device))
        scaler.step(optimizer)
        scaler.update(1024.0)
        if random.random() < 0.4 or number == 199:
            shares.append(changes.share())
            amp.apply_changes(receiver, changes.take())
    assert not any(w.any() for w in differing(snapshot(receiver), snapshot(model)).values())
    assert 0 < shares[-1] < 0.5 < max(shares)  # some weights, not all


# What is refused, and when it ends.


def test_it_costs_an_eighth_of_a_byte_and_ends_with_the_object(device: str) -> None:
    model = Weights([(1024, 64)], device, BF16)
    changes = amp.Changes(model)
    held = amp._C.changes_of(model.w0)
    assert held.memory.numel() * 8 == 1024 * 64 // 8 + 8
    with pytest.raises(ValueError, match=r"w0 is watched by another amp\.Changes"):
        amp.Changes(model)
    optimizer = amp.optim.SGD(model.parameters(), lr=0.1)
    give_gradients(model, 0)
    optimizer.step()
    assert changes.count() > 0
    bytes_before = bits(held.memory).clone()
    del changes
    del held
    assert amp._C.changes_of(model.w0) is None
    optimizer.step()  # writes no notes any more
    assert amp.Changes(model).take() == {}
    assert bytes_before.any()


def test_weights_that_come_and_go(device: str) -> None:
    model = nn.ModuleDict({"a": Weights([(5, 5)], device, BF16)})
    changes = amp.Changes(model)
    model["b"] = Weights([(3,)], device, BF16)
    taken = changes.take()
    assert taken.keys() == {"b.w0"}
    assert len(taken["b.w0"].positions) == 3
    del model["a"]
    assert changes.take() == {}
    assert changes.share() == 0.0


def in_parts(model: Any) -> Any:
    model[1] = nn.DataParallel(torch.compile(model[1]))
    return nn.DataParallel(model)


def test_names_are_without_what_data_parallel_adds() -> None:
    """On either side; DistributedDataParallel is in tests/distributed."""
    plain = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2))).to(BF16)
    trainer, receiver = in_parts(copy.deepcopy(plain)), in_parts(copy.deepcopy(plain))
    changes = amp.Changes(trainer)
    give_gradients(trainer, 0)
    amp.optim.SGD(trainer.parameters(), lr=1.0).step()
    taken = changes.take()
    assert list(taken) == [name for name, _ in plain.named_parameters()]
    for each in (plain, receiver):
        amp.apply_changes(each, taken)
        for now, wanted in zip(each.parameters(), trainer.parameters(), strict=True):
            assert torch.equal(now, wanted)


def test_tied_weights_have_their_first_name(device: str) -> None:
    model = Weights([(4, 4)], device, BF16)
    model.tied = model.w0
    changes = amp.Changes(torch.compile(model))
    model.w0.data.add_(1)
    assert changes.take().keys() == {"w0"}


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (lambda d: amp.Changes([torch.ones(3)]), TypeError, "model must be a torch.nn.Module"),
        (lambda d: amp.Changes(Weights([(3,)], d, BF16), "bf16"), ValueError, "dtype must be"),
        (lambda d: amp.Changes(Weights([(3,)], d, torch.float32)), ValueError, "name the dtype"),
        (lambda d: amp.Changes(Weights([(3,)], "meta", BF16)), ValueError, "w0 is on the meta"),
    ],
)
def test_bad_arguments(device: str, make: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        make(device)


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        (lambda t: {"w9": t["w0"]}, ValueError, "1 of 2 names are not those"),
        (lambda t: {"w0": (t["w0"][0] + 3, t["w0"][1])}, ValueError, "positions from 3 to 6"),
        (lambda t: {"w0": (t["w0"][0] - 1, t["w0"][1])}, ValueError, "positions from -1 to 2"),
        (lambda t: {"w0": (t["w0"][0], t["w0"][1][1:])}, ValueError, "of the same length"),
        (lambda t: {"w0": (t["w0"][0], t["w0"][1].half())}, TypeError, "would be rounded"),
        (lambda t: {"w0": (t["w0"][0], t["w0"][1].float())}, TypeError, "would be rounded"),
    ],
)
def test_bad_changes_leave_the_receiver_alone(
    device: str, change: Any, error: type[Exception], text: str
) -> None:
    model = Weights([(4,), (3,)], device, BF16)
    changes = amp.Changes(model)
    changes.mark_all()
    receiver = copy.deepcopy(model)
    for param in model.parameters():
        param.data.add_(1)
    taken = changes.take()
    before = snapshot(receiver)
    with pytest.raises(error, match=text):
        amp.apply_changes(receiver, {"w1": taken["w1"], **change(taken)})
    assert not any(w.any() for w in differing(before, snapshot(receiver)).values())


def test_a_float32_receiver(device: str) -> None:
    model = Weights([(4,)], device, BF16)
    changes, receiver = amp.Changes(model), Weights([(4,)], device, torch.float32)
    model.w0.data.add_(1)
    amp.apply_changes(receiver, changes.take())
    assert torch.equal(receiver.w0, model.w0.float())
