"""Muon for whole models: which parameters are matrices, stacks and blocks, one verdict for all."""

from __future__ import annotations

import copy
import math
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import raw_bytes
from torch import Tensor, nn

import amp_mp as amp
from amp_mp import _C


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.output = nn.Linear(width, width, bias=False)
        self.mlp = nn.Sequential(
            nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        q, _, v = self.qkv(self.norm(x)).chunk(3, -1)
        x = x + self.output(torch.sigmoid(q) * v)
        return x + self.mlp(x)


class Model(nn.Module):
    def __init__(self, width: int = 32, tied: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(40, width)
        self.pos_table = nn.Parameter(torch.zeros(8, width))
        self.blocks = nn.ModuleList(Block(width) for _ in range(2))
        self.experts = nn.Parameter(torch.randn(3, width, 2 * width) * 0.1)
        self.lm_head = nn.Linear(width, 40, bias=False)
        if tied:
            self.lm_head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) + self.pos_table[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        x = x + torch.relu(x @ self.experts[0]) @ self.experts[1].mT + self.experts[2].sum(1)[:1]
        return self.lm_head(x)


def names_of(optimizer: amp.optim.Muon, muon: bool) -> set[str]:
    groups = [g for g in optimizer.param_groups if g["use_muon"] is muon]
    return {name for group in groups for name in group["param_names"]}


MATRICES = {
    "experts",
    *(f"blocks.{i}.{n}.weight" for i in (0, 1) for n in ("qkv", "output", "mlp.0", "mlp.2")),
}


def loss_of(model: nn.Module, seed: int) -> Tensor:
    tokens = torch.randint(0, 40, (4, 8), generator=torch.Generator().manual_seed(seed))
    tokens = tokens.to(next(model.parameters()).device)
    return nn.functional.cross_entropy(model(tokens).float().flatten(0, 1), tokens.flatten())


@pytest.mark.parametrize("tied", [False, True])
def test_a_model_s_matrices_are_chosen_by_its_modules(tied: bool) -> None:
    model = Model(tied=tied)
    optimizer = amp.optim.Muon(model, others={"lr": 3e-4})
    assert names_of(optimizer, True) == MATRICES
    named = {name for name, _ in model.named_parameters()}
    assert names_of(optimizer, False) == named - MATRICES
    assert {g["lr"] for g in optimizer.param_groups} == {1e-3, 3e-4}


def test_patterns_override_the_choice() -> None:
    model = Model()
    optimizer = amp.optim.Muon(
        model, matrices=["lm_head.*"], not_matrices="*.mlp.*", split={"*.qkv.weight": 3}
    )
    mlp = {name for name in MATRICES if ".mlp." in name}
    assert names_of(optimizer, True) == (MATRICES - mlp) | {"lm_head.weight"}
    blocks = {name: g["split"] for g in optimizer.param_groups[:-1] for name in g["param_names"]}
    assert {name for name, count in blocks.items() if count == 3} == {
        "blocks.0.qkv.weight",
        "blocks.1.qkv.weight",
    }


def test_convolutions_are_chosen_by_name_alone_and_flattened() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3), nn.Flatten(), nn.Linear(8, 2))
    with pytest.raises(ValueError, match=r"output layers: \['3.weight'\]\).*matrices="):
        amp.optim.Muon(model)
    optimizer = amp.optim.Muon(model, matrices=["1.weight"], lr=0.02)
    flat = nn.Parameter(model[1].weight.detach().flatten(1).clone())
    other = amp.optim.Muon([flat], lr=0.02)
    model[1].weight.grad = torch.randn_like(model[1].weight)
    flat.grad = model[1].weight.grad.flatten(1).clone()
    optimizer.step()
    other.step()
    assert torch.equal(model[1].weight.flatten(1), flat)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"matrices": ["nothing.*"]}, "matrices: no parameter's name matches 'nothing"),
        ({"not_matrices": ["nothing"]}, "not_matrices: no parameter"),
        ({"matrices": ["*.qkv.weight"], "not_matrices": ["blocks.0.*"]}, "patterns of both"),
        ({"split": {"*.mlp.9": 2}}, "split: no parameter"),
        ({"split": {"lm_head.weight": 2}}, "which AdamW updates"),
        ({"split": {"*.qkv.weight": 5}}, r"blocks.0.qkv.weight.*96.*5 equal blocks"),
        ({"matrices": ["*.bias"]}, r"norm.bias.*shape \(32,\) is no matrix"),
        ({"others": {"lr": -1.0}}, "others: lr must not be negative"),
        ({"ns_steps": 100}, "ns_steps must be"),
        ({"ns_steps": True}, "ns_steps must be None or a whole number"),
        ({"ns_coefficients": (1.0, 2.0)}, r"'quintic', three finite numbers.*\(1.0, 2.0\)"),
        ({"ns_coefficients": (1.0, 2.0, math.nan)}, "ns_coefficients must be"),
        ({"ns_coefficients": [(1.0, 2.0, 3.0), (1.0, 2.0)]}, "ns_coefficients must be"),
        ({"ns_coefficients": []}, "ns_coefficients must be"),
        ({"ns_coefficients": "fast"}, "ns_coefficients must be 'cans', 'deepseek'.*'fast'"),
        ({"ns_dtype": torch.float64}, "ns_dtype must be torch.bfloat16.*found torch.float64"),
        ({"ns_dtype": "bfloat16"}, "ns_dtype must be torch.bfloat16"),
        ({"ns_gram": "always"}, "ns_gram must be True, False or 'auto', found 'always'"),
        ({"ns_gram": 2}, "ns_gram must be"),
        ({"split": {"*.qkv.weight": (64, 31)}}, r"qkv.weight.*has 96 rows.*\(64, 31\) 95"),
        ({"split": {"*.qkv.weight": (96, 0)}}, r"split must be .* rows of each block; found"),
        ({"split": {"*.qkv.weight": ()}}, r"split must be .* rows of each block; found"),
        ({"adjust_lr_fn": "spectral"}, "adjust_lr_fn must be one of"),
        ({"momentum": -0.1}, "momentum must not be negative"),
        ({"normalize": "columns"}, "normalize must be None or"),
        ({"normalize": "rows", "beta2": 1}, r"beta2 must be in \[0, 1\), found 1"),
    ],
)
def test_errors_name_what_is_wrong(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        amp.optim.Muon(Model(), **arguments)


def test_what_is_no_matrix_is_refused_by_name() -> None:
    model = Model()
    with pytest.raises(ValueError, match=r"'blocks.0.norm.weight'.* of shape \(32,\) is no matrix"):
        amp.optim.Muon(model.named_parameters())
    with pytest.raises(
        ValueError, match=r"parameter 1 of group 0 of shape \(2, 3, 4, 5\).*flatten"
    ):
        amp.optim.Muon([nn.Parameter(torch.zeros(2, 3)), nn.Parameter(torch.zeros(2, 3, 4, 5))])
    with pytest.raises(TypeError, match="second_momentum_buffer"):
        amp.optim.Muon(model, second_momentum_buffer="bfloat16")  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="others: unknown entry 'momentum'"):
        amp.optim.Muon(model, others={"momentum": 0.9})
    with pytest.raises(TypeError, match="pass the model"):
        amp.optim.Muon([nn.Parameter(torch.zeros(2, 3))], split={"*": 2})
    with pytest.raises(TypeError, match="complex64"):
        amp.optim.Muon([nn.Parameter(torch.zeros(2, 3, dtype=torch.complex64))])
    optimizer = amp.optim.Muon([nn.Parameter(torch.zeros(2, 3))])
    with pytest.raises(ValueError, match="is no matrix"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(3))]})
    assert len(optimizer.param_groups) == 1
    optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(3))], "use_muon": False})
    assert optimizer.param_groups[1]["betas"] == (0.9, 0.999)
    assert "ns_steps" not in optimizer.param_groups[1]


def test_sparse_gradients_are_refused_before_anything_is_changed() -> None:
    model = nn.ModuleDict({"a": nn.Embedding(5, 4, sparse=True), "b": nn.Linear(4, 4, bias=False)})
    optimizer = amp.optim.Muon(model, matrices=["b.weight"])
    before = raw_bytes([p.detach() for p in model.parameters()])
    model["b"](model["a"](torch.tensor([1, 2]))).sum().backward()
    with pytest.raises((TypeError, ValueError), match=r"'a.weight'"):
        optimizer.step()
    assert raw_bytes([p.detach() for p in model.parameters()]) == before
    assert all(float(state["step"]) == 0 for state in optimizer.state.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_object_does_what_two_optimizers_do(device: str, dtype: torch.dtype) -> None:
    model = Model().to(device, dtype)
    alone = copy.deepcopy(model)
    numbers = {"lr": 3e-4, "betas": (0.8, 0.99), "eps": 1e-7, "weight_decay": 0.02}
    one = amp.optim.Muon(model, lr=0.02, others=numbers)
    named = dict(alone.named_parameters())
    muon = amp.optim.Muon([named[n] for n in one.param_groups[0]["param_names"]], lr=0.02)
    adamw = amp.optim.AdamW([named[n] for n in one.param_groups[1]["param_names"]], **numbers)
    for step in range(3):
        loss_of(model, step).backward()
        loss_of(alone, step).backward()
        one.step()
        muon.step()
        adamw.step()
        for each in (one, muon, adamw):
            each.zero_grad()
    for p, q in zip(model.parameters(), alone.parameters(), strict=True):
        assert torch.equal(p, q)


def test_there_is_one_norm_and_one_verdict_for_matrices_and_others(device: str) -> None:
    model = Model().to(device)
    optimizer = amp.optim.Muon(model, max_grad_norm=0.1)
    loss_of(model, 1).backward()
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    squares = sum(float(grad.double().square().sum()) for grad in grads)
    optimizer.step()
    assert optimizer.grad_norm == pytest.approx(math.sqrt(squares), rel=1e-6)
    for name, bad in [("lm_head.weight", "blocks.0.qkv.weight"), ("experts", "embedding.weight")]:
        before = raw_bytes([[p.detach() for p in model.parameters()], optimizer.state_dict()])
        optimizer.zero_grad()
        loss_of(model, 2).backward()
        named = dict(model.named_parameters())
        named[bad].grad[0, 0] = math.nan
        optimizer.step()
        assert optimizer.step_was_skipped, name
        after = raw_bytes([[p.detach() for p in model.parameters()], optimizer.state_dict()])
        assert after == before, name


def test_the_loss_scaler_moves_once_for_both(device: str) -> None:
    model = Model().to(device)
    optimizer = amp.optim.Muon(model)
    scaler = amp.GradScaler(device, init_scale=1024.0, growth_interval=2)
    scales = []
    for step in range(5):
        scaler.scale(loss_of(model, step)).backward()
        if step == 3:
            next(model.parameters()).grad[0] = math.inf
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        scales.append(scaler.get_scale())
    assert scales == [1024.0, 2048.0, 2048.0, 1024.0, 1024.0]


def test_stacks_and_blocks_are_matrices_of_their_own(device: str) -> None:
    values = torch.randn(4, 16, 24, device=device)
    stack = nn.Parameter(values.clone())
    blocks = nn.Parameter(values.flatten(0, 1).clone())
    single = [nn.Parameter(each.clone()) for each in values]
    optimizer = amp.optim.Muon(
        [{"params": [stack]}, {"params": [blocks], "split": 4}, {"params": single}],
        lr=0.02,
        adjust_lr_fn="match_rms_adamw",
    )
    for _ in range(2):
        grad = torch.randn_like(values)
        stack.grad, blocks.grad = grad.clone(), grad.flatten(0, 1).clone()
        for p, g in zip(single, grad, strict=True):
            p.grad = g.clone()
        optimizer.step()
    wanted = torch.stack([p.detach() for p in single])
    assert torch.equal(stack, wanted)
    assert torch.equal(blocks.view_as(stack), wanted)


def test_many_matrices_of_a_shape_are_a_few_products(device: str) -> None:
    params = [nn.Parameter(torch.randn(16, 16, device=device)) for _ in range(50)]
    params += [nn.Parameter(torch.randn(8, 32, device=device)) for _ in range(50)]
    optimizer = amp.optim.Muon(params[::2] + params[1::2])
    for p in params:
        p.grad = torch.randn_like(p)
    with torch.profiler.profile() as profile:
        optimizer.step()
    name = "aten::baddbmm"  # the pretend GPU's kernel calls the CPU's
    called = [e for e in profile.events() if e.name == name]
    assert sum(e.cpu_parent is None or e.cpu_parent.name != name for e in called) == 2 * 5 * 2


def test_large_stacks_are_cut() -> None:
    whole = torch.randn(5, 16, 16).bfloat16()
    cut = whole.clone()
    _C.orthogonalise_(whole, {})
    _C.orthogonalise_(cut, {}, stack_bytes=2 * 2 * 16 * 16)
    assert torch.equal(whole, cut)


@pytest.mark.parametrize("way", ["state_dict", "checkpoint"])
@pytest.mark.parametrize("memory", ["exact", "lean", "tiny", "nano"])
def test_states_of_a_model_go_into_a_file_and_back(
    device: str, memory: str, way: str, tmp_path: Path
) -> None:
    model = Model().to(device, torch.bfloat16)
    optimizer = amp.optim.Muon(model, memory=memory, others={"lr": 2e-4})
    loss_of(model, 0).backward()
    optimizer.step()
    again = Model().to(device, torch.bfloat16)
    resumed = amp.optim.Muon(again, memory=memory)
    if way == "checkpoint":
        amp.checkpoint.save(tmp_path / "run", model=model, optimizer=optimizer)
        amp.checkpoint.load(tmp_path / "run", model=again, optimizer=resumed)
    else:
        again.load_state_dict(model.state_dict())
        resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert [g["lr"] for g in resumed.param_groups] == [1e-3, 2e-4]
    copied = pickle.loads(pickle.dumps(optimizer))
    assert copied.param_groups[1]["betas"] == (0.9, 0.999)
    for own, opt in ((model, optimizer), (again, resumed)):
        opt.zero_grad()
        loss_of(own, 1).backward()
        opt.step()
    assert raw_bytes([p.detach() for p in again.parameters()]) == raw_bytes(
        [p.detach() for p in model.parameters()]
    )
    assert raw_bytes(resumed.state_dict()["state"]) == raw_bytes(optimizer.state_dict()["state"])


def test_a_file_that_gives_vectors_to_muon_is_refused() -> None:
    model = Model()
    optimizer = amp.optim.Muon(model)
    saved = copy.deepcopy(optimizer.state_dict())
    for group in saved["param_groups"]:
        group.update(use_muon=True, split=1, flatten=False)
    with pytest.raises(ValueError, match="is no matrix"):
        optimizer.load_state_dict(saved)
    assert [g["use_muon"] for g in optimizer.param_groups] == [True, False]


@pytest.mark.parametrize("entry", ["momentum_buffer", "exp_avg", "exp_avg_sq"])
def test_a_file_without_a_state_is_refused(entry: str) -> None:
    model = Model()
    optimizer = amp.optim.Muon(model)
    loss_of(model, 0).backward()
    optimizer.step()
    saved = copy.deepcopy(optimizer.state_dict())
    states = saved["state"].values()
    del next(state for state in states if entry in state)[entry]
    before = raw_bytes(optimizer.state_dict()["state"])
    with pytest.raises(ValueError, match=f"'{entry}' of parameter .* is missing"):
        optimizer.load_state_dict(saved)
    assert raw_bytes(optimizer.state_dict()["state"]) == before


@pytest.mark.parametrize("clip", [None, "previous", "parameter"])
def test_gradients_can_be_released(device: str, clip: str | None) -> None:
    model = Model().to(device)
    twin = copy.deepcopy(model)
    norm = None if clip is None else 1e9  # never clips
    one = amp.optim.Muon(model, lr=0.02, max_grad_norm=norm)
    two = amp.optim.Muon(twin, lr=0.02, max_grad_norm=norm)
    with one.attach(model, clip=clip or "parameter"):
        for step in range(3):
            loss_of(model, step).backward()
            assert all(p.grad is None for p in model.parameters())
            one.step()
            loss_of(twin, step).backward()
            two.step()
            two.zero_grad()
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(p, q)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_fp16_optimizer_scales_clips_and_skips(device: str, dtype: torch.dtype) -> None:
    model = Model().to(device, dtype)
    twin = copy.deepcopy(model)
    inner = amp.optim.Muon(model, lr=0.02)
    wrapped = amp.FP16_Optimizer(inner, static_loss_scale=64.0)
    plain = amp.optim.Muon(twin, lr=0.02)
    for step in range(3):
        wrapped.zero_grad()
        wrapped.backward(loss_of(model, step))
        for p, q in zip(model.parameters(), twin.parameters(), strict=True):
            q.grad = None if p.grad is None else p.grad.to(q.dtype)
        wrapped.step()
        plain.step()
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.allclose(p.float(), q.float(), atol=1e-2 if dtype == torch.float16 else 0)


def test_memory_is_reported_and_foretold() -> None:
    model = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 8, bias=False)).bfloat16()
    optimizer = amp.optim.Muon(model, memory="lean")
    optimizer.init_state()
    held = optimizer.memory_report().bytes
    matrix, output = 64 * 64, 64 * 8
    assert held["momentum_buffer"] == 2 * matrix
    assert held["exp_avg"] == 2 * output
    assert "Muon" in type(optimizer).__name__
    told = amp.diagnose.sharded_memory(10**6, 1, optimizer="Muon")
    assert told.rows[0].states > 0
