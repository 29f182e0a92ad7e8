"""Other libraries' AdamW in gpu_step.py, and the whole list of candidates.

Their bytes are counted from their sources; one that is not installed is reported so.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

from gpu_candidates import BASE, CLIP, LR, Candidate, each, ours, plain, torchs
from gpu_lists import ShapeList

# flashoptim: gradient 2, weight 4, remainder 2 or 4; moments 8 bits each with a float16 scale for
# every 32, or unquantised in the weight's bfloat16.
FLASH_24 = 2 + 4 + 2 + 4 + 4 * 2 / 32 + CLIP
FLASH_32 = 2 + 4 + 4 + 8 + CLIP
OPTIMI = 2 + 4 + 8 + 4 + CLIP  # gradient; weight, moments, compensation, all bfloat16


def eight_bits(wide: float, whole: bool) -> Callable[[ShapeList], float]:
    """Moments of 8 bits with a float32 scale for every 256.

    wide: bytes for both, read and written, where a tensor is too small; whole: or no multiple of
    256.
    """

    def moved(shapes: ShapeList) -> float:
        narrow = 4 + 4 * 4 / 256
        return sum(
            n * (2 + 4 + CLIP + (narrow if n >= 4096 and (n % 256 == 0 or not whole) else wide))
            for n in shapes.sizes
        )

    return moved


def peer(module: str, name: str, **options: Any) -> Callable[[Any], Any]:
    """A peer's optimizer, looked up when it is made: a missing one is that candidate's error."""

    def make(params: Any) -> Any:
        return getattr(importlib.import_module(module), name)(params, lr=LR, **options)

    return make


FLASH_24_NAME, FLASH_32_NAME = "flashoptim 24-bit", "flashoptim 32-bit, unquantised"


def peers() -> list[Candidate]:
    """The APIs of flashoptim 0.1.4, torch-optimi 0.3.3, bitsandbytes 0.50 and torchao 0.18."""
    flash = functools.partial(peer, "flashoptim", "FlashAdamW")
    return [
        plain(FLASH_24_NAME, flash(master_weight_bits=24), each(FLASH_24)),
        plain(FLASH_32_NAME, flash(master_weight_bits=32, quantize=False), each(FLASH_32)),
        plain("optimi, Kahan", peer("optimi", "AdamW", kahan_sum=True), each(OPTIMI)),
        plain("bitsandbytes 8-bit", peer("bitsandbytes.optim", "AdamW8bit"), eight_bits(16, False)),
        plain("torchao 8-bit", peer("torchao.optim", "AdamW8bit"), eight_bits(8, True)),
    ]


# Asked first, on every list: exact's share of the bandwidth, then against torch and FlashOptim.
KEY = ("amp_mp exact", BASE, FLASH_32_NAME, "amp_mp tiny", FLASH_24_NAME)


def candidates(shapes: ShapeList, device: str, others: bool) -> list[Candidate]:
    """All that a list is timed with, in the order of what targets need: those of KEY first."""
    every = {c.name: c for c in (*ours(), *(peers() if others else []), *torchs())}
    slow = [name for name in every if name.startswith("torchao")]  # compiles for every shape
    names = dict.fromkeys([*(n for n in KEY if n in every), *(n for n in every if n not in slow)])
    found = [every[name] for name in (*names, *slow)]
    fits = not shapes.large and device == "cuda"
    found = [c for c in found if fits or not c.small_only]
    return [c for c in found if shapes.large or not c.large_only]
