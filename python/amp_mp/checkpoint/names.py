"""The names of a model's parameters in a checkpoint: without what wrappers add to them."""

from typing import Any

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from amp_mp.apex.fp16_state import WrappedOptimizer

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


def named_params(model: nn.Module) -> dict[str, Tensor]:
    """Every parameter by its name; one with several names has its first."""
    found: dict[str, Tensor] = {}
    for name, param in unwrapped(model).named_parameters():
        for part in PARTS:
            name = name.replace(part, "")
        found[name] = param
    return found


def names_of_groups(model: nn.Module, optimizer: Any) -> list[list[str]]:
    """The names of an optimizer's parameters, group by group.

    TypeError for what is no torch.optim.Optimizer, or keeps masters in place of the model's
    parameters; ValueError for a parameter that is not the model's.
    """
    if isinstance(optimizer, WrappedOptimizer):
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
                    f"parameter {position} of group {number}, of shape {tuple(param.shape)}, is "
                    "none of the model's parameters; make the optimizer after the model was "
                    "sharded, from model.parameters()"
                )
        found.append([names[param] for param in group["params"]])
    return found
