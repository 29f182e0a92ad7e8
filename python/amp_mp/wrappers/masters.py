"""Float32 masters in an optimizer's param_groups, or those that an optimizer of amp_mp keeps."""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any
from weakref import WeakSet, finalize, ref

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from amp_mp import _C
from amp_mp.dtypes import LOW_PRECISION, NATIVE
from amp_mp.model.changes import noting
from amp_mp.model.kept_modules import NotScriptable
from amp_mp.module_names import prepared_models
from amp_mp.optim.base import FusedOptimizer
from amp_mp.optim.rule import NO_STATES
from amp_mp.optim.state import kept_masters
from amp_mp.optim.state.edit_blocks import edit_masters
from amp_mp.optim.state.stored_formats import MASTER_ENTRIES
from amp_mp.optim.step.params import drop_repeats
from amp_mp.param_groups import ParamInfo, low_params, param_infos, params_in
from amp_mp.sharding.shards import like, why_foreign


def model_params(optimizer: Optimizer) -> list[Tensor]:
    """The model's parameters that an optimizer updates, in place of their masters."""
    low = low_params(optimizer)
    return [low.get(param, param) for param in params_in(optimizer.param_groups)]


class _BeforeUse(NotScriptable):
    """A hook before a model's forward and state_dict: it gets what was written into its masters.

    In a compiled model it does nothing. Copies of the model have a hook without masters.
    """

    def __init__(self, masters: "Masters | None" = None) -> None:
        self._masters = None if masters is None else ref(masters)

    def __call__(self, *_: Any) -> None:
        if self._masters is not None and not torch.compiler.is_compiling():
            masters = self._masters()
            if masters is not None:
                masters.show()

    def __reduce__(self) -> tuple[Any, ...]:
        return _BeforeUse, ()


def _called(params: set[Tensor]) -> Iterator[nn.Module]:
    """What scripts call of the models that have these parameters, of those that were converted.

    A hook in each of their modules would cost more than all of this. Of copies of such models the
    modules alone are known that have parameters of their own.
    """
    found = set[Tensor]()
    modules = list(prepared_models)
    while modules:
        module = modules.pop()
        own = params.intersection(module.parameters())
        if own and type(module).forward is nn.Module.forward:  # a ModuleList, which nobody calls
            modules += module.children()
        elif own:
            found |= own
            yield module
    yield from kept_masters.owners(params - found)


class Masters:
    """Replaces an optimizer's low-precision parameters by float32 masters and keeps both.

    Lists of lists have one list for each param_group. enabled: False for no masters. stale: an
    interrupt has left the model older than its masters. low: the parameter of each master.
    """

    def __init__(self, optimizer: Optimizer, enabled: bool = True) -> None:
        self.optimizer = optimizer
        self.enabled = enabled
        self.stale = False
        self.low = low_params(optimizer)
        self._hooked = WeakSet[nn.Module]()
        self.refresh()

    def refresh(self, first: int = 0) -> None:
        """Gives masters to trainable low-precision parameters; first TypeError as refuse_dtypes.

        first: the group to begin with.
        """
        self.refuse_dtypes(first)
        for group in self.optimizer.param_groups[first:] if self.enabled else ():
            drop_repeats(group)  # one parameter has one master
        low = [
            param
            for param in chain(*self.groups(first) if self.enabled else ())
            if param.requires_grad and param.dtype in LOW_PRECISION
        ]
        if not low:
            return
        _C.refuse_borrowed(low, "a look at an optimizer's masters", reads=True)
        values = zip(low, _C.first_masters(low), strict=True)
        masters = {param: nn.Parameter(own) for param, own in values}
        for params in self.groups(first):
            for i, param in enumerate(params):
                if param in masters:
                    self._give_state(param, masters[param])
                    params[i] = masters[param]
        _C.adopt_masters([*masters], [*masters.values()])
        hook = _BeforeUse(self)
        for module in {*_called({*masters})}.difference(self._hooked):
            self._hooked.add(module)
            hooks: Any = module  # whose methods torch has not typed
            before_forward = hooks.register_forward_pre_hook(hook, prepend=True)
            for handle in before_forward, hooks.register_state_dict_pre_hook(hook):
                finalize(self, handle.remove).atexit = False

    def refuse_dtypes(self, first: int = 0) -> None:
        """Raises TypeError for a trainable parameter not in float16, bfloat16 or float32."""
        for param in chain(*self.groups(first)):
            if param.requires_grad and param.dtype not in NATIVE:
                raise TypeError(
                    f"{self.label_of(param)} (shape {tuple(param.shape)}) has dtype {param.dtype}; "
                    "FP16_Optimizer takes float16, bfloat16 and float32"
                )

    def _give_state(self, param: Tensor, master: Tensor) -> None:
        """Gives the parameter's state to its master, which knows the parameter from now on."""
        self.low[master] = param
        state = self.optimizer.state.pop(param, None)
        if state is not None:
            kept = {k: v for k, v in state.items() if k not in MASTER_ENTRIES}
            if not isinstance(self.optimizer, FusedOptimizer):  # it says in which format each is
                low = {k: v for k, v in kept.items() if getattr(v, "dtype", None) in LOW_PRECISION}
                kept |= {k: v.float() for k, v in low.items()}
            self.optimizer.state[master] = kept

    def label_of(self, param: Tensor) -> str:
        """The name for messages of a parameter of the model."""
        infos = param_infos(self.optimizer.param_groups)
        return next(info.label for own, info in infos if self.model_param(own) is param)

    def model_infos(self) -> Iterator[tuple[Tensor, ParamInfo]]:
        """The model's parameters, each with what messages say of it."""
        for param, info in param_infos(self.optimizer.param_groups):
            yield self.model_param(param), info

    def groups(self, first: int = 0) -> list[list[Tensor]]:
        """The lists of parameters in the optimizer's param_groups, themselves; first: as above."""
        return [group["params"] for group in self.optimizer.param_groups[first:]]

    def grouped_pairs(self) -> list[list[tuple[Tensor, Tensor]]]:
        """Every low-precision parameter that has a master, with this master."""
        low = self.low
        return [[(low[p], p) for p in params if p in low] for params in self.groups()]

    def pairs(self) -> list[tuple[Tensor, Tensor]]:
        """`grouped_pairs` in a single list."""
        return [*zip(*self.lists(), strict=True)]

    def lists(self) -> tuple[list[Tensor], list[Tensor]]:
        """The parameters that have a master, and the masters, in the same order."""
        low, masters = [], []
        for group in self.optimizer.param_groups:
            for param in group["params"]:
                if param in self.low:
                    low.append(self.low[param])
                    masters.append(param)
        return low, masters

    @property
    def fp16_groups(self) -> list[list[Tensor]]:
        """The model's low-precision parameters."""
        return [[param for param, _ in pairs] for pairs in self.grouped_pairs()]

    @property
    def fp32_from_fp16_groups(self) -> list[list[Tensor]]:
        """Their masters, in which is what was written into the parameters."""
        if not self.stale:
            self.follow()
        return [[master for _, master in pairs] for pairs in self.grouped_pairs()]

    @property
    def fp32_from_fp32_groups(self) -> list[list[Tensor]]:
        """The model's trainable float32 parameters, which need no masters."""
        low, kind = self.low, torch.float32
        return [
            [p for p in params if p not in low and p.requires_grad and p.dtype == kind]
            for params in self.groups()
        ]

    def model_param(self, param: Tensor) -> Tensor:
        """The model's parameter that stands behind one in the param_groups."""
        return self.low.get(param, param)

    # Around a step.

    def follow(self) -> None:
        """Remakes masters that do not round to their parameters, unless written themselves.

        RuntimeError inside of AveragedModel.swap.
        """
        _C.follow_masters(*self.lists())

    def to_model(self) -> None:
        """Rounds the masters into the model's parameters; float16 saturates at +-65504."""
        params, masters = self.lists()
        with noting(params):
            _C.round_masters(params, masters)
        self.stale = False

    def show(self) -> None:
        """Rounds the masters that were written otherwise than by a step into the model."""
        _C.round_written_masters(self.low.values())

    def unshown(self) -> list[Tensor]:
        """The model's parameters whose masters wait for `show`."""
        return _C.written_masters(self.low.values())

    @contextmanager
    def edit(self, params: Any) -> Iterator[Any]:
        """FP16_Optimizer.masters."""
        pairs, own = self.pairs(), self.optimizer.param_groups
        model = [[*map(self.model_param, group["params"])] for group in own]
        format = "float32" if self.enabled else "none"
        groups = [{**g, "master": format, "params": p} for g, p in zip(own, model, strict=True)]
        _C.take_over_masters(*self.lists())
        self.show()
        states = {param: {"master": master} for param, master in pairs}
        with edit_masters(params, [NO_STATES] * len(groups), groups, states) as masters:
            yield masters

    # Snapshots.

    def snapshot(self, optimizer: dict[str, Any]) -> list[list[Tensor]]:
        """Copies of the masters; optimizer: a snapshot of the wrapped optimizer's state dict."""
        return [[m.detach().clone() for m in masters] for masters in self.fp32_from_fp16_groups]

    def check(self, saved: list[list[Tensor]]) -> None:
        """Raises ValueError if a snapshot of the masters has other groups or shapes."""
        if wrong := next(filter(None, map(why_foreign, chain(*saved))), ""):
            raise ValueError(f"state_dict: fp32_from_fp16 {wrong}; nothing was loaded")
        both = saved, self.fp32_from_fp16_groups
        shapes, own = ([[tuple(m.shape) for m in group] for group in x] for x in both)
        if shapes != own:
            raise ValueError(
                f"state_dict: fp32_from_fp16 has masters of shapes {shapes}, "
                f"this optimizer has {own}; nothing was loaded"
            )

    def load(self, saved: list[list[Tensor]]) -> None:
        """Copies a checked snapshot into the masters, and their rounded values into the model."""
        self.refresh()  # the snapshot may come from an optimizer that keeps masters otherwise
        with self.edit([param for param, _ in self.pairs()]) as masters:
            for master, value in zip(masters, chain(*saved), strict=True):
                master.copy_(value)


class FusedMasters(Masters):
    """The masters in a fused optimizer's state, which its step reads and writes."""

    optimizer: FusedOptimizer

    def edit(self, params: Any) -> Any:
        """See FusedOptimizer.masters."""
        return self.optimizer.masters(params)

    def refresh(self, first: int = 0) -> None:
        """Makes the whole state of every trainable parameter; TypeError as in Masters.

        That of a group added later is made when it is asked for, or by the step.
        """
        self.refuse_dtypes(first)
        if first == 0:
            self.optimizer.init_state()

    @property
    def fp16_groups(self) -> list[list[Tensor]]:
        """The model's low-precision parameters, also those without masters (master="none").

        Frozen ones are among them once they have state, so that a snapshot from before fits.
        """
        known = self.optimizer.state
        low = [[p for p in group if p.dtype in LOW_PRECISION] for group in self.groups()]
        return [[p for p in params if p.requires_grad or known.get(p)] for params in low]

    def grouped_pairs(self) -> list[list[tuple[Tensor, Tensor]]]:
        """As in Masters, but the masters are copies, to be read only."""
        state, own = self.optimizer.state, self.fp16_groups
        if any(param not in state for param in chain(*own)):
            self.optimizer.init_state()
        records = [[(p, _C.weight_of(p)) for p in params] for params in own]
        low = [[p for p, record in rows if record and record.entry] for rows in records]
        return [[(p, like(_C.float32_of(p, True), p)) for p in params] for params in low]

    def pairs(self) -> list[tuple[Tensor, Tensor]]:
        """See grouped_pairs."""
        return list(chain(*self.grouped_pairs()))

    def follow(self) -> None:
        """Does nothing: these masters are copies."""

    def to_model(self) -> None:
        """Does nothing: the step has written the parameters."""

    def snapshot(self, optimizer: dict[str, Any]) -> list[list[Tensor]]:
        """The masters in the optimizer's snapshot, so that a file has each of them once."""
        indices = chain(*(group["params"] for group in optimizer["param_groups"]))
        states = (optimizer["state"].get(index, {}) for index in indices)
        saved = dict(zip(chain(*self.groups()), states, strict=True))
        found: list[list[Tensor]] = []
        for group, pairs in zip(self.optimizer.param_groups, self.grouped_pairs(), strict=True):
            # Where another optimizer has left remainders, the master that a load makes of them.
            makes = _C.float32_master if group["master"] == "float32" else None
            held = [(p, m, saved[p].get("master")) for p, m in pairs]
            found.append([h if h is not None else makes(p) if makes else m for p, m, h in held])
        return found
