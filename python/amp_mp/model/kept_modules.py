"""Modules that stay float32 inside a low-precision model: casts before and after their forward."""

import dataclasses
from typing import Any

import torch
from torch import Tensor, nn

from amp_mp.casting import products
from amp_mp.dtypes import LOW_PRECISION
from amp_mp.model.selection import is_marked, is_normalisation, named_tensors
from amp_mp.nested import map_tensors, tensors_in
from amp_mp.nn import float32_layers
from amp_mp.torch_private import NormBase

# The modules that torch can give low-precision inputs beside float32 weights on a CPU, which saves
# the casts; the first ones are fused after a choice of products.
CHOSEN_FIRST = (nn.LayerNorm, nn.RMSNorm)
MIXING = (*CHOSEN_FIRST, nn.GroupNorm, NormBase)

# The attribute of a tensor that was cast for a kept module: the module's id, and the dtype that it
# had. The id, because the tensor may go to a kept module inside the first as it is.
CAST_FROM = "_amp_mp_cast_from"


class NotScriptable:
    """A hook of a module in Python; torch.jit.script asks for its name before it compiles it."""

    @property
    def __name__(self) -> str:
        """Raises the AttributeError that torch.jit.script then shows."""
        raise AttributeError(
            "torch.jit.script cannot compile the hooks of this model's modules, casts or those of "
            "an FP16_Optimizer, which are in Python; use torch.jit.trace or torch.export"
        )


@dataclasses.dataclass
class LowPrecisionWeight:
    """A converted parameter of a model, found by module and name, so that copies have theirs."""

    module: nn.Module
    name: str

    @property
    def dtype(self) -> torch.dtype | None:
        """The parameter's dtype now."""
        return getattr(getattr(self.module, self.name, None), "dtype", None)


def compute_in_float32(modules: list[nn.Module], neighbour: LowPrecisionWeight | None) -> None:
    """Makes these modules compute in their weights' dtype and return the dtype they were given.

    neighbour: its dtype is what the outermost of these modules return where they are given no
    floating-point tensor, as an embedding is, and what normalisation layers return in any case:
    beside a float32 residual stream, low-precision layers follow them.
    """
    inner = {id(part) for module in modules for part in module.modules() if part is not module}
    for module in modules:
        hooks = module._forward_hooks
        leave = next((hook for hook in hooks.values() if isinstance(hook, _Leave)), None)
        if leave is None:  # otherwise the module was prepared before
            leave = _Leave()
            module.register_forward_pre_hook(_enter, with_kwargs=True)
            module.register_forward_hook(leave, with_kwargs=True)
        leave.neighbour = None if id(module) in inner else neighbour


def return_given_dtype(modules: list[nn.Module]) -> None:
    """Casts what modules with float32 buffers return to the dtype of their first tensor."""
    for module in modules:
        if _LeaveRotary() not in module._forward_hooks.values():
            module.register_forward_hook(_LeaveRotary(), with_kwargs=True)


def float32_is_kept(module: nn.Module) -> bool:
    """Whether a module is marked to stay float32, or stays so since its model was converted."""
    return is_marked(module) or _enter in module._forward_pre_hooks.values()


def _converts_itself(module: nn.Module) -> bool:
    """Whether the module's forward casts its inputs and its result, as compat's TypedForward."""
    return getattr(vars(module).get("forward"), "casts_by_itself", False)


def _enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> Any:
    """Casts low-precision inputs to the weights' dtype, where the module cannot mix dtypes.

    kwargs: None where torch.ao.quantization.convert has copied the hook to the module that it made.
    """
    given = kwargs or {}
    inputs = [t for t in tensors_in(*args, *given.values()) if t.dtype in LOW_PRECISION]
    if not inputs or _converts_itself(module) or _mixes(module, inputs):
        return None
    dtype = _weight_dtype(module)
    if dtype in LOW_PRECISION:  # the user has converted the module
        return None

    def up(tensor: Tensor) -> Tensor:
        if tensor.dtype not in LOW_PRECISION:
            return tensor
        cast = tensor.to(dtype)
        setattr(cast, CAST_FROM, (id(module), tensor.dtype))
        return cast

    raised = tuple(map_tensors(up, value) for value in args)
    if kwargs is None:
        return raised
    return raised, {name: map_tensors(up, value) for name, value in kwargs.items()}


@dataclasses.dataclass
class _Leave(NotScriptable):
    """A hook that casts the result back to the dtype of the module's first low-precision input."""

    neighbour: LowPrecisionWeight | None = None

    def __call__(self, module: nn.Module, args: Any, *rest: Any) -> Any:
        *named, output = rest  # no kwargs: see _enter
        kwargs = named[0] if named else {}
        if _converts_itself(module):
            return output
        given = [t for t in tensors_in(*args, *kwargs.values()) if t.is_floating_point()]
        casts = (getattr(tensor, CAST_FROM, (0, None)) for tensor in given)
        dtype = next((dtype for owner, dtype in casts if owner == id(module)), None)
        if dtype is None and self.neighbour and (not given or is_normalisation(module)):
            dtype = self.neighbour.dtype
        return _lowered(output, dtype)


@dataclasses.dataclass
class _LeaveRotary(NotScriptable):
    """A hook that casts the result to the dtype of the module's first floating-point input."""

    def __call__(self, module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> Any:
        if _converts_itself(module):
            return output
        given = (t.dtype for t in tensors_in(*args, *kwargs.values()) if t.is_floating_point())
        return _lowered(output, next(given, None))


def _lowered(output: Any, dtype: torch.dtype | None) -> Any:
    """The result with its float32 and float64 tensors in a low-precision dtype."""
    if dtype not in LOW_PRECISION:
        return output
    wide = (torch.float32, torch.float64)
    return map_tensors(lambda t: t.to(dtype) if t.dtype in wide else t, output, results=True)


def _mixes(module: nn.Module, inputs: list[Tensor]) -> bool:
    """Whether torch's own kernel takes these inputs beside float32 weights."""
    # By the function, because fully_shard gives modules a class of their own.
    where = type(module).forward.__module__
    if where == float32_layers.__name__:  # casts by itself
        return True
    own = isinstance(module, MIXING) and where.startswith("torch.nn.")
    if isinstance(module, CHOSEN_FIRST):
        chosen = all(products.is_chosen(t.dtype) for t in inputs)
        own = own and chosen and _weight_dtype(module) == torch.float32
    return own and all(t.device.type == "cpu" for t in inputs)


def _weight_dtype(module: nn.Module) -> torch.dtype:
    """The widest floating-point dtype of a module's own tensors now, or of its children's."""
    own = [*module._parameters.values(), *module._buffers.values()]  # quicker than named_tensors
    found = {t.dtype for t in own if t is not None and t.is_floating_point()}
    if not found:
        found = {t.dtype for t in named_tensors(module).values() if t.is_floating_point()}
    return max(found, key=lambda dtype: dtype.itemsize, default=torch.float32)
