"""Which parameters of a model are matrices for Muon, and which are for AdamW."""

import re
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Any

from torch import Tensor, nn

CONVOLUTIONS = nn.modules.conv._ConvNd
# Rows of an embedding and weights of a normalisation are looked up or multiplied one by one.
NOT_MATRICES = (
    *(nn.Embedding, nn.EmbeddingBag, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm),
    *(nn.modules.batchnorm._NormBase, nn.RNNBase, CONVOLUTIONS),
)
# The same in other libraries' modules, and positions and tokens that are plain parameters.
NOT_MATRIX_NAME = re.compile(r"embed|position|pos_|token|norm", re.IGNORECASE)
# Output layers are known by these names, outside of lists of blocks.
HEADS = ("lm_head", "head", "heads", "output", "classifier", "logits", "score", "unembed")

Named = tuple[str, Tensor]
Patterns = Iterable[str] | str | None


def muon_groups(
    model: nn.Module, matrices: Patterns, not_matrices: Patterns, split: Mapping[str, int] | None
) -> list[dict[str, Any]]:
    """A model's parameters as param_groups: Muon's, and one of AdamW's.

    Matrices that are split, and flattened ones, have groups of their own. Raises ValueError naming
    a pattern that matches nothing, or a parameter that two patterns disagree about.
    """
    named = dict(model.named_parameters())
    chosen = _matching(named, matrices, "matrices")
    refused = _matching(named, not_matrices, "not_matrices")
    if both := sorted(chosen & refused):
        raise ValueError(f"{both[0]!r} matches patterns of both matrices and not_matrices")
    owners = _owners(model)
    heads = _heads(model)
    groups: dict[tuple[int, bool], list[Named]] = {}
    others: list[Named] = []
    own = {n for n, p in named.items() if _is_matrix(n, p, owners[id(p)], heads)}
    own = (own | chosen) - refused
    blocks = _blocks(named, own, split or {})
    for name, param in named.items():
        if name not in own:
            others.append((name, param))
            continue
        flatten = any(isinstance(module, CONVOLUTIONS) for module, _ in owners[id(param)])
        groups.setdefault((blocks.get(name, 1), flatten), []).append((name, param))
    found: list[dict[str, Any]] = [
        {"params": params, "use_muon": True, "split": split, "flatten": flatten}
        for (split, flatten), params in groups.items()
    ]
    return [*found, {"params": others, "use_muon": False}] if others else found


def _matching(names: Iterable[str], patterns: Patterns, argument: str) -> set[str]:
    found: set[str] = set()
    listed = [patterns] if isinstance(patterns, str) else list(patterns or ())
    for pattern in listed:
        own = {name for name in names if fnmatchcase(name, pattern)}
        if not own:
            raise ValueError(f"{argument}: no parameter's name matches {pattern!r}")
        found |= own
    return found


def _blocks(named: Iterable[str], own: set[str], split: Mapping[str, int]) -> dict[str, int]:
    blocks: dict[str, int] = {}
    for pattern, count in split.items():
        for name in sorted(_matching(named, [pattern], "split")):
            if name not in own:
                raise ValueError(
                    f"split: {pattern!r} matches {name!r}, which AdamW updates; name it in "
                    "matrices, or change the pattern"
                )
            blocks[name] = count
    return blocks


def _owners(model: nn.Module) -> dict[int, list[tuple[nn.Module, str]]]:
    owners: dict[int, list[tuple[nn.Module, str]]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        for param in module._parameters.values():
            if param is not None:
                owners.setdefault(id(param), []).append((module, name))
    return owners


def _is_matrix(
    name: str, param: Tensor, owners: list[tuple[nn.Module, str]], heads: set[int]
) -> bool:
    if param.dim() not in (2, 3) or id(param) in heads:
        return False
    for module, _ in owners:
        if isinstance(module, NOT_MATRICES):
            return False
        plain = isinstance(module, nn.Linear | nn.MultiheadAttention)
        kind = type(module).__name__
        if not plain and NOT_MATRIX_NAME.search(f"{kind}.{name.rpartition('.')[2]}"):
            return False
    return True


def _heads(model: nn.Module) -> set[int]:
    """The ids of output layers' weights.

    Those of linear layers that share an embedding's weight or have a name of HEADS outside of any
    list; if there is none, that of the last linear layer.
    """
    linear = [(n, m) for n, m in model.named_modules() if isinstance(m, nn.Linear)]
    embeddings = [m for m in model.modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag)]
    tables = {id(embedding.weight) for embedding in embeddings}
    found = {id(m.weight) for _, m in linear if id(m.weight) in tables}
    for name, module in linear:
        parts = name.split(".")
        if parts[-1] in HEADS and not any(part.isdigit() for part in parts):
            found.add(id(module.weight))
    return found or {id(module.weight) for _, module in linear[-1:]}
