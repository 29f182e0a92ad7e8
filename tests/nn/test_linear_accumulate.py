"""amp_mp.nn.functional.linear_accumulate, and the native product below it."""

from __future__ import annotations

import ctypes
from pathlib import Path

import numpy as np
import pytest
import torch
from pretend_gpu.build import build_cublas
from torch import Tensor, nn
from torch.nn import functional

import amp_mp as amp
from amp_mp import _C

LOW = (torch.bfloat16, torch.float16)
SHAPES = [(1, 1, 1), (3, 5, 7), (17, 1, 4), (2, 9, 1), (513, 3, 2), (1030, 33, 31), (0, 4, 3)]


def whole_numbers(*shape: int, dtype: torch.dtype, device: str = "cpu") -> Tensor:
    """From -8 to 8: sums of their products are exact in float32, in any order."""
    return torch.randint(-8, 9, shape).to(device, dtype)


def product(grad_output: Tensor, input: Tensor) -> Tensor:
    """grad_output^T input over all rows, in float64 by NumPy."""
    rows = [t.detach().double().cpu().flatten(0, -2).numpy() for t in (grad_output, input)]
    return torch.from_numpy(np.einsum("ro,ri->oi", *rows))


@pytest.fixture(scope="module")
def fake() -> ctypes.CDLL:
    """tests/emulators/fake_cublas.c, loaded."""
    return ctypes.CDLL(str(build_cublas()))


@pytest.mark.parametrize("by_gemm", [False, True], ids=["loop", "gemm"])
@pytest.mark.parametrize("dtype", [*LOW, torch.float32])
@pytest.mark.parametrize(("rows", "out", "columns"), SHAPES)
def test_the_product_is_added_whatever_the_shape(
    fake: ctypes.CDLL, rows: int, out: int, columns: int, dtype: torch.dtype, by_gemm: bool
) -> None:
    grad_output = whole_numbers(rows, out, dtype=dtype)
    input = whole_numbers(rows, columns, dtype=dtype)
    before = whole_numbers(out, columns, dtype=torch.float32)
    grad, version = before.clone(), before._version
    gemm = _C.Gemm(fake._name) if by_gemm else None
    calls = ctypes.c_int.in_dll(fake, "calls").value
    _C.accumulate_weight_grad_(grad, grad_output, input, gemm, 12345 if by_gemm else 0)
    assert torch.equal(grad.double(), before.double() + product(grad_output, input))
    assert grad._version > version
    called = ctypes.c_int.in_dll(fake, "calls").value - calls
    assert called == (by_gemm and rows > 0)
    if called:
        assert ctypes.c_void_p.in_dll(fake, "last_handle").value == 12345


@pytest.mark.parametrize("by_gemm", [False, True], ids=["loop", "gemm"])
def test_rows_may_lie_anywhere_in_memory(fake: ctypes.CDLL, by_gemm: bool) -> None:
    gemm = _C.Gemm(fake._name) if by_gemm else None
    wide = whole_numbers(4, 6, 20, dtype=torch.bfloat16)
    cases = {
        "columns of a wider matrix": (wide[..., 3:8], wide[..., 8:20]),
        "transposed": (wide.transpose(0, 2)[..., :2], wide.transpose(0, 2)[..., 1:4]),
        "one row for all": (wide[:, :1].expand(4, 6, 20), wide),
        "a vector": (wide[0, 0, :3], wide[0, 0, 3:9]),
    }
    for name, (grad_output, input) in cases.items():
        grad = torch.zeros(grad_output.shape[-1], input.shape[-1])
        _C.accumulate_weight_grad_(grad, grad_output, input, gemm)
        wanted = product(torch.atleast_2d(grad_output), torch.atleast_2d(input))
        assert torch.equal(grad.double(), wanted), name


def test_a_refusal_of_cublas_is_an_error(fake: ctypes.CDLL) -> None:
    with pytest.raises(RuntimeError, match=r"libcublas\.so\.0 is not loaded"):
        _C.Gemm("libcublas.so.0")
    torch_library = next(Path(torch.__file__).parent.glob("lib/libc10.so"))
    with pytest.raises(RuntimeError, match="has no cublasGemmEx"):
        _C.Gemm(str(torch_library))
    answer = ctypes.c_int.in_dll(fake, "answer")
    answer.value = 13
    try:
        with pytest.raises(RuntimeError, match=r"status 13 to \[3, 4\] \+= \[2, 3\]\^T \[2, 4\]"):
            _C.accumulate_weight_grad_(torch.zeros(3, 4), LEFT, RIGHT, _C.Gemm(fake._name))
    finally:
        answer.value = 0


GRAD, LEFT, RIGHT = torch.zeros(3, 4), torch.zeros(2, 3).bfloat16(), torch.zeros(2, 4).bfloat16()
WRONG = {
    "grad_weight .* must be Float": (GRAD.half(), LEFT, RIGHT),
    "grad_weight .* must be a contiguous matrix": (torch.zeros(4, 3).t(), LEFT, RIGHT),
    r"grad_output .* must have shape \[..., 3\]": (GRAD, RIGHT, RIGHT),
    r"input .* must have shape \[..., 4\]": (GRAD, LEFT, LEFT),
    "input .* must be BFloat16": (GRAD, LEFT, RIGHT.half()),
    "grad_output .* must be float32, float16": (GRAD, LEFT.double(), RIGHT.double()),
    "must agree in all sizes but the last": (GRAD, LEFT, RIGHT[:1]),
    "as many dimensions": (GRAD, LEFT, RIGHT[0]),
    "grad_output .* has layout Sparse": (GRAD, LEFT.to_sparse(), RIGHT),
    "input .* is neither on a CPU nor": (GRAD, LEFT, RIGHT.to("meta")),
}


@pytest.mark.parametrize("message", WRONG)
def test_what_does_not_go_together_is_named(message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        _C.accumulate_weight_grad_(*WRONG[message])
    assert not GRAD.any()


def test_accumulates_is_for_backwards() -> None:
    with pytest.raises(RuntimeError, match="inside a backward"):
        _C.accumulates(nn.Parameter(torch.zeros(2)))


@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize("shape", [(6,), (9, 6), (2, 3, 6), (0, 6), (2, 0, 6)])
@pytest.mark.parametrize("with_bias", [True, False])
def test_it_is_linear_with_a_float32_gradient(
    shape: tuple[int, ...], dtype: torch.dtype, with_bias: bool, device: str
) -> None:
    x = whole_numbers(*shape, dtype=dtype, device=device).requires_grad_()
    weight = nn.Parameter(whole_numbers(5, 6, dtype=dtype, device=device))
    bias = nn.Parameter(whole_numbers(5, dtype=dtype, device=device)) if with_bias else None
    out = amp.nn.functional.linear_accumulate(x, weight, bias)
    assert torch.equal(out, functional.linear(x, weight, bias))
    grad_output = whole_numbers(*out.shape, dtype=dtype, device=device)
    out.backward(grad_output, retain_graph=True)
    out.backward(grad_output)
    assert weight.grad is not None
    assert weight.grad.dtype == torch.float32
    wanted = 2 * product(torch.atleast_2d(grad_output), torch.atleast_2d(x))
    assert torch.equal(weight.grad.double().cpu(), wanted)
    assert x.grad is not None
    assert torch.equal(x.grad, 2 * (grad_output @ weight.detach()))
    if bias is not None:
        assert bias.grad is not None
        assert bias.grad.dtype == dtype
        assert torch.equal(bias.grad, 2 * grad_output.reshape(-1, 5).sum(0))


def test_float32_frozen_and_no_grad_are_plain_linear(device: str) -> None:
    x = torch.randn(3, 4, device=device)
    weight = nn.Parameter(torch.randn(2, 4, device=device))
    out = amp.nn.functional.linear_accumulate(x, weight)
    assert out.grad_fn is not None
    assert "_Linear" not in out.grad_fn.name()
    low = nn.Parameter(weight.detach().bfloat16())
    with torch.no_grad():
        amp.nn.functional.linear_accumulate(x.bfloat16(), low)
    low.requires_grad_(False)
    out = amp.nn.functional.linear_accumulate(x.bfloat16().requires_grad_(), low)
    out.sum().backward()
    assert low.grad_dtype == torch.bfloat16


def test_errors() -> None:
    linear = amp.nn.functional.linear_accumulate
    x, weight = torch.ones(3, 4).bfloat16(), nn.Parameter(torch.ones(2, 4).bfloat16())
    with pytest.raises(ValueError, match=r"weight of shape \(2, 4\) is computed by <MulBackward0"):
        linear(x, weight * 2)
    functional.linear(x, weight).sum().backward()
    with pytest.raises(ValueError, match=r"gradient in torch.bfloat16 already; set weight.grad ="):
        linear(x, weight)
    assert weight.grad_dtype == torch.bfloat16
    weight.grad = None
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        linear(x[:, :3], weight)
    with pytest.raises(RuntimeError, match="same dtype"):
        linear(x.float(), weight)
    with pytest.raises(TypeError, match="weight must be a plain tensor"):
        linear(x, nn.Parameter(weight.detach().to("meta")))
