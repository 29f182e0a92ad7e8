"""How a CPU computes products of low-precision tensors: in their own arithmetic or in float32's.

Processors without instructions for a dtype multiply it up to 400 times slower than float32. There,
products, convolutions and attention compute in float32 and round once (csrc/torch/products).
"""

import os

import torch
from torch import distributed

from amp_mp import _C
from amp_mp.dtypes import LOW_PRECISION, check_choice
from amp_mp.text_table import dtype_name

CHOICES = ("auto", "native", "float32")
VARIABLE = "AMP_MP_PRODUCTS"
SETTINGS = ("bfloat16", "float16", "float32", "measure")
# By rows and columns of a matrix: float32's products are taken where native ones take more than so
# many times as long. At 64 products by AVX2 take 37 times as long, and native ones 3.4 times, since
# oneDNN takes its time before it begins: 4 took them for emulated ones now and then, in noise. At
# 256 noise needs a margin.
SLOWER = {64: 16.0, 256: 1.1}


# The dtypes that were chosen for. Layer norms of these on a CPU compute in float32, gradients of
# their weights included, and take float32 weights too.
CHOSEN: set[torch.dtype] = set()


def choose_products(products: str, dtype: torch.dtype) -> None:
    """Chooses how this process computes products of a dtype on the CPU.

    products: "native", "float32", or "auto": as AMP_MP_PRODUCTS says, else as chosen before, else
    by a measurement of at most 30 ms. Processes of a torch.distributed run take the choice of the
    first one that calls this. AMP_MP_PRODUCTS: "bfloat16" or "float16" for the one dtype whose
    products are native, "float32" for neither, "measure" to measure in each process by itself.

    Raises ValueError as `check_products`.
    """
    check_products(products)
    setting = os.environ.get(VARIABLE)
    name = dtype_name(dtype)
    if setting in SETTINGS[:3]:
        products = "native" if setting == name else "float32"
    elif products == "auto":
        if (products := _C.products.choice(dtype)) == "undecided":
            products = measured(dtype)
        if not setting and distributed.is_available() and distributed.is_initialized():
            store = distributed.distributed_c10d._get_default_store()
            products = store.compare_set(f"amp_mp/products/{name}", "", products).decode()
    _C.products.choose(dtype, products == "float32")
    CHOSEN.add(dtype)


def check_products(products: str) -> None:
    """Raises ValueError for another word, in the argument or in AMP_MP_PRODUCTS."""
    check_choice("products", products, CHOICES)
    check_choice(VARIABLE, os.environ.get(VARIABLE) or "measure", SETTINGS)


def measured(dtype: torch.dtype) -> str:
    """What is faster on one thread of this processor: "native" or "float32"."""
    for size, slower in SLOWER.items():
        native, in_float32 = _C.products.seconds(dtype, size, 10, 0.005)  # some are interrupted
        if native > slower * in_float32:
            return "float32"
    return "native"


def describe_products() -> str:
    """A line for each low-precision dtype: the speeds on this CPU, and what was chosen."""
    lines = []
    for dtype in LOW_PRECISION:
        native, in_float32 = (2e-9 * 256**3 / s for s in _C.products.seconds(dtype, 256, 2, 0.01))
        lines.append(
            f"{dtype} products on one thread of this CPU: native {native:.0f} GFLOP/s, in float32 "
            f"{in_float32:.0f}; chosen: {_C.products.choice(dtype)}"
        )
    return "\n".join(lines)
