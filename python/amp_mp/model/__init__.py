"""Whole models: to low precision, and their weights back at float32.

`prepare` converts a float32 model and keeps the exact values for the optimizer's masters, `convert`
converts without keeping them and marks what stays float32, `float32_state_dict` saves and loads the
weights at full precision.
"""

from amp_mp.model.convert import convert_network, keep_fp32
from amp_mp.model.float32_state_dict import float32_state_dict, load_float32_state_dict
from amp_mp.model.prepare import prepare

__all__ = [
    "convert_network",
    "float32_state_dict",
    "keep_fp32",
    "load_float32_state_dict",
    "prepare",
]
