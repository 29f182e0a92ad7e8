"""The presets, and what they store moments and squares as."""

from __future__ import annotations

from rules import PRESETS

MEMORIES = [m for m in PRESETS if m not in (None, "float32")]
