"""How a CPU multiplies low-precision tensors: in their own arithmetic or in float32's.

Processors without instructions for a dtype multiply it up to 400 times slower than float32. There,
products, convolutions and attention compute in float32 and round once (csrc/torch/products).
"""

import functools
import json
import math
import os

import torch
from torch import distributed

from amp_mp import _C
from amp_mp.dtypes import LOW_PRECISION, check_choice
from amp_mp.text_table import dtype_name
from amp_mp.torch_private import default_store

CHOICES = ("auto", "native", "float32")
VARIABLE = "AMP_MP_PRODUCTS"
FIXED = ("bfloat16", "float16", "float32", "converted")
SETTINGS = (*FIXED, "measure")

Seconds = dict[str, dict[str, float]]  # by shape and way, as `_C.products.measure` gives them


def choose_products(products: str, dtype: torch.dtype) -> None:
    """Chooses how this process computes products of a dtype on the CPU.

    products: "native", "float32", or "auto": as AMP_MP_PRODUCTS says, else as chosen before, else
    what a measurement of at most 30 ms finds faster. It also finds which products in float32 the
    CPU loops compute. Processes of a torch.distributed run take the choice of the first one that
    calls this. AMP_MP_PRODUCTS measures nothing: "bfloat16" or "float16" is the one dtype whose
    products are native, with "float32" or "converted" neither is; those in float32 go through the
    loops, or with "converted" all but those of few rows through torch's float32 product. "measure"
    measures in each process by itself.

    Raises ValueError as `check_products`.
    """
    check_products(products)
    setting = os.environ.get(VARIABLE)
    name = dtype_name(dtype)
    if setting in FIXED:
        choice = "native" if setting == name else "float32", _fixed(setting)
    elif products == "auto":
        choice = _C.products.chosen.get(dtype) or ("auto", measured(dtype))
        if not setting and distributed.is_available() and distributed.is_initialized():
            store = default_store()
            first = store.compare_set(f"amp_mp/products/{name}", "", json.dumps(choice))
            choice = tuple(json.loads(first))
    else:
        choice = products, measured(dtype)
    _C.products.choose(dtype, *choice)


def is_chosen(dtype: torch.dtype) -> bool:
    """Whether there was a choice for a dtype.

    Layer norms of the dtype on a CPU then compute in float32, gradients of their weights included,
    and take float32 weights.
    """
    return dtype in _C.products.chosen  # a dict, which torch.compile can read


def check_products(products: str) -> None:
    """Raises ValueError for another word, in the argument or in AMP_MP_PRODUCTS."""
    check_choice("products", products, CHOICES)
    check_choice(VARIABLE, os.environ.get(VARIABLE) or "measure", SETTINGS)


@functools.cache
def measured(dtype: torch.dtype) -> Seconds:
    """What each way takes on one thread of this processor, measured once in a process."""
    return _C.products.measure(dtype)


def _fixed(setting: str) -> Seconds:
    """Seconds from which follows what a setting says."""
    faster = "converted" if setting == "converted" else "loops"
    return {
        shape: {
            "native": math.inf,
            "loops": float(faster != "loops" and shape != "few rows"),
            "converted": float(faster != "converted" or shape == "few rows"),
        }
        for shape in _C.products.work
    }


def describe_products() -> str:
    """Two lines for each low-precision dtype: the speeds on this CPU, and what was chosen."""
    lines = []
    for dtype in LOW_PRECISION:
        seconds = measured(dtype)
        fastest = {
            way: max(2e-9 * work / seconds[shape][way] for shape, work in _C.products.work.items())
            for way in ("native", "loops", "converted")
        }
        lines += [
            f"{dtype} products on one thread of this CPU, GFLOP/s at most: "
            + ", ".join(f"{way} {speed:.0f}" for way, speed in fastest.items()),
            "  chosen: " + ", ".join(f"{k}: {way}" for k, way in _C.products.ways(dtype).items()),
        ]
    return "\n".join(lines)
