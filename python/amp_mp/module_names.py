"""Names of modules and parameters, and the wrappers of models that change them."""

from fnmatch import fnmatchcase
from weakref import WeakSet

from torch import nn

from amp_mp.torch_private import WRAPPED

DDP = "module."  # what DistributedDataParallel puts before every name
# Models that were prepared or converted: messages name their modules and parameters by path.
prepared_models: WeakSet[nn.Module] = WeakSet()


def without_wrappers(name: str) -> str:
    """A parameter's or module's name as the plain model has it."""
    return ".".join(part for part in name.split(".") if part not in WRAPPED)


def matches(name: str, pattern: str) -> bool:
    """Whether an fnmatch pattern means this name, as it is or as the plain model has it."""
    return fnmatchcase(name, pattern) or fnmatchcase(without_wrappers(name), pattern)


def is_wrapper(module: nn.Module) -> bool:
    """Whether it is a DistributedDataParallel or FSDP1 module, around another one."""
    # By the class's name, because importing torch.distributed.fsdp takes a second.
    names = {kind.__name__ for kind in type(module).__mro__}
    return not names.isdisjoint(("DistributedDataParallel", "FullyShardedDataParallel"))
