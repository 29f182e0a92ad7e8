"""What a low-precision parameter's first master is made of.

amp_mp.model keeps float32 values of prepared parameters. This package does not import it, so it
puts its two functions here when it is imported.
"""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor


@dataclass
class FirstValues:
    """take: a parameter's float32 values, of a DTensor this process's part; None: its own are all.

    tensors_of: what is kept for it until then.
    """

    take: Callable[[Tensor], Tensor | None]
    tensors_of: Callable[[Tensor], tuple[Tensor, ...]]


first_values = FirstValues(
    take=lambda param: None,
    tensors_of=lambda param: (),
)
