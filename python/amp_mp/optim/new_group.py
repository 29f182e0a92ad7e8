"""Checks a param_group that was added to a fused optimizer."""

from typing import Any

from amp_mp.optim.options import check_group
from amp_mp.optim.step.gather import param_infos
from amp_mp.optim.step.refuse import refuse_param


def check_last_group(groups: list[dict[str, Any]]) -> None:
    """Removes the last of the param_groups and raises, by name, if it cannot be used.

    ValueError for a number that is out of range, TypeError for a parameter that cannot be stepped;
    frozen ones may have any dtype.
    """
    try:
        check_group(groups[-1])
        for param, info in param_infos(groups):
            if param.requires_grad or param.is_meta:
                refuse_param(param, info.label)
    except (TypeError, ValueError):
        groups.pop()
        raise
