"""Every update rule with its arguments, and one parameter as the NumPy reference steps it."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import reference
import reference_formats as formats
import torch
from helpers import array
from reference import Numbers
from torch import Tensor

import amp_mp as amp

ADAM = {"lr": 3e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1}
SGD = {"lr": 0.05, "momentum": 0.9, "dampening": 0.1, "weight_decay": 0.01, "nesterov": False}
NESTEROV = {**SGD, "dampening": 0.0, "nesterov": True}
RMSPROP = {"lr": 0.01, "alpha": 0.99, "eps": 1e-8, "weight_decay": 0.01, "momentum": 0.9}
CENTERED = {**RMSPROP, "eps": 0.1, "centered": True}  # near 0 the variance is rounding noise
LARS = {**SGD, "trust_coefficient": 0.02, "clip": False, "eps": 1e-8}
LAMB = {**ADAM, "always_adapt": True}
RADAM = {**ADAM, "decoupled_weight_decay": False}
NADAM = {**RADAM, "momentum_decay": 4e-3}
CAUTIOUS = {"decoupled_weight_decay": True, "cautious": True}
LION = {"lr": 1e-3, "betas": (0.9, 0.99), "weight_decay": 0.1}
OUTSIDE = {"grad_averaging": True, "bias_correction": True, "reg_inside_moment": False}
NOVOGRAD = {**ADAM, "betas": (0.95, 0.98), "grad_averaging": False}
RULES: dict[str, tuple[type[amp.optim.FusedOptimizer], dict[str, Any]]] = {
    "adamw": (amp.optim.AdamW, ADAM),
    "adamw cautious": (amp.optim.AdamW, {**ADAM, "cautious": True}),
    "adam": (amp.optim.Adam, ADAM),
    "amsgrad adamw": (amp.optim.AdamW, {**ADAM, "amsgrad": True}),
    "amsgrad cautious": (amp.optim.AdamW, {**ADAM, "amsgrad": True, "cautious": True}),
    "amsgrad adam": (amp.optim.Adam, {**ADAM, "amsgrad": True}),
    "sgd": (amp.optim.SGD, SGD),
    "nesterov": (amp.optim.SGD, NESTEROV),
    "plain sgd": (amp.optim.SGD, {**SGD, "momentum": 0.0, "dampening": 0.0}),
    "scaled": (amp.optim.SGD, {**SGD, "dampening": 0.0, "momentum_form": "scaled"}),
    "scaled nesterov": (amp.optim.SGD, {**NESTEROV, "momentum_form": "scaled"}),
    "adadelta": (amp.optim.Adadelta, {"lr": 0.5, "rho": 0.9, "eps": 1e-6, "weight_decay": 0.01}),
    "nadam": (amp.optim.NAdam, NADAM),
    "nadam decoupled": (amp.optim.NAdam, {**NADAM, "decoupled_weight_decay": True}),
    "nadam cautious": (amp.optim.NAdam, {**NADAM, **CAUTIOUS}),
    "radam": (amp.optim.RAdam, RADAM),
    "radam decoupled": (amp.optim.RAdam, {**RADAM, "decoupled_weight_decay": True}),
    "radam cautious": (amp.optim.RAdam, {**RADAM, **CAUTIOUS}),
    "adagrad": (
        amp.optim.Adagrad,
        {"lr": 0.02, "lr_decay": 0.1, "eps": 1e-10, "weight_decay": 0.01},
    ),
    "adamax": (amp.optim.Adamax, {**ADAM, "lr": 2e-3}),
    "rmsprop": (amp.optim.RMSprop, {**RMSPROP, "momentum": 0.0}),
    "rmsprop momentum": (amp.optim.RMSprop, RMSPROP),
    "centered": (amp.optim.RMSprop, {**CENTERED, "momentum": 0.0}),
    "centered momentum": (amp.optim.RMSprop, CENTERED),
    "lion": (amp.optim.Lion, LION),
    "lion cautious": (amp.optim.Lion, {**LION, "cautious": True}),
    "lars": (amp.optim.LARS, LARS),
    "lars nesterov": (amp.optim.LARS, {**LARS, **NESTEROV}),
    "larc": (amp.optim.LARS, {**LARS, "clip": True, "trust_coefficient": 0.5}),
    "lamb": (amp.optim.LAMB, LAMB),
    "lamb cautious": (amp.optim.LAMB, {**LAMB, "cautious": True}),
    "lamb without decay": (
        amp.optim.LAMB,
        {**LAMB, "always_adapt": False, "weight_decay": 0.0},
    ),
    "novograd": (amp.optim.NovoGrad, NOVOGRAD),
    "novograd averaging": (amp.optim.NovoGrad, {**NOVOGRAD, "grad_averaging": True}),
    "novograd outside": (amp.optim.NovoGrad, {**NOVOGRAD, **OUTSIDE}),
}
# Rules for matrices alone.
OF_MATRICES: dict[str, tuple[type[amp.optim.FusedOptimizer], dict[str, Any]]] = {
    "hyperball": (amp.optim.AdamW, {**ADAM, "lr": 0.05, "hyperball": True}),
}
# Every optimizer by its name, with arguments for which it keeps most of its states.
KINDS: dict[str, dict[str, Any]] = {
    "Adam": {},
    "AdamW": {"amsgrad": True},
    "SGD": {"momentum": 0.9},
    "LARS": {"momentum": 0.9},
    "Adadelta": {},
    "NAdam": {},
    "RAdam": {"betas": (0.8, 0.9)},
    "Adagrad": {},
    "RMSprop": {"momentum": 0.9},
    "Adamax": {},
    "Lion": {},
    "LAMB": {},
    "NovoGrad": {},
}
# Optimizers that torch has under the same name, with arguments that both take.
TWINS: dict[str, tuple[str, dict[str, Any]]] = {
    "adamw": ("AdamW", {"lr": 1e-2, "weight_decay": 0.1}),
    "adamw betas": ("AdamW", {"lr": 1e-3, "betas": (0.8, 0.95)}),
    "adam": ("Adam", {"lr": 1e-2}),
    "adam L2": ("Adam", {"lr": 1e-2, "weight_decay": 0.1}),
    "adam maximize": ("Adam", {"lr": 1e-2, "maximize": True}),
    "amsgrad": ("Adam", {"lr": 1e-2, "amsgrad": True}),
    "amsgrad adamw": (
        "AdamW",
        {"lr": 1e-2, "amsgrad": True, "weight_decay": 0.1, "betas": (0.8, 0.9)},
    ),
    "adagrad": ("Adagrad", {"lr": 0.1, "lr_decay": 0.01}),
    "adagrad from 1": (
        "Adagrad",
        {"initial_accumulator_value": 1.0, "weight_decay": 0.1, "maximize": True},
    ),
    "adadelta": ("Adadelta", {"weight_decay": 0.1}),
    "adadelta rho": ("Adadelta", {"lr": 0.1, "rho": 0.99, "eps": 1e-3, "maximize": True}),
    "nadam": ("NAdam", {"lr": 1e-2, "weight_decay": 0.1}),
    "nadam decoupled": (
        "NAdam",
        {
            "lr": 1e-2,
            "betas": (0.8, 0.95),
            "weight_decay": 0.1,
            "momentum_decay": 0.1,
            "decoupled_weight_decay": True,
        },
    ),
    "radam": ("RAdam", {"lr": 1e-2, "weight_decay": 0.1}),
    "radam decoupled": (
        "RAdam",
        {"betas": (0.8, 0.95), "weight_decay": 0.1, "decoupled_weight_decay": True},
    ),
    "radam never rectifies": ("RAdam", {"betas": (0.9, 0.6)}),
    "adamax": ("Adamax", {"lr": 1e-2, "weight_decay": 0.1}),
    "rmsprop": ("RMSprop", {"lr": 1e-3, "weight_decay": 0.1}),
    "rmsprop momentum": ("RMSprop", {"lr": 1e-3, "momentum": 0.9, "alpha": 0.9}),
    "centered": ("RMSprop", {"lr": 1e-3, "centered": True, "weight_decay": 0.1}),
    "centered momentum": ("RMSprop", {"lr": 1e-3, "centered": True, "momentum": 0.9, "alpha": 0.9}),
    "sgd": ("SGD", {"lr": 0.1, "weight_decay": 0.01}),
    "momentum": ("SGD", {"lr": 0.1, "momentum": 0.9, "dampening": 0.2}),
    "nesterov": ("SGD", {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    "maximize": ("SGD", {"lr": 0.1, "momentum": 0.9, "maximize": True}),
}
# What `memory` is to mean: the master, first moments, sums of squares.
PRESETS = {
    None: ("split32", "float32", "float32"),
    "float32": ("float32", "float32", "float32"),
    "exact": ("split32", "float32", "float32"),
    "lean": ("split24", "bfloat16", "ue8m8"),
    "tiny": ("split24", "m8", "ue8m8"),
    "micro": ("split24", "m8", "log8"),
    "nano": ("split20", "m8", "log8"),
    "masterless": ("none", "m8", "log8"),
}
MEMORIES = [m for m in PRESETS if m not in (None, "float32")]
# Formats of groups, and what takes their place where rows are no multiple of 32.
WITHOUT_ROWS = {"m8": "bfloat16", "i8": "bfloat16", "log8": "ue8m8"}
# What an entry's name adds to the state's.
SUFFIXES = {f: f"_{f}" for f in ("m8", "i8", "log8", "ue8m8")} | {"float16_root": "_root"}
# A split's entry beside a bfloat16 weight.
REMAINDERS = {"split32": "remainder16", "split24": "remainder8", "split20": "remainder4"}
# The arguments for each preset.
STORAGES: dict[str, dict[str, Any]] = {m: {"memory": m} for m in PRESETS if m}
MASTERED = {m: own for m, own in STORAGES.items() if PRESETS[m][0] != "none"}
SQUARES = ("exp_avg_sq", "square_avg", "acc_delta", "sum")
FLOAT32_ONLY = ("max_exp_avg_sq", "grad_avg", "exp_inf")


def is_allowed(*case: Any) -> bool:
    """Whether a case has no float16 weights for "nano", which refuses them."""
    return not ("nano" in case and any(value in case for value in ("float16", torch.float16)))


def cases(*parameters: Iterable[Any]) -> list[tuple[Any, ...]]:
    """For parametrize: all combinations that are allowed."""
    return [case for case in itertools.product(*parameters) if is_allowed(*case)]


def has_groups(shape: Sequence[int], group: int) -> bool:
    """Whether a row has whole groups: of 32 for codes with scales, of 2 for split20."""
    wide = [size for size in shape if size != 1]
    return len(wide) > 1 and math.prod(wide) > 0 and math.prod(wide[1:]) % group == 0


def formats_of(
    rule: str, states: tuple[str, ...], shape: Sequence[int], storage: dict[str, Any]
) -> dict[str, str]:
    """What the master and the states of a parameter are to be stored as."""
    master, moment, square = PRESETS[storage.get("memory")]
    if rule == "muon" and moment == "m8":
        moment = "i8"
    master, rows = storage.get("master", master), has_groups(shape, 32)
    formats = {"master": "split24" if master == "split20" and not has_groups(shape, 2) else master}
    for name in states:
        format = storage.get(name, square if name in SQUARES else moment)
        if name in FLOAT32_ONLY or (rule.startswith("centered") and name in SQUARES):
            format = "float32"
        formats[name] = format if rows else WITHOUT_ROWS.get(format, format)
    return formats


class Expected:
    """One parameter, stepped by the reference and stored by it."""

    def __init__(
        self,
        rule: str,
        weight: Tensor,
        number: int = 0,
        states: tuple[str, ...] = (),
        maximize: bool = False,
        **storage: Any,
    ) -> None:
        self.rule, self.number, self.maximize, self.storage = rule, number, maximize, storage
        self.kind, self.numbers = (RULES | OF_MATRICES).get(rule, (None, {}))
        self.formats = formats_of(rule, states, weight.shape, storage)
        usual = "stochastic" if storage.get("memory") == "masterless" else "nearest"
        self.rounding = storage.get("rounding", usual)
        self.dtype = str(weight.dtype).removeprefix("torch.")
        self.visible = self.master = self.stored = array(weight).reshape(-1)
        packed = self.formats["master"] == "split20"
        self.parts = [
            formats.weight_bits(self.master, self.dtype),
            np.zeros(weight.numel(), np.int16),
        ]
        if packed:
            self.parts[1] = np.zeros(weight.numel() // 2, np.uint8)
        self.states = {name: np.zeros_like(self.master) for name in states}
        self.clock = reference.Clock()

    def step(self, grad: np.ndarray, multiplier: np.float32) -> None:
        kind, numbers = self.kind, self.numbers
        assert kind is not None
        self.clock.tick(*numbers.get("betas", (0, 0)))
        with np.errstate(all="ignore"):
            g = grad.reshape(-1) * (-multiplier if self.maximize else multiplier)
            master, *states = self._stepped(kind, numbers, g)
            for name, values in zip(self.states, states, strict=True):
                # Where the update is measured the moments have been stored already.
                measured = kind is amp.optim.LAMB or numbers.get("hyperball", False)
                self.states[name] = values if measured else self._kept(name, values)
            self._store(master)

    def write(self, weight: np.ndarray) -> None:
        """The user has written: the weight counts, and of the master what is below its rounding."""
        format, weight = self.formats["master"], weight.reshape(-1)
        if self.dtype == "float32" or format == "none":
            self.master = weight
        elif format == "float32":
            rounded = reference.store(self.stored, self.dtype, saturating=True)
            same = rounded.view(np.uint32) == weight.view(np.uint32)
            self.master = np.where(same, self.stored, weight)
        else:
            self.parts[0] = formats.weight_bits(weight, self.dtype)
            self.master = formats.decode(self.parts, format, self.dtype)
        self.visible = weight

    def _stepped(self, kind: type, given: dict[str, Any], g: np.ndarray) -> tuple[Any, ...]:
        w, states, clock = self.master, [*self.states.values()], self.clock
        in_other_words = ("amsgrad", "centered", "momentum_form", "hyperball")
        numbers = Numbers(**{k: n for k, n in given.items() if k not in in_other_words})
        if kind is amp.optim.LAMB or given.get("hyperball"):
            m, v = reference.adam_moments(g, *states, numbers)
            m, v = self._kept("exp_avg", m), self._kept("exp_avg_sq", v)
            rule = reference.lamb if kind is amp.optim.LAMB else reference.adamh
            return rule(w, m, v, clock, numbers), m, v
        if issubclass(kind, amp.optim.AdamW):
            states += [None] * (3 - len(states))
            decoupled = kind is amp.optim.AdamW
            return reference.adam(g, w, *states, clock, numbers, decoupled=decoupled)
        if kind is amp.optim.RMSprop:
            if len(states) == 1:
                w, _, square_avg = reference.rmsprop(g, w, states[0], states[0], numbers)
                return w, square_avg
            return reference.rmsprop(g, w, *states[:2], numbers, *states[2:])
        if kind is amp.optim.SGD and "momentum_form" in given:
            return reference.scaled_sgd(g, w, *states, numbers)
        if kind is amp.optim.SGD:
            buffer = states[0] if states else w
            return reference.sgd(g, w, buffer, clock, numbers)[: 1 + len(states)]
        if kind is amp.optim.Lion:
            return reference.lion(g, w, *states, numbers)
        rules = {
            amp.optim.Adadelta: reference.adadelta,
            amp.optim.NAdam: reference.nadam,
            amp.optim.RAdam: reference.radam,
            amp.optim.Adagrad: reference.adagrad,
            amp.optim.Adamax: reference.adamax,
            amp.optim.LARS: reference.lars,
            amp.optim.NovoGrad: reference.novograd,
        }
        return rules[kind](g, w, *states, clock, numbers)

    def _kept(self, name: str, values: np.ndarray) -> np.ndarray:
        """What a state holds after storing the values."""
        format = self.formats[name]
        if format == "float32":
            return values
        bits = self._bits(values.size, weights=False)
        return formats.decode(formats.encode(values, format, bits), format)

    def _store(self, values: np.ndarray) -> None:
        format = self.formats["master"]
        if self.dtype == "float32":
            self.master = self.visible = values
        elif format == "float32":
            self.master = self.stored = values
            self.visible = reference.store(values, self.dtype, saturating=True)
        elif format == "none" and self.rounding == "nearest":
            self.master = self.visible = reference.store(values, self.dtype, saturating=True)
        elif format == "none":
            format, bits = f"{self.dtype}_stochastic", self._bits(values.size, weights=True)
            self.master = formats.decode(formats.encode(values, format, bits), format)
            self.visible = self.master
        else:
            bits = self._bits(values.size, weights=True) if format == "split20" else None
            self.parts = formats.encode(values, format, bits, self.dtype)
            self.master = formats.decode(self.parts, format, self.dtype)
            self.visible = formats.decode(self.parts[:1], self.dtype)

    def _bits(self, size: int, *, weights: bool) -> np.ndarray:
        seed = self.storage.get("seed", 0)
        return formats.stream(size, seed, self.clock.step, self.number, weights=weights)


def raw(tensor: Tensor) -> np.ndarray:
    """The bits of a tensor of one or two bytes an element, one dimension."""
    kind = torch.int8 if tensor.element_size() == 1 else torch.int16
    return tensor.detach().cpu().reshape(-1).view(kind).numpy()


def found_state(state: dict[str, Any], name: str, format: str) -> np.ndarray:
    """A state's numbers, decoded by the reference."""
    if format == "float32":
        return array(state[name]).reshape(-1)
    entry = name + SUFFIXES.get(format, "")
    bits = raw(state[entry])
    if format in ("m8", "i8"):
        return formats.decode([bits, raw(state[f"{entry}_scale"]).view(np.uint16)], format)
    if format == "log8":
        scales = raw(state[f"{entry}_scale"]).view(np.uint8)
        return formats.decode([bits.view(np.uint8), scales], format)
    return formats.decode([bits.view(np.uint16)], format)


def found_master(state: dict[str, Any], param: Tensor, format: str) -> np.ndarray:
    """What the rule updates, decoded by the reference."""
    if param.dtype == torch.float32 or format == "none":
        return array(param).reshape(-1)
    if format == "float32":
        return array(state["master"]).reshape(-1)
    dtype = str(param.dtype).removeprefix("torch.")
    remainder = raw(state[REMAINDERS[format] + "_float16" * (dtype == "float16")])
    second = remainder.view(np.uint8) if format == "split20" else remainder
    return formats.decode([raw(param).view(np.uint16), second], format, dtype)
