"""Names of the entries of a parameter's state: csrc/torch/state/rule_table.h has the table."""

import torch
from torch import Tensor

from amp_mp import _C
from amp_mp.sharding.shards import like, local_of

CLOCK = _C.clock_entries()  # the numbers that a parameter's clock consists of
MASTER_ENTRIES = _C.master_entries()  # their dtypes, by name
CODED = tuple(_C.coded_endings())


def scale_name(entry: str) -> str:
    """The entry that holds the scales of a grouped format's entry."""
    return f"{entry}_scale"


def is_coded(entry: str) -> bool:
    """Whether an entry has the name of codes, of any state."""
    return entry.endswith(CODED)


def as_bytes(value: Tensor) -> Tensor:
    """A tensor's bytes, uint8 [*shape, bytes per element], in the same memory and placements."""
    shown = local_of(value).unsqueeze(-1).view(torch.uint8)
    return like(shown, value, (*value.shape, shown.shape[-1]))
