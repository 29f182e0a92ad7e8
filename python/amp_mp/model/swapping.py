"""Other weights in a model for the time of a block, in place."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from amp_mp import _C
from amp_mp.optim.state.original_values import awaits_original, entry_of, put_entry

_swapped: set[int] = set()  # ids of the parameters that hold other weights now


@contextmanager
def swapped(
    names: Sequence[str],
    live: Sequence[Tensor],
    values: Sequence[Tensor],
    optimizers: Sequence[Any],
) -> Iterator[None]:
    """A block in which the tensors `live` hold `values`; after it they have their bytes again.

    Raises RuntimeError where one of the optimizers steps, or any other that has one of these
    parameters; and, after restoring the weights, where a parameter was written inside.
    """
    own = {id(tensor) for tensor in live if isinstance(tensor, nn.Parameter)}

    def refuse(optimizer: Any, *_: Any) -> None:
        stepped = (id(param) for group in optimizer.param_groups for param in group["params"])
        if optimizer in optimizers or not own.isdisjoint(stepped):
            raise RuntimeError(
                "an optimizer's step inside of AveragedModel.swap(), where the model's weights "
                "are averages; step after the block"
            )

    refuse_swapped(live, "swap()")
    entries = {tensor: entry_of(tensor) for tensor in live if awaits_original(tensor)}
    saved = [tensor.detach().clone() for tensor in live]
    written: list[str] = []
    hook = register_optimizer_step_pre_hook(refuse)
    _swapped.update(own)
    try:
        _write(live, values)
        versions = [tensor._version for tensor in live]
        yield
        written = [n for n, t, v in zip(names, live, versions, strict=True) if t._version != v]
    finally:
        _write(live, saved)
        _C.used_on_current_stream(saved)
        for param, entry in entries.items():
            put_entry(param, entry)
        _swapped.difference_update(own)
        hook.remove()
    params = {name for name, tensor in zip(names, live, strict=True) if id(tensor) in own}
    if found := params.intersection(written):  # buffers may be written: a norm's statistics
        raise RuntimeError(
            f"{', '.join(sorted(found)[:5])} was written inside of AveragedModel.swap(), where the "
            "model's weights are averages; the weights are restored, what was written is lost"
        )


def refuse_swapped(live: Sequence[Tensor], what: str) -> None:
    """Raises RuntimeError where one of the tensors holds another weight now."""
    if _swapped and not _swapped.isdisjoint(map(id, live)):
        raise RuntimeError(
            f"{what} inside of AveragedModel.swap(), where the model's weights are averages; do it "
            "after the block"
        )


@torch.no_grad()
def _write(tensors: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    for tensor, value in zip(tensors, values, strict=True):
        tensor.copy_(value)
