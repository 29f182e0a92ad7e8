"""NVCaffe's types of a net and its layers, for storage and arithmetic, forward and backward."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from amp_mp.compat import typed_forward as typed
from amp_mp.compat.solver import SolverTypes
from amp_mp.compat.type_functions import Types
from amp_mp.dtypes import LOW_PRECISION
from amp_mp.module_names import matches
from amp_mp.text_table import aligned

WORDS = {
    "DOUBLE": torch.float64,
    "FLOAT": torch.float32,
    "FLOAT16": torch.float16,
    "BFLOAT16": torch.bfloat16,
}
NAMES = {dtype: word for word, dtype in WORDS.items()}
FIELDS = ("forward_type", "backward_type", "forward_math", "backward_math")
# Which of them are FLOAT at least, by a layer's kind.
AT_LEAST_FLOAT = {typed.LOSS: FIELDS, typed.NORM: FIELDS[2:], typed.SOFTMAX: FIELDS[2:]}
Type = str | torch.dtype
# The attribute of an nn.TransformerEncoder that made nested tensors before its layers had types.
USED_NESTED = "_amp_mp_used_nested"


class Row(NamedTuple):
    """One layer: its name, its class, its four types in NVCaffe's words, and what is special."""

    layer: str
    kind: str
    forward_type: str
    backward_type: str
    forward_math: str
    backward_math: str
    note: str


class LayerTypes(list[Row]):
    """A row for each layer; prints as a table. solver: what follows from solver_data_type."""

    def __init__(self, rows: list[Row], model: nn.Module, solver: SolverTypes) -> None:
        super().__init__(rows)
        self._model, self.solver = model, solver

    def __str__(self) -> str:
        return f"{aligned(('layer', 'class', *FIELDS, ''), self)}\n{self.solver}"

    def undo(self) -> None:
        """Gives every layer its own forward method back."""
        undo_layer_types(self._model)


def set_layer_types(
    model: nn.Module,
    *,
    default_forward_type: Type = "FLOAT",
    default_backward_type: Type = "FLOAT",
    default_forward_math: Type | None = None,
    default_backward_math: Type | None = None,
    layers: Mapping[str, Mapping[str, Type]] | None = None,
    solver_data_type: Type = "FLOAT",
) -> LayerTypes:
    """Chooses for each layer what is stored and computed in, forward and backward apart.

        types = amp.compat.set_layer_types(
            model, default_forward_type="FLOAT16", default_backward_type="FLOAT16",
            layers={"fc*": dict(forward_type="FLOAT", backward_math="FLOAT")},
        )
        print(types)
        optimizer = amp.optim.SGD(model.parameters(), lr=0.1, **types.solver.options(amp.optim.SGD))

    A layer is a module without children, or an nn.MultiheadAttention. Its inputs, weights and
    result are rounded to its forward type, and it computes in its forward math type. The gradients
    of its result, inputs and weights are rounded to its backward type and computed in its backward
    math type. Float16 weights saturate at +-65504; activations and gradients become inf.

    torch gives a tensor and its gradient one dtype. So a result has the wider dtype of its two
    types. A weight's gradient is stored in the weight's grad_dtype.

    Norms, losses and softmax layers compute in FLOAT at least, norms have unrounded weights, and
    losses have FLOAT gradients and results. Layers that amp.keep_fp32 or `prepare` keeps float32
    are FLOAT unless `layers` names them. docs/layer_types.md has the costs.

    Args:
        model: is changed in place, before or after `prepare`. Copies and pickles have the types.
        default_forward_type, default_backward_type: "FLOAT", "FLOAT16", "DOUBLE", "BFLOAT16", or a
            torch dtype of these.
        default_forward_math, default_backward_math: the same; default: the net's type.
        layers: for fnmatch patterns over names of layers, or of modules that contain them, any of
            forward_type, backward_type, forward_math and backward_math; the last match counts. A
            layer's math type is its own entry, else its own type's, else the net's.
        solver_data_type: the type of weights and history, "FLOAT", "FLOAT16" or "DOUBLE". No weight
            is converted; SolverTypes tells what follows.

    Returns a table of the layers' types; `undo()` gives the layers back their own forward methods.

    Raises, before anything is changed:
        TypeError: model is not a module in Python; layers holds something else.
        ValueError: an unknown type or entry; a pattern that matches no layer; a type below FLOAT
            that `layers` asks of a layer which has FLOAT at least; a layer that has types already,
            a lazy one, one with a forward method of its own (amp.attach_main_grads comes later), a
            norm with low-precision statistics; parameters that solver_data_type cannot have.
    """
    if not isinstance(model, nn.Module) or isinstance(model, torch.jit.ScriptModule):
        raise TypeError(f"model must be a torch.nn.Module in Python, found {type(model).__name__}")
    types = (default_forward_type, default_backward_type)
    given = zip(FIELDS, (*types, default_forward_math, default_backward_math), strict=True)
    default = {
        field: _dtype(word, f"default_{field}")
        for field, word in given
        if word is not None or field.endswith("type")
    }
    names, kinds = typed.layers_of(model), typed.kinds_of(model)
    chosen = _chosen(names, {} if layers is None else layers)
    made = []
    rows = []
    for module, kind in kinds.items():
        label = ", ".join(names[module]) or "(the model)"
        _refuse(module, label, kind)
        own = _types(default, chosen[module], kind, f"{label} ({type(module).__name__})")
        made.append(typed.TypedForward(module, kind, own))
        words = (NAMES[dtype] for dtype in own)
        rows.append(Row._make((label, type(module).__name__, *words, kind)))
    solver = SolverTypes(model, kinds, _dtype(solver_data_type, "solver_data_type"))
    for layer in made:
        layer.attach()
    for module in model.modules():
        if getattr(module, "use_nested_tensor", False):  # which few operators take
            module.__dict__ |= {"use_nested_tensor": False, USED_NESTED: True}
    return LayerTypes(rows, model, solver)


def undo_layer_types(model: nn.Module) -> None:
    """Takes the types of set_layer_types from every layer of a model, such as a copy of it."""
    for module in model.modules():
        layer = typed.forward_of(module)
        if layer is not None:
            layer.detach()
        if module.__dict__.pop(USED_NESTED, False):
            module.__dict__["use_nested_tensor"] = True


def _dtype(given: Any, argument: str) -> torch.dtype:
    dtype = WORDS.get(given) if isinstance(given, str) else given
    if not isinstance(dtype, torch.dtype) or dtype not in NAMES:
        raise ValueError(
            f"{argument} must be {', '.join(WORDS)}, or a torch dtype of these; found {given!r}"
        )
    return dtype


# A layer's own entries: the type, and the pattern that has it.
Chosen = dict[str, tuple[torch.dtype, str]]


def _chosen(names: Mapping[nn.Module, list[str]], layers: Any) -> dict[nn.Module, Chosen]:
    chosen: dict[nn.Module, Chosen] = {module: {} for module in names}
    if not isinstance(layers, Mapping):
        raise TypeError(f"layers must be a dict of dicts by pattern, found {layers!r}")
    for pattern, entries in layers.items():
        if not isinstance(pattern, str) or not isinstance(entries, Mapping):
            raise TypeError(
                f"layers must have a dict such as dict(forward_type='FLOAT') for each pattern, "
                f"found {pattern!r}: {entries!r}"
            )
        if unknown := [entry for entry in entries if entry not in FIELDS]:
            raise ValueError(f"layers[{pattern!r}]: {unknown[0]!r} is none of {', '.join(FIELDS)}")
        own = {e: (_dtype(t, f"layers[{pattern!r}]: {e}"), pattern) for e, t in entries.items()}
        # It names a layer, or a module that contains it.
        parts = [(m, name.split(".")) for m, own_names in names.items() for name in own_names]
        starts = [(m, ".".join(p[:end])) for m, p in parts for end in range(1, len(p) + 1)]
        matched = {m: None for m, start in starts if matches(start, pattern)}
        if not matched:
            text = f"layers: {pattern!r} matches no layer of the model"
            raise ValueError(f"{text}; model.named_modules() has the names")
        for module in matched:
            chosen[module] |= own
    return chosen


def _types(default: Mapping[str, torch.dtype], own: Chosen, kind: str, layer: str) -> Types:
    found = {}
    for way in ("forward", "backward"):
        stored, math = f"{way}_type", f"{way}_math"
        net = torch.float32 if kind == typed.KEPT else default[stored]
        net_math = torch.float32 if kind == typed.KEPT else default.get(math, net)
        found[stored] = own[stored][0] if stored in own else net
        found[math] = own[math][0] if math in own else own.get(stored, (net_math,))[0]
    for field in AT_LEAST_FLOAT.get(kind, ()):
        wide = torch.promote_types(found[field], torch.float32)
        if field in own and wide != found[field]:
            raise ValueError(
                f"layers[{own[field][1]!r}]: {field} cannot be {NAMES[found[field]]} for {layer}, "
                "which has FLOAT at least; leave it out, or write a pattern without this layer"
            )
        found[field] = wide
    if kind == typed.NORM:  # its statistics have one type
        widest = torch.promote_types(found["forward_math"], found["backward_math"])
        found["forward_math"] = found["backward_math"] = widest
    return Types(*(found[field] for field in FIELDS))


def _refuse(module: nn.Module, label: str, kind: str) -> None:
    problem = ""
    if typed.forward_of(module) is not None:
        problem = "has types already; call amp.compat.undo_layer_types(model) first"
    elif "forward" in module.__dict__:
        problem = "has a forward method of its own (as attach_main_grads sets); set types first"
    elif isinstance(module, torch.jit.ScriptModule):
        problem = "is a TorchScript module, whose arithmetic is fixed; use the Python module"
    elif any(map(is_lazy, [*module.parameters(), *module.buffers()])):
        problem = "is lazy; run the model once before set_layer_types"
    elif kind == typed.NORM and any(b.dtype in LOW_PRECISION for b in module.buffers()):
        problem = "has low-precision statistics; call its float() first"
    if problem:
        raise ValueError(f"model: the layer {label} {problem}")
