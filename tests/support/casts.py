"""The dtypes in which operators really computed; products in low precision on every CPU."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from amp_mp import _C
from amp_mp.casting import op_table, products


@contextmanager
def products_in_low_precision() -> Iterator[None]:
    """Has Apex's table cast matrix products on a CPU whose low-precision products are slow, too.

    The table leaves them in float32 there. The others decide by size. AMP_MP_PRODUCTS is unset
    meanwhile: amp.init would choose by it again.
    """
    chosen = _C.products.chosen[torch.float16]
    slow_bfloat16, slow_float16 = (
        _C.products.choice(low) == "float32" for low in (torch.bfloat16, torch.float16)
    )
    apex = op_table.APEX
    if slow_bfloat16:
        by_size = {"low_precision_if_large": "low_precision"}
        apex = tuple((by_size.get(policy, policy), ops) for policy, ops in apex)
    with mock.patch.object(op_table, "APEX", apex), mock.patch.dict(os.environ):
        os.environ.pop(products.VARIABLE, None)
        if slow_float16 and not slow_bfloat16:
            products.choose_products("native", torch.float16)
        yield
    _C.products.choose(torch.float16, *chosen)


class Computed(TorchDispatchMode):
    """The floating dtypes that operators below autocast take in and give out.

    Views, casts and the initialisation of modules do not count, nor does the exact -x.
    """

    IDLE = frozenset(
        [
            "_to_copy",
            "copy_",
            "clone",
            "detach",
            "empty",
            "empty_like",
            "uniform_",
            "fill_",
            "zeros",
            "neg",
        ]
    )

    def __init__(self) -> None:
        super().__init__()
        self.taken: set[torch.dtype] = set()
        self.given: set[torch.dtype] = set()
        self.by_name: dict[str, set[torch.dtype]] = {}  # both, of each operator
        self.result: set[torch.dtype] = set()  # what the caller gets

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = func(*args, **(kwargs or {}))
        name = func._schema.name.split("::")[1]
        views = any(a.alias_info and not a.alias_info.is_write for a in func._schema.arguments)
        if not views and name not in self.IDLE:
            taken, given = dtypes_of((args, kwargs or {})), dtypes_of(result)
            self.taken |= taken
            self.given |= given
            self.by_name[name] = self.by_name.get(name, set()) | taken | given
        return result


def dtypes_of(values: Any) -> set[torch.dtype]:
    leaves = torch.utils._pytree.tree_leaves(values)
    return {x.dtype for x in leaves if isinstance(x, Tensor) and x.is_floating_point()}


def computed(expression: str, names: dict[str, Any]) -> Computed:
    with Computed() as found, torch.no_grad():
        found.result = dtypes_of(eval(expression, names))
    return found


def spellings(rows: dict[str, list[str]]) -> list[str]:
    """Every expression of some rows."""
    return [expression for row in rows.values() for expression in row]


def unlike(
    expressions: Iterable[str], outcome: Callable[[str], Any], wanted: Any
) -> dict[str, Any]:
    """The expressions whose outcome is not the one wanted, each with its outcome or its error."""
    found = {}
    for expression in expressions:
        try:
            found[expression] = outcome(expression)
        except Exception as error:  # the others are looked at all the same
            found[expression] = f"{type(error).__name__}: {error}"
    return {expression: each for expression, each in found.items() if each != wanted}
