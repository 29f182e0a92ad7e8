"""Names of modules and parameters as the plain model has them, and patterns over these."""

from fnmatch import fnmatchcase

# What torch.compile, activation checkpointing and FSDP1 put into names.
PARTS = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")
DDP = "module."  # what DistributedDataParallel puts before every name


def without_wrappers(name: str) -> str:
    """A parameter's or module's name as the plain model has it."""
    return ".".join(part for part in name.split(".") if part not in PARTS)


def matches(name: str, pattern: str) -> bool:
    """Whether an fnmatch pattern means this name, as it is or as the plain model has it."""
    return fnmatchcase(name, pattern) or fnmatchcase(without_wrappers(name), pattern)
