"""Regions in which torch casts, with and without an end; functions with a precision; step hooks.

The wrappers of functions read torch's autocast state, which Dynamo can trace, and do nothing while
casts are off. The hooks switch casts off while an optimizer steps. `begin` and `end` are of casting
that a handle switches on.
"""

import functools
import threading
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar
from weakref import ref

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim import optimizer as optimizers

from amp_mp import _C
from amp_mp.casting import op_table
from amp_mp.casting.op_table import DEVICES, table_of
from amp_mp.casting.products import choose_products
from amp_mp.dtypes import LOW_PRECISION, check_dtype
from amp_mp.nested import map_tensors, tensors_in
from amp_mp.switch import ENABLED

F = TypeVar("F", bound=Callable[..., Any])

clear_cache = _C.casting.clear_cache
set_keep_casts = _C.casting.set_keeps_casts  # of this thread; returns what was set before

_hooks_installed = False
_steps = 0  # of all optimizers since the hooks were installed
_lock = threading.Lock()


def autocast(
    device_type: str | None = None,
    dtype: torch.dtype | None = None,
    enabled: bool = ENABLED,
    cache_enabled: bool | None = None,
    *,
    keep_casts: bool = False,
) -> torch.autocast:
    """A torch.autocast, which checkpoint, compile and DDP understand.

    The first one in a process puts the "torch" table in force, if no table is: torch's own lists,
    and a cache of weight casts that notices writes inside the region. Call it before worker threads
    run. Raises ValueError for another device type or dtype.

    device_type: "cuda" or "cpu"; default: "cuda" where there is one. dtype: torch.float16 or
    torch.bfloat16; default: float16 on CUDA, bfloat16 on a CPU. enabled: False for a region without
    casts (default under AMP_MP=0). cache_enabled: cast a weight once a region; default: as outside.
    keep_casts: True keeps the casts of weights for the next region, and amp_mp's optimizers write
    them: a training step then casts no weight. Only if nothing writes weights through `.data`,
    `out=p.data`, NumPy or DLPack, or amp.casting.clear_cache() is called after it. False: as
    outside; in the outermost region the casts end with the region, as torch's do.
    """
    device, low = resolve(device_type, dtype)
    compiling = torch.compiler.is_compiling()
    if enabled and not compiling:
        install_step_hooks()
        if table_of(device, None) is None:
            op_table.install("torch", device)
        if device == "cpu":
            choose_products("auto", low)
    region = _KeepingCasts if keep_casts and not compiling else torch.autocast
    return region(device, dtype=low, enabled=enabled, cache_enabled=cache_enabled)


class _KeepingCasts(torch.autocast):
    def __enter__(self) -> Any:
        self._kept_before = set_keep_casts(True)
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *error: Any) -> Any:
        set_keep_casts(self._kept_before)
        return super().__exit__(*error)


def disable_casts(device_type: str | None = None) -> torch.autocast:
    """A region without casts on the device type."""
    return torch.autocast(resolve(device_type, None)[0], enabled=False)


def backward(loss: Tensor, **kwargs: Any) -> None:
    """loss.backward(**kwargs) with casts off, for training under amp.init without loss scaling.

    Backward must run as the graph was recorded. With casts on, the products in the backward pass
    of what was computed in float32 would run in low precision: gradients off by 1e-3. scale_loss
    does the same.
    """
    with disable_casts(loss.device.type):
        loss.backward(**kwargs)  # type: ignore[no-untyped-call]


def resolve(device_type: str | None, dtype: torch.dtype | None) -> tuple[str, torch.dtype]:
    """The device type and low precision of a region; ValueError naming a wrong argument."""
    device = op_table.check_device(device_type, "device_type")
    low = dtype or (torch.float16 if device == "cuda" else torch.bfloat16)
    check_dtype(low, LOW_PRECISION)
    return device, low


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


def _registers(decorate: Callable[[Any], Any]) -> Callable[[Any, str], None]:
    def register(module: Any, name: str) -> None:
        if not hasattr(module, name):
            raise ValueError(f"No function named {name} in module {module}.")
        setattr(module, name, decorate(getattr(module, name)))

    kind = decorate.__name__
    register.__name__ = register.__qualname__ = f"register_{kind}"
    register.__doc__ = f"Replaces a module's or class's function by its {kind}, or ValueError."
    return register


register_half_function = _registers(half_function)
register_float_function = _registers(float_function)
register_promote_function = _registers(promote_function)


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


class _Arguments(tuple[Any, ...]):
    """A step's positional arguments."""

    switched_off: list[str]  # the device types whose casts are off during the step


def install_step_hooks() -> None:
    """Adds the hooks to every optimizer's step, once per process.

    torch calls no post-hook where a step raises. There the native guard switches the casts on
    again, as soon as the exception leaves the step. It cannot do so inside a TorchDispatchMode,
    which undoes what operators change in the thread's dispatch state.
    """
    global _hooks_installed
    with _lock:
        if not _hooks_installed:
            _C.casting.guard_steps()
            optimizers.register_optimizer_step_pre_hook(_before)
            optimizers.register_optimizer_step_post_hook(_after)
            _hooks_installed = True


def steps_taken() -> int:
    """How many steps all optimizers have taken with the hooks; tells iterations apart."""
    return _steps


def _before(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    on = [device for device in DEVICES if torch.is_autocast_enabled(device)]
    if not on:
        return None
    closure = args[1] if len(args) > 1 else kwargs.get("closure")
    if callable(closure):  # it runs the model's forward pass, which is cast
        closure = _with_casts(closure, on)
        if len(args) > 1:
            args = (args[0], closure, *args[2:])
        else:
            kwargs = {**kwargs, "closure": closure}
    args = _Arguments(args)
    args.switched_off = on
    _switch(on, False)
    return args, kwargs


def _after(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    global _steps
    _steps += 1
    if isinstance(args, _Arguments):
        _switch(args.switched_off, True)
    torch.clear_autocast_cache()
    _C.casting.optimizer_stepped()


def _switch(devices: list[str], enabled: bool) -> None:
    for device in devices:
        torch.set_autocast_enabled(device, enabled)


def _with_casts(closure: Callable[[], Any], on: list[str]) -> Callable[[], Any]:
    def wrapped() -> Any:
        _switch(on, True)
        try:
            return closure()
        finally:
            _switch(on, False)

    return wrapped


class Casting(NamedTuple):
    """How one device type casts; `verbose` and the table are the process's, the rest a thread's."""

    device: str
    enabled: bool
    dtype: torch.dtype
    caching: bool
    keeps: bool
    table: tuple[str, bool]  # its name, and whether it computes what it bans in float32 instead
    verbose: bool

    def put_in_force(self) -> None:
        """Casts so from now on, by our kernels. ValueError, and no change: an unknown table."""
        if self.table != table_of(self.device, None if self.enabled else self.table):
            op_table.install(self.table[0], self.device, self.table[1])
        op_table.set_verbose(self.verbose)
        set_keep_casts(self.keeps)
        torch.set_autocast_enabled(self.device, self.enabled)
        torch.set_autocast_dtype(self.device, self.dtype)
        torch.set_autocast_cache_enabled(self.caching)
        clear_casts()


def clear_casts() -> None:
    """Drops the casts of weights, torch's and ours."""
    torch.clear_autocast_cache()
    clear_cache()


def _casting_of(device: str) -> Casting:
    set_keep_casts(keeps := set_keep_casts(False))
    low, caching = torch.get_autocast_dtype(device), torch.is_autocast_cache_enabled()
    enabled = torch.is_autocast_enabled(device)
    return Casting(device, enabled, low, caching, keeps, table_of(device), op_table.is_verbose())


class _Owners(threading.local):
    began: tuple[tuple[ref[Any], Casting], ...] = ()  # in this order
    before: tuple[Casting, ...] = ()  # what was in force before the first


_owners = _Owners()


def begin(owner: Any, casting: Casting) -> None:
    """Puts it in force until `end(owner)`. An owner that is gone has no end: it was for good."""
    before = tuple(map(_casting_of, DEVICES))
    casting.put_in_force()
    if not _owners.began or _owners.began[-1][0]() is None:
        _owners.began = ()
        _owners.before = before
    _owners.began += ((ref(owner), casting),)


def end(owner: Any) -> None:
    """Puts in force what was before the first owner, and then the castings of those left."""
    if any(each() is owner for each, _ in _owners.began):
        _owners.began = tuple(row for row in _owners.began if row[0]() not in (None, owner))
        for casting in (*_owners.before, *(casting for _, casting in _owners.began)):
            casting.put_in_force()
