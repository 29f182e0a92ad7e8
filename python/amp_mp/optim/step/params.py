"""An optimizer's parameters: repeated ones, and those that it refuses."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from amp_mp.dtypes import NATIVE
from amp_mp.optim.rule import Group
from amp_mp.sharding.shards import is_dtensor, is_gathered, local_of, why_unusable


def drop_repeats(group: Group) -> None:
    """Keeps each parameter of a new group, and its name, once: it is stepped once."""
    places = first_places([id(param) for param in group["params"]])
    if len(places) < len(group["params"]):
        for key in {"params", "param_names"} & group.keys():
            group[key] = [group[key][at] for at in places]


def first_places(numbers: Sequence[int | str]) -> list[int]:
    """The first place of each of the numbers, in order."""
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

    That is no matrix or, if it is new, all zeros, which would stay so: this waits for the device.
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
