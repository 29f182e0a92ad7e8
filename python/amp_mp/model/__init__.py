"""Whole models: to low precision, and their weights back at float32.

`prepare` converts a float32 model and keeps the exact values for the optimizer's masters, `convert`
converts without keeping them and marks what stays float32, `float32_state_dict` saves and loads the
weights at full precision.
"""
