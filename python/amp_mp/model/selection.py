"""What stays float32 when a model is converted, by default, by the caller's choice or by marks."""

import fnmatch
import re
from collections.abc import Iterable
from typing import NamedTuple

from torch import Tensor, nn

from amp_mp.module_names import matches, plain_names
from amp_mp.torch_private import NormBase

# Statistics and small affine weights, where low precision saves nothing and costs accuracy.
NORMALISATIONS = (nn.LayerNorm, nn.GroupNorm, nn.RMSNorm, NormBase)

# Other libraries' normalisation layers are known by their class's name (LlamaRMSNorm, T5LayerNorm,
# FrozenBatchNorm2d, but not Normalize), if they hold vectors only: PreNorm, which holds a whole
# block, and AdaLayerNorm, which holds a Linear, are not among them.
NORMALISATION_NAME = re.compile(r"norm(?!al)|normali[sz]ation", re.IGNORECASE)

# torch's modules whose operators refuse low precision: fake quantisation, and torch.linalg.
FLOAT32_ALONE = ("FakeQuantizeBase", "ObserverBase", "_Orthogonal")

# Where torch has the modules that fake-quantise their weights. Some compute in float32 whatever
# their weights are (ConvBn2d, LSTM), and torch's convert() makes integer modules of float32 alone.
FLOAT32_PACKAGES = ("torch.ao.nn.qat.", "torch.ao.nn.intrinsic.qat.", "torch.ao.nn.quantizable.")

# Buffers that are multiplied by positions: an error of 2^-9 in a frequency is one of 2 radians at
# position 1000. The second list only in a class that is named for rotary positions.
FREQUENCIES = ("*inv_freq*",)
ROTARY_FREQUENCIES = ("bands", "freqs", "periods", "theta")
ROTARY_NAME = re.compile(r"rotary|rope", re.IGNORECASE)

# The attribute that the function keep_fp32 sets on a module: the names of its own parameters and
# buffers that stay float32, "" for all of them. Names and not ids, so that copies have the marks.
MARKS = "_amp_mp_keep_fp32"

Kept = type[nn.Module] | nn.Module | str | Iterable[type[nn.Module] | nn.Module | str]


class Selection(NamedTuple):
    """What stays float32 in a model.

    modules: they compute in float32. rotary: modules with frequencies, whose results get the dtype
    of their inputs. tensors: ids of the parameters and buffers of `modules`, and of single ones.
    """

    modules: list[nn.Module]
    rotary: list[nn.Module]
    tensors: set[int]


def keep_fp32(model: nn.Module, patterns_or_types: Kept) -> nn.Module:
    """Marks what stays float32 when `prepare` or `convert_network` converts; returns the model.

    The marks add to those functions' own keep_fp32 arguments and defaults. They sit on the modules:
    copies and pickles have them, and so does a module that becomes part of another model.

    model: where to look. Nothing in it is converted. patterns_or_types: one or several nn.Module
    types, modules, and fnmatch patterns over the names of modules, parameters and buffers
    ("decoder.*", "*.table"), with `prepare`'s errors. A marked module computes in float32 and
    returns the dtype it was given. A marked parameter of one of torch's layers, or all tensors of a
    module without parts, mark the module; mark others where their module mixes dtypes itself.
    """
    if patterns_or_types is None:  # which is the default elsewhere
        raise TypeError("keep_fp32 takes nn.Module types, modules and strings, found None")
    modules, tensors = matching(model, patterns_or_types, "keep_fp32")
    for module in model.modules():
        own = named_tensors(module, recurse=False)
        marks = {name for name, tensor in own.items() if id(tensor) in tensors}
        if id(module) in modules:
            marks.add("")
        if marks:
            setattr(module, MARKS, marks | set(vars(module).get(MARKS, ())))
    return model


def select(model: nn.Module, keep_fp32: Kept | None, keep_fp32_only: Kept | None) -> Selection:
    """What stays float32: see `prepare`; errors as there."""
    modules = {id(m): m for m in model.modules() if _is_float32_alone(m)}
    kept: set[int] = set()
    chosen: set[int] = set()
    rotary = []
    if keep_fp32_only is None:
        modules |= {id(m): m for m in model.modules() if is_normalisation(m)}
        kept = {id(t) for t in named_tensors(model).values() if t.dim() == 0}
        for module in model.modules():
            if found := frequencies(module):
                rotary.append(module)
                kept |= set(map(id, found))
    for name, wanted in (("keep_fp32", keep_fp32), ("keep_fp32_only", keep_fp32_only)):
        if wanted is not None:
            more, tensors = matching(model, wanted, name)
            modules |= more
            chosen |= tensors
    for module in model.modules():
        chosen |= {id(getattr(module, name, None)) for name in vars(module).get(MARKS, ()) if name}
        if is_marked(module) or _computes_with(module, chosen):
            modules[id(module)] = module
    inside = _add_sharing(model, modules)
    rotary = [module for module in rotary if id(module) not in modules]
    return Selection(list(modules.values()), rotary, kept | chosen | inside)


def matching(model: nn.Module, wanted: Kept, where: str) -> tuple[dict[int, nn.Module], set[int]]:
    """Modules by id, and ids of single tensors, that types and patterns name; or an error."""
    modules: dict[int, nn.Module] = {}
    kept: set[int] = set()
    tensors, plain = named_tensors(model), plain_names(model)
    for entry in [wanted] if isinstance(wanted, str | type | nn.Module) else wanted:
        if isinstance(entry, type) and issubclass(entry, nn.Module):
            modules |= {id(m): m for m in model.modules() if isinstance(m, entry)}
        elif isinstance(entry, nn.Module):
            if all(entry is not module for module in model.modules()):
                raise ValueError(f"{where}: this {type(entry).__name__} is not in the model")
            modules[id(entry)] = entry
        elif isinstance(entry, str):
            parts = {n: m for n, m in model.named_modules() if plain[n]}
            found = {id(m): m for n, m in parts.items() if matches(n, entry, plain)}
            names = [name for name in tensors if matches(name, entry, plain)]
            if not found and not names:
                raise ValueError(f"{where}: {entry!r} matches no module or parameter of the model")
            modules |= found
            kept |= {id(tensors[name]) for name in names}
        else:
            raise TypeError(f"{where} takes nn.Module types, modules and strings, found {entry!r}")
    return modules, kept


def is_marked(module: nn.Module) -> bool:
    """Whether keep_fp32 has marked the whole module."""
    return "" in vars(module).get(MARKS, ())


def _is_float32_alone(module: nn.Module) -> bool:
    """Whether torch's operators for the module refuse low precision."""
    return any(
        base.__name__ in FLOAT32_ALONE or base.__module__.startswith(FLOAT32_PACKAGES)
        for base in type(module).__mro__
    )


def _computes_with(module: nn.Module, chosen: set[int]) -> bool:
    """Whether single tensors that a user keeps make the module compute in float32.

    One of torch's does for any of its tensors, for it cannot mix dtypes; another where these are
    all of its own and it has no parts. A list of parameters computes nothing.
    """
    own = {id(t) for t in named_tensors(module, recurse=False).values() if t.is_floating_point()}
    if chosen.isdisjoint(own) or isinstance(module, nn.ParameterList | nn.ParameterDict):
        return False
    is_torchs = type(module).__module__.startswith("torch.nn.")
    return is_torchs or (own <= chosen and next(module.children(), None) is None)


def is_normalisation(module: nn.Module) -> bool:
    """Whether a module is a normalisation layer: torch's own, or by its name and its tensors."""
    if isinstance(module, NORMALISATIONS):
        return True
    return NORMALISATION_NAME.search(type(module).__name__) is not None and all(
        sum(size > 1 for size in tensor.shape) <= 1 for tensor in named_tensors(module).values()
    )


def frequencies(module: nn.Module) -> list[Tensor]:
    """The module's own buffers that hold rotary frequencies."""
    is_rotary = ROTARY_NAME.search(type(module).__name__) is not None
    patterns = (*FREQUENCIES, *(ROTARY_FREQUENCIES if is_rotary else ()))
    buffers = dict(module.named_buffers(recurse=False))
    return [b for name, b in buffers.items() if any(fnmatch.fnmatch(name, p) for p in patterns)]


def named_tensors(module: nn.Module, recurse: bool = True) -> dict[str, Tensor]:
    """The module's parameters and buffers by name; a tied weight has several names."""
    params = module.named_parameters(recurse=recurse, remove_duplicate=False)
    return dict([*params, *module.named_buffers(recurse=recurse, remove_duplicate=False)])


def _add_sharing(model: nn.Module, modules: dict[int, nn.Module]) -> set[int]:
    while True:
        inside = {id(t) for m in modules.values() for t in named_tensors(m).values()}
        within = {id(part) for m in modules.values() for part in m.modules()}
        sharing = {
            id(m): m
            for m in model.modules()
            if id(m) not in within and any(id(p) in inside for p in m.parameters(recurse=False))
        }
        if not sharing:
            return inside
        modules |= sharing
