"""TypedTensor: what is valid, converted and kept, access by access."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from helpers import random, raw_bytes
from torch import Tensor

from amp_mp.compat.typed_tensor import TypedTensor

F64, F32, F16, BF16 = torch.float64, torch.float32, torch.float16, torch.bfloat16
ALL = [F64, F32, F16, BF16]
INF, NAN = math.inf, math.nan


def filled(device: str, values: Any, dtype: torch.dtype = F32, **kwargs: Any) -> TypedTensor:
    return TypedTensor.from_tensor(torch.tensor(values, dtype=dtype, device=device), **kwargs)


# Two values, four types.


def test_data_and_gradient_have_their_own_types(device: str) -> None:
    blob = TypedTensor((2, 3), F32, F16, device)
    assert (blob.data().dtype, blob.grad().dtype) == (F32, F16)
    blob.mutable_grad(F64).fill_(3)
    blob.mutable_data(BF16).fill_(2)
    assert (blob.current_dtype, blob.current_grad_dtype) == (BF16, F64)
    assert (blob.valid_dtypes, blob.valid_grad_dtypes) == ({BF16}, {F64})
    assert (blob.data() == 2).all()
    assert (blob.grad() == 3).all()
    assert (blob.data().dtype, blob.grad().dtype) == (F32, F16)
    assert blob.data().device.type == device
    assert TypedTensor((1,), BF16).grad().dtype == BF16


@pytest.mark.parametrize("dtype", ALL)
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 0, 5), (2, 3, 5)])
def test_what_was_never_written_is_zero_in_every_type(
    device: str, dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    blob = TypedTensor(shape, device=device)
    for found in (blob.data(dtype), blob.grad(dtype), blob.mutable_data(dtype), blob.data(F64)):
        assert found.shape == shape
        assert (found == 0).all()


def test_memory_is_taken_when_a_type_is_asked_for_and_counted(device: str) -> None:
    blob = TypedTensor((3, 5), F32, F16, device)
    sizes = [blob.nbytes]
    for access in (
        blob.data,
        lambda: blob.data(F16),
        lambda: blob.mutable_data(F64),
        lambda: blob.data(F16),
        blob.grad,
        lambda: blob.mutable_grad(F32),
    ):
        access()
        sizes.append(blob.nbytes)
    assert [size // 15 for size in sizes] == [0, 4, 6, 14, 14, 16, 20]


# Reads.


def test_a_float32_master_read_in_other_types_and_back_has_its_bits(device: str) -> None:
    values = torch.from_numpy(random(4097, seed=1, spread=1e3, special=True)).to(device)
    blob = TypedTensor.from_tensor(values)
    for dtype in (F16, BF16, F64, F16):
        blob.data(dtype)
        assert raw_bytes(blob.data(F32)) == raw_bytes(values)


def test_a_conversion_is_done_once_and_again_after_the_next_write(device: str) -> None:
    blob = filled(device, [1.0, 2.0])
    half = blob.data(F16)
    version = half._version
    for _ in range(3):
        assert blob.data(F32).dtype == F32
        assert blob.data(F16) is half
    assert half._version == version
    blob.mutable_data(F32).add_(1)
    assert blob.data(F16) is half  # the memory is used again
    assert half._version > version
    assert half.tolist() == [2.0, 3.0]


def test_validity_access_by_access(device: str) -> None:
    blob = TypedTensor((3,), F32, device=device)
    steps: list[tuple[Callable[[torch.dtype], Tensor], torch.dtype, set[torch.dtype]]] = [
        (blob.data, F32, {F32}),
        (blob.data, F16, {F32, F16}),
        (blob.data, F16, {F32, F16}),
        (blob.data, F64, {F32, F16, F64}),
        (blob.data, F32, {F32, F16, F64}),
        (blob.mutable_data, F32, {F32}),
        (blob.data, BF16, {F32, BF16}),
        (blob.mutable_data, F16, {F16}),
        (blob.mutable_data, F64, {F64}),
        (blob.data, F32, {F64, F32}),
    ]
    assert (blob.current_dtype, blob.valid_dtypes) == (F32, set())
    for access, dtype, valid in steps:
        assert access(dtype).dtype == dtype
        assert (blob.current_dtype, blob.valid_dtypes) == (dtype, valid)
    assert blob.valid_grad_dtypes == set()


def test_random_accesses_agree_with_a_model_in_numpy(device: str) -> None:
    """The model: one array, of the type written last; reading casts it, float16 saturating."""
    kinds = {F64: np.float64, F32: np.float32, F16: np.float16}
    generator = np.random.default_rng(0)
    blob, model = TypedTensor((5,), device=device), np.zeros(5, np.float32)
    for _ in range(300):
        dtype = list(kinds)[generator.integers(3)]
        kind = kinds[dtype]
        limit = 65504.0 if kind is np.float16 else INF
        # In two steps, as torch does from float64.
        read = np.clip(model.astype(np.float32), -limit, limit) if model.dtype != kind else model
        read = read.astype(kind)
        if generator.random() < 0.5:
            found = blob.data(dtype)
        else:
            found = blob.mutable_data(dtype)
            model = read
        assert raw_bytes(found) == raw_bytes(torch.from_numpy(read))
        if model is read:
            model = generator.standard_normal(5).astype(kind) * kind(1000)
            found.copy_(torch.from_numpy(model))


# Overflow.


@pytest.mark.parametrize("source", [F64, F32, BF16])
def test_data_saturates_in_float16_and_gradients_do_not(device: str, source: torch.dtype) -> None:
    values = torch.tensor([7e4, -7e4, INF, -INF, NAN, 1.0], dtype=source, device=device)
    blob = TypedTensor.from_tensor(values)
    blob.mutable_grad(source).copy_(values)
    found, gradient = blob.data(F16).tolist(), blob.grad(F16).tolist()
    assert found[:4] + found[5:] == [65504.0, -65504.0, 65504.0, -65504.0, 1.0]
    assert gradient[:4] + gradient[5:] == [INF, -INF, INF, -INF, 1.0]
    assert math.isnan(found[4])
    assert math.isnan(gradient[4])
    assert blob.data(source).tolist()[:4] == values.tolist()[:4]  # the master is as it was


# Updates.


@pytest.mark.parametrize("grad_dtype", ALL)
def test_an_update_is_made_in_the_masters_type_whatever_was_read_before(
    device: str, grad_dtype: torch.dtype
) -> None:
    """2^-13 is lost beside 1 in float16; four of them are half a step."""
    blob = filled(device, [1.0], grad_dtype=grad_dtype)
    blob.mutable_grad().fill_(2.0**-13)
    for count in range(1, 5):
        assert blob.data(F16).dtype == F16  # the forward pass
        blob.update()
        assert blob.data().item() == 1 - count * 2.0**-13
    assert blob.data(F16).item() == 1 - 2.0**-11
    assert blob.grad().item() == 2.0**-13


@pytest.mark.parametrize("dtype", ALL)
def test_an_update_leaves_only_the_master_valid(device: str, dtype: torch.dtype) -> None:
    blob = filled(device, [3.0, 4.0], dtype)
    blob.mutable_grad(F32).fill_(1)
    for other in ALL:
        blob.data(other)
    blob.update()
    assert (blob.current_dtype, blob.valid_dtypes) == (dtype, {dtype})
    assert all(blob.data(other).tolist() == [2.0, 3.0] for other in ALL)


def test_an_infinite_gradient_is_seen_in_the_master(device: str) -> None:
    blob = filled(device, [1.0])
    blob.mutable_grad(F32).fill_(1e6)
    blob.mutable_grad(F16)
    blob.update()
    assert blob.data().item() == -INF


# From a tensor, and errors.


@pytest.mark.parametrize("dtype", ALL)
def test_from_tensor_copies_shape_type_and_values(device: str, dtype: torch.dtype) -> None:
    tensor = torch.randn(3, 5, device=device, dtype=F64).to(dtype).requires_grad_()
    blob = TypedTensor.from_tensor(tensor, grad_dtype=F16)
    assert raw_bytes(blob.data()) == raw_bytes(tensor)
    assert (blob.dtype, blob.grad_dtype, blob.shape) == (dtype, F16, tensor.shape)
    assert blob.device == tensor.device
    assert not blob.data(F32).requires_grad
    blob.mutable_data().zero_()
    assert (tensor != 0).any()


@pytest.mark.parametrize("wrong", [torch.int8, torch.bool, torch.complex64, "float16"])
def test_other_types_are_refused_by_name_and_change_nothing(device: str, wrong: Any) -> None:
    blob = filled(device, [1.0])
    before = blob.current_dtype, blob.valid_dtypes, blob.nbytes
    for method in (blob.data, blob.mutable_data, blob.grad, blob.mutable_grad):
        with pytest.raises(TypeError, match=r"^dtype must be one of torch.float64, .*found") as e:
            method(wrong)
        assert str(e.value).endswith(str(wrong))
    assert (blob.current_dtype, blob.valid_dtypes, blob.nbytes) == before
    with pytest.raises(TypeError, match=r"^dtype must be"):
        TypedTensor((3,), wrong)
    with pytest.raises(TypeError, match=r"^dtype must be"):
        TypedTensor((3,), F32, wrong)
    with pytest.raises(TypeError, match=r"^dtype must be .*torch.int16"):
        TypedTensor.from_tensor(torch.arange(3, dtype=torch.int16))


# Integers.

INTEGERS = [torch.int32, torch.uint32, torch.int64, torch.uint64]


@pytest.mark.parametrize("dtype", INTEGERS)
def test_integers_are_kept_as_they_are(device: str, dtype: torch.dtype) -> None:
    """Labels: 2^24 + 1 is not a float32, and -1 marks what is to be ignored."""
    values = [0, 1, 2**24 + 1] + ([-1] if dtype.is_signed else [2**32 - 1])
    labels = TypedTensor.from_tensor(torch.tensor(values, dtype=dtype, device=device), F32)
    assert labels.data().tolist() == labels.data(dtype).tolist() == values
    assert (labels.data().dtype, labels.grad().dtype) == (dtype, F32)
    assert labels.nbytes == len(values) * (dtype.itemsize + 4)
    labels.mutable_data().copy_(torch.tensor(values[::-1], dtype=dtype))
    assert labels.data().tolist() == values[::-1]
    assert TypedTensor((3,), dtype, device=device).grad().tolist() == [0, 0, 0]
    assert (TypedTensor((2,), F16, dtype, device).mutable_grad(dtype) == 0).all()


@pytest.mark.parametrize("dtype", INTEGERS)
def test_arithmetic_on_integers_is_refused_by_name_and_changes_nothing(
    device: str, dtype: torch.dtype
) -> None:
    labels = TypedTensor.from_tensor(torch.tensor([3, 4], dtype=dtype, device=device))
    before = raw_bytes(labels.data()), labels.valid_dtypes, labels.nbytes
    others = [other for other in [*ALL, *INTEGERS] if other != dtype]
    for other in others:
        for method in (labels.data, labels.mutable_data, labels.grad, labels.mutable_grad):
            with pytest.raises(TypeError, match=rf"^dtype: {other} of a TypedTensor of {dtype} .*"):
                method(other)
    with pytest.raises(TypeError, match=rf"^update: the data is {dtype}.*mutable_data"):
        labels.update()
    assert (raw_bytes(labels.data()), labels.valid_dtypes, labels.nbytes) == before
    weight = TypedTensor((2,), F32, dtype, device)
    with pytest.raises(TypeError, match=rf"^update: the gradient is {dtype}"):
        weight.update()
    with pytest.raises(TypeError, match=rf"^dtype: {dtype} of a TypedTensor of torch.float32"):
        weight.data(dtype)


def test_negative_sizes_are_refused() -> None:
    with pytest.raises(ValueError, match=r"^shape must not have negative sizes, found \(3, -1\)"):
        TypedTensor((3, -1))


def test_it_prints_its_shape_and_types() -> None:
    assert repr(TypedTensor((2, 3), F32, F16)) == (
        "TypedTensor((2, 3), dtype=torch.float32, grad_dtype=torch.float16, device='cpu')"
    )
