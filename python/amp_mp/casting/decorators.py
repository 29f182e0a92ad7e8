"""Functions with a precision of their own, as decorators or in place in their module.

The wrappers read torch's autocast state, which Dynamo can trace, and do nothing while casts are
off.
"""

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from amp_mp.nested import map_tensors, tensors_in

F = TypeVar("F", bound=Callable[..., Any])


def half_function(function: F) -> F:
    """Casts floating arguments to the autocast dtype; for functions that are fast in low precision.

    Tensors in lists, tuples, named tuples and dicts are cast too; float64 is not cast, and the
    caller's containers are not changed. The function itself runs without further casts, and the
    casts are part of the graph: gradients come back in the dtypes of the arguments.
    """
    return _wrap(function, lambda device, _: torch.get_autocast_dtype(device))


def float_function(function: F) -> F:
    """As half_function, to float32; for functions that need its range or digits."""
    return _wrap(function, lambda _device, _: torch.float32)


def promote_function(function: F) -> F:
    """As half_function, to the widest dtype among the arguments."""
    return _wrap(function, lambda _, dtypes: dtypes.pop() if len(dtypes) == 1 else torch.float32)


def register_half_function(module: Any, name: str) -> None:
    """Replaces a module's or class's function by its half_function; ValueError if it has none."""
    _register(half_function, module, name)


def register_float_function(module: Any, name: str) -> None:
    """Replaces a module's or class's function by its float_function; ValueError if it has none."""
    _register(float_function, module, name)


def register_promote_function(module: Any, name: str) -> None:
    """Replaces a module's or class's function by its promote_function; ValueError if none."""
    _register(promote_function, module, name)


def _register(decorate: Callable[[Any], Any], module: Any, name: str) -> None:
    if not hasattr(module, name):
        raise ValueError(f"No function named {name} in module {module}.")
    setattr(module, name, decorate(getattr(module, name)))


def _wrap(function: F, dtype_of: Callable[[str, set[torch.dtype]], torch.dtype]) -> F:
    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        tensors = [t for t in tensors_in(args, kwargs) if _is_castable(t)]
        if not tensors or not torch.is_autocast_enabled(device := tensors[0].device.type):
            return function(*args, **kwargs)
        dtype = dtype_of(device, {t.dtype for t in tensors})
        args, kwargs = map_tensors(lambda t: t.to(dtype) if _is_castable(t) else t, (args, kwargs))
        with torch.autocast(device, enabled=False):
            return function(*args, **kwargs)

    return wrapper  # type: ignore[return-value]


def _is_castable(tensor: Tensor) -> bool:
    return tensor.is_floating_point() and tensor.dtype != torch.float64
