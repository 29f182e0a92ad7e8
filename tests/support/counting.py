"""Exponent histograms by NumPy, and ours of the same numbers."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from helpers import on
from numpy.typing import NDArray
from torch import nn

from amp_mp.diagnose import ExponentHistogram, UpdateRatios
from amp_mp.diagnose.histogram import EXPONENTS


def counted(values: NDArray[np.float32]) -> dict[Any, int]:
    """The oracle: exponents by np.frexp in float64."""
    with np.errstate(invalid="ignore"):  # a signalling NaN becomes a quiet one
        x = np.abs(values.astype(np.float64))
    finite = x[np.isfinite(x) & (x > 0)]
    exponents, counts = np.unique(np.frexp(finite)[1] - 1, return_counts=True)
    return {
        **dict(zip(exponents.tolist(), counts.tolist(), strict=True)),
        "zero": int((x == 0).sum()),
        "inf": int(np.isinf(x).sum()),
        "nan": int(np.isnan(x).sum()),
        "amax": float(finite.max(initial=0)),
    }


def found(histogram: ExponentHistogram) -> dict[Any, int]:
    counts = histogram.counts
    assert counts.dtype == torch.int64
    assert counts.shape == (277,)
    return {
        **{e: n for e, n in zip(EXPONENTS, counts.tolist(), strict=True) if n},
        "zero": histogram.zeros,
        "inf": histogram.infs,
        "nan": histogram.nans,
        "amax": histogram.amax,
    }


def of(values: Any, device: str = "cpu", dtype: torch.dtype = torch.float32) -> ExponentHistogram:
    return ExponentHistogram.of(on(device, np.asarray(values, dtype=np.float32).ravel(), dtype))


def stepped(weight: NDArray[np.float64], update: NDArray[np.float64], **options: Any) -> Any:
    """A float32 parameter that one step of SGD moves by the updates; the row for it."""
    param = nn.Parameter(torch.from_numpy(weight.astype(np.float32)))
    optimizer = torch.optim.SGD([param], lr=1.0)
    param.grad = torch.from_numpy(-update.astype(np.float32))
    with UpdateRatios(optimizer, **options) as ratios:
        optimizer.step()
    (row,) = ratios.report()
    return row


UP = 1 + 2.0**-10  # a little more than
