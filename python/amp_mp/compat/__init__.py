"""Forms of mixed precision from other libraries: OpenSeq2Seq's and NVCaffe's.

`openseq2seq` has its optimizer wrapper and configuration switch, `regularizers` terms that are
computed on the masters, `typed_tensor` NVCaffe's blob, `shift_for_scale` its loss scaling without
unscaling.
"""

from amp_mp.compat.openseq2seq import MixedPrecisionOptimizerWrapper, mixed_precision
from amp_mp.compat.regularizers import l1, l2_half, l2_sum, mp_regularizer_wrapper
from amp_mp.compat.shift_for_scale import shift_for_scale
from amp_mp.compat.typed_tensor import TypedTensor

__all__ = [
    "MixedPrecisionOptimizerWrapper",
    "TypedTensor",
    "l1",
    "l2_half",
    "l2_sum",
    "mixed_precision",
    "mp_regularizer_wrapper",
    "shift_for_scale",
]
