"""float32 masters: for models in low precision, and around any torch optimizer."""

from amp_mp.master.convert import (
    BN_convert_float,
    convert_network,
    keep_fp32,
    network_to_half,
    tofp16,
)
from amp_mp.master.fp16_optimizer import FP16_Optimizer
from amp_mp.master.openseq2seq import MixedPrecisionOptimizerWrapper, mixed_precision
from amp_mp.master.prepare import prepare
from amp_mp.master.regularizer import l1, l2_half, l2_sum, mp_regularizer_wrapper
from amp_mp.master.typed_tensor import TypedTensor

__all__ = [
    "BN_convert_float",
    "FP16_Optimizer",
    "MixedPrecisionOptimizerWrapper",
    "TypedTensor",
    "convert_network",
    "keep_fp32",
    "l1",
    "l2_half",
    "l2_sum",
    "mixed_precision",
    "mp_regularizer_wrapper",
    "network_to_half",
    "prepare",
    "tofp16",
]
