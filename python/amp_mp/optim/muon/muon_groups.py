"""Which parameters of a model are matrices for Muon, and which are for AdamW."""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from amp_mp.module_names import DDP, matches, without_wrappers
from amp_mp.torch_private import ConvNd, NormBase

# Rows of an embedding and weights of a normalisation are looked up or multiplied one by one.
NOT_MATRICES = (
    nn.Embedding,
    nn.EmbeddingBag,
    nn.LayerNorm,
    nn.GroupNorm,
    nn.RMSNorm,
    nn.RNNBase,
    ConvNd,
    NormBase,
)
# The same in other libraries' modules; and what is a plain parameter that is added, multiplied or
# looked up: positions, tokens, gains, Mamba's A_log and D. Searched in "type.name".
NOT_MATRIX_NAME = re.compile(
    r"embed|position|pos_|token|norm|\.[^.]*(scale|gain|bias)|\.(pos|cls|A_log|D)(\.|$)",
    re.IGNORECASE,
)
# Output layers are known by these names outside of lists of blocks, and by the second kind if they
# are the model's own.
HEAD = re.compile(r"(.*_)?(heads?|classifier)|output|logits|score|unembed|embed_out|qa_outputs")
OWN_HEAD = re.compile(r"(.*_)?out(put)?s?")

Named = tuple[str, Tensor]
Patterns = Iterable[str] | str | None


def muon_groups(
    model: nn.Module, matrices: Patterns, not_matrices: Patterns, split: Mapping[str, Any] | None
) -> list[dict[str, Any]]:
    """A model's parameters as param_groups: Muon's, and one of AdamW's.

    Matrices that are split, and flattened ones, have groups of their own. Raises ValueError naming
    a pattern that matches nothing, or a parameter that two patterns disagree about, and where no
    matrix remains for Muon.
    """
    named = dict(model.named_parameters())
    chosen = _matching(named, matrices, "matrices")
    refused = _matching(named, not_matrices, "not_matrices")
    if both := sorted(chosen & refused):
        raise ValueError(f"{both[0]!r} matches patterns of both matrices and not_matrices")
    owners = _owners(model)
    heads = _heads(model)
    groups: dict[tuple[Any, bool], list[Named]] = {}
    others: list[Named] = []
    own = {n for n, p in named.items() if _is_matrix(p, owners[id(p)], heads)}
    own = (own | chosen) - refused
    if not own:
        ends = [
            n for n, p in named.items() if p.dim() > 1 and {m for m, _ in owners[id(p)]} & heads
        ]
        raise ValueError(
            f"Muon finds no matrix in the model (output layers: {ends}); name those that it is to "
            'update, Muon(model, matrices=["*.weight"]), or take AdamW'
        )
    blocks = _blocks(named, own, split or {})
    for name, param in named.items():
        if name not in own:
            others.append((name, param))
            continue
        flatten = any(isinstance(module, ConvNd) for module, _ in owners[id(param)])
        groups.setdefault((blocks.get(name, 1), flatten), []).append((name, param))
    made: list[dict[str, Any]] = [
        {"params": params, "use_muon": True, "split": split, "flatten": flatten}
        for (split, flatten), params in groups.items()
    ]
    return [*made, {"params": others, "use_muon": False}] if others else made


def _matching(names: Iterable[str], patterns: Patterns, argument: str) -> set[str]:
    found: set[str] = set()
    listed = [patterns] if isinstance(patterns, str) else list(patterns or ())
    for pattern in listed:
        own = {n for n in names if matches(n, pattern) or matches(n.removeprefix(DDP), pattern)}
        if not own:
            raise ValueError(f"{argument}: no parameter's name matches {pattern!r}")
        found |= own
    return found


def _blocks(named: Iterable[str], own: set[str], split: Mapping[str, Any]) -> dict[str, Any]:
    blocks: dict[str, Any] = {}
    for pattern, count in split.items():
        for name in sorted(_matching(named, [pattern], "split")):
            if name not in own:
                raise ValueError(
                    f"split: {pattern!r} matches {name!r}, which AdamW updates; name it in "
                    "matrices, or change the pattern"
                )
            rows = isinstance(count, Sequence) and not isinstance(count, str)
            blocks[name] = tuple(count) if rows else count
    return blocks


def _owners(model: nn.Module) -> dict[int, list[tuple[nn.Module, str]]]:
    """The modules that have each parameter, parametrized or not, and its name there."""
    owners: dict[int, list[tuple[nn.Module, str]]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        outer, inside, tensor = f".{name}".partition(".parametrizations.")
        owner = model.get_submodule(outer[1:]) if inside else module
        for own, param in module._parameters.items():
            if param is not None:
                owners.setdefault(id(param), []).append((owner, f"{tensor}.{own}".lstrip(".")))
    return owners


def _is_matrix(param: Tensor, owners: list[tuple[nn.Module, str]], heads: set[nn.Module]) -> bool:
    if param.dim() not in (2, 3) or min(param.shape) < 2:
        return False
    for module, own in owners:
        if isinstance(module, NOT_MATRICES) or module in heads:
            return False
        plain = isinstance(module, nn.Linear | nn.MultiheadAttention)
        if not plain and NOT_MATRIX_NAME.search(f"{type(module).__name__}.{own}"):
            return False
    return True


def _heads(model: nn.Module) -> set[nn.Module]:
    """The output layers.

    Linear layers that share an embedding's weight or have an output layer's name; if there is none,
    those that end the model.
    """
    linear = {n: m for n, m in model.named_modules() if isinstance(m, nn.Linear)}
    embeddings = [m for m in model.modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag)]
    tables = {id(p) for embedding in embeddings for p in embedding.parameters()}
    found: set[nn.Module] = {
        m for m in linear.values() if any(id(p) in tables for p in m.parameters())
    }
    plain = {without_wrappers(name): module for name, module in model.named_modules()}
    for name, module in linear.items():
        outer, _, own = without_wrappers(name).rpartition(".")
        if own.isdigit() and isinstance(plain[outer], nn.ModuleList):
            outer, _, own = outer.rpartition(".")  # heads.0, heads.1
        above = [part for part in outer.split(".") if part not in ("", DDP.rstrip("."))]
        if any(part.isdigit() for part in (*above, own)):
            continue
        if HEAD.fullmatch(own) or (not above and OWN_HEAD.fullmatch(own)):
            found.add(module)
    return found or set(_last(model, {m.in_features for m in linear.values()}))


def _last(module: nn.Module, taken: set[int]) -> Sequence[nn.Module]:
    """The linear layers that end a module; `taken`: how many features linear layers take.

    Among the module's own layers those whose results no linear layer takes, whole or in two or
    three parts; without any, the last layer, or those that end the last module inside. Lists of
    blocks are skipped.
    """
    if isinstance(module, nn.Linear):
        return [module]
    inner = [
        child
        for child in module.children()
        if not isinstance(child, nn.ModuleList)
        and any(isinstance(each, nn.Linear) for each in child.modules())
    ]
    ends = [
        child
        for child in inner
        if isinstance(child, nn.Linear)
        and not any(child.out_features == parts * n for n in taken for parts in (1, 2, 3))
    ]
    return ends or (_last(inner[-1], taken) if inner else [])
