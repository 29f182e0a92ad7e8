"""Muon's first pass in NumPy, bit for bit."""

from __future__ import annotations

from reference import F32, Floats


def muon_direction(
    g: Floats, m: Floats, *, momentum: float, nesterov: bool
) -> tuple[Floats, Floats]:
    """Jordan et al. 2024, with torch.lerp's two forms of an average. Returns m, direction."""
    gain, kept = F32(1 - momentum), F32(momentum)

    def towards(m: Floats) -> Floats:
        return m + gain * (g - m) if gain < 0.5 else g - kept * (g - m)

    m = towards(m)
    return m, towards(m) if nesterov else m
