"""Whole models: converted to low precision, and their weights saved and loaded at float32."""
