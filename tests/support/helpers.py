"""Making tensors, and comparing them bit by bit."""

from __future__ import annotations

import functools
import io
import os
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

PRETEND_GPU = os.environ.get("AMP_MP_PRETEND_GPU") == "1"
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
LOSES_UPDATES = r"torch\.optim\.\w+ updates low-precision weights"  # warnings of amp_mp
NO_GRADIENT = "no parameter of this optimizer has a gradient"
RAGGED = (0, 1, 2, 3, 7, 8, 15, 16, 17, 31, 33, 63, 64, 65, 4097, 1_000_003)


def is_gpu(device: str | torch.device) -> bool:
    """Whether tests on this device run on a real GPU, whose torch has kernels of its own."""
    return torch.device(device).type == "cuda" and not PRETEND_GPU


def warns(message: str, expected: bool = True) -> AbstractContextManager[Any]:
    """pytest.warns, of a message of amp_mp; unless it is expected, a warning is an error."""
    return pytest.warns(UserWarning, match=f"^amp_mp: {message}") if expected else nullcontext()


def skip_unless_torch_unscales(device: str, dtype: torch.dtype) -> None:
    """For tests of torch's own GradScaler, which has no kernel for bfloat16 on a GPU (2.11)."""
    if not _torch_unscales(device, dtype):
        pytest.skip(f"torch's own GradScaler cannot unscale {dtype} on {device}")


@functools.cache
def _torch_unscales(device: str, dtype: torch.dtype) -> bool:
    grad = torch.ones(1, dtype=dtype, device=device)
    found_inf, inverse = torch.zeros(1, device=device), torch.ones(1, device=device)
    try:
        torch._amp_foreach_non_finite_check_and_unscale_([grad], found_inf, inverse)
    except NotImplementedError:
        return False
    return True


def random(size: int, seed: int, spread: float = 1.0, special: bool = False) -> NDArray[np.float32]:
    """float32 numbers over many binades; `special` adds zeros, infinities, NaN and subnormals."""
    generator = np.random.default_rng(seed)
    x = generator.standard_normal(size) * np.exp2(generator.uniform(-12, 4, size)) * spread
    values = x.astype(np.float32)
    if special and size:
        odd = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, 1e-40, -1e-42, 65519, 65520, 3e38])
        where = generator.integers(0, size, max(1, size // 50))
        values[where] = generator.choice(odd, where.size).astype(np.float32)
    return values


def interesting_floats() -> np.ndarray:
    """float32 numbers at, just below and just above rounding boundaries, by strata.

    All 65,536 upper halves, each with the lower halves at which float16 (13 dropped bits) or
    bfloat16 (16) rounds one way or the other, and a pseudo-random one.
    """
    upper = np.arange(1 << 16, dtype=np.uint32) << 16
    edges = [0, 1, 0x0FFF, 0x1000, 0x1001, 0x1FFF, 0x2000, 0x3000, 0x7FFF, 0x8000, 0x8001, 0xFFFF]
    lower = np.array(edges, dtype=np.uint32)
    noise = np.random.default_rng(0).integers(0, 1 << 16, 1 << 16, dtype=np.uint32)
    bits = np.concatenate([(upper[:, None] | lower[None, :]).reshape(-1), upper | noise])
    return bits.view(np.float32)


def on(device: str, values: NDArray[np.float32], dtype: torch.dtype, shift: int = 0) -> Tensor:
    """The values as a tensor that starts `shift` elements off an aligned address."""
    base = torch.zeros(values.size + shift, dtype=dtype, device=device)
    tensor = base[shift:]
    tensor.copy_(torch.from_numpy(values))
    return tensor


def array(tensor: Tensor) -> NDArray[np.float32]:
    """The tensor's values as float32: exact from any of the three formats."""
    return tensor.detach().float().cpu().numpy()


def assert_same(found: NDArray[Any], wanted: NDArray[Any], what: str) -> None:
    """Equal bit for bit, a NaN being equal to any NaN."""
    assert found.dtype == wanted.dtype, what
    assert found.shape == wanted.shape, what
    kind = {4: np.uint32, 8: np.uint64}[found.dtype.itemsize]
    different = (found.view(kind) != wanted.view(kind)) & ~(np.isnan(found) & np.isnan(wanted))
    if different.any():
        at = int(np.flatnonzero(different)[0])
        raise AssertionError(
            f"{what}: {different.sum()} of {found.size} differ, first at {at}: "
            f"{found[at]!r} instead of {wanted[at]!r}"
        )


def assert_same_bits(found: NDArray[Any], wanted: NDArray[Any], device: str, what: str) -> None:
    """Equal bit for bit; on a GPU, whose every product of a NaN is 0x7FFFFFFF, but for NaNs."""
    assert_same(found, wanted, what)
    if not is_gpu(device):
        assert found.tobytes() == wanted.tobytes(), f"{what}: other NaNs"


def raw_bytes(value: Any) -> Any:
    """A value with every tensor in it as bytes, to compare a whole state before and after."""
    if isinstance(value, Tensor):
        plain = value.detach().cpu().contiguous()
        return (
            value.dtype,
            tuple(value.shape),
            plain.reshape(-1).view(torch.uint8).numpy().tobytes(),
        )
    if isinstance(value, dict):
        return {key: raw_bytes(v) for key, v in value.items()}
    if isinstance(value, list | tuple):
        return [raw_bytes(v) for v in value]
    return value


def autocast_state() -> tuple[bool, dict[str, tuple[bool, torch.dtype]]]:
    """All of this thread's: whether weights are cached, and for each device on or off and dtype."""
    devices = ("cpu", "cuda")
    return torch.is_autocast_cache_enabled(), {
        d: (torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in devices
    }


def state_names(optimizer: Any) -> tuple[str, ...]:
    """The states that an optimizer of one rule keeps for each parameter."""
    from amp_mp.optim.base import stepper_of  # after the pretend GPU has been installed

    return stepper_of(optimizer).group_rules()[0].names


def through_a_file(value: Any, weights_only: bool = False, device: str | None = None) -> Any:
    """What torch.load reads after torch.save; with a device onto that."""
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=weights_only, map_location=device)
