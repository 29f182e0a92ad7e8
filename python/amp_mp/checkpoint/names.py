"""The names of a model's parameters in a checkpoint: without what wrappers add to them."""

from typing import Any

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from amp_mp import _C
from amp_mp.apex.fp16_optimizer import FP16_Optimizer
from amp_mp.sharding.shards import is_dtensor

# What torch.compile, activation checkpointing and FSDP1 put into names.
PARTS = ("_orig_mod.", "_checkpoint_wrapped_module.", "_fsdp_wrapped_module.")


def unwrapped(model: nn.Module) -> nn.Module:
    """The model in a DistributedDataParallel or torch.compile."""
    while True:
        inner = model.module if isinstance(model, DistributedDataParallel) else None
        inner = getattr(model, "_orig_mod", None) if inner is None else inner
        if not isinstance(inner, nn.Module):
            return model
        model = inner


def named_params(model: nn.Module, every_name: bool = False) -> dict[str, Tensor]:
    """Every parameter by its name. One with several names has its first, or all of them."""
    named = unwrapped(model).named_parameters(remove_duplicate=not every_name)
    return {without_wrappers(name): param for name, param in named}


def without_wrappers(name: str) -> str:
    """A parameter's or module's name as the plain model has it."""
    for part in PARTS:
        name = f"{name}.".replace(part, "").removesuffix(".")
    return name


def refuse_sharded(more: dict[str, Any]) -> None:
    """TypeError for an optimizer of sharded parameters among other objects to save or load."""
    for name, each in more.items():
        groups = each.param_groups if isinstance(each, Optimizer) else []
        if any(is_dtensor(param) for group in groups for param in group["params"]):
            raise TypeError(
                f"{name} is an optimizer of sharded parameters; save it with its model in a "
                "directory of its own"
            )


def names_of_groups(model: nn.Module, optimizer: Any) -> list[list[str]]:
    """The names of an optimizer's parameters, group by group.

    TypeError for what is no torch.optim.Optimizer, or keeps masters in place of the model's
    parameters; ValueError for a parameter that is not the model's.
    """
    if isinstance(optimizer, FP16_Optimizer):
        raise TypeError(
            "optimizer is an FP16_Optimizer; around one of amp_mp's pass optimizer.optimizer and "
            "scaler=optimizer.loss_scaler, around another save its state_dict() as it is"
        )
    if not isinstance(optimizer, Optimizer):
        kind = type(optimizer).__name__
        raise TypeError(f"optimizer must be a torch.optim.Optimizer, found {kind}")
    names = {param: name for name, param in named_params(model).items()}
    found = []
    for number, group in enumerate(optimizer.param_groups):
        for position, param in enumerate(group["params"]):
            if param not in names:
                raise ValueError(
                    f"{_C.param_label(group, number, position)}, of shape {tuple(param.shape)}, is "
                    "none of the model's parameters; make the optimizer after the model was "
                    "sharded, from model.parameters()"
                )
        found.append([names[param] for param in group["params"]])
    return found
