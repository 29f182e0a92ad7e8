"""The pairs of codes that are compared: one for Adam's first moment, one for its second."""

from __future__ import annotations

from dataclasses import dataclass

import published_codes as published
from moment_codes import BFLOAT16, CUBE, FLOAT32, LOG8, M8, UE8M8, Code


@dataclass(frozen=True)
class Format:
    """How both moments are stored, and who does so."""

    name: str
    first: Code
    square: Code
    source: str

    @property
    def bytes(self) -> float:
        """Of both moments of one parameter."""
        return self.first.bytes + self.square.bytes


OURS = "amp_mp, memory="
_ALL = (
    Format("exact", FLOAT32, FLOAT32, f'{OURS}"exact"'),
    Format("lean", BFLOAT16, UE8M8, f'{OURS}"lean"'),
    Format("tiny", M8, UE8M8, f'{OURS}"tiny"'),
    Format("micro", M8, LOG8, f'{OURS}"micro"'),
    Format("cube", CUBE, UE8M8, "amp_mp, an earlier form of tiny"),
    Format(
        "FlashOptim",
        published.FLASH_MOMENT,
        published.FLASH_VARIANCE,
        "FlashOptim 0.1.3, arXiv 2602.23349",
    ),
    Format(
        "bitsandbytes-8bit",
        published.BNB_MOMENT,
        published.BNB_VARIANCE,
        "bitsandbytes 0.50.2, arXiv 2110.02861",
    ),
    Format("torchao-8bit", published.AO8_MOMENT, published.AO8_VARIANCE, "torchao 0.19.0"),
    Format(
        "torchao-4bit",
        published.AO4_MOMENT,
        published.AO4_VARIANCE,
        "torchao 0.19.0, arXiv 2309.01507",
    ),
    Format("torchao-fp8", published.AO_FP8, published.AO_FP8, "torchao 0.19.0"),
)
FORMATS = {format.name: format for format in _ALL}
