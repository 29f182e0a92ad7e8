"""Forms of mixed precision from other libraries: OpenSeq2Seq's and NVCaffe's.

`openseq2seq` has its optimizer wrapper and configuration switch, `regularizers` terms that are
computed on the masters, `typed_tensor` NVCaffe's blob, `shift_for_scale` its loss scaling without
unscaling, `layer_types` its types of a net and of single layers.
"""

from amp_mp.compat.layer_types import LayerTypes, set_layer_types, undo_layer_types

__all__ = ["LayerTypes", "set_layer_types", "undo_layer_types"]
