"""Whole models: converted to low precision, and their weights saved and loaded at float32.

`convert` has `prepare` and `convert_network`, `selection` what stays float32 in both,
`kept_modules` makes it compute so. `float32_state_dict` reads a model's weights from the masters
and loads them back, `averaged_model` averages them. `changes` finds those that steps change, and
`float8` encodes them, for samplers.
"""
