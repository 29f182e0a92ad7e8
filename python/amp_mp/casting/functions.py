"""Python functions with a precision of their own: decorators, and registration by name.

The wrappers read torch's autocast state, which Dynamo can trace, and do nothing while casts are
off.
"""

import functools
from collections.abc import Callable, Iterator, Mapping
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
    """As half_function, to float32; for functions that need its range or digits."""
    return _wrap(function, lambda _device, _: torch.float32)


def promote_function(function: F) -> F:
    """As half_function, to the widest dtype among the arguments."""
    return _wrap(function, lambda _, dtypes: dtypes.pop() if len(dtypes) == 1 else torch.float32)


def register_half_function(module: Any, name: str) -> None:
    """Replaces a function of a module or class by its half_function; ValueError if it has none."""
    _register(module, name, half_function)


def register_float_function(module: Any, name: str) -> None:
    """As register_half_function, with float_function."""
    _register(module, name, float_function)


def register_promote_function(module: Any, name: str) -> None:
    """As register_half_function, with promote_function."""
    _register(module, name, promote_function)


def _register(module: Any, name: str, decorate: Callable[[Any], Any]) -> None:
    if not hasattr(module, name):
        raise ValueError(f"No function named {name} in module {module}.")
    setattr(module, name, decorate(getattr(module, name)))


def _wrap(function: F, dtype_of: Callable[[str, set[torch.dtype]], torch.dtype]) -> F:
    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        tensors = list(_tensors((args, kwargs)))
        if not tensors or not torch.is_autocast_enabled(device := tensors[0].device.type):
            return function(*args, **kwargs)
        dtype = dtype_of(device, {t.dtype for t in tensors})
        args, kwargs = _cast((args, kwargs), dtype)
        with torch.autocast(device, enabled=False):
            return function(*args, **kwargs)

    return wrapper  # type: ignore[return-value]


def _is_castable(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point() and value.dtype != torch.float64


def _tensors(value: Any) -> Iterator[Tensor]:
    if _is_castable(value):
        yield value
    elif isinstance(value, list | tuple | Mapping):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from _tensors(item)


def _cast(value: Any, dtype: torch.dtype) -> Any:
    if _is_castable(value):
        return value.to(dtype)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_cast(item, dtype) for item in value))
    if isinstance(value, list | tuple):
        return type(value)([_cast(item, dtype) for item in value])
    if isinstance(value, dict):
        return {key: _cast(item, dtype) for key, item in value.items()}
    return value
