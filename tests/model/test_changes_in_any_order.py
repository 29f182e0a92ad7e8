"""amp.Changes beside a model of its contract, under any order of calls.

The contract: a take has, of each tensor, every weight that a step has changed since the last one
that was given, or all of them where something else has written it; and who puts in all that is
given has the trainer's bits.
"""

from __future__ import annotations

import copy
import zlib
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from random_tests import random_runs
from rules import STORAGES, is_allowed
from torch import Tensor, nn

import amp_mp as amp

WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
PIECES = {
    "w0": [("v", (90,), 180), ("q", (2, 45), 0), ("k", (90, 1), 90)],
    "w1": [("head", (100,), 0), ("tail", (413,), 100)],
    "tied": [("tied_v", (90,), 180), ("tied_q", (90,), 0), ("tied_k", (90,), 90)],
}


def pieces(name: str, shape: torch.Size) -> Iterable[amp.Piece]:
    """What the receiver calls a tensor, and for what is none of PIECES, its own name."""
    given = PIECES.get(name, [(f"its_{name}", tuple(shape), 0)])
    return [amp.Piece(*each) for each in given]


class Trained(nn.Module):
    """Two parameters, of which one has two names, a norm in float32, and buffers."""

    def __init__(self, device: str, dtype: torch.dtype) -> None:
        super().__init__()
        source = torch.Generator().manual_seed(1)
        for name, shape in {"w0": (3, 90), "w1": (513,)}.items():
            sizes = 4.0 ** -torch.randint(0, 5, shape, generator=source)
            values = torch.randn(shape, generator=source) * sizes
            self.register_parameter(name, nn.Parameter(values.to(device, dtype)))
        self.norm = nn.Parameter(torch.ones(7, device=device))
        self.tied = self.w0
        self.register_buffer("mean", torch.ones(130, device=device, dtype=dtype))
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64, device=device))
        self.register_buffer("scratch", torch.zeros(3, device=device), persistent=False)


def bits(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().contiguous().view(-1).view(WORDS[tensor.element_size()])


class Contract:
    """What a take has to give, by the trainer's first names; numbers are the weights' bits."""

    def __init__(self, model: nn.Module, with_buffers: bool) -> None:
        self.model, self.with_buffers = model, with_buffers
        now = self.now()
        self.stepped = {n: torch.zeros(t.numel(), dtype=torch.bool) for n, t in now.items()}
        self.mean = now.get("mean", torch.empty(0))
        self.net = {n: torch.zeros(t.numel(), dtype=torch.int64) for n, t in now.items()}
        self.all = self.marked = False  # marked: since the last take
        self.held: set[str] = set()  # given whole, and not confirmed
        self.kept: tuple[dict[str, Tensor], bool] | None = None
        self.version = self.base = 0

    def tensors(self) -> dict[str, Tensor]:
        found: dict[str, Tensor] = dict(self.model.named_parameters())
        if self.with_buffers:
            found |= {n: t for n, t in self.model.named_buffers() if n != "scratch"}
        return found

    def now(self) -> dict[str, Tensor]:
        return {name: bits(tensor).clone() for name, tensor in self.tensors().items()}

    def is_noted(self, name: str) -> bool:
        """Whether its elements are told apart."""
        return name in ("w0", "w1", "mean")

    def note(self, name: str, differ: Tensor) -> None:
        self.stepped[name] |= differ
        if self.kept and differ.any():
            self.kept = (self.kept[0], True)

    def look(self) -> None:
        """As each call does that asks for changes: buffers are compared with a copy."""
        if self.with_buffers:
            now = self.now()["mean"]
            self.note("mean", now != self.mean)
            self.mean = now

    def wrote(self, before: dict[str, Tensor], a_step: bool) -> None:
        for name, now in self.now().items():
            differ = now != before[name]
            if name == "mean":
                continue  # which a look compares
            if self.is_noted(name) and a_step:
                self.note(name, differ)
            else:  # writes that take each other back are none
                self.net[name] += now.long() - before[name].long()

    def is_whole(self, name: str) -> bool:
        return self.all or name in self.held or bool(self.net[name].any())

    def wanted(self) -> dict[str, Tensor]:
        """Where each tensor counts as changed."""
        return {n: torch.ones_like(s) if self.is_whole(n) else s for n, s in self.stepped.items()}

    def taken(self) -> None:
        self.kept = ({n: d.clone() for n, d in self.net.items()}, False)
        self.marked = False
        self.held = {name for name in self.net if self.is_whole(name)}
        self.version += 1

    def given(self) -> None:
        assert self.kept is not None
        self.stepped = {n: torch.zeros_like(s) for n, s in self.stepped.items()}
        self.net = {n: d - self.kept[0][n] for n, d in self.net.items()}
        self.all = self.all and self.marked
        self.held = set()
        self.kept = None
        self.base = self.version


class Receiver:
    """Has the trainer's tensors, or pieces of them, and puts in nothing but changes."""

    def __init__(self, contract: Contract, named: bool) -> None:
        self.module, self.contract, self.named = nn.Module(), contract, named
        self.version = 0
        for name, tensor in contract.tensors().items():
            for piece, part in self.parts(name, tensor):
                if isinstance(tensor, nn.Parameter):
                    self.module.register_parameter(piece, nn.Parameter(part.clone()))
                else:
                    self.module.register_buffer(piece, part.clone())

    def parts(self, name: str, tensor: Tensor) -> list[tuple[str, Tensor]]:
        flat = tensor.detach().reshape(-1)
        if not self.named:
            return [(name, tensor.detach())]
        return [
            (p.name, flat[p.first : p.first + p.numel].view(p.shape))
            for p in pieces(name, tensor.shape)
        ]

    def put(self, taken: Any) -> None:
        own = dict(self.module.state_dict(keep_vars=True))
        known = {n: c for n, c in taken.items() if n in own}
        assert all(n.startswith("tied") for n in taken.keys() - known.keys())
        into = amp.model.changes.Taken(known)
        into.base, into.version = taken.base, taken.version
        amp.apply_changes(self.module, into, version=self.version)
        self.version = taken.version

    def check(self, sums: dict[str, tuple[int, int]]) -> None:
        """Whether it has the trainer's bits, and its bytes the trainer's checksums."""
        own = self.module.state_dict()
        for name, tensor in self.contract.tensors().items():
            for piece, part in self.parts(name, tensor):
                assert torch.equal(bits(own[piece]), bits(part)), piece
                low, high = sums[piece]
                data = bits(own[piece]).view(torch.uint8).numpy().tobytes()
                assert zlib.adler32(data) == high << 16 | low, piece


def check_taken(taken: Any, contract: Contract, receiver: Receiver, every: bool) -> None:
    """Names, order, positions, values and versions."""
    wanted, names = contract.wanted(), []
    tensors = contract.tensors()
    order = list(contract.model.state_dict()) if every else list(tensors)
    for name in order:
        own = "w0" if name == "tied" else name
        if own not in tensors:
            continue
        flags = wanted[own].view(tensors[own].shape)
        for piece, where in receiver.parts(name, flags):
            is_named = where.any() or every or (receiver.named and flags.any())
            if not is_named:
                assert piece not in taken
                continue
            names.append(piece)
            positions, values = taken[piece]
            assert positions.dtype == torch.int32
            assert positions.is_contiguous()
            assert values.is_contiguous()
            assert torch.equal(positions.cpu().long(), where.reshape(-1).nonzero().flatten()), piece
            part = dict(receiver.parts(name, tensors[own]))[piece].reshape(-1)
            assert values.dtype == part.dtype
            assert torch.equal(bits(values), bits(part[positions.long()])), piece
    if not every:  # the trainer's order is not asked for
        names.sort(key=list(taken).index)
    assert list(taken) == names
    whole = all(contract.is_whole(name) for name in tensors)
    assert taken.base == (None if whole else contract.base)
    assert taken.version == contract.version + 1


ACTIONS = [
    *["step", "step", "overflow", "zero", "take", "keep", "given", "lose", "begin", "count"],
    *["data", "place", "load", "optimizer", "mark", "move", "buffers"],
]


@random_runs(60)
@given(
    actions=st.lists(st.tuples(st.sampled_from(ACTIONS), st.integers(0, 99)), max_size=14),
    memory=st.sampled_from(list(STORAGES)),
    dtype=st.sampled_from([torch.bfloat16, torch.float16]),
    named=st.booleans(),
    with_buffers=st.booleans(),
)
def test_any_order_of_calls(
    device: str,
    actions: list[tuple[str, int]],
    memory: str,
    dtype: torch.dtype,
    named: bool,
    with_buffers: bool,
) -> None:
    assume(is_allowed(memory, dtype))
    model = Trained(device, dtype)
    contract = Contract(model, with_buffers)
    receiver = Receiver(contract, named)
    changes = amp.Changes(model, buffers=with_buffers, names=pieces if named else None)
    optimizer: Any = None
    assert changes.aliases == {"w0": ["tied"]}

    def take(number: int, keep: bool = False) -> Any:
        contract.look()
        every = number % 2 == 0
        taken = changes.take(every=every, keep=keep, global_positions=number % 3 == 0)
        check_taken(taken, contract, receiver, every)
        contract.taken()
        if not keep:
            contract.given()
        return taken

    def put(taken: Any) -> None:
        receiver.put(taken)
        receiver.check(changes.checksums())

    for action, number in [*actions, ("take", 0)]:
        before = contract.now()
        name = ("w0", "w1")[number % 2]
        param = model.get_parameter(name)
        is_step = action in ("step", "overflow", "zero")
        if is_step:
            if optimizer is None:
                optimizer = amp.optim.AdamW(
                    [model.w0, model.w1, model.norm], lr=1e-3, **STORAGES[memory]
                )
            source = torch.Generator().manual_seed(number)
            for each in (model.w0, model.w1, model.norm):
                grad = torch.randn(each.shape, generator=source) * (action != "zero")
                each.grad = grad.to(each)
            if action == "overflow":
                model.w0.grad.view(-1)[-1] = torch.inf
            optimizer.step()
        elif action == "optimizer":
            optimizer = None
        elif action == "mark":
            changes.mark_all()
            contract.all = contract.marked = True
        elif action == "count":
            contract.look()
            assert changes.count() == sum(int(w.sum()) for w in contract.wanted().values())
        elif action == "take":
            put(take(number))
        elif action == "keep":
            put(take(number, keep=True))
        elif action == "lose":
            take(number, keep=number % 3 > 0)  # nobody gets it
            if number % 3 == 0:  # nor does the trainer know
                after = take(number)
                if after.base is not None:
                    with pytest.raises(ValueError, match="lead from version"):
                        receiver.put(after)
                changes.mark_all()
                contract.all = contract.marked = True
            put(take(number))
        elif action == "given":
            if contract.kept is None or contract.kept[1]:
                with pytest.raises(RuntimeError, match="take"):
                    changes.given()
            else:
                changes.given()
                contract.given()
        elif action == "begin":
            changes.begin()
            contract.look()
            contract.taken()
            contract.given()
            receiver = Receiver(contract, named)
            receiver.version = changes.version
        elif action == "load":
            state = copy.deepcopy(model.state_dict())
            state[name].view(-1)[number] = number
            model.load_state_dict(state)
        elif action == "data":
            param.data.view(-1)[number:].mul_(-1)
        elif action == "place":
            with torch.no_grad():
                param.view(-1)[: number + 1].add_(number)
        elif action == "buffers":
            model.mean.view(-1)[number] += 1
            model.steps += number
            model.mean = model.mean.clone()  # another tensor, as modules may put there
        elif action == "move" and device == "cpu":
            for each in model.parameters():
                each.data = each.data.clone()
        elif action == "move":
            model.to("cpu")
            if number % 2:
                contract.look()
                assert changes.count() == sum(int(w.sum()) for w in contract.wanted().values())
            model.to(device)
        assert changes.version == contract.version
        contract.wrote(before, is_step)
