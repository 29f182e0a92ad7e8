"""Statistics of a step's tensors over all processes that hold a part of them."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from amp_mp import _C
from amp_mp.sharding.reduction import Reduction, selection


class WholeStatistics:
    """Turns the statistics of a step's shards into those of the whole tensors.

    Every process gathers the same rows at every step, those of parameters without a gradient too.
    """

    def __init__(
        self,
        buckets: list[tuple[torch.device, list[int]]],
        params: list[Tensor],
        process_groups: Sequence[Any],
    ) -> None:
        """buckets: the device of each, and where its parameters are among all parameters."""
        self._devices = [device for device, _ in buckets]
        self._device = self._devices[0] if buckets else torch.device("cpu")
        self._reduction = Reduction(params, process_groups, self._device)
        self.is_needed = self._reduction.is_needed
        self._count = count = len(params)
        self._places = [selection(indices, count, self._device) for _, indices in buckets]

    def refuse_stock_scaler(self) -> None:
        """Raises RuntimeError where torch's GradScaler would not see an overflow on all processes.

        It reduces what it finds over the mesh of the first gradient alone.
        """
        if self._reduction.splits_differ:
            raise RuntimeError(
                "torch.amp.GradScaler misses overflows on other processes where parameters are not "
                "all split over the same processes (tensor parallel, process_groups): some "
                "would skip the step and the others not. Use amp_mp.GradScaler in its place"
            )

    def totals(self, found: list[_C.Measurement]) -> list[_C.Measurement]:
        """For each bucket a measurement with a total alone; together they are that of everything.

        found: of the buckets' gradients on this process.
        """
        return self._split(None, self._reduction.total(self._all([each.rows for each in found])))

    def of_tensors(
        self, found: list[_C.Measurement], weights: list[_C.Measurement]
    ) -> tuple[list[_C.Measurement], list[_C.Measurement]]:
        """The same with a row for each whole tensor, of the gradients and of the masters."""
        own = [self._all([each.rows for each in part]) for part in (found, weights)]
        both = self._reduction.of_tensors(torch.cat(own, 1))
        grads, masters = both[:, :3].contiguous(), both[:, 3:].contiguous()
        total = self._reduction.total_of_whole(grads)
        return self._split(grads, total), self._split(masters, torch.zeros_like(total))

    def updates_of(self, bucket: int) -> Callable[[Tensor], Tensor]:
        """A function that makes the rows [n, 3] of a bucket's whole tensors of its shards'."""
        place = self._places[bucket]

        def updates(rows: Tensor) -> Tensor:
            whole = self._reduction.of_tensors(self._spread(rows, place))
            return (whole if place is None else whole[place]).to(rows.device)

        return updates

    def _spread(self, rows: Tensor, place: Tensor | None) -> Tensor:
        """A bucket's rows as rows of all parameters, 0 for the others."""
        rows = rows.to(self._device)
        return rows if place is None else rows.new_zeros(self._count, 3).index_copy(0, place, rows)

    def _all(self, rows: list[Tensor]) -> Tensor:
        parts = [self._spread(r[:-1], place) for r, place in zip(rows, self._places, strict=True)]
        return parts[0] if len(parts) == 1 else torch.stack(parts).sum(0)

    def _split(self, rows: Tensor | None, total: Tensor) -> list[_C.Measurement]:
        """A measurement for each bucket; the total stands in the first."""
        found = []
        for number, (device, place) in enumerate(zip(self._devices, self._places, strict=True)):
            last = (total if number == 0 else torch.zeros_like(total))[None]
            own = rows if rows is None or place is None else rows[place]
            known = last if own is None else torch.cat([own, last])
            found.append(_C.Measurement(known.to(device)))
        return found
