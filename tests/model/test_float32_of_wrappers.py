"""float32_state_dict and load_float32_state_dict with an optimizer inside of another."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import wrapping
from helpers import LOSES_UPDATES, raw_bytes, warns
from rules import is_allowed
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import amp_mp as amp

WRAPPERS: dict[str, Callable[[Any], Any]] = {
    "FP16_Optimizer": lambda o: amp.FP16_Optimizer(o, verbose=False),
    "LARC": amp.apex.parallel.LARC,
    "FP16_Optimizer around LARC": lambda o: amp.FP16_Optimizer(
        amp.apex.parallel.LARC(o), verbose=False
    ),
}
INNER: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    **wrapping.INNER,
    "amp AdamW exact": lambda params: amp.optim.AdamW(params, lr=0.01),
    "amp AdamW nano": lambda p: amp.optim.AdamW(p, lr=0.01, betas=(0.9, 0.99), memory="nano"),
    "amp AdamW micro": lambda p: amp.optim.AdamW(p, lr=0.01, betas=(0.9, 0.99), memory="micro"),
}
LOW = [torch.bfloat16, torch.float16]
COMPACT = ("micro", "nano")


def made(wrapper: str, inner: str, dtype: torch.dtype, seed: int = 1) -> tuple[nn.Module, Any]:
    torch.manual_seed(seed)
    net = amp.prepare(nn.Sequential(nn.Linear(5, 4), nn.LayerNorm(4), nn.Linear(4, 3)), dtype)
    return net, WRAPPERS[wrapper](INNER[inner](net.parameters()))


def train(net: nn.Module, optimizer: Any) -> None:
    x = torch.linspace(-1, 1, 10, dtype=net[0].weight.dtype).reshape(2, 5)  # type: ignore[index]
    loss = net(x).float().square().mean()
    if isinstance(optimizer, amp.FP16_Optimizer):
        optimizer.backward(loss)
    else:
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def has_masters(wrapper: str, inner: str) -> bool:
    return wrapper != "LARC" or inner.startswith("amp")


@pytest.mark.parametrize(
    ("inner", "dtype"),
    [c for c in itertools.product(INNER, LOW) if is_allowed(*c[0].split(), c[1])],
)
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_masters_inside_a_wrapper_are_given(wrapper: str, inner: str, dtype: torch.dtype) -> None:
    net, optimizer = made(wrapper, inner, dtype)
    with warns(LOSES_UPDATES, not has_masters(wrapper, inner)):
        for _ in range(3):
            train(net, optimizer)
    found = amp.float32_state_dict(net, optimizer)
    assert all(x.dtype == torch.float32 for x in found.values())
    again = {name: x.to(net.state_dict()[name].dtype) for name, x in found.items()}
    if not inner.endswith(COMPACT):  # split24 and split20 round ties otherwise
        assert raw_bytes(again) == raw_bytes(net.state_dict())
    kept = not torch.equal(found["0.weight"], net[0].weight.float())  # type: ignore[index]
    assert kept == has_masters(wrapper, inner)
    if isinstance(optimizer, amp.FP16_Optimizer):
        (masters,) = optimizer.fp32_from_fp16_groups
        (params,) = optimizer.fp16_groups
        names = {param: name for name, param in net.named_parameters()}
        for param, master in zip(params, masters, strict=True):
            assert torch.equal(found[names[param]], master)


@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize("inner", [name for name in INNER if not name.endswith(COMPACT)])
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_masters_inside_a_wrapper_are_loaded(wrapper: str, inner: str, dtype: torch.dtype) -> None:
    net, optimizer = made(wrapper, inner, dtype)
    with warns(LOSES_UPDATES, not has_masters(wrapper, inner)):
        train(net, optimizer)
    wanted: dict[str, Tensor] = {
        name: torch.randn_like(x) for name, x in amp.float32_state_dict(net, optimizer).items()
    }
    amp.load_float32_state_dict(net, optimizer, wanted)
    if has_masters(wrapper, inner):
        found = amp.float32_state_dict(net, optimizer)
        assert raw_bytes(found) == raw_bytes(wanted)
        # A step from there begins at the loaded values.
        for group in optimizer.param_groups:
            group["lr"] = group["weight_decay"] = 0.0
        train(net, optimizer)
        assert raw_bytes(amp.float32_state_dict(net, optimizer)) == raw_bytes(wanted)
    rounded = {name: x.to(net.state_dict()[name].dtype) for name, x in wanted.items()}
    assert raw_bytes(net.state_dict()) == raw_bytes(rounded)


@pytest.mark.parametrize("wrong", ["AdamW", [1], nn.Linear(2, 2)])
def test_what_is_no_optimizer_is_refused_before_a_byte_changes(wrong: Any) -> None:
    net, _ = made("LARC", "amp AdamW", torch.bfloat16)
    before = raw_bytes(net.state_dict())
    values = {name: x.float() + 1 for name, x in net.state_dict().items()}
    with pytest.raises(TypeError, match=r"^optimizer must be a torch.optim.Optimizer, found"):
        amp.load_float32_state_dict(net, wrong, values)
    with pytest.raises(TypeError, match=r"^optimizer must be a torch.optim.Optimizer, found"):
        amp.float32_state_dict(net, wrong)
    assert raw_bytes(net.state_dict()) == before


@pytest.mark.parametrize("steps", [0, 1])
def test_tied_weights_are_one_tensor_as_in_the_model(device: str, steps: int) -> None:
    """So a file has them once, and save_pretrained, which refuses shared memory, takes them."""
    model = nn.ModuleDict(
        {"embedding": nn.Embedding(11, 8), "head": nn.Linear(8, 11), "other": nn.Linear(8, 8)}
    )
    model["head"].weight = model["embedding"].weight
    amp.prepare(model.to(device), torch.bfloat16)
    optimizer = amp.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        for param in model.parameters():
            param.grad = torch.ones_like(param)
        optimizer.step()
    averaged = amp.AveragedModel(model, optimizer)
    for found in (amp.float32_state_dict(model, optimizer), averaged.float32_state_dict()):
        assert found["head.weight"] is found["embedding.weight"]
        others = [name for name in found if name != "head.weight"]
        assert len({found[name].data_ptr() for name in others}) == len(others)
        assert not {each.data_ptr() for each in found.values()} & {
            each.data_ptr() for each in (*model.parameters(), *averaged.parameters())
        }
        twin = nn.Linear(8, 11).to(device)
        twin.load_state_dict({n: found[f"head.{n}"] for n in ("weight", "bias")})


def plain() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))


def checkpointed(model: Any) -> nn.Module:
    model[0] = checkpoint_wrapper(model[0])
    model[2] = torch.compile(model[2])
    return model  # type: ignore[no-any-return]


def in_ddp(model: nn.Module) -> nn.Module:
    """As DistributedDataParallel around a compiled model, whose class is asked for its name."""
    wrapper = type("DistributedDataParallel", (nn.Module,), {})()
    wrapper.module = torch.compile(model)
    return wrapper


def part_in_data_parallel(model: Any) -> nn.Module:
    model[2] = nn.DataParallel(model[2])
    return model  # type: ignore[no-any-return]


AROUND: dict[str, Callable[[nn.Module], Any]] = {
    "nothing": lambda model: model,
    "DataParallel": nn.DataParallel,
    "DataParallel around a part": part_in_data_parallel,
    "compile": torch.compile,
    "parts": checkpointed,
    "ddp": in_ddp,
}


@pytest.mark.parametrize("saved", AROUND)
@pytest.mark.parametrize("loaded", AROUND)
def test_float32_values_are_found_under_any_wrappers_names(saved: str, loaded: str) -> None:
    """They are given under the names of the model's own state_dict, as torch gives them."""
    torch.manual_seed(0)
    one = AROUND[saved](amp.prepare(plain(), torch.bfloat16))
    found = amp.float32_state_dict(one)
    assert list(found) == list(one.state_dict())
    other = AROUND[loaded](amp.prepare(plain(), torch.bfloat16))
    wanted = raw_bytes(list(found.values()))
    assert raw_bytes(list(amp.float32_state_dict(other).values())) != wanted
    amp.load_float32_state_dict(other, found)
    assert raw_bytes(list(amp.float32_state_dict(other).values())) == wanted


def test_a_name_that_is_in_no_form_the_models_is_refused() -> None:
    net = torch.compile(amp.prepare(plain(), torch.bfloat16))
    state = amp.float32_state_dict(net)  # type: ignore[arg-type]
    state["_orig_mod.3.weight"] = state.pop("_orig_mod.2.weight")
    with pytest.raises(RuntimeError, match=r"Unexpected key.*_orig_mod\.3\.weight") as error:
        amp.load_float32_state_dict(net, state)  # type: ignore[call-overload]
    assert "_orig_mod.2.weight" in str(error.value)
