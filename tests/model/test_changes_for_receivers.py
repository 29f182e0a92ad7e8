"""What a receiver asks of amp.Changes: its names, all names, versions, and no copy of the weights.

Any order of these calls is in test_changes_in_any_order.py.
"""

from __future__ import annotations

import copy
import pickle
import zlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import amp_mp as amp

BF16 = torch.bfloat16


class Attention(nn.Module):
    """q, k and v in one matrix of four, eight and four rows; two experts in one tensor."""

    def __init__(self, device: str) -> None:
        super().__init__()
        source = torch.Generator().manual_seed(0)

        def weights(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.randn(shape, generator=source).to(device, BF16))

        self.qkv, self.experts, self.norm = weights(16, 8), weights(2, 3, 8), weights(8)
        self.register_buffer("bias", torch.zeros(2, device=device))
        self.register_buffer("table", torch.ones(4, device=device), persistent=False)


def hugging_face(name: str, shape: torch.Size) -> list[amp.Piece]:
    if name == "qkv":
        return [
            amp.Piece("q_proj", (4, 8)),
            amp.Piece("k_proj", (8, 8), 4 * 8),
            amp.Piece("v_proj", (4, 8), 12 * 8),
        ]
    if name == "experts":
        return [amp.Piece(f"experts.{i}", tuple(shape[1:]), 24 * i) for i in range(shape[0])]
    return [amp.Piece(name, tuple(shape))]


def step(model: nn.Module, lr: float = 1e-3) -> None:
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    amp.optim.SGD(model.parameters(), lr=lr).step()


def test_pieces_have_the_receivers_names_shapes_and_positions(device: str) -> None:
    model = Attention(device)
    changes = amp.Changes(model, names=hugging_face)
    with torch.no_grad():
        model.qkv[5, 3] += 1  # by others, so all of qkv counts
    step_of_experts = amp.optim.SGD([model.experts], lr=1.0)
    model.experts.grad = torch.zeros_like(model.experts)
    model.experts.grad[1, 2, 7] = 1
    step_of_experts.step()
    taken = changes.take()
    assert [len(taken[name].positions) for name in ("q_proj", "k_proj", "v_proj")] == [32, 64, 32]
    assert torch.equal(taken["v_proj"].values.view(4, 8), model.qkv[12:])
    assert taken["experts.1"].positions.tolist() == [2 * 8 + 7]
    assert len(taken["experts.0"].positions) == 0
    assert "norm" not in taken


@pytest.mark.parametrize(
    ("names", "text"),
    [
        (lambda n, s: [amp.Piece(n, (3,))], r"qkv of 0 to 3; .* each of the 128 elements once"),
        (lambda n, s: [amp.Piece(n, tuple(s)), amp.Piece("x", (1,), 5)], "element 5|element 128"),
        (lambda n, s: [amp.Piece(n, tuple(s), 1)], "element 0 begins none"),
        (lambda n, s: [], "gave none"),
        (lambda n, s: [amp.Piece("w", tuple(s))], "gives 'w' to a piece of qkv and to one of exp"),
    ],
)
def test_pieces_that_leave_out_or_repeat_elements(names: Any, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        amp.Changes(Attention("cpu"), names=names)


def test_every_name_of_the_state_dict_in_its_order(device: str) -> None:
    model = nn.Sequential(Attention(device), nn.BatchNorm1d(4, device=device, dtype=BF16))
    model.add_module("again", model[0])
    changes = amp.Changes(model, buffers=True)
    assert list(changes.take(every=True)) == list(model.state_dict())
    step(model)
    model[1].num_batches_tracked += 1
    model[1].running_mean[2] += 1
    taken = changes.take(every=True)
    assert list(taken) == list(model.state_dict())
    for name, value in model.state_dict().items():
        positions, values = taken[name]
        assert values.dtype == value.dtype, name
        assert torch.equal(value.reshape(-1)[positions.long()], values)
    assert taken["1.running_mean"].positions.tolist() == [2]
    assert taken["1.running_var"].positions.tolist() == []
    assert taken["1.num_batches_tracked"].values.tolist() == [1]
    assert changes.aliases == {f"0.{name}": [f"again.{name}"] for name in model[0].state_dict()}


@pytest.mark.parametrize("dtype", [None, BF16])
def test_buffers_in_float32_are_compared_as_they_are_given(
    device: str, dtype: torch.dtype | None
) -> None:
    model = Attention(device)
    changes, receiver = amp.Changes(model, dtype, buffers=True), copy.deepcopy(model)
    model.bias[1] += 1e-3
    taken = changes.take()
    assert list(taken) == ["bias"]
    assert taken["bias"].positions.tolist() == ([0, 1] if dtype is None else [1])
    assert taken["bias"].values.dtype == (dtype or torch.float32)
    amp.apply_changes(receiver, taken)
    assert torch.equal(receiver.bias, model.bias.to(dtype or torch.float32).float())
    model.bias[1] += 1e-9  # which bfloat16 does not see
    assert list(changes.take()) == ([] if dtype else ["bias"])


def test_a_receiver_that_missed_one_says_so(device: str) -> None:
    model = Attention(device)
    changes, receiver = amp.Changes(model), copy.deepcopy(model)
    changes.begin()
    version, sent = changes.version, []
    for _ in range(3):
        step(model)
        sent.append(changes.take())
    amp.apply_changes(receiver, sent[0], version=version)
    before = copy.deepcopy(receiver.state_dict())
    with pytest.raises(ValueError, match="lead from version 3 to 4, and the model has version 2"):
        amp.apply_changes(receiver, sent[2], version=sent[0].version)
    with pytest.raises(TypeError, match="dict does not say"):
        amp.apply_changes(receiver, dict(sent[1]), version=sent[0].version)
    assert all(torch.equal(value, before[name]) for name, value in receiver.state_dict().items())
    parts = pickle.loads(pickle.dumps(sent[1]))  # as all_gather_object does
    for part in (parts, sent[1]):  # of two processes, of one version
        amp.apply_changes(receiver, part, version=sent[1].base)
    changes.mark_all()
    amp.apply_changes(receiver, changes.take(), version=0)  # which has every weight
    assert all(map(torch.equal, receiver.parameters(), model.parameters()))


def test_begin_after_a_load(device: str) -> None:
    """A trainer that has loaded a checkpoint, and sends it whole by other means."""
    model = Attention(device)
    changes = amp.Changes(model, buffers=True)
    state = {name: value + 1 for name, value in model.state_dict().items()}
    model.load_state_dict(state)
    changes.mark_all()
    changes.begin()
    assert changes.take() == {}
    model.load_state_dict(state, assign=True)
    changes.begin()
    assert changes.count() == 0


def test_a_failure_while_sending_costs_bytes(device: str) -> None:
    model = Attention(device)
    changes, receiver = amp.Changes(model), copy.deepcopy(model)

    def send(fails: bool) -> None:
        taken = changes.take(keep=True)
        if fails:
            raise ConnectionError
        amp.apply_changes(receiver, taken)
        changes.given()

    for number in range(6):
        step(model)
        if number % 3 == 2:
            model.load_state_dict({n: v + 1 for n, v in model.state_dict().items()})
        try:
            send(fails=number in (1, 2, 4))
        except ConnectionError:
            continue
        assert all(map(torch.equal, receiver.parameters(), model.parameters()))
        assert changes.count() == 0


def test_given_is_refused_where_it_would_lose_changes(device: str) -> None:
    model = Attention(device)
    changes, receiver = amp.Changes(model), copy.deepcopy(model)
    with pytest.raises(RuntimeError, match=r"belongs to take\(keep=True\), once"):
        changes.given()
    step(model)
    changes.take(keep=True)
    step(model)
    with pytest.raises(RuntimeError, match="a step has changed weights since"):
        changes.given()
    amp.apply_changes(receiver, changes.take())
    assert all(map(torch.equal, receiver.parameters(), model.parameters()))
    step(model)
    changes.take(keep=True)
    changes.mark_all()  # a new receiver, which the marks are for
    changes.given()
    assert changes.share() == 1.0


def most_bytes(run: Callable[[], object]) -> int:
    """The most memory that tensors take at one time of a call, above what they took before."""
    with torch.profiler.profile(profile_memory=True) as profile:
        result = run()  # kept as long as the profile
    del result
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    most = now = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    return most


def test_no_copy_of_the_weights() -> None:
    """take, begin, checksums and applying stay far below two bytes a weight."""
    model = nn.ParameterList(torch.randn(512, 4096).to(BF16) for _ in range(4))
    optimizer, weights = amp.optim.AdamW(model.parameters(), lr=1e-6), 4 * 512 * 4096
    changes, receiver = amp.Changes(model), copy.deepcopy(model)
    for param in model.parameters():
        param.grad = torch.randn(param.shape).to(BF16)
    optimizer.step()
    share = changes.share()
    assert 0 < share < 0.03
    taken: Any = None

    def take() -> None:
        nonlocal taken
        taken = changes.take()

    for run in (take, lambda: amp.apply_changes(receiver, taken), changes.begin):
        assert most_bytes(run) < (6 * share + 0.01) * weights
    assert most_bytes(changes.checksums) < 16 << 20  # of the bytes that are added together
    for (low, high), param in zip(changes.checksums().values(), model.parameters(), strict=True):
        data = param.detach().view(torch.uint8).numpy().tobytes()
        assert zlib.adler32(data) == high << 16 | low
    assert all(map(torch.equal, receiver.parameters(), model.parameters()))


@pytest.mark.parametrize("names", [None, hugging_face])
def test_changes_have_memory_of_their_own(device: str, names: Any) -> None:
    """Pickling one carries no other."""
    model = Attention(device)
    changes = amp.Changes(model, names=names)
    step(model)
    tensors: list[Tensor] = [each for changed in changes.take().values() for each in changed]
    for each in tensors:
        assert each.untyped_storage().nbytes() < each.nbytes + 64
    assert len({each.data_ptr() for each in tensors}) == len(tensors)
