"""Functions that torch.compile does not trace."""

from collections.abc import Callable
from typing import Any, TypeVar, cast

from torch import _disable_dynamo  # type: ignore[attr-defined]

Function = TypeVar("Function", bound=Callable[..., Any])


def outside_graphs(function: Function) -> Function:
    """The function, which a compiled caller calls as it is, with everything that it calls.

    Traced, a step would take torch.compile a minute and be computed by other kernels with other
    results. torch loads its compiler at the first call, as it does when an optimizer is made.
    """
    return cast("Function", _disable_dynamo(function))
