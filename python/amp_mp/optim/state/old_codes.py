"""Formats that only files of before have: they are read, and stored anew in a format of today."""

from torch import Tensor

# By name, the format of today that has taken its place and has arrays of the same kinds. m8_cubed
# is what m8 was: a code q of [-127, 127] stands for scale * (q / 127)^3.
OLD_FORMATS = {"m8_cubed": "m8"}
STEP = 4.8818978e-07  # 1 / 127^3, rounded down so that code 127 is not above the scale


def stored_like(format: str) -> str:
    """The format of today that has the same arrays: what took a format's place, or itself."""
    return OLD_FORMATS.get(format, format)


def decode_old(codes: Tensor, scales: Tensor | None, format: str) -> Tensor:
    """The float32 numbers of one of these formats, with the bits that they always had.

    codes, scales: in the order of memory.
    """
    assert format == "m8_cubed", format
    assert scales is not None, format
    step = (scales.float() * STEP).repeat_interleave(codes.numel() // max(scales.numel(), 1))
    q = codes.float()
    return q * q * q * step
