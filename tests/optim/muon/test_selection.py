"""Which parameters Muon takes of a model: by what they do, never by where a name happens to be."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.utils import parametrizations

import amp_mp as amp


def names_of(optimizer: amp.optim.Muon, muon: bool) -> set[str]:
    groups = [g for g in optimizer.param_groups if g["use_muon"] is muon]
    return {name for group in groups for name in group["param_names"]}


def taken(model: nn.Module, **options: Any) -> set[str]:
    """What Muon updates of a model."""
    optimizer = amp.optim.Muon(model, **options)
    every = {name for name, _ in model.named_parameters()}
    assert names_of(optimizer, True) | names_of(optimizer, False) == every
    return names_of(optimizer, True)


class With(nn.Module):
    """Two hidden layers and a head, and a parameter of some name and shape."""

    def __init__(self, name: str, *shape: int, kind: str = "Mixer") -> None:
        super().__init__()
        inner = type(kind, (nn.Module,), {})()
        inner.register_parameter(name, nn.Parameter(torch.randn(*shape)))
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 8)
        self.inner = inner
        self.head = nn.Linear(8, 4)


HIDDEN = {"first.weight", "second.weight"}


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("gain", (8, 8)),
        ("layer_scale", (8, 8)),
        ("weight", (1, 8)),
        ("weight", (8, 1)),
        ("weight", (3, 1, 8)),
        ("registers", (1, 4, 8)),
        ("cls", (2, 8)),
        ("cls_token", (4, 8)),
        ("pos_table", (8, 16)),
        ("relative_position_bias", (8, 16)),
        ("A_log", (16, 8)),
        ("D", (16, 8)),
        ("D", (16,)),
        ("bias_k", (2, 8)),
        ("weight", (4, 3, 3, 3)),
    ],
)
def test_what_is_added_multiplied_or_looked_up_is_adamws(name: str, shape: tuple[int, ...]) -> None:
    assert taken(With(name, *shape)) == HIDDEN


@pytest.mark.parametrize("kind", ["RMSNorm", "PatchEmbed", "LayerNormWithBias"])
def test_other_libraries_norms_and_embeddings_are_adamws(kind: str) -> None:
    assert taken(With("weight", 8, 16, kind=kind)) == HIDDEN


@pytest.mark.parametrize("name", ["weight", "w1", "experts", "Dense", "class_map"])
@pytest.mark.parametrize("shape", [(8, 16), (3, 8, 16)])
def test_plain_matrices_are_muons(name: str, shape: tuple[int, ...]) -> None:
    assert taken(With(name, *shape, kind="ScaledMixer")) == {*HIDDEN, f"inner.{name}"}


@pytest.mark.parametrize("dim", [0, 1])
def test_of_weight_norm_the_direction_is_a_matrix_and_the_gain_is_not(dim: int) -> None:
    model = nn.Sequential(nn.Linear(8, 32), nn.Linear(32, 16), nn.Linear(16, 3))
    for layer in model:
        parametrizations.weight_norm(layer, dim=dim)
    pairs = {f"{i}.parametrizations.weight.original1" for i in (0, 1)}
    assert taken(model) == pairs
    embedding = nn.Sequential(nn.Embedding(9, 8), nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 9))
    for layer in embedding:
        parametrizations.weight_norm(layer, dim=dim)
    assert taken(embedding) == {f"{i}.parametrizations.weight.original1" for i in (1, 2)}


class Agent(nn.Module):
    """Heads that are defined before the body."""

    def __init__(self, policy: str, value: str) -> None:
        super().__init__()
        self.add_module(policy, nn.Linear(32, 4))
        self.add_module(value, nn.Linear(32, 1))
        self.body = nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh())


@pytest.mark.parametrize(
    "names", [("policy_out", "value_out"), ("policy_head", "value_head"), ("actor", "critic")]
)
def test_heads_are_the_models_own_layers_and_never_an_inner_body(names: tuple[str, str]) -> None:
    assert taken(Agent(*names)) == {"body.0.weight", "body.2.weight"}
    wrapped = nn.Module()
    wrapped.module = Agent(*names)  # as DistributedDataParallel and torch.compile wrap
    assert taken(wrapped) == {"module.body.0.weight", "module.body.2.weight"}


def test_wrapped_models_have_the_plain_models_groups() -> None:
    """Heads are known, and patterns match, through compiled and checkpointed modules and DDP."""
    options: Any = {"not_matrices": "body.0.*", "split": {"body.2.weight": 2}}
    model, plain = Agent("policy_head", "value_head"), Agent("policy_head", "value_head")
    model.policy_head = checkpoint_wrapper(model.policy_head)
    model.value_head = torch.compile(model.value_head)  # type: ignore[assignment]
    model.body[2] = checkpoint_wrapper(model.body[2])
    ddp = nn.Module()
    ddp.module = torch.compile(model)
    assert taken(plain, **options) == {"body.2.weight"}
    name = "module._orig_mod.body.2._checkpoint_wrapped_module.weight"
    assert taken(ddp, **options) == {name}


def test_the_head_inside_the_last_module_is_found() -> None:
    class Classifier(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Linear(6, 32)
            self.blocks = nn.ModuleList(nn.Linear(32, 32) for _ in range(2))
            self.decode = nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 5))

    assert taken(Classifier()) == {
        "embed.weight",
        "blocks.0.weight",
        "blocks.1.weight",
        "decode.0.weight",
    }


def test_lists_of_heads_are_heads_and_lists_of_blocks_have_none() -> None:
    class Many(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(
                nn.ModuleDict({"up": nn.Linear(8, 16), "output": nn.Linear(16, 8)})
                for _ in range(2)
            )
            self.heads = nn.ModuleList(nn.Linear(8, n) for n in (3, 5))

    blocks = {f"blocks.{i}.{n}.weight" for i in (0, 1) for n in ("up", "output")}
    model = Many()
    assert taken(model) == blocks
    del model.heads  # a model that ends with its blocks has no head
    assert taken(model) == blocks


def test_an_autoencoder_ends_with_its_last_layer() -> None:
    model = nn.Sequential(nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 8))
    assert taken(model) == {"0.weight", "2.weight"}


@pytest.mark.parametrize(
    "model", [nn.Linear(8, 8), nn.Sequential(nn.Embedding(9, 8), nn.Linear(8, 9))]
)
def test_a_model_of_one_linear_layer_says_what_to_pass(model: nn.Module) -> None:
    with pytest.raises(ValueError, match=r"output layers: \[.*weight'\]\).*matrices=\[.*AdamW"):
        amp.optim.Muon(model)
    name = next(n for n, p in model.named_parameters() if n.endswith("weight"))
    assert taken(model, matrices=["*weight"]) >= {name}
    with pytest.raises(ValueError, match=r"output layers: \[\]\).*AdamW"):
        amp.optim.Muon(nn.LayerNorm(8))


def test_no_decay_means_none_for_all_groups() -> None:
    def decays(**options: Any) -> list[float]:
        groups = amp.optim.Muon(Agent("pi", "v"), **options).param_groups
        return [group["weight_decay"] for group in groups]

    assert decays() == [0.1, 0.01]
    assert decays(weight_decay=0.05) == [0.05, 0.01]
    assert decays(weight_decay=0) == [0, 0]
    assert decays(weight_decay=0, others={"weight_decay": 0.3}) == [0, 0.3]
    assert decays(weight_decay=0, others={"lr": 1e-4}) == [0, 0]


def test_parameters_without_names_can_be_added_to_a_model() -> None:
    optimizer = amp.optim.Muon(Agent("pi", "v"), lr=0.02)
    matrix, vector = nn.Parameter(torch.randn(8, 4)), nn.Parameter(torch.randn(8))
    optimizer.add_param_group({"params": [matrix]})
    optimizer.add_param_group({"params": iter([vector]), "use_muon": False})
    named = nn.Parameter(torch.randn(4, 8))
    optimizer.add_param_group({"params": [("extra", named)]})
    names = [group["param_names"] for group in optimizer.param_groups[2:]]
    assert names == [["group2.0"], ["group3.0"], ["extra"]]
    for param in (matrix, vector, named):
        param.grad = torch.ones_like(param)
    before = [p.detach().clone() for p in (matrix, vector, named)]
    optimizer.step()
    assert not any(map(torch.equal, before, (matrix, vector, named)))
    again = amp.optim.Muon(Agent("pi", "v"))
    for group in optimizer.param_groups[2:]:
        params = [nn.Parameter(p.detach().clone()) for p in group["params"]]
        again.add_param_group({"params": params, "use_muon": group["use_muon"]})
    assert again.param_groups[2]["param_names"] == ["group2.0"]
    plain = amp.optim.Muon([nn.Parameter(torch.randn(4, 4))])
    plain.add_param_group({"params": nn.Parameter(torch.randn(4, 4))})
    assert "param_names" not in plain.param_groups[1]
    with pytest.raises(ValueError, match=r"'group5.0'\) of shape \(3,\) is no matrix"):
        optimizer.add_param_group({"params": torch.nn.Parameter(torch.zeros(3))})


def test_the_summary_lists_what_updates_each_parameter() -> None:
    model = nn.ModuleDict({"qkv": nn.Linear(32, 64), "out": nn.Linear(32, 32)})
    optimizer = amp.optim.Muon(
        model, matrices="*.weight", split={"qkv.w*": (32, 16, 16)}, adjust_lr_fn="sqrt"
    )
    rows = [line.split("  ") for line in optimizer.param_summary().splitlines()]
    cells = [[cell.strip() for cell in row if cell.strip()] for row in rows]
    assert cells == [
        ["parameter", "shape", "rule", "blocks", "factor"],
        ["qkv.weight", "(64, 32)", "Muon", "1 x (32, 32), 2 x (16, 32)", "1, 0.7071"],
        ["out.weight", "(32, 32)", "Muon", "1 x (32, 32)", "1"],
        ["qkv.bias", "(64,)", "AdamW"],
        ["out.bias", "(32,)", "AdamW"],
    ]
    by_hand = amp.optim.Muon([nn.Parameter(torch.zeros(2, 6, 4))], adjust_lr_fn="match_rms_adamw")
    assert by_hand.param_summary().splitlines()[1].split()[0] == "0.0"
