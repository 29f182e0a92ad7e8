"""Python functions with a precision of their own: decorators, and registration by name.

The wrappers read torch's autocast state, which Dynamo can trace, and do nothing while casts are
off.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor

F = TypeVar("F", bound=Callable[..., Any])


def half_function(function: F) -> F:
    """Casts floating arguments to the autocast dtype; for functions that are fast in low precision.

    Tensors in lists, tuples, named tuples and dicts are cast too; float64 is left alone, and the
    caller's containers are not changed. The function itself runs without further casts, and the
    casts are part of the graph: gradients come back in the dtypes of the arguments.
    """
    return _wrap(function, lambda device, _: torch.get_autocast_dtype(device))


def float_function(function: F) -> F:
    """Casts floating arguments to float32; for functions that need its range or digits."""
    return _wrap(function, lambda _device, _: torch.float32)


def promote_function(function: F) -> F:
    """Casts floating arguments to the widest dtype among them."""
    return _wrap(function, lambda _device, tensors: _widest(tensors))


def register_half_function(module: Any, name: str) -> None:
    """half_function over an attribute of a module or class, in place.

    Raises ValueError if there is no such attribute.
    """
    _register(module, name, half_function)


def register_float_function(module: Any, name: str) -> None:
    """float_function over an attribute of a module or class, in place; errors as its sibling."""
    _register(module, name, float_function)


def register_promote_function(module: Any, name: str) -> None:
    """promote_function over an attribute of a module or class, in place; errors as its sibling."""
    _register(module, name, promote_function)


def _register(module: Any, name: str, decorate: Callable[[Any], Any]) -> None:
    if not hasattr(module, name):
        raise ValueError(f"No function named {name} in module {module}.")
    setattr(module, name, decorate(getattr(module, name)))


def _wrap(function: F, dtype_of: Callable[[str, list[Tensor]], torch.dtype | None]) -> F:
    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        tensors: list[Tensor] = []
        _collect((args, kwargs), tensors)
        if not tensors:
            return function(*args, **kwargs)
        device = tensors[0].device.type
        if not torch.is_autocast_enabled(device):
            return function(*args, **kwargs)
        dtype = dtype_of(device, tensors)
        new_args, new_kwargs = _cast((args, kwargs), dtype)
        with torch.autocast(device, enabled=False):
            return function(*new_args, **new_kwargs)

    return wrapper  # type: ignore[return-value]


def _is_castable(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point() and value.dtype != torch.float64


def _collect(value: Any, found: list[Tensor]) -> None:
    if _is_castable(value):
        found.append(value)
    elif isinstance(value, list | tuple):
        for item in value:
            _collect(item, found)
    elif isinstance(value, Mapping):
        for item in value.values():
            _collect(item, found)


def _cast(value: Any, dtype: torch.dtype | None) -> Any:
    if _is_castable(value):
        return value.to(dtype)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_cast(item, dtype) for item in value))
    if isinstance(value, list | tuple):
        return type(value)([_cast(item, dtype) for item in value])
    if isinstance(value, dict):
        return {key: _cast(item, dtype) for key, item in value.items()}
    return value


def _widest(tensors: list[Tensor]) -> torch.dtype:
    dtypes = {t.dtype for t in tensors}
    return dtypes.pop() if len(dtypes) == 1 else torch.float32
