"""Forms of mixed precision from other libraries: OpenSeq2Seq's and NVCaffe's.

`openseq2seq` has its optimizer wrapper and configuration switch, `regularizers` terms that are
computed on the masters, `typed_tensor` NVCaffe's blob, `shift_for_scale` its loss scaling without
unscaling.
"""
