"""Whole models: converted to low precision, and their weights saved and loaded at float32.

`convert` has `prepare`, which keeps the float32 values for the optimizer's masters, and
`convert_network`, which does not. `selection` decides what stays float32 in both, `kept_modules`
makes it compute so, `loading` keeps the float32 values through loading and copying.
`float32_state_dict` reads a model's weights from the masters and loads them back.
"""
