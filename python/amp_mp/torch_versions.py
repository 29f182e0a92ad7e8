"""What differs, in public names, between the versions of torch that amp_mp runs with, 2.11 to 2.15.

torch_private.py has the private ones, csrc/torch/torch_versions.h what differs for C++.
"""

from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling


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
