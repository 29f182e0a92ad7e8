"""Averages of a model's weights, taken of the optimizer's masters."""

import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from amp_mp import _C
from amp_mp.dtypes import LOW_PRECISION, NATIVE
from amp_mp.model.changes import noting
from amp_mp.model.sharded import copy_of, reshard
from amp_mp.optim.state import kept_masters
from amp_mp.optim.state.stored_formats import split_name
from amp_mp.optim.step.cuda_graphs import is_capturing
from amp_mp.param_groups import params_in, stepped_params
from amp_mp.sharding.shards import (
    any_dtensor,
    is_dtensor,
    is_placed_as,
    like,
    local_of,
    locals_of,
)

FORMAT = "split32"  # of an average of low-precision weights


class AveragedModel(nn.Module):
    """A moving average of a model's weights: torch.optim.swa_utils.AveragedModel for any precision.

        averaged = amp.AveragedModel(model, decay=0.9999)
        ...
        optimizer.step()
        averaged.update()
        ...
        with averaged.swap():  # the model has the averages in here
            evaluate(model)

    Averages the master of each low-precision parameter, whichever optimizer steps it, or the weight
    where there is no master, in float32. `module` is a copy of the model with the averages, rounded
    to the model's dtypes. The rest of their float32 values is in `remainders`: an average takes 4
    bytes in all.

    Args:
        model: what is averaged, after `prepare`; it is copied, and not changed. The copy's
            parameters do not require gradients.
        optimizer: needed only where a script writes weights between steps: the averages then have
            the masters that this optimizer, or one of a list, goes on with. Default None: a weight
            that was written since the last step counts as it is.
        decay: a number in [0, 1]: an update by x makes decay * average + (1 - decay) * x. Or a
            function of the number of updates so far, from 1 on. The first update copies. Default
            None: the mean of all updates.
        warmup: True uses min(decay, (1 + n) / (10 + n)) after n updates; decay is a number then.
        use_buffers: True averages floating-point buffers too; others, and by default all, are
            copied at each update.
        device: where the averages are. Default: where the parameters are.

    `n_averaged` counts the updates, on the CPU, so that no update waits for a GPU. The state dict
    has all of it but decay and model; copies have no model: call `follow`.
    Parameters of other dtypes than float32, float16 and bfloat16 are averaged in their own,
    integers copied. Raises TypeError or ValueError for arguments of another kind or out of range.

    Of a model sharded by fully_shard, parallelize_module or both, each process averages its own
    shards and sends nothing: the averages are DTensors placed as the weights. Make it after the
    model was sharded. What fully_shard has sharded runs in `swap` alone.
    """

    n_averaged: Tensor
    _followed: tuple[nn.Module] | None  # in a tuple the model is not a submodule
    _optimizers: tuple[weakref.ref[Any], ...]

    def __init__(
        self,
        model: nn.Module,
        optimizer: Any = None,
        *,
        decay: float | Callable[[int], float] | None = None,
        warmup: bool = False,
        use_buffers: bool = False,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        if decay is not None and not callable(decay):
            _decay_number(decay)
        elif warmup:
            raise ValueError(f"warmup=True needs a number as decay, such as 0.999, found {decay!r}")
        self.decay, self.warmup, self.use_buffers = decay, warmup, use_buffers
        self.follow(model, optimizer)
        self.module = copy_of(model).requires_grad_(False)
        kept_masters.unwatched.difference_update(self.module.modules())
        for param in self.module.parameters():
            kept_masters.drop(param)  # a remainder takes its place
        if device is not None:
            self.module.to(device)
        self.register_buffer("n_averaged", torch.tensor(0))
        self.remainders = nn.Module()
        averaged = [(n, average) for n, average in self._averaged() if average.dtype in NATIVE]
        _C.check_weights([local_of(t) for _, t in averaged], [name for name, _ in averaged])
        for name, average in averaged:
            if average.dtype in LOW_PRECISION:
                key = name.replace(".", "/")  # a name in a module has no dots
                self.remainders.register_buffer(key, torch.zeros_like(average, dtype=torch.int16))
        self._move(model, 0.0)

    def follow(self, model: nn.Module, optimizer: Any = None) -> None:
        """Sets the model that `update` and `swap` mean.

        optimizer: as for the class. Raises TypeError for what is neither an optimizer, a list of
        them nor None.
        """
        given = optimizer if isinstance(optimizer, list | tuple) else [optimizer]
        for each in given:
            if each is not None and not hasattr(each, "param_groups"):
                raise TypeError(
                    f"optimizer must be an optimizer or None, found {each!r}; decay, use_buffers "
                    "and device are given by name"
                )
        self._optimizers = tuple(weakref.ref(each) for each in given if each is not None)
        self._followed = (model,)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The averaged module's forward."""
        return self.module(*args, **kwargs)

    def update(self) -> None:
        """One update by the model as it is now; as `update_parameters`.

        RuntimeError in a copy that follows no model yet.
        """
        self.update_parameters(self._following())

    def update_parameters(self, model: nn.Module) -> None:
        """One update by a model's masters: the first copies, later ones follow the decay.

        Raises ValueError, before anything is changed, where the model's tensors do not correspond
        to the averages, or decay's number is not in [0, 1]; RuntimeError inside of `swap` and while
        a CUDA graph is captured.
        """
        count, decay = int(self.n_averaged), self.decay
        if count == 0 or decay is None:
            found = count / (count + 1)
        else:
            found = _decay_number(decay(count) if callable(decay) else decay)
            found = min(found, (1 + count) / (10 + count)) if self.warmup else found
        self._move(model, found)
        self.n_averaged += 1

    @contextmanager
    def swap(self, model: nn.Module | None = None) -> Iterator[nn.Module]:
        """Puts the averages into the model's weights and buffers, in place, for a `with` block.

        After the block, also where it raises or is interrupted, they have the bytes that they had.
        Copies of them exist meanwhile. The block's variable is the model: `model`, by default the
        one that it follows.

        Raises ValueError where the model's tensors do not correspond to the averages; RuntimeError
        where an optimizer steps, `update`, `swap`, amp_mp.checkpoint or a float32 state dict of
        the model is called inside, or, after restoring the weights, where anything else wrote them.
        """
        model = self._following() if model is None else model
        averages, live, _ = self._tensors(model)
        names = [name for name, _ in _named_tensors(model)]
        own = [tensor for tensor in live if isinstance(tensor, nn.Parameter)]
        loan = _C.Loan(own)

        def refuse(optimizer: Any, *_: Any) -> None:
            # This hook may still be there after an interrupt: of averages alone, and only if any.
            if _C.Loan.is_any:
                params = params_in(optimizer.param_groups)
                _C.refuse_borrowed(params, "an optimizer's step", reads=True)

        _C.refuse_borrowed(own, "swap()")
        _C.round_written_masters(own)
        known = [(tensor, record) for tensor in live if (record := _C.weight_of(tensor))]
        unwritten = [(t, record) for t, record in known if record.is_unwritten(t)]
        saved = [local_of(tensor).detach().clone() for tensor in live]
        written: list[str] = []

        def restore() -> None:
            """Restores the weights; after an interrupt it is called again, and goes on."""
            if not saved:
                return
            reshard(model)  # a forward has gathered averages
            _write(live, saved)
            _C.used_on_current_stream(saved)
            for tensor, record in unwritten:
                record.stamp(tensor)
            loan.give_back()
            hook.remove()
            saved.clear()

        hook = register_optimizer_step_pre_hook(refuse)
        try:
            try:
                loan.borrow("swap()")
                _write(live, locals_of(averages))
                stamps = [_C.Stamp(tensor) for tensor in live]
                yield model
                # Buffers may be written: a norm's statistics.
                found = zip(names, live, stamps, strict=True)
                written = [
                    n for n, t, stamp in found if not stamp.still(t) and isinstance(t, nn.Parameter)
                ]
            finally:
                restore()
        except BaseException:
            restore()
            raise
        if written:
            first = ", ".join(sorted(written)[:5])
            raise RuntimeError(
                f"{first} was written inside of AveragedModel.swap(), where the model's weights "
                "are averages; the weights are restored, what was written is lost"
            )

    def float32_state_dict(self) -> dict[str, Any]:
        """The averaged module's state dict with every bit of the averages.

        Low-precision tensors are float32 in it; all are copies, tied tensors the same one. A
        float32 model can load it.
        """
        low = [tensor for _, tensor in self._averaged() if tensor.dtype in LOW_PRECISION]
        remainders = dict(zip(map(id, low), self.remainders.buffers(), strict=True))
        found = self.module.state_dict(keep_vars=True)
        made: dict[int, Any] = {}
        for value in {id(each): each for each in found.values()}.values():
            if not isinstance(value, Tensor):  # what a module gives by get_extra_state
                made[id(value)] = value
                continue
            tensor, remainder = value.detach(), remainders.get(id(value))
            if remainder is not None:
                form = split_name(FORMAT, tensor.dtype)
                tensor = like(_C.decode(local_of(tensor), local_of(remainder), form), tensor)
            dtype = torch.float32 if tensor.dtype in LOW_PRECISION else tensor.dtype
            made[id(value)] = tensor.to(dtype, copy=True)
        return {name: made[id(value)] for name, value in found.items()}

    def _following(self) -> nn.Module:
        if self._followed is None:
            raise RuntimeError(
                "this AveragedModel was copied or unpickled and has no model; call its "
                "follow(model) first"
            )
        return self._followed[0]

    def _averaged(self) -> list[tuple[str, Tensor]]:
        found = _named_tensors(self.module)
        return found if self.use_buffers else found[: len(list(self.module.parameters()))]

    def _tensors(self, model: nn.Module) -> tuple[list[Tensor], list[Tensor], int]:
        """Parameters and buffers of the averaged module and of the model; how many are averaged.

        What FSDP2 has gathered is shards again.
        """
        reshard(model)
        params = list(self.module.parameters())
        own = [*params, *self.module.buffers()]
        live = [*model.parameters(), *model.buffers()]
        if len(own) != len(live):
            raise ValueError(
                f"model has {len(live)} parameters and buffers, its average {len(own)}: the model "
                "has changed since; make a new AveragedModel"
            )
        are_split = any_dtensor([*own, *live])
        for index, (average, tensor) in enumerate(zip(own, live, strict=True)):
            if average.dtype != tensor.dtype or average.shape != tensor.shape:
                name = _named_tensors(self.module)[index][0]
                raise ValueError(
                    f"model: {name} is {tensor.dtype} of shape {tuple(tensor.shape)}, its average "
                    f"{average.dtype} of shape {tuple(average.shape)}; make the AveragedModel "
                    "after amp_mp.prepare and every other change"
                )
            if are_split and not is_placed_as(average, tensor):
                name = _named_tensors(self.module)[index][0]
                raise ValueError(
                    f"model: {name} {_place(tensor)}, and its average {_place(average)}; make the "
                    "AveragedModel after fully_shard and parallelize_module, and load the state of "
                    "this one into it with amp_mp.checkpoint"
                )
        return own, live, len(own if self.use_buffers else params)

    @torch.no_grad()
    def _move(self, model: nn.Module, decay: float) -> None:
        averages, live, moving = self._tensors(model)
        _C.refuse_borrowed(live, "an update", reads=True)
        if any(is_capturing(device) for device in {tensor.device for tensor in live}):
            raise RuntimeError(
                "an update while a CUDA graph is captured: replays would not count in n_averaged; "
                "update after each replay"
            )
        _C.round_written_masters(live)
        with noting(self.module.parameters()):
            self._write(averages, live, moving, decay)

    def _write(self, averages: list[Tensor], live: list[Tensor], moving: int, decay: float) -> None:
        """Moves the first `moving` averages towards the live tensors, and copies the others."""
        # buffers() takes microseconds each
        remainders = iter(locals_of(self.remainders._buffers.values()))
        optimizers = [each for ref in self._optimizers if (each := ref()) is not None]
        stepped = stepped_params(optimizers)
        beside = _C.masters_beside(live, [tensor in stepped for tensor in live])
        averages, live = locals_of(averages), locals_of(live)
        native: dict[torch.device, list[tuple[Any, ...]]] = defaultdict(list)
        for index, (average, value, master) in enumerate(zip(averages, live, beside, strict=True)):
            moves, dtype = index < moving, average.dtype
            if moves and dtype in LOW_PRECISION:
                native[average.device].append((average, next(remainders), value, master))
            elif moves and dtype == torch.float32:
                native[average.device].append((average, None, value, None))
            elif moves and (dtype.is_floating_point or dtype.is_complex):
                average.lerp_(value.to(average.device), 1 - decay)
            else:
                average.copy_(value)
        for rows in native.values():
            to, to_masters, values, masters = zip(*rows, strict=True)
            _C.average_(to, to_masters, values, masters, decay)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "AveragedModel":
        """Moves the averages and leaves n_averaged where it is; TypeError where it would cast."""
        for name, tensor in self._averaged():
            found = fn(torch.empty(0, dtype=tensor.dtype, device=tensor.device)).dtype
            if found != tensor.dtype:
                raise TypeError(
                    f"an AveragedModel's {name} cannot be cast from {tensor.dtype} to {found}; its "
                    "float32_state_dict() has the averages in float32"
                )
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.n_averaged = self.n_averaged.cpu()
        return self

    def __getstate__(self) -> dict[str, Any]:
        """Without the model, which a copy or a pickle must not contain."""
        return {**self.__dict__, "_followed": None, "_optimizers": ()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Sets a copy or a pickle up: its averages are not watched, for they have remainders."""
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        kept_masters.unwatched.difference_update(self.module.modules())


def _named_tensors(module: nn.Module) -> list[tuple[str, Tensor]]:
    return [*module.named_parameters(), *module.named_buffers()]


def _decay_number(decay: Any) -> float:
    if not isinstance(decay, int | float) or isinstance(decay, bool):
        raise TypeError(f"decay must be a number, a function of a number or None, found {decay!r}")
    if not 0 <= decay <= 1:
        raise ValueError(f"decay must be in [0, 1], found {decay!r}")
    return float(decay)


def _place(tensor: Any) -> str:
    if not is_dtensor(tensor):
        return "is whole on each process"
    mesh = tuple(tensor.device_mesh.shape)
    return f"is split as {tensor.placements} over a mesh of {mesh} processes"


@torch.no_grad()
def _write(tensors: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    """Writes values, those of this process, into tensors or the memory of DTensors."""
    for tensor, value in zip(tensors, values, strict=True):
        local = local_of(tensor)
        local.copy_(value)
        if local is not tensor:
            torch.autograd.graph.increment_version(tensor)
