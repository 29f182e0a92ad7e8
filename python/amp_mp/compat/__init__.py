"""Forms of mixed precision from OpenSeq2Seq (`openseq2seq`) and NVCaffe (the other files)."""

from amp_mp.compat.layer_types import set_layer_types, undo_layer_types
from amp_mp.compat.openseq2seq import (
    MixedPrecisionOptimizerWrapper,
    l1,
    l2_half,
    l2_sum,
    mixed_precision,
    mp_regularizer_wrapper,
)
from amp_mp.compat.solver import shift_for_scale
from amp_mp.compat.typed_tensor import TypedTensor

# fmt: off
__all__ = [
    "MixedPrecisionOptimizerWrapper", "TypedTensor", "l1", "l2_half", "l2_sum", "mixed_precision",
    "mp_regularizer_wrapper", "set_layer_types", "shift_for_scale", "undo_layer_types",
]
