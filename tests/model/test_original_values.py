"""The float32 values that prepare keeps for the first step: how many bytes, and what they live
through."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from helpers import interesting_floats, raw_bytes, through_a_file
from torch import Tensor, nn

import amp_mp as amp
from amp_mp.model.convert import convert_network

LOW = [torch.float16, torch.bfloat16]
BF16 = torch.bfloat16
lows = pytest.mark.parametrize("dtype", LOW)


def network(device: str) -> nn.Sequential:
    return nn.Sequential(nn.Linear(30, 20), nn.LayerNorm(20), nn.Linear(20, 5)).to(device)


def sgd(model: nn.Module, lr: float = 0.0) -> amp.optim.SGD:
    return amp.optim.SGD(model.parameters(), lr=lr, master="float32")


def first_masters(model: nn.Module) -> dict[str, Tensor]:
    """What the masters hold after a step that changes nothing."""
    optimizer = sgd(model)
    for param in model.parameters():
        param.grad = torch.zeros_like(param)
    optimizer.step()
    state = optimizer.state
    return {n: state[p]["master"] for n, p in model.named_parameters() if "master" in state[p]}


def low_values(model: nn.Module) -> dict[str, Tensor]:
    """The float32 values of what prepare will convert: all but the norm in the middle."""
    return {n: p.detach().clone() for n, p in model.named_parameters() if not n.startswith("1.")}


def original_bytes(model: nn.Module) -> int:
    return sgd(model).memory_report().bytes.get("original", 0)


# How much is kept.


@lows
def test_two_bytes_an_element_beside_the_weights(device: str, dtype: torch.dtype) -> None:
    model = amp.prepare(nn.Linear(512, 512, bias=False).to(device), dtype)
    report = sgd(model).memory_report()
    assert 2 <= report.per_parameter["original"] < 2.05
    assert "original" in str(report)


def test_a_frozen_base_keeps_nothing(device: str) -> None:
    """A base model that is frozen, with one layer that is trained."""
    model = nn.Sequential(nn.Linear(400, 400), nn.Linear(400, 10, bias=False)).to(device)
    model[0].requires_grad_(False)
    amp.prepare(model, BF16)
    assert original_bytes(model) < 2.05 * 4000


def test_the_first_step_shows_them_in_the_state_also_those_of_a_later_checkpoint(
    device: str,
) -> None:
    model = amp.prepare(network(device), BF16)
    assert original_bytes(model) > 0
    optimizer = sgd(model)
    for param in model.parameters():
        param.grad = torch.zeros_like(param)
    optimizer.step()
    assert "original" not in optimizer.memory_report().bytes
    model.load_state_dict(network(device).state_dict())
    assert "original" not in optimizer.memory_report().bytes


WRITES: dict[str, Callable[[nn.Linear], object]] = {
    "mul_": lambda model: model.weight.mul_(2),
    "one element": lambda model: model.weight[3, 7].add_(1),
    "data": lambda model: model.weight.data.clamp_(min=0),
    "load_state_dict": lambda model: model.load_state_dict(
        {"weight": torch.randn(20, 30).bfloat16()}
    ),
}


@pytest.mark.parametrize("reports", [True, False])  # before the step: it frees what is kept
@pytest.mark.parametrize("write", WRITES)
def test_a_written_weight_keeps_none_and_is_what_its_master_starts_from(
    device: str, write: str, reports: bool
) -> None:
    model = amp.prepare(nn.Linear(30, 20, bias=False).to(device), BF16)
    with torch.no_grad():
        WRITES[write](model)
    if reports:
        assert original_bytes(model) == 0
    written = model.weight.detach().clone()
    assert torch.equal(first_masters(model)["weight"], written.float())
    assert torch.equal(model.weight, written)


# What is kept is exact.


@lows
def test_every_float32_is_kept_to_the_bit(device: str, dtype: torch.dtype) -> None:
    """Ties, subnormals, what is beyond float16 and infinities; a NaN stays one."""
    values = torch.from_numpy(interesting_floats()[::7].copy())
    model = nn.Linear(values.numel(), 1, bias=False).to(device)
    with torch.no_grad():
        model.weight.copy_(values[None])
    amp.prepare(model, dtype)
    with torch.no_grad():
        limit = torch.finfo(dtype).max if dtype == torch.float16 else float("inf")
        wanted = values.clamp(-limit, limit).to(dtype)
    assert torch.equal(model.weight[0].cpu().nan_to_num(3.0), wanted.nan_to_num(3.0))
    (found,) = amp.float32_state_dict(model, sgd(model)).values()
    assert torch.equal(found[0].cpu().view(torch.int32), values.view(torch.int32))


@lows
def test_values_that_two_bytes_cannot_hold_are_kept_too(device: str, dtype: torch.dtype) -> None:
    """All of them ties that round down, in bfloat16; far below float16's range, and beyond it."""
    value = 1 + 2.0**-8 if dtype == BF16 else 3.3e-7
    model = nn.Linear(64, 64, bias=False).to(device)
    nn.init.constant_(model.weight, value)
    nn.init.constant_(model.weight[0], 7e4)
    exact = model.weight.detach().clone()
    amp.prepare(model, dtype)
    assert original_bytes(model) <= 4 * 64 * 64
    assert torch.equal(first_masters(model)["weight"], exact)


@lows
def test_a_few_such_values_keep_their_places_in_any_layout(device: str, dtype: torch.dtype) -> None:
    model = nn.Conv2d(6, 8, 3, bias=False).to(device, memory_format=torch.channels_last)
    with torch.no_grad():
        model.weight[3, 2, 1] = torch.tensor([1 + 2.0**-8, 7e4, 3.3e-7])
    exact = model.weight.detach().clone()
    amp.prepare(model, dtype)
    assert torch.equal(amp.float32_of(model.weight), exact)
    optimizer = amp.optim.SGD(model.parameters(), lr=0.0, master="float32")
    model.weight.grad = torch.zeros_like(model.weight)
    optimizer.step()
    assert torch.equal(amp.float32_of(model.weight, optimizer), exact)


# What they live through.

COPIES: dict[str, Callable[[nn.Module], nn.Module]] = {
    "deepcopy": copy.deepcopy,
    "pickle": through_a_file,
    "pickle of a copy": lambda model: through_a_file(copy.deepcopy(model)),
    "a part": lambda model: nn.Sequential(*copy.deepcopy(list(model))),
    "channels_last": lambda model: model.to(memory_format=torch.channels_last),
    "prepared again": lambda model: amp.prepare(model, model[0].weight.dtype),
    "the other dtype": lambda model: amp.prepare(
        model, LOW[1 - LOW.index(model[0].weight.dtype)], keep_fp32=nn.LayerNorm
    ),
}


@lows
@pytest.mark.parametrize("name", COPIES)
def test_a_copy_before_the_first_step_starts_from_float32(
    device: str, name: str, dtype: torch.dtype
) -> None:
    model = network(device)
    exact = low_values(model)
    amp.prepare(model, dtype)
    copied = COPIES[name](model)
    assert raw_bytes(first_masters(copied)) == raw_bytes(exact)
    if name not in ("channels_last", "prepared again", "the other dtype"):
        assert raw_bytes(first_masters(model)) == raw_bytes(exact)  # the model has them still


def test_a_copy_of_a_written_model_starts_from_the_weights(device: str) -> None:
    model = amp.prepare(nn.Linear(30, 20, bias=False).to(device), BF16)
    with torch.no_grad():
        model.weight.mul_(3)
    for copied in (copy.deepcopy(model), through_a_file(model)):
        assert torch.equal(first_masters(copied)["weight"], model.weight.float())


def test_a_copy_that_is_written_leaves_the_models(device: str) -> None:
    model = network(device)
    exact = low_values(model)
    amp.prepare(model, BF16)
    copied = copy.deepcopy(model)
    with torch.no_grad():
        copied[0].weight.zero_()
    assert (first_masters(copied)["0.weight"] == 0).all()
    assert raw_bytes(first_masters(model)) == raw_bytes(exact)


def tied(device: str) -> nn.Sequential:
    model = nn.Sequential(nn.Embedding(11, 8), nn.Linear(8, 11, bias=False)).to(device)
    model[1].weight = model[0].weight
    return model


def test_tied_weights_of_a_copy_are_tied_and_exact(device: str) -> None:
    model = tied(device)
    exact = model[0].weight.detach().clone()
    copied = through_a_file(copy.deepcopy(amp.prepare(model, BF16)))
    assert copied[1].weight is copied[0].weight
    assert torch.equal(first_masters(copied)["0.weight"], exact)


def test_a_kept_parameter_gets_its_float32_values_back(device: str) -> None:
    model = network(device)
    exact = low_values(model)
    amp.prepare(model, BF16)
    amp.prepare(model, BF16, keep_fp32="0")
    assert torch.equal(model[0].weight, exact["0.weight"])


@lows
def test_float32_state_dict_before_the_first_step_has_them(device: str, dtype: torch.dtype) -> None:
    model = network(device)
    before = raw_bytes(model.state_dict())
    optimizer = sgd(amp.prepare(model, dtype))
    assert raw_bytes(amp.float32_state_dict(model, optimizer)) == before
    assert raw_bytes(amp.float32_state_dict(model, optimizer)) == before  # and has them still


# Loading a float32 checkpoint into a prepared model.


@lows
@pytest.mark.parametrize("kind", ["the model", "a copy", "frozen when prepared"])
def test_a_float32_checkpoint_keeps_its_bits(device: str, dtype: torch.dtype, kind: str) -> None:
    model = network(device)
    model[0].requires_grad_(kind != "frozen when prepared")
    amp.prepare(model, dtype)
    model[0].requires_grad_(True)
    if kind == "a copy":
        model = through_a_file(copy.deepcopy(model))
    saved = network("cpu")
    model.load_state_dict(saved.state_dict())
    for name, value in model.state_dict().items():
        assert torch.equal(value.cpu(), saved.state_dict()[name].to(value.dtype)), name
    assert raw_bytes(first_masters(model)) == raw_bytes(low_values(saved))


def test_of_a_partial_checkpoint_both_parts_are_exact(device: str) -> None:
    model = network(device)
    exact = low_values(model)
    amp.prepare(model, BF16)
    saved = network(device)[2].state_dict(prefix="2.")
    assert len(model.load_state_dict(saved, strict=False).missing_keys) == 4
    assert raw_bytes(first_masters(model)) == raw_bytes(exact | saved)


def test_tied_weights_load_at_float32(device: str) -> None:
    model, saved = amp.prepare(tied(device), BF16), tied(device)
    model.load_state_dict(saved.state_dict())
    assert torch.equal(first_masters(model)["0.weight"], saved[0].weight)


def test_a_failed_load_leaves_the_masters_to_what_the_weights_are(device: str) -> None:
    model = amp.prepare(network(device), BF16)
    saved = network(device).state_dict()
    saved["2.weight"] = torch.zeros(3, 3)
    with pytest.raises(RuntimeError, match="size mismatch"):
        model.load_state_dict(saved)
    for name, master in first_masters(model).items():
        assert torch.equal(model.get_parameter(name), master.to(BF16)), name


def test_an_element_that_a_hook_changes_while_loading_is_the_value(device: str) -> None:
    model = nn.Linear(30, 20, bias=False).to(device)

    def prune(module: nn.Module, _: object) -> None:
        with torch.no_grad():
            module.weight[3].zero_()

    model.register_load_state_dict_post_hook(prune)
    amp.prepare(model, BF16)
    saved = torch.randn(20, 30, device=device)
    model.load_state_dict({"weight": saved})
    saved[3] = 0.0
    assert torch.equal(first_masters(model)["weight"], saved)


def test_float16_that_overflows_while_loading_is_what_is_seen(device: str) -> None:
    """torch's load rounds 1e5 to inf; the master is not another number."""
    model = amp.prepare(nn.Linear(2, 1, bias=False).to(device), torch.float16)
    model.load_state_dict({"weight": torch.tensor([[1e5, 1 / 3]])})
    found = amp.float32_state_dict(model, sgd(model))["weight"]
    assert found.tolist() == [[float("inf"), torch.tensor(1 / 3).item()]]


def test_convert_network_drops_them(device: str) -> None:
    model = amp.prepare(network(device), BF16)
    convert_network(model, torch.float16)
    assert original_bytes(model) == 0
    for name, master in first_masters(model).items():
        assert torch.equal(master, model.get_parameter(name).float()), name
