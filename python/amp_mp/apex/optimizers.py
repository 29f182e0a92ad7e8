"""apex.optimizers: Apex's names, arguments and defaults for the rules of amp_mp.optim."""

from inspect import Parameter, Signature, signature
from typing import Any, ClassVar

import torch
from torch.optim.optimizer import required

from amp_mp import _C
from amp_mp.optim.adam import AdamW
from amp_mp.optim.adaptive import Adagrad
from amp_mp.optim.base import FusedOptimizer
from amp_mp.optim.layerwise import LAMB, NovoGrad
from amp_mp.optim.options import Options
from amp_mp.optim.rule import Group, Rule
from amp_mp.optim.sgd import SGD
from amp_mp.optim.step.stepper import Stepper
from amp_mp.param_groups import params_in
from amp_mp.sharding.gradients import Verdict, by_device, gradients_of

# fmt: off
__all__ = [
    "FusedAdagrad", "FusedAdam", "FusedLAMB", "FusedMixedPrecisionLamb", "FusedNovoGrad",
    "FusedSGD",
]
# fmt: on
ADAM = {"lr": 1e-3, "bias_correction": True, "betas": (0.9, 0.999), "eps": 1e-8}
LAMB_ARGUMENTS = ADAM | {"eps": 1e-6, "weight_decay": 0.01, "amsgrad": False, "adam_w_mode": True}
LAMB_ARGUMENTS |= {"grad_averaging": True, "set_grad_none": True, "max_grad_norm": 1.0}
LAMB_ARGUMENTS |= {"use_nvlamb": False}
OPTIONS = {"check_overflow": False}  # Apex's optimizers step with whatever gradients they are given
MODES = ("set_grad_none", "capturable", "adam_w_mode")
NUMBERS = ("lr", "betas", "eps", "weight_decay", "bias_correction")


class UnscalingStepper(Stepper):
    """Also divides the gradients by a loss scaler's scale, for scripts that read them then."""

    def run(self, optimizer: Any) -> _C.StepInputs:
        """As Stepper's; gradients of a skipped step stay as they are."""
        inputs = super().run(optimizer)
        verdict = self.native.log.verdict
        if inputs.scale is None or self.release or verdict is None:
            return inputs
        grads = gradients_of(params_in(optimizer.param_groups))
        for device, indices in by_device(grads).items():
            own = [grads[i] for i in indices]
            division = _C.decide(device, [], scale=inputs.scale)
            Verdict(*division).skip.copy_(Verdict(*verdict).skip)
            _C.copy_(own, own, verdict=division)
        return inputs


class ApexOptimizer(FusedOptimizer):
    """What Apex's optimizers have in common beside amp_mp.optim's, whose options they take too.

    Low-precision parameters have masters whatever master_weights says (`master="none"` is without).
    check_overflow is False by default, as in Apex.
    After a step under a loss scaler, and after scale_loss, gradients are the true ones.

    Args:
        bias_correction: False leaves out the divisions by 1 - beta^t. Default True.
        set_grad_none: what zero_grad does by default.
        capturable: makes lr a float32 tensor, which a CUDA graph reads at each replay.

    Raises ValueError (for amsgrad RuntimeError, as Apex) naming an argument that the rule of
    amp_mp.optim lacks, and what to pass.
    """

    _arguments: ClassVar[dict[str, Any]]  # Apex's, in its order, with its defaults
    _numbers: ClassVar[tuple[str, ...]] = NUMBERS  # those that a param_group has
    _only: ClassVar[dict[str, Any]] = {}  # what the others have to be
    set_grad_none = True
    capturable = False
    adam_w_mode = True
    _stepper_class = UnscalingStepper

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        kind = Parameter.POSITIONAL_OR_KEYWORD
        shown = signature(cls).parameters.values()
        own = [Parameter(name, kind, default=value) for name, value in cls._arguments.items()]
        shared = [
            p.replace(default=OPTIONS.get(p.name, p.default))
            for p in shown
            if p.kind is p.KEYWORD_ONLY and p.name not in cls._arguments
        ]
        cls.__signature__ = Signature([Parameter("params", kind), *own, *shared])  # type: ignore[assignment]

    def __init__(self, params: Any, *args: Any, **named: Any) -> None:
        bound = signature(type(self)).bind(params, *args, **named).arguments
        given, needed = OPTIONS | self._arguments | bound, {"amsgrad": False, **self._only}
        if wrong := [n for n, value in needed.items() if n in given and given[n] != value]:
            found, wanted = (", ".join(f"{n}={v[n]!r}" for n in wrong) for v in (given, needed))
            message = f"{type(self).__name__} has no {found}: pass {wanted}"
            if "amsgrad" in wrong:
                raise RuntimeError(f"{message}, or use amp_mp.optim.AdamW(amsgrad=True)")
            raise ValueError(message)
        vars(self).update({n: bool(given[n]) for n in MODES if n in given})
        options: Any = {n: v for n, v in given.items() if n in Options.__annotations__}
        FusedOptimizer.__init__(self, params, {n: given[n] for n in self._numbers}, options)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), **{n: getattr(self, n) for n in MODES}}

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As amp_mp.optim's."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        if self.capturable and group["params"]:
            device = group["params"][0].device
            group["lr"] = torch.tensor(float(group["lr"]), dtype=torch.float32, device=device)

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """As torch's; by default it does what set_grad_none says."""
        super().zero_grad(self.set_grad_none if set_to_none is None else set_to_none)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As amp_mp.optim's; also takes Apex's state dicts, where a group has the step count."""
        groups, states = state_dict["param_groups"], dict(state_dict["state"])
        for group in (g for g in groups if "step" in g):
            for key in (k for k in group["params"] if k in states and "step" not in states[k]):
                states[key] = {**states[key], "step": torch.tensor(float(group["step"]))}
        groups = [{name: value for name, value in g.items() if name != "step"} for g in groups]
        super().load_state_dict({**state_dict, "state": states, "param_groups": groups})


class FusedAdam(ApexOptimizer, AdamW):
    """amp_mp.optim.AdamW, or with adam_w_mode=False Adam, whose weight decay is L2."""

    _rules = Rule("adam_"), Rule("adamw_")
    _arguments = (
        ADAM
        | {"adam_w_mode": True, "weight_decay": 0.0, "amsgrad": False, "set_grad_none": True}
        | {"capturable": False, "master_weights": False}
    )

    def _rule_of(self, group: Group) -> Rule:
        return self._rules[self.adam_w_mode]


class FusedAdagrad(ApexOptimizer, Adagrad):
    """amp_mp.optim.Adagrad; adagrad_w_mode=True decouples the weight decay."""

    _numbers = ("lr", "eps", "weight_decay", "adagrad_w_mode")
    _arguments: ClassVar = {
        "lr": 1e-2,
        "eps": 1e-10,
        "weight_decay": 0.0,
        "set_grad_none": True,
        "adagrad_w_mode": False,
    }


class FusedSGD(ApexOptimizer, SGD):
    """amp_mp.optim.SGD; lr may come from the groups, wd_after_momentum=True decouples the decay.

    Masters have gradients whatever materialize_master_grads says.
    """

    momentum_form = "unscaled"
    _numbers = ("lr", "momentum", "dampening", "weight_decay", "nesterov", "wd_after_momentum")
    _arguments: ClassVar = {
        "lr": required,
        "momentum": 0.0,
        "dampening": 0.0,
        "weight_decay": 0.0,
        "nesterov": False,
        "wd_after_momentum": False,
        "materialize_master_grads": True,
        "set_grad_none": False,
    }


class FusedLAMB(ApexOptimizer, LAMB):
    """amp_mp.optim.LAMB of gradients clipped to max_grad_norm, or not with None.

    use_nvlamb is amp_mp's always_adapt. adam_w_mode=False: the weight decay is L2.
    grad_averaging=False: gradients are added to the first moment times 1, not 1 - beta1. The update
    is not written to `.grad`.
    """

    _numbers = (*NUMBERS, "grad_averaging", "adam_w_mode", "use_nvlamb")
    _arguments = LAMB_ARGUMENTS


class FusedMixedPrecisionLamb(FusedLAMB):
    """FusedLAMB with lr as a tensor; step must be 0: load a state dict instead."""

    capturable = True
    _only: ClassVar = {"step": 0}
    _arguments: ClassVar = {
        "lr": 1e-3,
        "step": 0,
        **{name: LAMB_ARGUMENTS[name] for name in LAMB_ARGUMENTS if name != "set_grad_none"},
        "reduced_precision_dtype": None,
    }


class FusedNovoGrad(ApexOptimizer, NovoGrad):
    """amp_mp.optim.NovoGrad in NVIDIA's form; norm_type must be 2, init_zero False."""

    _numbers = (*NUMBERS, "grad_averaging", "reg_inside_moment")
    _only: ClassVar = {"norm_type": 2, "init_zero": False}
    _arguments = (
        ADAM
        | {"weight_decay": 0.0, "amsgrad": False, "reg_inside_moment": False}
        | {"grad_averaging": True, "norm_type": 2, "init_zero": False, "set_grad_none": True}
    )
