"""Whole models: converted to low precision, and their weights saved and loaded at float32.

`convert` has `prepare`, which keeps the float32 values for the optimizer's masters,
`convert_network`, which does not, and `keep_fp32`, which marks what stays float32 in both.
`float32_state_dict` reads a model's weights from the masters and loads them back.
"""
