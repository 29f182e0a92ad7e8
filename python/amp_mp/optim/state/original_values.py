"""The float32 values that `prepare` rounds, kept beside each parameter until its master is made.

A parameter waits for a master from `prepare` until an optimizer makes one, also through
load_state_dict, deepcopy and pickle. While it waits it has values, or None: it is frozen or was
written since, and a float32 state dict may bring new ones. Of a DTensor everything here is about
the shard on this process.
"""

from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass, field, replace
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from amp_mp import _C
from amp_mp.dtypes import LOW_PRECISION, rounded
from amp_mp.sharding.replaced import ReplacedCheck, assigned
from amp_mp.sharding.shards import is_dtensor, local_of, part

SHARD = -1  # the version of a DTensor's values: model.to() changes its counters


@dataclass
class OriginalValues:
    """A parameter's float32 values, stored as what the low-precision weight lacks.

    version, checksum: of the weight that the values were rounded to. tensors: as the native code
    stores them (csrc/torch/state/original_values.h).
    """

    version: int
    checksum: int
    tensors: tuple[Tensor, ...]

    def belong_to(self, weight: Tensor, version: int) -> bool:
        """Whether nothing was written to the weight since; both as `_weight` gives them.

        The version counter sees all writes but those through `.data`, the checksum sees these. It
        alone is not enough: DistributedDataParallel sends rank 0's rounded weights to all ranks;
        rank 0 alone would keep its values, and masters would differ between ranks. Nothing sends
        shards, so for them a checksum that also sees the elements' places is enough.
        """
        return version == self.version and _C.is_rounded_original(
            weight, self.tensors, self.checksum, by_place=version == SHARD
        )


@dataclass
class Mark:
    """What is known of a plain parameter after its end: whether it waited then, and with values."""

    waits: bool = True
    has_values: bool = False


@dataclass
class Waiting:
    """A parameter that waits for a master. dtensor: itself, if it is one."""

    values: OriginalValues | None = None
    mark: Mark = field(default_factory=Mark)
    dtensor: Tensor | None = None


# A plain parameter is found by a weak reference. A DTensor must have none, because model.to() and
# to_empty() exchange the insides of two DTensors, which torch refuses for tensors with weak
# references. The module that owns it stands for it, and it is found by its id.
_plain: MutableMapping[Tensor, Waiting] = WeakTensorKeyDictionary()
_sharded: MutableMapping[nn.Module, dict[int, Waiting]] = WeakKeyDictionary()
# By a prepared module's names, so that what sharding and to_empty put in their place is known.
_marks: MutableMapping[nn.Module, dict[str, Mark]] = WeakKeyDictionary()
# A module's parameters and their values in a state dict, between its two hooks.
_given: MutableMapping[nn.Module, dict[str, tuple[Any, Tensor]]] = WeakKeyDictionary()


def _waiting(param: Tensor) -> Waiting | None:
    found = _plain.get(param)
    if found is None and is_dtensor(param):
        return next((own[id(param)] for own in _sharded.values() if id(param) in own), None)
    return found


def awaits_original(param: Tensor) -> bool:
    """Whether the parameter was prepared and no optimizer has taken its values yet."""
    return _waiting(param) is not None


def _put_values(
    param: Tensor, values: OriginalValues | None, owner: nn.Module | None = None
) -> Waiting:
    """Makes a parameter wait. owner: its module, which a DTensor needs that does not wait yet."""
    found = _waiting(param)
    if found is None and is_dtensor(param):
        assert owner is not None, "a DTensor that begins to wait needs its module"
        found = Waiting(dtensor=param)
        _sharded.setdefault(owner, {})[id(param)] = found
    elif found is None:
        found = _plain[param] = Waiting()
    found.values = values
    found.mark.has_values = values is not None
    return found


def keep_original(param: Tensor, values: Tensor, owner: nn.Module | None = None) -> None:
    """Keeps the float32 values that a parameter's low-precision ones were rounded from.

    values: beside a DTensor a DTensor placed as it is, or the part on this process. owner: the
    parameter's module, as long as the parameter may not wait yet. Nothing is kept for a parameter
    that does not require gradients, nor on the meta device.
    """
    weight, version = _weight(param)
    kept = None
    if param.requires_grad and not weight.is_meta:
        own = local_of(values).detach()
        checksum, tensors = _C.encode_original(weight, own, by_place=version == SHARD)
        kept = OriginalValues(version, checksum, tuple(tensors))
    _put_values(param, kept, owner)


def copy_values(
    param: Tensor, values: OriginalValues | None, owner: nn.Module | None = None
) -> None:
    """Gives a parameter the values of another with the same numbers; owner: as keep_original's."""
    _put_values(param, values and replace(values, version=_weight(param)[1]), owner)


def drop_original(param: Tensor) -> None:
    """Frees a parameter's values; others that are loaded later are kept."""
    if _waiting(param) is not None:
        _put_values(param, None)


def drop(param: Tensor) -> None:
    """Frees a parameter's values for good; the native code after the state has the master."""
    if (found := _waiting(param)) is None:
        return
    found.values = None
    found.mark.has_values = found.mark.waits = False
    for own in _sharded.values():
        own.pop(id(param), None)
    _plain.pop(param, None)


def values_of(param: Tensor) -> OriginalValues | None:
    """A parameter's values; they are freed here if it was written since."""
    found = _waiting(param)
    if found is None:
        return None
    if found.values is not None and not found.values.belong_to(*_weight(param)):
        drop_original(param)
    return found.values


def original_of(param: Tensor) -> Tensor | None:
    """The float32 values that the parameter was rounded from, or None; a new plain tensor."""
    if (values := values_of(param)) is None:
        return None
    _C.used_on_current_stream(values.tensors)  # those of `prepare`, which are dropped afterwards
    return _C.decode_original(_weight(param)[0], values.tensors)


def take_original(param: Tensor) -> Tensor:
    """A new float32 master for a parameter, same shape, layout and device.

    It holds the original values if `prepare` kept them and the parameter was not written since.
    They are dropped here. Of a DTensor it is a plain tensor: the master of the local tensor.
    Raises RuntimeError for a DTensor whose values were lost: fully_shard and parallelize_module
    make new Parameters. A state dict that is loaded after it brings values.
    """
    found = find(param)
    drop(param)
    if found is None or found[0] is None:
        return _weight(param)[0].to(torch.float32, copy=True)
    return found[0]


def find(param: Tensor) -> tuple[Tensor | None] | None:
    """As take_original, but keeps the values; the native code asks where it makes a master.

    (None,) where the parameter's own values are all, and None where it does not wait.
    """
    if not _plain and not is_dtensor(param):
        return None
    if (found := _waiting(param)) is None:
        if is_dtensor(param) and (name := _name_of_lost(param)):
            raise RuntimeError(
                f"{name}, a DTensor of shape {tuple(param.shape)}, was prepared before it was "
                "sharded; sharding made a new Parameter, and the float32 values kept beside the "
                "old one are lost. Shard the float32 model first, then call amp_mp.prepare. (Or "
                "load a state dict after sharding, or convert with "
                "amp.apex.fp16_utils.convert_network, which keeps no float32 values.)"
            )
        return None
    weight, version = _weight(param)
    if found.values is None or not found.values.belong_to(weight, version):
        return (None,)
    _C.used_on_current_stream(found.values.tensors)  # of `prepare`, which are dropped afterwards
    return (_C.decode_original(weight, found.values.tensors),)


def tensors_of(param: Tensor) -> tuple[Tensor, ...]:
    """What is kept for a parameter until its state has a master."""
    return getattr(values_of(param), "tensors", ())


def _mark_owner(module: nn.Module, params: Mapping[str, Tensor]) -> None:
    """Notes a prepared module's parameters, so that they are known after sharding."""
    waiting = {n: w for n, p in params.items() if not is_dtensor(p) and (w := _waiting(p))}
    _marks[module] = {name: each.mark for name, each in waiting.items()}


def follow_replaced(module: nn.Module, names: Iterable[str]) -> None:
    """Makes what sharding and to_empty put in waiting parameters' places wait for loaded values."""
    for name, param, _ in _replaced_in(module):
        if name in names:
            _marks[module][name] = _put_values(param, None, module).mark


def _replaced_in(module: nn.Module) -> Iterator[tuple[str, Tensor, Mark]]:
    """Parameters that replaced waiting ones and do not wait yet, and the marks of these."""
    for name, mark in _marks.get(module, {}).items():
        param = module._parameters.get(name) if mark.waits else None
        if param is not None and param.dtype in LOW_PRECISION and not awaits_original(param):
            yield name, param, mark


def _name_of_lost(param: Tensor) -> str:
    """The module's class and the name of a DTensor whose values were lost; else empty."""
    for module in list(_marks):
        for name, own, mark in _replaced_in(module):
            if mark.has_values and own is param:
                return f"{type(module).__name__}.{name}"
    return ""


def _weight(param: Tensor) -> tuple[Tensor, int]:
    """The parameter's memory on this process, and the version of it."""
    if is_dtensor(param):
        return local_of(param).detach(), SHARD
    return param.detach(), param._version


def track(module: nn.Module) -> None:
    """Keeps the float32 values of a module's own parameters through loading and copying."""
    _mark_owner(module, own_parameters(module))
    if _after_load not in module._load_state_dict_post_hooks.values():  # else prepared before
        hooks: Any = module  # whose methods torch has not typed
        hooks.register_load_state_dict_pre_hook(_BeforeLoad(module))
        hooks.register_load_state_dict_post_hook(_after_load)


class _BeforeLoad:
    """A module's hook that notes the float32 values which load_state_dict is about to round.

    deepcopy and pickle copy it with its module, and with it what is kept of the parameters.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = ref(module)

    def __call__(self, module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
        # Whether a parameter awaits them is asked after loading: FSDP2's own hook, which puts the
        # shards back in place of gathered parameters, may run after this one.
        _given[module] = {
            name: (param, value)
            for name, param in module._parameters.items()
            if isinstance(value := state_dict.get(prefix + name), Tensor)
        }

    def __reduce__(self) -> tuple[Any, ...]:
        module = self._module()
        params = {} if module is None else own_parameters(module)
        waiting = {n: (p, values_of(p)) for n, p in params.items() if awaits_original(p)}
        return _restored, (module, waiting)


def own_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """The module's own parameters by name, each under every name that it has there."""
    return {name: param for name, param in module._parameters.items() if param is not None}


def _restored(
    module: nn.Module, waiting: dict[str, tuple[nn.Parameter, OriginalValues | None]]
) -> _BeforeLoad:
    """The hook of a copied module, whose parameters wait as those of the original do."""
    for param, values in waiting.values():
        copy_values(param, values, module)
    _mark_owner(module, {n: p for n, (p, _) in waiting.items()})  # it has no parameters yet
    return _BeforeLoad(module)


@torch.no_grad()
def _after_load(module: nn.Module, _: Any) -> None:
    """Keeps the float32 values of a state dict; where a parameter got another value, that one."""
    given = _given.pop(module, {})
    follow_replaced(module, given)
    for name, (before, value) in given.items():
        param = module._parameters.get(name)
        if before is not None and before is not param and not is_dtensor(param):
            assigned[before] = None
            ReplacedCheck.assignments += 1
        if param is None or not awaits_original(param) or param.shape != value.shape:
            continue
        if param.dtype in LOW_PRECISION and value.dtype == torch.float32:
            weight = local_of(param)
            values = torch.empty_like(weight, dtype=torch.float32).copy_(part(value, param))
            loaded = rounded(values, param.dtype) == weight
            keep_original(param, torch.where(loaded, values, weight.float()))
        else:
            drop_original(param)
