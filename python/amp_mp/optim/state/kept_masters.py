"""Follows the float32 values of a model's weights through loading, copying and sharding.

What rounding cuts off from a weight is in its record (csrc/torch/weights/weight.h). Everything here
is about a DTensor's shard on this process.
"""

import copy
from collections.abc import Collection, Iterable, Mapping, MutableMapping
from typing import Any
from weakref import WeakKeyDictionary, WeakSet, ref

import torch
from torch import Tensor, nn

from amp_mp import _C
from amp_mp.dtypes import LOW_PRECISION, rounded
from amp_mp.optim.state.replaced import ReplacedCheck
from amp_mp.sharding.shards import is_dtensor, local_of, part

# The records of the parameters, by name, of the modules that `prepare` has converted. They tell
# what sharding and to_empty have replaced.
_prepared: MutableMapping[nn.Module, dict[str, _C.Weight]] = WeakKeyDictionary()
# Modules with low-precision tensors, converted or copied since the last step (model/moving.py).
unwatched = WeakSet[nn.Module]()
# A module's parameters and their values in a state dict, between its two hooks.
_given: MutableMapping[nn.Module, dict[str, tuple[Any, Tensor]]] = WeakKeyDictionary()


def keep(param: Tensor, values: Tensor, owner: nn.Module | None = None) -> None:
    """Keeps the float32 values that a parameter was rounded from, unless it is frozen.

    values: a DTensor's part on this process. owner: the parameter's module, through which a DTensor
    is found after Module.to.
    """
    record = _C.weight_at(param, owner)
    trains = param.requires_grad or record.is_stepped
    if trains and not local_of(param).is_meta:
        record.store(param, values.detach())
    else:
        record.drop()


def drop(param: Tensor) -> None:
    """Frees a parameter's master. An optimizer's state keeps what it shows."""
    if (record := _C.weight_of(param)) is not None:
        record.drop()


def taken_float32(param: Tensor) -> Tensor:
    """The parameter's float32 values, for a master that a script steps itself: its own goes."""
    values = _C.float32_of(param)
    drop(param)
    return values


def drop_masters(model: nn.Module) -> None:
    """Frees the masters of a model's weights, for inference after training.

    Drop the optimizer too: its state shows the same tensors. A new one starts from the weights as
    they are. Does nothing to a model that was never prepared or trained. amp_mp.optim.forget frees
    no master: it is for an optimizer that goes on.
    """
    for param in model.parameters():
        drop(param)


def is_prepared(param: Tensor) -> bool:
    """Whether `prepare` has converted the parameter."""
    record = _C.weight_of(param)
    return record is not None and record.is_prepared


def tensors_of(param: Tensor) -> list[Tensor]:
    """What is kept beside a parameter; it is freed here if the parameter was written since."""
    record = _C.weight_of(param)
    if record is None:
        return []
    if not record.is_stepped and not record.is_unwritten(param):
        record.drop()
    return record.tensors


def refuse_lost(param: Tensor) -> None:
    """RuntimeError for a DTensor that has replaced a parameter with a master."""
    for module, own in list(_prepared.items()):
        for name, record in own.items():
            if record.is_lost and module._parameters.get(name) is param:
                raise RuntimeError(
                    f"{type(module).__name__}.{name}, a DTensor of shape {tuple(param.shape)}, was "
                    "prepared before it was sharded; sharding made a new Parameter, and the "
                    "float32 values kept beside the old one are lost. Shard the float32 model "
                    "first, then call amp_mp.prepare. (Or load a state dict after sharding, or "
                    "convert with amp.apex.fp16_utils.convert_network, which keeps no float32 "
                    "values.)"
                )


def follow_replaced(module: nn.Module, names: Iterable[str]) -> None:
    """Takes what sharding and to_empty have put in prepared parameters' places as prepared."""
    for name in _prepared.get(module, {}).keys() & set(names):
        param = module._parameters.get(name)
        if param is not None and param.dtype in LOW_PRECISION and not is_prepared(param):
            _mark(module, {name: param})


def _mark(module: nn.Module, params: Mapping[str, Tensor]) -> None:
    """Notes parameters of a module as prepared."""
    own = _prepared.setdefault(module, {})
    for name, param in params.items():
        own[name] = _C.weight_at(param, module)
        own[name].is_prepared = True


def owners(params: Collection[Tensor]) -> list[nn.Module]:
    """The prepared modules, and copies of such, that have one of these parameters of their own."""
    known = list(_prepared) if params else []
    return [m for m in known if any(p in params for p in own_parameters(m).values())]


def track(module: nn.Module) -> None:
    """Keeps float32 values of a module's own parameters through loading and copying."""
    low = {n: p for n, p in own_parameters(module).items() if p.dtype in LOW_PRECISION}
    _mark(module, low)
    keeps_loads(module)


def keeps_loads(module: nn.Module) -> list[Any]:
    """Has a module keep the float32 values that load_state_dict rounds.

    Returns the new hooks' handles; none where it does so already.
    """
    if _after_load in module._load_state_dict_post_hooks.values():
        return []
    hooks: Any = module  # whose methods torch has not typed
    return [
        hooks.register_load_state_dict_pre_hook(_BeforeLoad(module)),
        hooks.register_load_state_dict_post_hook(_after_load),
    ]


class _BeforeLoad:
    """A module's hook that notes the values which load_state_dict is about to round.

    deepcopy and pickle copy it with its module, and with it the parameters' masters.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = ref(module)

    def __call__(self, module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
        # Whether they are needed is asked after loading: FSDP2's own hook, which puts the
        # shards back in place of gathered parameters, may run after this one.
        _given[module] = {
            name: (param, value)
            for name, param in module._parameters.items()
            if isinstance(value := state_dict.get(prefix + name), Tensor)
        }

    def __reduce__(self) -> tuple[Any, ...]:
        module = self._module()
        own = {} if module is None else own_parameters(module)
        found = {n: (p, record) for n, p in own.items() if (record := _C.weight_of(p))}
        return _restored, (
            module,
            {
                n: (p, record.is_prepared, record.state(p), _has_written_master(p))
                for n, (p, record) in found.items()
            },
        )


def own_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """The module's own parameters by name, each under every name that it has there."""
    return {name: param for name, param in module._parameters.items() if param is not None}


def _restored(module: nn.Module, known: dict[str, tuple[Any, ...]]) -> _BeforeLoad:
    """The hook of a copied module, whose parameters have masters as those of the original do."""
    unwatched.add(module)
    for name, (param, prepared, state, *written) in known.items():  # a pickle of before has less
        if prepared:
            _mark(module, {name: param})  # by name: the module has no parameters yet
        if state is not None:
            if len(state) == 5:  # a pickle of before: with a checksum nobody had stepped it
                state = (*state, state[3] is None)
            _take_over(param, state, any(written), module)
    return _BeforeLoad(module)


def _copied(param: nn.Parameter, memo: dict[int, Any]) -> nn.Parameter:
    """deepcopy's copy of a parameter, with a copy of its master."""
    twin: nn.Parameter = param.__deepcopy__(memo)  # type: ignore[no-untyped-call]
    record = _C.weight_of(param)
    if record is not None and (state := record.state(param)) is not None:
        _take_over(twin, copy.deepcopy(state, memo), _has_written_master(param))
    return twin


# Where deepcopy looks before it asks the object. Subclasses of Parameter are copied as before.
copy._deepcopy_dispatch[nn.Parameter] = _copied  # type: ignore[attr-defined]


def _has_written_master(param: Tensor) -> bool:
    """Whether a script has written the master in param_groups, which the weight has not got yet."""
    return bool(_C.written_masters([param]))


def _take_over(
    param: Tensor, state: tuple[Any, ...], has_written_master: bool, owner: nn.Module | None = None
) -> None:
    """Gives a copied parameter the state of the original's record."""
    _C.weight_at(param, owner).set_state(param, state)
    if has_written_master:
        _C.round_masters([param], [state[0]])


@torch.no_grad()
def _after_load(module: nn.Module, _: Any) -> None:
    """Keeps the values of a state dict; where a parameter got another value, that one."""
    given = _given.pop(module, {})
    follow_replaced(module, given)
    for name, (before, value) in given.items():
        param = module._parameters.get(name)
        # Otherwise FSDP2 has put a shard back in place of the gathered parameter.
        is_assigned = before is not param and is_dtensor(before) == is_dtensor(param)
        if before is not None and is_assigned:
            _C.weight_at(before).is_replaced = True
            ReplacedCheck.assignments += 1
        if param is None or param.dtype not in LOW_PRECISION or param.shape != value.shape:
            continue
        if value.is_floating_point() and value.dtype != param.dtype:
            weight = local_of(param)
            values = torch.empty_like(weight, dtype=torch.float32).copy_(part(value, param))
            loaded = rounded(values, param.dtype) == weight
            keep(param, torch.where(loaded, values, weight.float()), module)
        elif (record := _C.weight_of(param)) is not None and not record.is_stepped:
            record.drop()
