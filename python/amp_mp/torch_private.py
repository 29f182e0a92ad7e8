"""Every private name of torch that the package uses, and what for.

Functions and classes are imported from here. The attributes of torch's objects in `ATTRIBUTES` are
used where the object is. tests/project/test_torch_private.py looks for all of them in the torch
that runs, and for others in the package. They were read in the sources of torch 2.11, 2.13 and
2.15, and are the same there unless a line says otherwise.
"""

import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn.modules import batchnorm, conv, dropout, loss, padding, pooling
from torch.optim import optimizer as optimizers
from torch.utils import _pytree

Function = TypeVar("Function", bound=Callable[..., Any])

# The base classes of layers that differ in their number of dimensions; to ask what a layer is.
BatchNorm = batchnorm._BatchNorm
NormBase = batchnorm._NormBase
ConvNd = conv._ConvNd
DropoutNd = dropout._DropoutNd
Loss = loss._Loss
PaddingNd = (
    padding._ConstantPadNd,
    padding._ReflectionPadNd,
    padding._ReplicationPadNd,
    padding._CircularPadNd,
)
MaxPoolNd = pooling._MaxPoolNd, pooling._AdaptiveMaxPoolNd

# Containers with tensors inside; torch has no public name for these.
keystr = _pytree.keystr
tree_flatten = _pytree.tree_flatten
tree_flatten_with_path = _pytree.tree_flatten_with_path
tree_leaves = _pytree.tree_leaves
tree_map_only = _pytree.tree_map_only
tree_unflatten = _pytree.tree_unflatten

# Whether torch.func transforms what runs now.
functorch_is_active = torch._C._are_functorch_transforms_active
# The number of the backward pass under way in this thread, or -1.
current_backward = torch._C._current_graph_task_id
# Many tensors in few kernels: their values, in place.
foreach_copy_ = torch._foreach_copy_
foreach_div_ = torch._foreach_div_
# torch's RMS norm, for which amp_mp registers kernels on the CPU.
fused_rms_norm = torch.ops.aten._fused_rms_norm
# The hooks of register_optimizer_step_pre_hook: whether ours is among them.
global_step_pre_hooks = optimizers._global_optimizer_pre_hooks

# What torch.compile, activation checkpointing and FSDP1 put into the names of parameters.
WRAPPED = "_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"
# How the key of a module's get_extra_state() ends.
EXTRA_STATE = "_extra_state"

# Attributes and methods, by the class that has them, with what they are used for.
ATTRIBUTES: dict[str, dict[str, str]] = {
    "Module": {
        "_parameters": "a module's own parameters, a shared one too; named_parameters() is slow",
        "_buffers": "the same of buffers",
        "_non_persistent_buffers_set": "the names of buffers that state_dict() leaves out",
        "_apply": "converts a module without its children; AveragedModel refuses casts there",
        "_forward_hooks": "whether a hook of ours is there",
        "_forward_pre_hooks": "the same",
        "_state_dict_hooks": "the same",
        "_load_state_dict_post_hooks": "the same",
    },
    "RNNBase": {
        "_flat_weights": "the list that its forward reads",
        "_flat_weights_names": "the names of these",
    },
    "ConvNd": {"_reversed_padding_repeated_twice": "what its forward gives to functional.pad"},
    "DistributedDataParallel": {"_active_ddp_module": "whether a forward runs inside of one"},
    "Parameter": {
        "_backward_hooks": "whether a hook would see a gradient that is added without autograd",
        "_post_accumulate_grad_hooks": "the same",
        "_base": "of which tensor it is a view: DistributedDataParallel reuses a bucket's memory",
    },
    "Function": {"_forward_cls": "the Function of a node's class: whether it calls backward"},
    "Optimizer": {
        "_patch_step_function": "puts the hooks of a step around it",
        "_optimizer_step_pre_hooks": "hooks of FP16_Optimizer and LARC, which are not the inner's",
        "_optimizer_step_post_hooks": "the same",
        "_optimizer_state_dict_pre_hooks": "the same",
        "_optimizer_state_dict_post_hooks": "the same; one of ours as the first of all",
        "_optimizer_load_state_dict_pre_hooks": "the same; one of ours as the last of all",
        "_optimizer_load_state_dict_post_hooks": "the same as the hooks of state_dict",
    },
    "GradScaler": {
        "_enabled": "read by the methods that are overridden",
        "_scale": "read and replaced by those",
        "_growth_tracker": "the same",
        "_device": "where the scale is",
        "_per_optimizer_states": "what torch keeps of an optimizer between unscale_ and update",
        "_get_scale_async": "the scale without waiting for the device",
        "_check_scale_growth_tracker": "overridden",
        "_check_inf_per_device": "overridden",
        "_unscale_grads_": "overridden",
        "_maybe_opt_step": "overridden, and watched by amp_mp.diagnose",
    },
    "DTensor": {
        "_local_tensor": "its memory on this process; to_local() would make a new tensor",
        "_spec": "exchanged together with the memory",
    },
    "DeviceMesh": {"_rank": "the process that has pickled a DTensor"},
    "fully_shard": {
        "_get_fsdp_state": "FSDP2's state of a module; FSDPModule has no public way to it",
    },
    "Module of fully_shard": {"_is_fsdp_managed_module": "whether a unit has its parameters"},
    "FSDPState": {"_is_root": "None until the first forward"},
    "FSDPParamGroup": {"_reset_sharded_params": "whether dtypes are fixed"},
    "FSDPParam": {"_module_info": "the parameter's module and name"},
}


def outside_graphs(function: Function) -> Function:
    """The function, which a compiled caller calls as it is, with everything that it calls.

    torch loads its compiler at the first call, as it does when an optimizer is made. The public
    torch.compiler.disable loads it when a function is decorated.
    """
    return cast("Function", torch._disable_dynamo(function))  # type: ignore[attr-defined]


def has_forward_derivatives() -> bool:
    """Whether a dual level of forward-mode differentiation is open."""
    return forward_ad._current_level >= 0


def at_end_of_backward(function: Callable[[], None]) -> None:
    """Calls the function when the backward pass under way ends, unless it raises."""
    torch.autograd.Variable._execution_engine.queue_callback(function)


def default_store() -> Any:
    """The store of torch.distributed's default process group."""
    return torch.distributed.distributed_c10d._get_default_store()


def flatten_state_dict(state: dict[str, Any]) -> dict[str, Any]:
    """Nested values by the keys that torch.distributed.checkpoint gives them."""
    from torch.distributed.checkpoint._nested_dict import flatten_state_dict

    return flatten_state_dict(state)[0]


def unflatten_state_dict(state: dict[str, Any], paths: Mapping[str, Any]) -> dict[str, Any]:
    """The reverse; paths: where each key's value was."""
    from torch.distributed.checkpoint._nested_dict import unflatten_state_dict

    return unflatten_state_dict(state, dict(paths))


def save_state_dict(state: dict[str, Any], writer: Any, group: Any, *, no_dist: bool) -> None:
    """torch.distributed.checkpoint.save, which itself may decide to be without a group."""
    from torch.distributed.checkpoint.state_dict_saver import _save_state_dict

    _save_state_dict(state, writer, group, no_dist=no_dist)


def local_shape_and_offset(
    shape: tuple[int, ...], tensor: Any
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """This process's part of a tensor of this shape that is placed as a DTensor is."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    return compute_local_shape_and_global_offset(shape, tensor.device_mesh, tensor.placements)


def dtensor_of(
    local: Tensor, tensor: Any, shape: tuple[int, ...], strides: tuple[int, ...]
) -> Tensor:
    """A DTensor around this process's part, placed as another one; nothing is moved or checked."""
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

    meta = TensorMeta(torch.Size(shape), strides, local.dtype)
    spec = DTensorSpec(tensor.device_mesh, tensor.placements, tensor_meta=meta)
    return DTensor(local, spec, requires_grad=False)  # type: ignore[no-untyped-call]


def fsdp_groups(state: Any) -> list[Any]:
    """FSDP2's groups of parameters of a module, from the state that torch keeps for it.

    Empty for the state of another of torch's wrappers, and for None.
    """
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:  # torch 2.11: one, or none
        group = getattr(state, "_fsdp_param_group", None)
        groups = [] if group is None else [group]
    return list(groups)


def composable_keys() -> tuple[str, str]:
    """The attributes in which fully_shard leaves its state in a module."""
    from torch.distributed._composable.contract import REGISTRY_KEY, STATE_KEY

    return STATE_KEY, REGISTRY_KEY


def has_sharded_modules() -> bool:
    """Whether there are modules of fully_shard; imports nothing."""
    states = sys.modules.get("torch.distributed._composable_state")
    return states is not None and len(states._module_state_mapping) > 0


def gathered_parameters() -> Iterator[Tensor]:
    """The plain parameters that FSDP2 has gathered from shards, in all modules of the process."""
    states = sys.modules.get("torch.distributed._composable_state")
    for reference in list(states._module_state_mapping.values()) if states else ():
        for group in fsdp_groups(reference()):
            for each in group.fsdp_params:
                if (param := getattr(each, "_unsharded_param", None)) is not None:
                    yield param


def keeps_grad_dtype(fsdp_param: Any) -> bool:
    """Whether FSDP2 gives a shard's gradient the shard's grad_dtype; torch before 2.15 does not."""
    return hasattr(fsdp_param, "sharded_grad_dtype")
