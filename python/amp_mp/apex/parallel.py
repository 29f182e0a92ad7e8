"""apex.parallel."""

from amp_mp.wrappers.larc import LARC

__all__ = ["LARC"]
