"""Names of modules and parameters, and the wrappers of models that change them."""

from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from weakref import WeakSet

from torch import nn

from amp_mp.torch_private import WRAPPED

DDP = "module."  # what DataParallel and DistributedDataParallel put before every name
# Models that were prepared or converted: messages name their modules and parameters by path.
prepared_models: WeakSet[nn.Module] = WeakSet()


def without_wrappers(name: str) -> str:
    """A parameter's or module's name as the plain model has it."""
    return ".".join(part for part in name.split(".") if part not in WRAPPED)


def adds_module(module: nn.Module) -> bool:
    """Whether it puts "module." before the names of what it is around."""
    return is_wrapper(module) or isinstance(module, nn.DataParallel)


def plain_names(
    model: nn.Module, adds: Callable[[nn.Module], bool] = adds_module
) -> dict[str, str]:
    """The names of all modules, also of those with several, each with the plain model's.

    adds: which modules put "module." before names.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    found = {"": ""}
    for name in modules:
        outer, _, last = name.rpartition(".")
        wraps = last in WRAPPED or (f"{last}." == DDP and adds(modules[outer]))
        if name:
            found[name] = found[outer] if wraps else f"{found[outer]}.{last}".lstrip(".")
    return found


def plain_name(names: Mapping[str, str], name: str) -> str:
    """The plain model's name of a module's tensor or extra state. names: as of plain_names."""
    outer, own = name, ""
    while outer not in names:
        outer, _, last = outer.rpartition(".")
        own = f".{last}{own}"
    return f"{names[outer]}{own}".lstrip(".")


def matches(name: str, pattern: str, names: Mapping[str, str] | None = None) -> bool:
    """Whether an fnmatch pattern means this name, as it is or as the plain model has it.

    names: as of plain_names, to look through "module." as well.
    """
    plain = without_wrappers(name) if names is None else plain_name(names, name)
    return fnmatchcase(name, pattern) or fnmatchcase(plain, pattern)


def is_wrapper(module: nn.Module) -> bool:
    """Whether it is a DistributedDataParallel or FSDP1 module, around another one."""
    # By the class's name, because importing torch.distributed.fsdp takes a second.
    names = {kind.__name__ for kind in type(module).__mro__}
    return not names.isdisjoint(("DistributedDataParallel", "FullyShardedDataParallel"))
