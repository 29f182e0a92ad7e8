"""Warns once of low-precision buffers and frozen weights that a script counts or averages in.

Low precision loses their small steps, and nothing else tells: a count ends at 256 in bfloat16. They
are known by their values after some of the first steps of any optimizer, because a script may write
them in a forward, a compiled one, or after a step, in place or not. DistributedDataParallel writes
all buffers in each forward, so a version counter tells nothing.

A model without such tensors is dropped at its first step. With them a run pays about 30 ms in all
on one thread of a CPU: .2 ms at each of 21 looks, 2 to 4 ms with 10 M frozen parameters, and 15 us
at the others of the first 1,536 steps.
"""

from collections.abc import Iterable
from itertools import takewhile
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from amp_mp import _C
from amp_mp.dtypes import LOW_PRECISION
from amp_mp.messages import warn
from amp_mp.module_names import prepared_models, without_wrappers
from amp_mp.optim.state import kept_masters
from amp_mp.optim.step.cuda_graphs import is_capturing
from amp_mp.sharding.gradients import by_device
from amp_mp.sharding.shards import local_of
from amp_mp.text_table import dtype_name

# At which steps values are compared: ever more rarely, as EMAs may begin late and move slowly.
LOOKS = frozenset({1, *(first << k for k in range(10) for first in (2, 3))})
LAST = max(LOOKS)
MOVES = 3  # small steps that make a count or an average; loading is one
ELEMENTS = 1024  # of each tensor that are compared


class _Seen:
    """A tensor's elements at the last look, and how often they have moved by a small step.

    stamp: of its last write. is_copied: whether each write since the last look has made it a
    copy of a weight that is trained, as a target network's; None where no write was seen.
    """

    def __init__(self, values: Tensor) -> None:
        self.values, self.moves, self.named = values, 0, False
        self.stamp: _C.Stamp | None = None
        self.is_copied: bool | None = None

    def compare(self, values: Tensor, is_buffer: bool) -> bool:
        """Whether it has moved by a small step: by at most half of the new size of what changed.

        The second step of a count is a small one, and so is each of an average; new noise or new
        rows of a queue are not. A frozen weight's step is compared with the size of all elements,
        since few of them may change, from zero.
        """
        before, self.values = self.values, values
        is_copied, self.is_copied = self.is_copied, None
        if is_copied or values.shape != before.shape or torch.equal(values, before):
            return False
        changed = values != before
        size = values.abs()[changed] if is_buffer else values.abs()
        moved = bool((values - before).abs()[changed].sum() <= size.sum() / 2)
        self.moves += moved
        return moved


class _Watch:
    """Follows modules through the first steps after they were converted or copied.

    Modules that have nothing to follow at the first look are dropped.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self.seen: WeakKeyDictionary[nn.Module, dict[str, _Seen]] = WeakKeyDictionary()
        self.seen.update({module: {} for module in modules})
        self.steps, self.looked = 0, False
        # Looks at which any frozen weight had moved: low precision stops most.
        self.weights_moved = 0

    def step(self) -> bool:
        """One more step; False after the last one."""
        self.steps += 1
        if self.weights_moved:
            self._follow()
        if self.steps in LOOKS:
            self._look()
        return bool(self.seen) and self.steps < LAST

    def _follow(self) -> None:
        """Looks at each write of weights that have moved: copies of others lose nothing.

        At every step, because the weight that was copied is another after the next one.
        """
        written = []
        for module, seen in self.seen.items():
            for name, known in seen.items():
                weight = module._parameters.get(name)
                if not known.moves or known.named or weight is None:
                    continue
                if known.stamp is None:
                    known.stamp = _C.Stamp(weight)
                elif not known.stamp.still(weight):
                    written.append((known, weight))
        if not written or any(is_capturing(device) for device in {w.device for _, w in written}):
            return
        copied = _are_copies([weight for _, weight in written])
        for (known, weight), is_copy in zip(written, copied, strict=True):
            known.is_copied = known.is_copied is not False and is_copy
            known.stamp = _C.Stamp(weight)

    def _look(self) -> None:
        found = [
            (module, name, local_of(tensor).detach(), name in module._buffers)
            for module, seen in self.seen.items()
            for name, tensor in _watched(module).items()
            # Only weights that were frozen at every look: networks may be frozen in turns.
            if name in seen or name in module._buffers or not self.looked
        ]
        if any(is_capturing(device) for device in {t.device for _, _, t, _ in found}):
            return
        self.looked = True
        values = _samples([tensor for _, _, tensor, _ in found])
        now: WeakKeyDictionary[nn.Module, dict[str, _Seen]] = WeakKeyDictionary()
        moved = False
        for (module, name, _, is_buffer), sample in zip(found, values, strict=True):
            known = now.setdefault(module, {})[name] = self.seen[module].get(name, _Seen(sample))
            moved |= known.compare(sample, is_buffer) and not is_buffer
        self.weights_moved += moved
        self.seen = now
        self._name()

    def _name(self) -> None:
        for is_buffer in (True, False):
            every = [
                (module, name, known)
                for module, seen in self.seen.items()
                for name, known in seen.items()
                if (name in module._buffers) == is_buffer and not known.named
            ]
            if is_buffer:
                every = [each for each in every if each[2].moves >= MOVES]
            elif self.weights_moved < MOVES:
                continue
            for _, _, known in every:
                known.named = True
            if moved := [(module, name) for module, name, known in every if known.moves]:
                _warn(moved, is_buffer)


watches: list[_Watch] = []


def look() -> None:
    """Before each step of any optimizer, as long as there is something to follow."""
    if torch.compiler.is_compiling():
        return
    if kept_masters.unwatched:
        watches.append(_Watch(kept_masters.unwatched))
        kept_masters.unwatched.clear()
    watches[:] = [watch for watch in list(watches) if watch.step()]


def leave_out(modules: Iterable[nn.Module]) -> None:
    """Ends the watch over these modules, whose weights come from another model."""
    own = list(modules)
    kept_masters.unwatched.difference_update(own)
    for watch in watches:
        for module in own:
            watch.seen.pop(module, None)


def _watched(module: nn.Module) -> dict[str, Tensor]:
    """The module's own low-precision buffers and frozen parameters, by name.

    Without buffers of torch's modules: spectral_norm's vectors, which are made anew.
    """
    own = {} if type(module).__module__.startswith("torch.nn.") else module._buffers
    return {
        name: tensor
        for name, tensor in {**own, **module._parameters}.items()
        if tensor is not None
        and not tensor.requires_grad
        and tensor.dtype in LOW_PRECISION
        and type(local := local_of(tensor)) in (Tensor, nn.Parameter)
        and local.layout == torch.strided
        and local.numel()
        and not local.is_meta
    }


def _are_copies(weights: list[Tensor]) -> list[bool]:
    """Of each weight whether a prepared model trains one that has the same elements."""
    wanted = {(weight.shape, weight.dtype) for weight in weights}
    trained = [
        param
        for model in prepared_models
        for param in model.parameters()
        if param.requires_grad and (param.shape, param.dtype) in wanted
    ]
    both = weights + trained
    samples = _samples([local_of(each).detach() for each in both])
    keys = [(t.shape, t.dtype, s.numpy().tobytes()) for t, s in zip(both, samples, strict=True)]
    known = set(keys[len(weights) :])
    return [key in known for key in keys[: len(weights)]]


@torch.no_grad()
def _samples(tensors: list[Tensor]) -> list[Tensor]:
    """Elements of each tensor on the CPU, one wait for each device."""
    found = tensors.copy()
    for own in by_device(tensors).values():
        # An odd stride, so that they are not one column of a matrix.
        parts = [tensors[i].flatten()[:: (tensors[i].numel() // ELEMENTS) | 1] for i in own]
        together = torch.cat([part.float() for part in parts]).cpu()
        sizes = [len(part) for part in parts]
        for i, values in zip(own, torch.split(together, sizes), strict=True):
            found[i] = values
    return found


def _warn(moved: list[tuple[nn.Module, str]], is_buffer: bool) -> None:
    paths = {
        module: without_wrappers(path)
        for model in prepared_models
        for path, module in model.named_modules()
    }
    known = all(module in paths for module, _ in moved)
    names = [f"{paths.get(m, type(m).__name__)}.{name}".lstrip(".") for m, name in moved]
    if known and not is_buffer:
        names = _modules_of(names)
    tensor = getattr(*moved[0])
    dtype = dtype_name(tensor.dtype)
    what = f"{dtype} buffers" if is_buffer else f"frozen {dtype} weights"
    where = "" if known else " (in a copy of a model)"
    shown = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
    last = round(2 / torch.finfo(tensor.dtype).eps)
    keep = f"keep_fp32={names!r}" if known else "keep_fp32= before copying"
    average = "" if is_buffer else ", or average with amp_mp.AveragedModel"
    warn(
        f"something moves {what} in small steps: {shown}{where}. {dtype} loses steps below half "
        f"a unit in the last place of an average, and a count ends at {last}. Keep them in "
        f"float32: amp_mp.prepare(..., {keep}){average}"
    )


def _modules_of(names: list[str]) -> list[str]:
    """The innermost modules that contain all of the names that begin with the same part."""
    groups: dict[str, list[list[str]]] = {}
    for name in names:
        groups.setdefault(name.split(".")[0], []).append(name.split("."))
    found = []
    for group in groups.values():
        same = takewhile(lambda parts: len(set(parts)) == 1, zip(*group, strict=False))
        found.append(".".join(parts[0] for parts in same))
    return found
