"""Muon, with AdamW for what is no matrix; the rules are in csrc/core/rules, muon.h and adam.h."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, Unpack

import torch
from torch import Tensor, nn

from amp_mp import _C
from amp_mp.optim.adam import ADAMH
from amp_mp.optim.base import FusedOptimizer
from amp_mp.optim.muon.matrices import (
    blocks_of,
    factor_of_rate,
    make_updates,
    refuse_shape,
    shape_of,
)
from amp_mp.optim.muon.muon_groups import muon_groups
from amp_mp.optim.options import Options, check_group, check_muon, make_plain
from amp_mp.optim.rule import Directions, Group, Rule, is_on
from amp_mp.text_table import aligned

# The numbers of Muon's groups that AdamW's do not have.
ITERATIONS = ("ns_coefficients", "ns_steps", "ns_dtype", "ns_gram")
SHAPES = (*ITERATIONS, "adjust_lr_fn", "split", "flatten")
OWN = ("momentum", "nesterov", "normalize", "beta2", *SHAPES)
OTHERS = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 1e-2}
DIRECTIONS = Directions(
    (*SHAPES, "use_muon"),
    check_muon,
    refuse_shape,
    shape_of,
    lambda group, shape: {"trust": factor_of_rate(group, shape)},
    make_updates,
)
MUON, MUONH = Rule("muon_", DIRECTIONS), Rule("muonh_", DIRECTIONS)
NORMUON, NORMUONH = (
    Rule(operator, DIRECTIONS, "second_momentum_buffer") for operator in ("muon_", "muonh_")
)
ADAMW = Rule("adamw_")


class Muon(FusedOptimizer):
    """Jordan et al., "Muon: an optimizer for hidden layers in neural networks" (2024).

        m = momentum m + (1 - momentum) g
        d = momentum m + (1 - momentum) g if nesterov else m
        w = (1 - lr weight_decay) w - lr factor(shape) NewtonSchulz(d)

    as torch.optim.Muon. NewtonSchulz makes the matrix d nearly orthogonal, whatever its size.
    It is for the matrices inside a model. Embeddings, output layers, norms and vectors take AdamW:
    param_groups with use_muon=False. Given a model, Muon makes the groups itself: docs/muon.md.

    Args:
        lr: learning rate. Default 1e-3.
        weight_decay: the weights shrink by lr times this at each step. 0 holds for AdamW's groups,
            too. Default 0.1.
        momentum: decay rate of m. Default 0.95.
        nesterov: Nesterov's momentum. Default True.
        ns_coefficients: the polynomials a x + b x^3 + c x^5 of the iterations: "quintic" (torch's),
            "polar_express", "cans", "deepseek", three numbers (a, b, c) for all iterations, or a
            list of such threes, whose last one repeats. Default "quintic".
        eps: torch's least norm that a matrix is divided by, 1e-7 there: smaller ones get smaller
            updates. 0 divides all alike. Default 0.
        ns_steps: number of iterations. Default None: 8 with "polar_express", 10 with "deepseek",
            the length of a list, else 5.
        adjust_lr_fn: factor(shape) of a matrix of A rows and B columns: sqrt(max(1, A / B)) for
            None and "original", sqrt(A / B) for "spectral_unclamped", also called "sqrt", and
            0.2 sqrt(max(A, B)) for "match_rms_adamw", with which rates and decays of AdamW fit.
            Default None.
        ns_dtype: the dtype of the products, torch.bfloat16, float16 or float32; their result is
            rounded to bfloat16. Default torch.bfloat16.
        ns_gram: True iterates on the small Gram matrix, of float32 (on a GPU float16, unless
            ns_dtype is float32): fewer products for long matrices, other roundings (Zhang et al.,
            "Gram Newton-Schulz", 2026). "auto": for those at least twice as long as wide. Default
            False, which has the bits of torch's.
        normalize: "rows" divides each row of NewtonSchulz(d) by the root of its running mean square
            and keeps the matrix' norm (Li et al., "NorMuon", 2025). Default None.
        beta2: decay rate of these mean squares. Default 0.95.
        cautious: as AdamW's, for both rules. Default False.
        hyperball: as AdamW's, for Muon's groups: u is NewtonSchulz(d), lr relative, and neither
            weight_decay nor adjust_lr_fn counts. Default False.
        others: lr, betas, eps and weight_decay of the groups with use_muon=False. Default: AdamW's.
        matrices, not_matrices: fnmatch patterns over a model's parameters, which Muon or AdamW is
            to update whatever their modules are. Default None.
        split: {pattern: blocks} of a model's fused matrices, such as query, key and value: how many
            equal blocks their rows fall into, or a tuple of the rows of each; each is a matrix of
            its own, with the rate of its own shape. Default None.

    A param_group may have use_muon, split (as above) and flatten (True makes one matrix of more
    dimensions). params may be a torch.nn.Module.
    State: momentum_buffer (m); with normalize second_momentum_buffer, float32, a number for each
    row; with hyperball radius; with use_muon=False exp_avg and exp_avg_sq as AdamW's.
    """

    _rules = (MUON, NORMUON, MUONH, NORMUONH, ADAMW, ADAMH)

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: str | Sequence[Any] = "quintic",
        eps: float = 0.0,
        ns_steps: int | None = None,
        adjust_lr_fn: str | None = None,
        *,
        ns_dtype: torch.dtype = torch.bfloat16,
        ns_gram: bool | Literal["auto"] = False,
        normalize: str | None = None,
        beta2: float = 0.95,
        cautious: bool = False,
        hyperball: bool = False,
        others: Mapping[str, Any] | None = None,
        matrices: Iterable[str] | None = None,
        not_matrices: Iterable[str] | None = None,
        split: Mapping[str, int | Sequence[int]] | None = None,
        **options: Unpack[Options],
    ) -> None:
        numbers = {
            "lr": lr,
            "weight_decay": weight_decay,
            "momentum": momentum,
            "nesterov": nesterov,
            "ns_coefficients": ns_coefficients,
            "eps": eps,
            "ns_steps": ns_steps,
            "adjust_lr_fn": adjust_lr_fn,
            "ns_dtype": ns_dtype,
            "ns_gram": ns_gram,
            "normalize": normalize,
            "beta2": beta2,
            "cautious": cautious,
            "hyperball": hyperball,
            "use_muon": True,
            "split": 1,
            "flatten": False,
        }
        self._others = {**OTHERS, **(others or {})}
        if weight_decay == 0 and "weight_decay" not in (others or {}):
            self._others["weight_decay"] = 0.0
        if unknown := sorted(set(self._others) - set(OTHERS)):
            raise TypeError(f"others: unknown entry {unknown[0]!r}; it takes {', '.join(OTHERS)}")
        make_plain(self._others)
        try:
            check_group(self._others)
        except ValueError as error:
            raise ValueError(f"others: {error}") from None
        if isinstance(params, nn.Module):
            params = muon_groups(params, matrices, not_matrices, split)
        elif matrices is not None or not_matrices is not None or split is not None:
            raise TypeError(
                "matrices, not_matrices and split are patterns over a model's names; pass the "
                "model in place of its parameters, or set use_muon and split in param_groups"
            )
        super().__init__(params, numbers, options)

    def _own_keys(self) -> frozenset[str]:
        return super()._own_keys() | self._others.keys()

    def _rule_of(self, group: Group) -> Rule:
        """Muon's or AdamW's; with rows that are normalised, or on the sphere, of another name."""
        on_sphere = is_on(group, "hyperball")
        if not group.get("use_muon", True):
            return ADAMH if on_sphere else ADAMW
        kinds = (NORMUON, NORMUONH) if group.get("normalize") else (MUON, MUONH)
        return kinds[on_sphere]

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As every fused optimizer's; ValueError, by name, for what is no matrix.

        Where other groups have names, as those of a model, parameters without get some, too:
        "group2.0" is the first of group 2.
        """
        own = dict(param_group)
        named = any("param_names" in g for g in self.param_groups[:1])  # torch: all or none
        params = own.get("params")
        if named and not isinstance(params, set | dict | None):
            listed = [params] if isinstance(params, Tensor) else list(params)
            if all(isinstance(param, Tensor) for param in listed):
                start = f"group{len(self.param_groups)}"
                listed = [(f"{start}.{i}", param) for i, param in enumerate(listed)]
            own["params"] = listed
        if not own.get("use_muon", True):
            own = {"hyperball": False, **self._others, **own}
        super().add_param_group(own)

    def _complete(self, group: Group) -> None:
        if not group.get("use_muon", True):
            for name, value in self._others.items():
                group.setdefault(name, value)
        super()._complete(group)
        if isinstance(group["split"], list):
            group["split"] = tuple(group["split"])
        for name in () if group["use_muon"] else OWN:
            group.pop(name, None)

    def param_summary(self) -> str:
        """A table: each parameter's name, shape, rule, blocks and their factors of the rate."""
        rows: list[tuple[Any, ...]] = []
        for number, group in enumerate(self.param_groups):
            for at, param in enumerate(group["params"]):
                name = group["param_names"][at] if "param_names" in group else f"{number}.{at}"
                cells = name, tuple(param.shape), "Muon" if group["use_muon"] else "AdamW"
                blocks = blocks_of(group, param) if group["use_muon"] else []
                parts = [f"{b.number} x ({b.rows}, {b.columns})" for b in blocks]
                factors = [f"{factor_of_rate(group, b[1:3]):.4g}" for b in blocks]
                rows.append((*cells, ", ".join(parts), ", ".join(factors)))
        return aligned(("parameter", "shape", "rule", "blocks", "factor"), rows)

    def torch_state_dict(self) -> dict[str, Any]:
        """As every fused optimizer's, with torch's form of the numbers of Newton-Schulz.

        torch.optim.Muon has three coefficients for all iterations; it refuses others at its step.
        """
        packed = super().torch_state_dict()
        for group in packed["param_groups"]:
            if "ns_steps" not in group:
                continue
            made = [tuple(each) for each in _C.ns_iterations(group)]
            same = made if len(set(made)) > 1 else (made or _C.ns_iterations({"ns_steps": 1}))[0]
            group.update(ns_coefficients=same, ns_steps=len(made), eps=group["eps"] or 1e-7)
        return packed

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_others": self._others}
