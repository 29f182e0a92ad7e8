"""Muon's step: bit for bit the reference with torch's Newton-Schulz, and near torch.optim.Muon."""

from __future__ import annotations

import copy
import math
from typing import Any

import numpy as np
import pytest
import reference_formats as formats
import rules
import torch
from helpers import DTYPES, array, assert_same, is_gpu, on, random
from reference import F32, Floats
from rules import Expected, found_master, found_state
from torch import Tensor, nn
from torch.optim._muon import _zeropower_via_newtonschulz

import amp_mp as amp
from amp_mp import _C
from amp_mp.optim.muon import matrices

SHAPES = [(64, 64), (64, 256), (256, 64), (33, 17), (8, 512), (1, 5), (64, 64), (5, 1)]
NUMBERS = {"lr": 0.02, "weight_decay": 0.1, "momentum": 0.95, "nesterov": True}
COEFFICIENTS, EPS = (3.4445, -4.775, 2.0315), 1e-7
STEPS = 3


def muon_direction(
    g: Floats, m: Floats, *, momentum: float, nesterov: bool
) -> tuple[Floats, Floats]:
    """Jordan et al. 2024, with torch.lerp's two forms of an average. Returns m, direction."""
    gain, kept = F32(1 - momentum), F32(momentum)

    def towards(m: Floats) -> Floats:
        return m + gain * (g - m) if gain < 0.5 else g - kept * (g - m)

    m = towards(m)
    return m, towards(m) if nesterov else m


class ExpectedMuon(Expected):
    """A matrix as NumPy and torch's own Newton-Schulz step it."""

    def __init__(
        self, weight: Tensor, number: int, numbers: dict[str, Any], **storage: Any
    ) -> None:
        super().__init__("muon", weight, number, ("momentum_buffer",), **storage)
        self.shape, self.numbers = tuple(weight.shape), {**NUMBERS, **numbers}

    def step(self, grad: np.ndarray, multiplier: np.float32) -> None:
        self.clock.tick(0, 0)
        numbers, f = self.numbers, np.float32
        of_rule = {name: numbers[name] for name in ("momentum", "nesterov")}
        g, m = grad.reshape(-1) * multiplier, self.states["momentum_buffer"]
        m, direction = muon_direction(g, m, **of_rule)
        self.states["momentum_buffer"] = self._kept("momentum_buffer", m)
        update = self.orthogonal(torch.from_numpy(direction).view(self.shape))
        keep = f(1 - numbers["lr"] * numbers["weight_decay"])
        self._store(self.master * keep - f(self.rate) * update)

    @property
    def rate(self) -> float:
        """The learning rate for this shape."""
        rows, columns = self.shape[-2:]
        factor = math.sqrt(max(1, rows / columns))
        if self.numbers.get("adjust_lr_fn") in ("spectral_unclamped", "sqrt"):
            factor = math.sqrt(rows / columns)
        elif self.numbers.get("adjust_lr_fn") == "match_rms_adamw":
            factor = 0.2 * math.sqrt(max(rows, columns))
        return float(self.numbers["lr"] * factor)

    def orthogonal(self, direction: Tensor) -> np.ndarray:
        steps = self.numbers.get("ns_steps", 5)
        whole = _zeropower_via_newtonschulz(direction, COEFFICIENTS, steps, EPS)
        return array(whole).reshape(-1)


# A GPU's products add in another order, so that some numbers between two iterations are the
# neighbouring bfloat16 ones. In 40 matrices of each shape here, with the sums in another order on a
# CPU, updates differed by up to 6 units of 2^-8 in an element and 1.8 % of their norm; this is
# twice as much. An update's norm is at most 1.2 for each row or column, whichever are fewer.
OF_ELEMENT, OF_NORM = 12 * 2**-8, 0.036 * 1.2
SPACING = {"float32": 2**-23, "float16": 2**-10, "bfloat16": 2**-7}  # relative to a number


def assert_near(found: Floats, wanted: Floats, want: ExpectedMuon, spacing: float) -> None:
    """After STEPS steps, in each of which a number of this spacing may be rounded the other way."""
    error = np.abs(found.astype(np.float64) - wanted)
    rounding = spacing * np.abs(wanted) + 2.0**-24  # also where float16 is subnormal
    assert (error <= STEPS * (OF_ELEMENT * want.rate + rounding)).all(), error.max()
    if spacing < SPACING["float16"]:
        norm = OF_NORM * want.rate * math.sqrt(min(want.shape)) + float(np.linalg.norm(rounding))
        assert np.linalg.norm(error) <= STEPS * norm


def check(
    device: str,
    weight: str = "float32",
    grad: str = "float32",
    shapes: list[tuple[int, ...]] = SHAPES,
    numbers: dict[str, Any] | None = None,
    **storage: Any,
) -> None:
    numbers = numbers or {}
    values = [random(math.prod(s), n + 1, 0.1) for n, s in enumerate(shapes)]
    params = [
        nn.Parameter(on(device, v, DTYPES[weight]).view(s))
        for v, s in zip(values, shapes, strict=True)
    ]
    optimizer = amp.optim.Muon(params, **{**NUMBERS, **numbers}, **storage)
    # The order of random bits follows the parameters, not their shapes.
    expected = [ExpectedMuon(p, n, numbers, **storage) for n, p in enumerate(params)]
    for step in range(STEPS):
        for number, (param, want) in enumerate(zip(params, expected, strict=True)):
            g = random(param.numel(), 100 * step + number, 1e-2)
            param.grad_dtype = DTYPES[grad]
            param.grad = on(device, g, DTYPES[grad]).view(param.shape)
            want.step(array(param.grad), np.float32(1))
        optimizer.step()
    for param, want in zip(params, expected, strict=True):
        what = f"{weight} weight, {grad} gradient, {tuple(param.shape)}"
        state = optimizer.state[param]
        found, master = array(param).reshape(-1), found_master(state, param, want.formats["master"])
        if is_gpu(device):
            none = want.formats["master"] == "none"
            assert_near(found, want.visible, want, SPACING[weight])
            assert_near(master, want.master, want, SPACING[weight] if none else 2**-15)
        else:
            assert_same(found, want.visible, f"{what}: weight")
            assert_same(master, want.master, f"{what}: master")
        found = found_state(state, "momentum_buffer", want.formats["momentum_buffer"])
        assert_same(found, want.states["momentum_buffer"], f"{what}: momentum")
        assert state["step"].item() == STEPS


@pytest.mark.parametrize("weight", DTYPES)
@pytest.mark.parametrize("grad", DTYPES)
def test_muon_equals_the_reference_bit_for_bit(device: str, weight: str, grad: str) -> None:
    check(device, weight, grad, master="float32")


@pytest.mark.parametrize(("memory", "weight"), rules.cases(rules.STORAGES, ["float16", "bfloat16"]))
def test_every_preset_equals_the_reference(device: str, memory: str, weight: str) -> None:
    check(device, weight, "bfloat16", memory=memory, seed=7)


@pytest.mark.parametrize("storage", ["float16", "m8", "i8", "bfloat16"])
def test_every_momentum_equals_the_reference(device: str, storage: str) -> None:
    check(device, "float32", "float16", momentum_buffer=storage, seed=3)


def test_momentum_of_an_older_file_goes_into_equal_steps_and_back(device: str) -> None:
    """Decoded, and encoded with the bits of step 0."""
    params = [nn.Parameter(on(device, random(64 * 96, 1), torch.bfloat16).view(64, 96))]
    optimizer = amp.optim.Muon(params, lr=0.01, memory="tiny", momentum_buffer="m8", seed=5)
    for step in range(3):
        params[0].grad = on(device, random(64 * 96, 10 + step), torch.bfloat16).view(64, 96)
        optimizer.step()
    values = found_state(optimizer.state[params[0]], "momentum_buffer", "m8")
    bits = formats.stream(64 * 96, 5)
    for format, own in (("i8", {}), ("m8", {"momentum_buffer": "m8"})):
        saved = copy.deepcopy(optimizer.state_dict())
        optimizer = amp.optim.Muon(params, lr=0.01, memory="tiny", **own)
        optimizer.load_state_dict(saved)
        state = optimizer.state[params[0]]
        names = {f"momentum_buffer_{format}", f"momentum_buffer_{format}_scale"}
        assert {n for n in state if n.startswith("momentum")} == names
        values = formats.decode(formats.encode(values, format, bits), format)
        assert_same(found_state(state, "momentum_buffer", format), values, format)


@pytest.mark.parametrize(
    ("memory", "wanted"),
    [
        ("exact", "float32"),
        ("lean", "bfloat16"),
        *((m, "i8") for m in ("tiny", "micro", "nano", "masterless")),
    ],
)
def test_presets_choose_the_momentum(memory: str, wanted: str) -> None:
    """Equal steps where updates are made of whole matrices; SGD's momentum keeps m8."""
    param = nn.Parameter(torch.ones(4, 32))
    for kind, own in ((amp.optim.Muon, {}), (amp.optim.SGD, {"momentum": 0.9})):
        group = kind([param], memory=memory, **own).param_groups[0]
        expected = "m8" if wanted == "i8" and kind is amp.optim.SGD else wanted
        assert group["momentum_buffer"] == expected


@pytest.mark.parametrize("weight", ["float16", "bfloat16"])
def test_weights_alone_are_rounded_stochastically(device: str, weight: str) -> None:
    check(device, weight, weight, master="none", rounding="stochastic", seed=11)


@pytest.mark.parametrize(
    "numbers",
    [
        {"nesterov": False},
        {"adjust_lr_fn": "match_rms_adamw", "weight_decay": 0.0},
        {"adjust_lr_fn": "original", "ns_steps": 2},
        {"adjust_lr_fn": "sqrt", "momentum": 0.4},
        {"adjust_lr_fn": "spectral_unclamped"},
        {"momentum": 0.0, "ns_steps": 7},
        {"ns_steps": 0, "eps": 1e-7},
    ],
)
def test_all_numbers_count(device: str, numbers: dict[str, Any]) -> None:
    check(device, numbers=numbers)
    check(device, "bfloat16", "bfloat16", numbers=numbers, memory="lean")


def pairs_of(shapes: list[tuple[int, ...]]) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    ours = [nn.Parameter(torch.randn(s) * 0.1) for s in shapes]
    return ours, copy.deepcopy(ours)


def new_gradients(*lists: list[nn.Parameter], spread: float = 1.0) -> None:
    for params in zip(*lists, strict=True):
        grad = torch.randn(params[0].shape) * spread
        for param in params:
            param.grad = grad.to(param.device, param.dtype, copy=True)


# torch adds in one rounding what we add in two, so a few of the directions' bfloat16 numbers are
# their neighbours. An element of an update is below 1.2 in size: it then differs by a few units of
# 2^-8.
UNIT = 2**-8
ADJUSTMENTS = [None, "original", "match_rms_adamw"]
ADJUSTMENTS += ["spectral_unclamped"] * (torch.__version__ >= (2, 14))


@pytest.mark.parametrize("adjust", ADJUSTMENTS)
@pytest.mark.parametrize("nesterov", [True, False])
def test_muon_is_torch_s_within_bfloat16(adjust: str | None, nesterov: bool) -> None:
    ours, theirs = pairs_of([*SHAPES[:5], (260, 300)])
    numbers = {"lr": 0.02, "adjust_lr_fn": adjust, "nesterov": nesterov}
    own = amp.optim.Muon(ours, **numbers)
    stock = torch.optim.Muon(theirs, **numbers)
    for _ in range(5):
        new_gradients(ours, theirs)
        before = [p.detach().clone() for p in ours]
        own.step()
        stock.step()
        for p, q, old in zip(ours, theirs, before, strict=True):
            rows, columns = p.shape
            factor = math.sqrt(max(1, rows / columns))
            if adjust == "match_rms_adamw":
                factor = 0.2 * math.sqrt(max(p.shape))
            elif adjust == "spectral_unclamped":
                factor = math.sqrt(rows / columns)
            assert (p - q).abs().max() <= 4 * UNIT * 0.02 * factor
            assert (p - q).norm() <= 0.02 * (q - old).norm()
            assert (p - old).abs().max() > 20 * UNIT * 0.02 * factor / math.sqrt(max(p.shape))
            with torch.no_grad():
                q.copy_(p)
            assert torch.allclose(
                own.state[p]["momentum_buffer"], stock.state[q]["momentum_buffer"], atol=1e-6
            )


def test_clipping_is_of_the_norm_of_all(device: str) -> None:
    ours, theirs = pairs_of([(8, 32), (32, 8)])
    ours = [nn.Parameter(p.detach().to(device)) for p in ours]
    own = amp.optim.Muon(ours, lr=0.02, max_grad_norm=0.5)
    stock = torch.optim.Muon(theirs, lr=0.02)
    for _ in range(3):
        new_gradients(ours, theirs)
        norm = nn.utils.clip_grad_norm_(theirs, 0.5)
        own.step()
        stock.step()
        assert own.grad_norm == pytest.approx(float(norm), rel=1e-6)
    for p, q in zip(ours, theirs, strict=True):
        found, wanted = own.state[p]["momentum_buffer"], stock.state[q]["momentum_buffer"]
        assert torch.allclose(found.cpu(), wanted, atol=1e-7)
        assert (p.detach().cpu() - q).abs().max() <= 12 * UNIT * 0.02 * 2


def test_state_dicts_go_to_torch_and_back() -> None:
    ours, theirs = pairs_of([(8, 32), (16, 16)])
    own, stock = amp.optim.Muon(ours, lr=0.02), torch.optim.Muon(theirs, lr=0.5)
    new_gradients(ours, theirs)
    own.step()
    stock.load_state_dict(own.torch_state_dict())
    for p, q in zip(ours, theirs, strict=True):
        assert torch.equal(own.state[p]["momentum_buffer"], stock.state[q]["momentum_buffer"])
    assert stock.param_groups[0]["lr"] == 0.02
    stock.param_groups[0]["lr"] = 0.03
    new_gradients(theirs)
    stock.step()
    again = amp.optim.Muon(copy.deepcopy(theirs), momentum_buffer="float16")
    again.load_state_dict(stock.state_dict())
    assert again.param_groups[0]["lr"] == 0.03
    for q, p in zip(theirs, again.param_groups[0]["params"], strict=True):
        wanted = stock.state[q]["momentum_buffer"]
        assert torch.equal(again.state[p]["momentum_buffer"], wanted.half())


@pytest.mark.parametrize("master", [None, "none"])
def test_torchs_own_state_dict_which_has_no_count_is_loaded(master: str | None) -> None:
    """The count goes on from 1. Any other gives the same step, which needs none."""
    ours, theirs = pairs_of([(8, 32), (16, 16)])
    stock = torch.optim.Muon(theirs, lr=0.02)
    for _ in range(3):
        new_gradients(theirs)
        stock.step()
    saved = copy.deepcopy(stock.state_dict())
    assert "step" not in saved["state"][0]
    counted = copy.deepcopy(ours)
    own, twin = (amp.optim.Muon(each, lr=0.5, master=master) for each in (ours, counted))
    own.load_state_dict(saved)
    for state in saved["state"].values():
        state["step"] = torch.tensor(3.0)
    twin.load_state_dict(saved)
    new_gradients(ours, counted, theirs)
    for optimizer in (own, twin, stock):
        optimizer.step()
    for p, q, r in zip(ours, counted, theirs, strict=True):
        assert (own.state[p]["step"], twin.state[q]["step"]) == (2, 4)
        assert torch.equal(p, q)
        buffers = own.state[p]["momentum_buffer"], stock.state[r]["momentum_buffer"]
        torch.testing.assert_close(*buffers, rtol=2.0**-22, atol=2.0**-24)


def test_what_is_written_outside_counts(device: str) -> None:
    param = nn.Parameter(torch.randn(32, 32, device=device).bfloat16())
    twin = nn.Parameter(param.detach().clone())
    one, two = amp.optim.Muon([param]), amp.optim.Muon([twin])
    new_gradients([param], [twin])
    one.step()
    two.step()
    with torch.no_grad():
        param.fill_(0.5)
        twin.copy_(torch.full_like(twin, 0.5))
    new_gradients([param], [twin])
    one.step()
    two.step()
    assert torch.equal(param, twin)
    assert (param.detach() - 0.5).abs().max() < 0.1


def test_parameters_may_be_frozen_late_or_empty(device: str) -> None:
    shapes = [(16, 16), (16, 16), (0, 16), (16, 16)]
    params = [nn.Parameter(torch.randn(s, device=device)) for s in shapes]
    params[1].requires_grad_(False)
    optimizer = amp.optim.Muon(params)
    for step in range(3):
        new_gradients([params[0], params[2]])
        params[3].grad = torch.randn_like(params[3]) if step == 1 else None
        optimizer.step()
    assert params[1] not in optimizer.state
    assert optimizer.state[params[0]]["step"].item() == 3
    assert optimizer.state[params[3]]["step"].item() == 1


def test_a_matrix_without_gradient_leaves_the_others_as_they_are(device: str) -> None:
    def run(with_second: bool) -> Tensor:
        torch.manual_seed(3)
        params = [nn.Parameter(torch.randn(16, 32, device=device)) for _ in range(3)]
        optimizer = amp.optim.Muon(params if with_second else [params[0], params[2]])
        for step in range(3):
            torch.manual_seed(10 + step)
            new_gradients([params[0], params[2]])
            params[1].grad = torch.ones_like(params[1]) if step == 0 else None
            optimizer.step()
        return torch.cat([params[0], params[2]]).detach()

    assert torch.equal(run(True), run(False))


@pytest.mark.parametrize("normalize", [None, "rows"])
def test_every_matrix_begins_at_16_bytes_and_has_the_bits_it_has_alone(
    device: str, normalize: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kernels for whole matrices are fast at such addresses alone; odd sizes lie in between."""
    shapes = [(3, 5), (5, 7), (5, 7), (5, 7), (1, 1), (8, 16), (3, 3, 3), (3, 3, 3), (2, 3)]
    seen: list[Tensor] = []

    def watched(*given: Any) -> Any:
        whole = _C.WholeMatrices(*given)

        def make(directions: Tensor) -> Tensor:
            seen.append(directions.clone())
            assert directions.data_ptr() % 16 == 0
            return whole(directions)

        return make

    def stepped(params: list[nn.Parameter], steps: int) -> None:
        optimizer = amp.optim.Muon(params, lr=0.02, normalize=normalize)
        for step in range(steps):
            for p in params:
                p.grad = on(device, random(p.numel(), step), torch.float32).view_as(p)
            optimizer.step()

    if device == "cpu":  # a GPU's products may have other bits in stacks
        together, alone = ([nn.Parameter(torch.ones(s)) for s in shapes] for _ in range(2))
        stepped(together, STEPS)
        for param in alone:
            stepped([param], STEPS)
        assert all(map(torch.equal, together, alone))

    # Which elements are whose is seen where gradients are powers of two of their own.
    monkeypatch.setattr(matrices, "WholeMatrices", watched)
    params = [nn.Parameter(torch.zeros(s, device=device)) for s in shapes]
    optimizer = amp.optim.Muon(params, normalize=normalize)
    for number, p in enumerate(params):
        p.grad = torch.full_like(p, 2.0**number)
    optimizer.step()
    (directions,) = seen
    for number, p in enumerate(params):
        value = torch.tensor(0.05 * 1.95 * 2**number, dtype=torch.bfloat16)  # of the first step
        own = (directions.cpu() == value).tolist()  # between matrices may be anything
        whole = [True] * p.numel()
        assert sum(own[at : at + p.numel()] == whole for at in range(0, len(own), 8)) == 1
