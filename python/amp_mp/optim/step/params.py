"""An optimizer's parameters: repeated ones, and those that it refuses."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from amp_mp.callers import is_inside_zero_redundancy
from amp_mp.dtypes import NATIVE
from amp_mp.optim.rule import Group
from amp_mp.sharding.shards import is_dtensor, is_gathered, local_of, why_unusable


def drop_repeats(group: Group) -> None:
    """Leaves each parameter of a new group in its list, and its name, once: it is stepped once."""
    places = first_places([id(param) for param in group["params"]])
    if len(places) < len(group["params"]):
        for key in {"params", "param_names"} & group.keys():
            group[key] = [group[key][at] for at in places]


def first_places(numbers: Sequence[int | str]) -> list[int]:
    """Where each of the numbers stands for the first time, in order."""
    return sorted({number: at for at, number in reversed([*enumerate(numbers)])}.values())


def refuse_param(param: Tensor, label: str) -> None:
    """Raises TypeError, by name, for a parameter that no step can update.

    One on the meta device, of another dtype, of a tensor subclass other than DTensor, a DTensor
    that is laid out in a way of its own, or one that fully_shard has gathered for a moment.
    """
    wrong = ""
    if param.device.type == "meta":
        wrong = "is on the meta device; give it memory first, with model.to_empty(device=...)"
    elif unusable := why_unusable(param):
        wrong = unusable
    elif is_gathered(param):
        wrong = (
            "belongs to a module of fully_shard that is gathered now, and will not be the module's "
            "parameter after it; call reshard() on the module first"
        )
    if not wrong and local_of(param).dtype not in NATIVE:
        wrong = (
            f"has dtype {param.dtype}; amp_mp's optimizers take float32, float16 and bfloat16, use "
            "torch.optim for the others"
        )
    if not wrong and local_of(param).dtype != param.dtype:
        wrong = (
            f"says that its dtype is {param.dtype}, but its shard is {local_of(param).dtype}: "
            ".data of a DTensor was set; convert the module instead, with model.to(dtype)"
        )
    if wrong:
        raise TypeError(f"{label} {wrong}")


def refuse_sphere(param: Tensor, label: str, is_new: bool) -> None:
    """Raises ValueError, by name, for a parameter whose norm hyperball=True cannot keep.

    One that is no matrix; if it is new also one of zeros, which would stay zeros: waits for it.
    """
    wrong = ""
    if param.dim() < 2:
        wrong = "is no matrix"
    elif is_new and param.numel():
        norm: Any = param.detach().norm()
        if not (norm.full_tensor() if is_dtensor(norm) else norm):
            wrong = "is 0, and would stay 0"
    if wrong:
        raise ValueError(
            f"{label} of shape {tuple(param.shape)} {wrong} with hyperball=True, which keeps norms "
            "of matrices; give it a param_group with hyperball=False"
        )


def refuse_zero(optimizer: Any, process_groups: tuple[Any, ...]) -> None:
    """Raises ValueError where ZeroRedundancyOptimizer makes the optimizer without process_groups.

    Each process would clip by the norm of its own parameters, and skip alone.
    """
    measures = optimizer.max_grad_norm is not None or optimizer.check_overflow
    if not measures or process_groups:
        return
    if is_inside_zero_redundancy():
        raise ValueError(
            "max_grad_norm or check_overflow inside a ZeroRedundancyOptimizer needs "
            "process_groups, the group that it shares the parameters over, as in "
            "ZeroRedundancyOptimizer(..., process_groups=torch.distributed.group.WORLD): each "
            "process would clip by its own part of the norm, and skip alone"
        )
