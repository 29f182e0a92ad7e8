"""amp_C and its applier against float64 NumPy: formulas, names, other objects, layouts, numbers."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import pytest
import torch
from apex_reference import adagrad, adam, gradients, lamb, novograd, parameters, sgd, start
from helpers import DTYPES, PRETEND_GPU
from tiers import paired
from torch import Tensor, nn

from amp_mp.apex import amp_C
from amp_mp.apex.contrib.clip_grad import clip_grad_norm_
from amp_mp.apex.multi_tensor_apply import MultiTensorApply, multi_tensor_applier

# Zero-size tensors first, last and between, one element, ragged sizes and more than 2^20.
SIZES = {
    "first": [0, 5, 4097],
    "last": [3, 64, 0],
    "between": [33, 0, 0, 1],
    "empty": [0, 0],
    "none": [],
    "large": [7, (1 << 20) + 3, 1],
    "many": [*range(70), 65537],
}
EPS = {"float32": 1e-6, "float16": 1e-3, "bfloat16": 8e-3}


def flag(device: str, value: int = 0) -> Tensor:
    return torch.full((1,), value, dtype=torch.int32, device=device)


def tensors(
    sizes: list[int], dtype: str, device: str, seed: int = 0, shift: int = 0
) -> list[Tensor]:
    source = torch.Generator().manual_seed(seed)
    made = []
    for size in sizes:
        base = torch.randn(size + shift, generator=source)[shift:]
        whole = torch.zeros(size + shift, dtype=DTYPES[dtype], device=device)
        made.append(whole[shift:].copy_(base))
    return made


def doubles(found: list[Tensor]) -> list[Any]:
    return [t.detach().double().cpu().numpy() for t in found]


def close(found: list[Tensor], wanted: list[Any], eps: float) -> None:
    for each, other in zip(doubles(found), wanted, strict=True):
        np.testing.assert_allclose(each, other, rtol=eps, atol=eps)


def run(op: Any, noop: Tensor, lists: list[list[Tensor]], *args: Any) -> Any:
    return multi_tensor_applier(op, noop, lists, *args)


def test_the_applier_passes_its_chunk_size() -> None:
    assert MultiTensorApply.available
    seen = MultiTensorApply(7)(lambda *args: args, flag("cpu"), [[]], 1.0)
    assert seen[0] == 7
    assert multi_tensor_applier.chunk_size == 65536


@pytest.mark.parametrize(("sizes", "dtype", "out", "shift"), paired(SIZES, DTYPES, DTYPES, (0, 1)))
def test_scale_and_axpby(device: str, sizes: str, dtype: str, out: str, shift: int) -> None:
    x = tensors(SIZES[sizes], dtype, device, 1, shift)
    y = tensors(SIZES[sizes], out, device, 2, shift)
    to = [torch.full_like(t, 7.0) for t in y]
    noop = flag(device)
    run(amp_C.multi_tensor_scale, noop, [x, to], 0.3)
    close(to, [0.3 * a for a in doubles(x)], EPS[out])
    run(amp_C.multi_tensor_axpby, noop, [x, y, to], 0.3, -2.0, -1)
    close(to, [0.3 * a - 2 * b for a, b in zip(doubles(x), doubles(y), strict=True)], 4 * EPS[out])
    run(amp_C.multi_tensor_scale, noop, [to, to], 0.5)  # in place
    assert noop.item() == 0


@pytest.mark.parametrize(("sizes", "dtype", "shift"), paired(SIZES, DTYPES, (0, 1)))
def test_norms(device: str, sizes: str, dtype: str, shift: int) -> None:
    x, noop = tensors(SIZES[sizes], dtype, device, 1, shift), flag(device)
    wanted = np.array([np.linalg.norm(a) for a in doubles(x)])
    total, each = run(amp_C.multi_tensor_l2norm, noop, [x], True)
    np.testing.assert_allclose(total.cpu().numpy(), [np.linalg.norm(wanted)], rtol=1e-6)
    np.testing.assert_allclose(each.cpu().numpy(), wanted, rtol=1e-6)
    scale = torch.tensor([0.25], device=device)
    half, parts = run(amp_C.multi_tensor_unscale_l2norm, noop, [x], scale, True)
    assert torch.equal(half, total * 0.25)
    assert torch.equal(parts, each * 0.25)
    total, each = run(amp_C.multi_tensor_l2norm, noop, [x])
    assert (total.shape, each.shape, total.dtype, noop.item()) == ((1,), (0,), torch.float32, 0)


@pytest.mark.parametrize("mixed", [True, False])
def test_mixed_dtypes_and_layouts(device: str, mixed: bool) -> None:
    """Elements are paired by place, whatever the memory's order; each tensor has its own dtype."""
    kinds = list(DTYPES) if mixed else ["float32"] * 3
    x = [torch.randn(2, 3, 4, 5).to(device, DTYPES[kind]) for kind in kinds]
    y = [t.flip(0).contiguous(memory_format=torch.channels_last) for t in x]
    to = [torch.empty_like(t, dtype=torch.float32) for t in y[::-1]]
    to[1] = torch.empty((5, 4, 3, 2), device=device).permute(3, 2, 1, 0)
    noop = flag(device)
    run(amp_C.multi_tensor_scale, noop, [x, to], 2.0)
    close(to, [2 * a for a in doubles(x)], 1e-6)
    run(amp_C.multi_tensor_axpby, noop, [x, y, to], 2.0, 0.5)
    close(to, [2 * a + b / 2 for a, b in zip(doubles(x), doubles(y), strict=True)], 1e-6)
    total, _ = run(amp_C.multi_tensor_l2norm, noop, [[*x, *y]])
    wanted = np.sqrt(sum((a * a).sum() for a in doubles([*x, *y])))
    np.testing.assert_allclose(total.item(), wanted, rtol=1e-6)


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize(("sizes", "dtype"), [("many", "float16"), ("large", "bfloat16")])
def test_the_flag_at_each_tensor(device: str, sizes: str, dtype: str, bad: float) -> None:
    x, noop = tensors(SIZES[sizes], dtype, device), flag(device)
    y = [t.clone() for t in x]
    to = [torch.empty_like(t) for t in x]
    lists = {
        amp_C.multi_tensor_scale: ([x, to], 1.0),
        amp_C.multi_tensor_axpby: ([x, y, to], 1.0, 1.0, 0),
        amp_C.multi_tensor_l2norm: ([x], True),
        amp_C.multi_tensor_unscale_l2norm: ([x], torch.ones(1, device=device)),
    }
    chosen = [i for i, t in enumerate(x) if t.numel()]
    for i in [chosen[0], chosen[len(chosen) // 2], chosen[-1]]:
        for at in {0, x[i].numel() // 2, x[i].numel() - 1}:
            kept = x[i][at].clone()
            x[i][at] = bad
            for op, (given, *args) in lists.items():
                noop.zero_()
                run(op, noop, given, *args)
                assert noop.item() == 1, (op.__name__, i, at)
            x[i][at] = kept
    for op, (given, *args) in lists.items():  # clean inputs do not clear it
        run(op, noop, given, *args)
        assert noop.item() == 1


def test_arg_to_check(device: str) -> None:
    x, y = torch.ones(3, device=device), torch.full((3,), torch.inf, device=device)
    to = torch.empty(3, device=device)
    found = {}
    for arg in (-1, 0, 1):
        noop = flag(device)
        run(amp_C.multi_tensor_axpby, noop, [[x], [y], [to]], 1.0, 1.0, arg)
        found[arg] = noop.item()
    assert found == {-1: 1, 0: 0, 1: 1}
    assert torch.isinf(to).all()  # written in any case, as in Apex
    with pytest.raises(ValueError, match="arg_to_check must be -1, 0 or 1, found 2"):
        run(amp_C.multi_tensor_axpby, flag(device), [[x], [y], [to]], 1.0, 1.0, 2)


def test_large_numbers_have_finite_norms(device: str) -> None:
    """Squares that float32 does not have are no overflow; infinite norms say so."""
    noop = flag(device)
    total, each = run(
        amp_C.multi_tensor_l2norm, noop, [[torch.full((4,), 1e25, device=device)]], True
    )
    np.testing.assert_allclose(total.item(), 2e25, rtol=1e-6)
    assert noop.item() == 0
    total, each = run(
        amp_C.multi_tensor_l2norm,
        noop,
        [[torch.ones(2, device=device), torch.tensor([torch.nan], device=device)]],
        True,
    )
    assert total.isinf().all()
    assert each.isinf().tolist() == [False, True]


@pytest.mark.parametrize(
    ("op", "count", "args"),
    [
        ("multi_tensor_scale", 2, (1.0,)),
        ("multi_tensor_axpby", 3, (1.0, 1.0, -1)),
        ("multi_tensor_adam", 4, (0.1, 0.9, 0.99, 1e-8, 1, 1, 1, 0.0)),
        ("multi_tensor_sgd", 3, (0.0, 0.9, 0.0, 0.1, False, True, False, 1.0)),
        ("multi_tensor_lamb", 4, (0.1, 0.9, 0.99, 1e-6, 1, 1, 0.0, 1, 1, 1.0, 1.0, False)),
        ("multi_tensor_adagrad", 3, (0.1, 1e-8, 0, 0.0)),
        (
            "multi_tensor_novograd",
            3,
            (torch.ones(2), 0.1, 0.9, 0.99, 1e-8, 1, 0, 0.0, 1, 0, 2),
        ),
    ],
)
def test_lists_that_do_not_fit_are_named(op: str, count: int, args: tuple[Any, ...]) -> None:
    function = getattr(amp_C, op)
    lists = [[torch.ones(3), torch.ones(2)] for _ in range(count)]
    for wrong, match in (
        ([*lists[:-1], lists[-1][:1]], rf"tensor_lists\[{count - 1}\] has 1 tensors, but .* 2"),
        ([*lists[:-1], lists[-1][::-1]], rf"tensor_lists\[{count - 1}\]\[0\] has shape \(2,\)"),
        (lists[:1], f"tensor_lists must be {count}"),
    ):
        with pytest.raises(ValueError, match=match):
            run(function, flag("cpu"), wrong, *args)
    assert all((t == 1).all() for each in lists for t in each)
    with pytest.raises(TypeError):
        run(function, flag("cpu"), lists, *args, 1, 2, 3)
    empty = [torch.ones(0), *args[1:]] if op.endswith("novograd") else args
    run(function, flag("cpu"), [[] for _ in lists], *empty)


def with_states(device: str, count: int, dtype: str) -> list[list[Tensor]]:
    params = [p.detach() for p in parameters(device, DTYPES[dtype])]
    return [
        params,
        *([torch.zeros_like(p, dtype=torch.float32) for p in params] for _ in range(count)),
    ]


def grads_of(device: str, step: int, size: float = 1.0) -> list[Tensor]:
    return [torch.from_numpy(np.array(g)).to(device) for g in gradients(step, size)]


@pytest.mark.parametrize(("mode", "corrected"), paired((0, 1), (0, 1)))
def test_adam(device: str, mode: int, corrected: int) -> None:
    params, m, v = with_states(device, 2, "float32")
    given = {"lr": 0.02, "betas": (0.9, 0.98), "eps": 1e-8, "weight_decay": 0.1}
    modes = {"adam_w_mode": bool(mode), "bias_correction": bool(corrected)}
    wanted = adam(start(params), 3, given | modes)
    for step in range(3):
        lists = [grads_of(device, step), params, m, v]
        args = (0.02, 0.9, 0.98, 1e-8, step + 1, mode, corrected, 0.1)
        run(amp_C.multi_tensor_adam, flag(device), lists, *args)
    close(params, wanted, 2e-6)
    assert all(p.grad is None for p in params)


def test_adam_of_other_dtypes(device: str) -> None:
    """bfloat16 parameters are rounded, gradients may be float16, and infinite ones are written."""
    params, m, v = with_states(device, 2, "bfloat16")
    before = [p.clone() for p in params]
    grads = [g.half() for g in grads_of(device, 0)]
    args = (0.1, 0.9, 0.98, 1e-8, 1, 1, 1, 0.0)
    run(amp_C.multi_tensor_adam, flag(device), [grads, params, m, v], *args)
    for p, b, g in zip(params, before, grads, strict=True):
        close([p], [b.double().cpu().numpy() - 0.1 * np.sign(doubles([g])[0])], 1e-2)
    grads[0].fill_(torch.inf)
    run(amp_C.multi_tensor_adam, flag(device), [grads, params, m, v], *args)
    assert not params[0].isfinite().any()


@pytest.mark.parametrize(("weight_decay", "mode", "averages"), paired((0.0, 0.1), (0, 1), (0, 1)))
def test_lamb(device: str, weight_decay: float, mode: int, averages: int) -> None:
    params, m, v = with_states(device, 2, "float32")
    given = {"lr": 0.02, "betas": (0.9, 0.98), "eps": 1e-6, "weight_decay": weight_decay}
    given |= {"bias_correction": True, "max_grad_norm": 1.0, "use_nvlamb": False}
    given |= {"adam_w_mode": mode, "grad_averaging": averages}
    wanted = lamb(start(params), 3, given, 3.0)
    for step in range(3):
        grads, noop = grads_of(device, step, 3.0), flag(device)
        norm, _ = run(amp_C.multi_tensor_l2norm, noop, [grads])
        args = (0.02, 0.9, 0.98, 1e-6, step + 1, 1, weight_decay, averages, mode, norm, 1.0, False)
        run(amp_C.multi_tensor_lamb, noop, [grads, params, m, v], *args)
    close(params, wanted, 2e-6)


@pytest.mark.parametrize(("corrected", "mode"), paired((0, 1), (0, 1)))
def test_novograd(device: str, corrected: int, mode: int) -> None:
    params, m = with_states(device, 1, "float32")
    given = {"lr": 0.02, "betas": (0.9, 0.98), "eps": 1e-8, "weight_decay": 0.1}
    modes = {"bias_correction": bool(corrected), "reg_inside_moment": mode == 0}
    wanted = novograd(start(params), 3, given | modes | {"grad_averaging": True})
    first = grads_of(device, 0)
    norms = torch.stack([g.norm() for g in first])
    for step in range(3):
        args = (norms, 0.02, 0.9, 0.98, 1e-8, step + 1, corrected, 0.1, 1, mode, 2)
        run(amp_C.multi_tensor_novograd, flag(device), [grads_of(device, step), params, m], *args)
    close(params, wanted, 2e-6)


@pytest.mark.parametrize("mode", [0, 1])
def test_adagrad(device: str, mode: int) -> None:
    params, h = with_states(device, 1, "float32")
    given = {"lr": 0.02, "eps": 1e-8, "weight_decay": 0.1, "adagrad_w_mode": mode}
    wanted = adagrad(start(params), 3, given)
    for step in range(3):
        lists = [grads_of(device, step), params, h]
        run(amp_C.multi_tensor_adagrad, flag(device), lists, 0.02, 1e-8, mode, 0.1)
    close(params, wanted, 2e-6)


@pytest.mark.parametrize(
    ("momentum", "nesterov", "after"),
    [(0.9, False, False), (0.9, True, False), (0.0, False, False), (0.9, True, True)],
)
def test_sgd(device: str, momentum: float, nesterov: bool, after: bool) -> None:
    """Scaled gradients, float16 copies, and nothing where the flag is set."""
    params, buffers = with_states(device, 1, "float32")
    halves = [p.half() for p in params]
    for buffer in buffers:
        buffer.fill_(torch.nan)  # what the first run ignores
    given = {"lr": 0.1, "momentum": momentum, "dampening": 0.0, "weight_decay": 0.1}
    wanted = sgd(start(params), 3, given | {"nesterov": nesterov, "wd_after_momentum": after})
    for step in range(3):
        lists = [[g * 4 for g in grads_of(device, step)], params, buffers, halves]
        args = (0.1, momentum, 0.0, 0.1, nesterov, step == 0, after, 0.25)
        before = [t.clone() for each in lists for t in each]
        run(amp_C.multi_tensor_sgd, flag(device, 1), lists, *args)
        same = zip(before, (t for each in lists for t in each), strict=True)
        assert all(torch.equal(a.nan_to_num(9), b.nan_to_num(9)) for a, b in same)
        run(amp_C.multi_tensor_sgd, flag(device), lists, *args)
    close(params, wanted, 2e-6)
    assert all(torch.equal(h, p.half()) for h, p in zip(halves, params, strict=True))


def test_update_scale_hysteresis(device: str) -> None:
    """Every second overflow in a row lowers the scale, two clean steps double it."""
    scale = torch.tensor([65536.0], device=device)
    growth, patience = flag(device), flag(device, 2)
    seen = []
    for found in (0, 1, 0, 1, 1, 1, 0, 0, 0, 0):
        args = (torch.tensor([float(found)], device=device), 2.0, 0.5, 2, 2)
        assert amp_C.update_scale_hysteresis(scale, growth, patience, *args) is scale
        seen.append((int(scale.item()) // 16384, growth.item(), patience.item()))
    wanted = [(4, 1, 2), (4, 0, 1), (4, 1, 2), (4, 0, 1), (2, 0, 0), (1, 0, -1)]
    assert seen == [*wanted, (1, 1, 2), (2, 0, 2), (2, 1, 2), (4, 0, 2)]


@pytest.mark.parametrize(
    ("growth_factor", "backoff_factor", "growth_interval", "hysteresis", "wanted"),
    [
        (1.0, 0.5, 1, 1, [8, 8, 4, 2, 2]),
        (0.5, 1.0, 1, 1, [4, 2, 2, 2, 1]),
        (2.0, 0.5, 0, 0, [8, 8, 4, 2, 2]),
    ],
)
def test_update_scale_hysteresis_of_any_numbers(
    device: str,
    growth_factor: float,
    backoff_factor: float,
    growth_interval: int,
    hysteresis: int,
    wanted: list[float],
) -> None:
    """What Apex takes, which checks none: a growth of 1 for a scale that only falls, say."""
    scale, growth, patience = torch.tensor([8.0], device=device), flag(device), flag(device, 1)
    numbers = growth_factor, backoff_factor, growth_interval, hysteresis
    seen = []
    for found in (0, 0, 1, 1, 0):
        found_inf = torch.tensor([float(found)], device=device)
        amp_C.update_scale_hysteresis(scale, growth, patience, found_inf, *numbers)
        seen.append(scale.item())
    assert seen == wanted


@pytest.mark.parametrize("growth_factor", [1.0, 2.0, 4.0])
def test_a_scale_under_hysteresis_has_no_bounds(device: str, growth_factor: float) -> None:
    """Apex's rule in float32: to 0 below the smallest normal number, never to infinity.

    The patience is full after a clean step; once it is used up each overflow lowers the scale.
    """
    backoff, interval, patience = 0.25, 3, 4
    scale, tracker, left = np.float32(1024), 0, patience
    tensors = torch.tensor([1024.0], device=device), flag(device), flag(device, patience)
    smallest, largest, seen = 2.0**-126, float(np.finfo(np.float32).max), []
    for run, overflows in ((6, True), (400, False), (150, True), (9, False)):
        for _ in range(run):
            if overflows:
                left, tracker = left - 1, 0
                if left <= 0:
                    lowered = np.float32(float(scale) * backoff)
                    scale = lowered if lowered >= smallest else np.float32(0)
            else:
                left, tracker = patience, (tracker + 1) % interval
                grown = float(scale) * growth_factor
                if tracker == 0 and grown <= largest:
                    scale = np.float32(grown)
            found_inf = torch.tensor([float(overflows)], device=device)
            amp_C.update_scale_hysteresis(
                *tensors, found_inf, growth_factor, backoff, interval, patience
            )
            assert [t.item() for t in tensors] == [scale, tracker, left]
        seen.append(float(scale))
    grown = 16.0 if growth_factor == 1 else float(2**127 if growth_factor == 2 else 2**126)
    assert seen == [16.0, grown, 0.0, 0.0]


@pytest.mark.parametrize("name", amp_C.__all__)
def test_each_function_says_more_than_its_signature(name: str) -> None:
    assert len(inspect.getdoc(getattr(amp_C, name)).partition("\n")[2].strip()) > 40


ONE, WIDE = torch.ones(2), torch.ones(2, dtype=torch.float64)
NOVOGRAD = (ONE, 0.1, 0.9, 0.99, 1e-8, 1, 1, 0.0, 1, 0, 0)  # the last is norm_type
REFUSED: list[tuple[type[Exception], str, str, Any, tuple[Any, ...]]] = [
    (TypeError, r"tensor_lists\[1\]\[0\] is None", "scale", [[ONE], [None]], (2.0,)),
    (TypeError, "tensor_lists holds a <class 'float'>", "scale", [[ONE], [3.0]], (2.0,)),
    (
        TypeError,
        r"tensor_lists\[1\] must be a list of tensors, found 3",
        "scale",
        [[ONE], 3],
        (2.0,),
    ),
    (
        TypeError,
        r"the state of tensor_lists\[1\]\[0\].*must be float32",
        "adagrad",
        [[ONE], [ONE], [WIDE]],
        (0.1, 1e-8, 0, 0.0),
    ),
    (ValueError, "norm_type must be 2", "novograd", [[ONE], [ONE], [ONE]], NOVOGRAD),
]


@pytest.mark.parametrize(("error", "words", "op", "lists", "args"), REFUSED)
def test_what_an_operator_does_not_take_is_named(
    error: type[Exception], words: str, op: str, lists: Any, args: tuple[Any, ...]
) -> None:
    with pytest.raises(error, match=words):
        getattr(amp_C, f"multi_tensor_{op}")(0, flag("cpu"), lists, *args)
    assert (ONE == 1).all()
    assert (WIDE == 1).all()


def test_numbers_may_be_tensors() -> None:
    """lr and the global norm; the caller's gradients and .grad stay as they are."""
    found: list[Any] = []
    for number in (float, lambda x: torch.tensor([x], dtype=torch.float64)):
        param, grad, *states = (torch.full((3,), x) for x in (1.0, 2.0, 0.0, 0.0))
        param.requires_grad_()
        rest = (0.9, 0.99, 1e-6, 1, True, 0.1, 1, 1, number(4.0), 1.0, False)
        lists = [[grad], [param], *([s] for s in states)]
        amp_C.multi_tensor_lamb(0, flag("cpu"), lists, number(0.25), *rest)
        assert param.grad is None
        assert (grad == 2).all()
        found.append(param.detach())
    assert torch.equal(*found)
    assert (found[0] < 1).all()


def test_clipping_reads_dense_layouts_itself() -> None:
    """float16 of other layouts has a finite norm as well; gaps and other dtypes are torch's."""
    large = torch.full((2, 3, 4, 5), 6e4, dtype=torch.float16)
    for grad in (large.to(memory_format=torch.channels_last), large.permute(3, 1, 0, 2)):
        param = nn.Parameter(torch.empty_like(grad))
        param.grad = grad.clone()
        norm = clip_grad_norm_([param], 1.0)
        assert norm.item() == pytest.approx(6e4 * 120**0.5, rel=1e-3)
        torch.testing.assert_close(param.grad, torch.full_like(grad, 120**-0.5), rtol=2e-3, atol=0)
    for dtype in (torch.float32, torch.float64):
        param = nn.Parameter(torch.zeros(4, 2, dtype=dtype))
        param.grad = torch.arange(16.0, dtype=dtype).view(4, 4)[:, ::2]
        before = param.grad.clone()
        norm = clip_grad_norm_(param, 1.0)
        assert norm.dtype == dtype
        torch.testing.assert_close(norm, before.norm())
        torch.testing.assert_close(param.grad, before / before.norm())


@pytest.mark.skipif(not PRETEND_GPU, reason="only the pretend GPU counts waits")
def test_the_host_waits_for_nothing() -> None:
    from pretend_gpu.device import ledger

    def lists(count: int) -> list[list[torch.Tensor]]:
        return [[torch.ones(s, device="cuda") for s in ((5,), (3, 2), (0,))] for _ in range(count)]

    noop, one = flag("cuda"), torch.ones(1, device="cuda")
    grad_norms, patience = torch.ones(3, device="cuda"), flag("cuda") + 2
    param = nn.Parameter(one.clone())
    param.grad = one.clone()
    betas = (0.1, 0.9, 0.99, 1e-8, 1)
    calls: dict[str, tuple[Any, ...]] = {
        "scale": (lists(2), 0.5),
        "axpby": (lists(3), 0.5, 2.0),
        "l2norm": (lists(1), True),
        "unscale_l2norm": (lists(1), one),
        "adam": (lists(4), *betas, 1, 1, 0.1),
        "adagrad": (lists(3), 0.1, 1e-8, 0, 0.1),
        "lamb": (lists(4), *betas, 1, 0.1, 1, 1, one, 1.0, False),
        "novograd": (lists(3), grad_norms, *betas, 0, 0.1, 1, 0, 2),
        "sgd": (lists(4), 0.1, 0.9, 0.0, 0.1, False, True, False, 0.5),
    }
    with ledger() as found:
        for name, given in calls.items():
            getattr(amp_C, f"multi_tensor_{name}")(0, noop, *given)
        amp_C.update_scale_hysteresis(one, noop, patience, 0 * one, 2.0, 0.5, 2000, 2)
        clip_grad_norm_([param], 1.0)
    assert (found.syncs, found.waits) == ([], 0)
    assert found.launches > 20
