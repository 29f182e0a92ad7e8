"""Whether amp_mp is on: the environment variable AMP_MP=0 turns it off, to compare."""

import os
from typing import Any

from amp_mp import _C
from amp_mp.dtypes import check_choice

_setting = os.environ.get("AMP_MP") or "1"  # an empty variable counts as unset
check_choice("the environment variable AMP_MP", _setting, ("0", "1"))
ENABLED = _setting == "1"  # the default of every argument `enabled`


def build_info() -> dict[str, Any]:
    """What the library was built for, the instruction set in use, and whether AMP_MP has it on."""
    return {**_C.build_info(), "enabled": ENABLED}
