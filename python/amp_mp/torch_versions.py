"""What differs between the versions of torch that amp_mp runs with, 2.11 to 2.15.

For C++ csrc/torch/torch_versions.h has it. Anything else is the same in all of them.
"""

from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling


def fsdp_groups(state: Any) -> list[Any]:
    """FSDP2's groups of parameters of a module, from the state that torch keeps for it.

    Empty for the state of another of torch's wrappers, and for None.
    """
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:  # torch 2.11: one, or none
        group = getattr(state, "_fsdp_param_group", None)
        groups = [] if group is None else [group]
    return list(groups)


def keeps_grad_dtype(fsdp_param: Any) -> bool:
    """Whether FSDP2 gives a shard's gradient the shard's grad_dtype; torch before 2.15 does not."""
    return hasattr(fsdp_param, "sharded_grad_dtype")


def all_gather(found: Tensor, given: Tensor, group: Any) -> None:
    """Writes the same tensor of all processes into one, in the order of ranks."""
    import torch.distributed as dist

    # torch 2.13 has renamed it, and warns of the old name.
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    gather(found, given, group=group)


def has_autocast(device_type: str) -> bool:
    """Whether devices of a type have autocast; meta has none."""
    # Dynamo of torch 2.11 cannot trace is_autocast_available. Of the devices it compiles for, only
    # meta has no autocast. `assume_constant_result` would do too, but it imports all of Dynamo.
    if is_compiling():
        return device_type != "meta"
    return torch.amp.is_autocast_available(device_type)
