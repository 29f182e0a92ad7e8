"""Parameters of which each process has its own, as experts, beside those that all have."""

from __future__ import annotations

import copy
import io
import math
import pickle
import warnings
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from around_sharding import error
from layouts import NORM_ERROR, made_once, whole
from ranks import on_ranks
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

import amp_mp as amp
from amp_mp.sharding import reduction

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("distributed")]

INF = float("inf")
# Four gradients of 3 that all have; of the experts, four of 20 on rank 0 and four of 1 on rank 1.
NORM = math.sqrt(4 * 3.0**2 + 4 * 20.0**2 + 4 * 1.0**2)


class Experts(nn.Module):
    """A layer that all processes have, and one of this process alone, if it has one."""

    def __init__(self, shards: bool, has_expert: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.dense = nn.Linear(2, 2, bias=False, dtype=torch.bfloat16)
        expert = nn.Linear(2, 2, bias=False, dtype=torch.bfloat16)
        self.expert: Any = expert if has_expert else None
        if shards:
            fully_shard(self.dense)

    def loss(self, token: float) -> Any:
        """Its gradients are 3 for the dense weights, and for the expert's 20 or `token` of rank 0.

        On rank 1 they are 1.
        """
        own = token if dist.get_rank() == 0 else 1.0
        dense, expert = torch.full((1, 2), 3.0), torch.full((1, 2), own)
        found = self.dense(dense.bfloat16()).sum()
        if self.expert is not None:
            found = found + self.expert(expert.bfloat16()).sum()
        return found.float()

    def groups(self, named: bool = True) -> list[dict[str, Any]]:
        own = {"process_groups": dist.group.WORLD} if named else {}
        dense = list(self.dense.parameters())
        expert = [] if self.expert is None else list(self.expert.parameters())
        return [{"params": dense}, {"params": expert, **own}]

    def weights(self) -> tuple[list[float], list[float]]:
        own = [] if self.expert is None else self.expert.weight.flatten().tolist()
        return whole(self.dense.weight).flatten().tolist(), own


def run(model: Experts, way: str, token: float, named: bool = True) -> float | None:
    """One step of a script; returns the norm that it reports."""
    groups = model.groups(named)
    options: dict[str, Any] = {"lr": 1.0, "max_grad_norm": 1.0}
    if way in ("LAMB", "LARS", "NovoGrad", "Muon", "AdamW"):
        optimizer: Any = getattr(amp.optim, way)(groups, **options)
    elif way.startswith("torch's SGD"):
        optimizer = torch.optim.SGD(groups, lr=1.0)
    else:
        optimizer = amp.optim.SGD(groups, **options)
    if "FP16_Optimizer" in way:
        around = amp.FP16_Optimizer(optimizer, loss_scale="dynamic", verbose=False)
        around.backward(model.loss(token))
        found = around.clip_master_grads(1.0)
        around.step()
        return found
    if "scale_loss" in way:
        handle = amp.init(dtype=torch.bfloat16, loss_scale="dynamic")
        with handle.scale_loss(model.loss(token), optimizer) as loss:
            loss.backward()
        optimizer.step()
        handle.deactivate()
        return None
    scaler = amp.GradScaler("cpu", init_scale=8.0, enabled="GradScaler" in way)
    scaler.scale(model.loss(token)).backward()
    scaler.step(optimizer)
    return getattr(optimizer, "grad_norm", None)


WAYS = ["clips", "GradScaler", "torch's SGD, GradScaler", "AdamW"]
WAYS += ["LAMB", "LARS", "NovoGrad", "Muon", "FP16_Optimizer", "torch's SGD, FP16_Optimizer"]
WAYS += ["scale_loss", "torch's SGD, scale_loss"]


def in_each_way(shards: bool) -> dict[str, tuple[Any, ...]]:
    """For each way: the norm; whether an inf in rank 0's expert leaves the weights; an error."""
    found = {}
    for way in WAYS:
        norm = run(Experts(shards), way, 20.0)
        bad = Experts(shards)
        before = bad.weights()
        run(bad, way, INF)
        unnamed = error(run, Experts(shards), way, 20.0, named=False)
        found[way] = norm, bad.weights() == before, unnamed
    return found


@pytest.mark.parametrize("shards", [True, False], ids=["FSDP2", "plain"])
def test_processes_clip_by_one_norm_and_skip_together(shards: bool) -> None:
    """With process_groups in the experts' param_group; without, what can be seen is refused."""
    for ways in on_ranks(2, in_each_way, shards):
        for way, (norm, stays, unnamed) in ways.items():
            assert norm is None or norm == pytest.approx(NORM, rel=NORM_ERROR), way
            assert stays, way
            # Without shards no step without process_groups sends anything that could show it.
            assert ("process_groups" in unnamed and "group 1" in unnamed) == shards, way


def without_an_expert(shards: bool) -> dict[str, tuple[float | None, bool]]:
    """Where rank 1 has no expert: the norm, and whether an inf leaves the weights."""
    found = {}
    for way in WAYS:
        has_expert = dist.get_rank() == 0
        norm = run(Experts(shards, has_expert), way, 20.0)
        bad = Experts(shards, has_expert)
        before = bad.weights()
        run(bad, way, INF)
        found[way] = norm, bad.weights() == before
    return found


@pytest.mark.parametrize("shards", [True, False], ids=["FSDP2", "plain"])
def test_a_process_without_experts_clips_and_skips_with_the_others(shards: bool) -> None:
    """Its param_group of experts is empty."""
    for ways in on_ranks(2, without_an_expert, shards):
        for way, (norm, stays) in ways.items():
            assert norm is None or norm == pytest.approx(math.sqrt(4 * 409.0), rel=NORM_ERROR), way
            assert stays, way


def limited() -> tuple[bool, bool, list[float]]:
    model = Experts(True)
    optimizer = amp.optim.SGD(model.groups(), lr=1.0, skip_norm_above=30.0)
    model.loss(20.0).backward()
    optimizer.step()
    first = optimizer.step_was_skipped
    optimizer.skip_norm_above = None
    optimizer.max_grad_norm = 1.0
    before = whole(model.dense.weight).float()
    optimizer.step()
    moved = (before - whole(model.dense.weight).float()).flatten().tolist()
    return first, optimizer.step_was_skipped, moved


def test_a_limit_of_the_norm_is_one_for_all() -> None:
    """Rank 1 alone would find a norm of 6.3; one matrix is clipped by one factor."""
    for first, second, moved in on_ranks(2, limited):
        assert (first, second) == (True, False)
        assert moved == pytest.approx([3.0 / NORM] * 4, abs=2.0**-8)  # weights below 1, bfloat16


def meshes(named: bool) -> Any:
    """Experts that are sharded themselves: two by two processes, and all four share the rest."""
    mesh = made_once((2, 2), ("ep", "shard"))
    torch.manual_seed(0)
    dense, expert = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
    fully_shard(dense, mesh=made_once((4,), ("all",)))
    fully_shard(expert, mesh=mesh["shard"])
    own = {"process_groups": mesh["ep"]} if named else {}
    groups = [{"params": dense.parameters()}, {"params": expert.parameters(), **own}]
    optimizer = amp.optim.SGD(groups, lr=1.0, max_grad_norm=1.0)
    x = torch.full((1, 4), 1.0 + mesh.get_local_rank("ep"))
    (dense(torch.ones(1, 4)).sum() + expert(x).sum()).backward()
    raised = error(optimizer.step)
    return raised or optimizer.grad_norm


def test_experts_of_dtensors() -> None:
    right = math.sqrt(16 * (1 + 1 + 4))
    assert on_ranks(4, meshes, True) == pytest.approx([right] * 4, rel=NORM_ERROR)
    assert all("process_groups" in raised for raised in on_ranks(4, meshes, False))


def crossed(cut: str, other: str) -> float | None:
    """A matrix cut over two dimensions of a mesh, after experts that half of the ranks have."""
    mesh = made_once((2, 2), ("dp", "tp"))
    ones = torch.ones(4, 4)
    dense = nn.Parameter(distribute_tensor(ones, mesh, [Shard(0), Shard(1)]))
    dense.grad = distribute_tensor(ones, mesh, [Shard(0), Shard(1)])
    experts = []
    if mesh.get_local_rank(other) == 0:
        experts.append(nn.Parameter(distribute_tensor(ones, mesh[cut], [Shard(0)])))
        experts[0].grad = distribute_tensor(2 * ones, mesh[cut], [Shard(0)])
    groups = [{"params": experts, "process_groups": mesh[other]}, {"params": [dense]}]
    optimizer = amp.optim.SGD(groups, lr=0.1, max_grad_norm=1.0)
    optimizer.step()
    return optimizer.grad_norm


@pytest.mark.parametrize(("cut", "other"), [("dp", "tp"), ("tp", "dp")])
def test_experts_do_not_change_the_order_in_which_parts_are_added(cut: str, other: str) -> None:
    """Processes that add the matrix over the mesh's dimensions in two orders add it twice."""
    assert on_ranks(4, crossed, cut, other) == pytest.approx([math.sqrt(16 + 64)] * 4)


def stages(experts: list[int]) -> float | None:
    """Pipeline stages of two processes each, with as many experts as a stage has."""
    mesh = made_once((2, 2), ("pp", "ep"))
    pp, ep = mesh.get_group("pp"), mesh.get_group("ep")
    rank = dist.get_rank()
    count = experts[mesh.get_local_rank("pp")]
    shared = nn.Parameter(torch.ones(3))
    shared.grad = torch.full((3,), float(1 + mesh.get_local_rank("pp")))
    own = [nn.Parameter(torch.ones(2)) for _ in range(count)]
    for each in own:
        each.grad = torch.full((2,), float(rank))
    groups: list[dict[str, Any]] = [{"params": [shared], "process_groups": pp}]
    if own:
        groups.append({"params": own, "process_groups": [pp, ep]})
    optimizer = amp.optim.SGD(groups, lr=1.0, max_grad_norm=1.0)
    optimizer.step()
    return optimizer.grad_norm


@pytest.mark.parametrize("experts", [[1, 1], [0, 3], [2, 1]])
def test_stages_with_other_numbers_of_experts(experts: list[int]) -> None:
    squares = 3 * (1 + 4) + 2 * sum(experts[rank // 2] * rank**2 for rank in range(4))
    assert on_ranks(4, stages, experts) == pytest.approx([math.sqrt(squares)] * 4, rel=NORM_ERROR)


def named_later() -> tuple[list[float | None], Any, Any]:
    """The norms with the experts' group named, after its state dict was loaded, and without."""
    model = Experts(False)
    optimizer = amp.optim.SGD(model.groups(), lr=0.0, momentum=0.9, max_grad_norm=1.0)
    model.loss(20.0).backward()
    norms = []
    for change in ("none", "loads", "forgets", "names"):
        state = optimizer.state_dict()
        if change == "loads":
            optimizer.load_state_dict(state)
        elif change == "forgets":
            optimizer.param_groups[1]["process_groups"] = None
        elif change == "names":
            optimizer.param_groups[1]["process_groups"] = [dist.group.WORLD]
        optimizer.step()
        norms.append(optimizer.grad_norm)
    return norms, state["param_groups"][1]["process_groups"], error(model_of_a_word)


def model_of_a_word() -> None:
    amp.optim.SGD([{"params": [nn.Parameter(torch.ones(1))], "process_groups": "ep"}], lr=0.1)


def test_the_group_is_read_at_each_step_and_stays_out_of_files() -> None:
    own = [math.sqrt(4 * 9.0 + 4 * 400.0), math.sqrt(4 * 9.0 + 4 * 1.0)]
    for rank, (norms, shown, wrong) in enumerate(on_ranks(2, named_later)):
        assert norms == pytest.approx([NORM, NORM, own[rank], NORM], rel=NORM_ERROR)
        assert shown is None
        assert wrong.startswith("TypeError: process_groups must be")


def other_numbers(is_ours: bool) -> bool:
    """scale_loss over experts of other numbers on each rank, with true gradients there already."""
    torch.manual_seed(0)
    dense = nn.Linear(2, 2, bias=False, dtype=torch.float16)
    fully_shard(dense)
    experts = nn.ModuleList(
        nn.Linear(2, 2, dtype=torch.float16) for _ in range(dist.get_rank() + 1)
    )
    groups = [
        {"params": dense.parameters()},
        {"params": experts.parameters(), "process_groups": dist.group.WORLD},
    ]
    lib = amp.optim if is_ours else torch.optim
    optimizer = lib.SGD(groups, lr=0.1)
    handle = amp.init(dtype=torch.float16, loss_scale=1024.0)
    x = torch.ones(1, 2, dtype=torch.float16)
    for number in range(2):
        loss = dense(x).float().sum() + sum(expert(x).float().sum() for expert in experts)
        if number == 0:
            loss.backward()
            continue
        with handle.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
    before = whole(dense.weight)
    optimizer.step()
    handle.deactivate()
    return torch.equal(before, whole(dense.weight))


@pytest.mark.parametrize("is_ours", [True, False])
def test_scale_loss_over_other_numbers_of_experts(is_ours: bool) -> None:
    """Which gradients are there already is asked tensor by tensor."""
    assert on_ranks(2, other_numbers, is_ours) == [False, False]


def resumed_fp16_optimizer() -> tuple[list[float], Any]:
    """The norms before and after a snapshot went through a file, and what the file says."""
    model = Experts(False)
    around = amp.FP16_Optimizer(torch.optim.SGD(model.groups(), lr=0.0), verbose=False)
    norms = []
    for number in range(2):
        around.zero_grad()
        around.backward(model.loss(20.0))
        norms.append(around.clip_master_grads(1.0))
        around.step()
        if number == 0:
            file = io.BytesIO()
            torch.save(around.state_dict(), file)
            file.seek(0)
            saved = torch.load(file)
            around.load_state_dict(saved)
    return norms, saved["optimizer_state_dict"]["param_groups"][1]["process_groups"]


def test_a_snapshot_around_torchs_optimizer_leaves_the_group_out() -> None:
    """torch's own state dicts hold it, and no file can."""
    for norms, shown in on_ranks(2, resumed_fp16_optimizer):
        assert norms == pytest.approx([NORM, NORM], rel=NORM_ERROR)
        assert shown is None


def float16_expert(shards: bool) -> tuple[float | None, list[float]]:
    """A float32 layer beside an expert in float16, which has no token on rank 0."""
    model = Experts(False)
    model.dense.float()
    model.expert.half()
    if shards:
        fully_shard(model.dense)
    optimizer = amp.optim.SGD(model.groups(), lr=1.0, max_grad_norm=1.0)
    handle = amp.init(dtype=torch.bfloat16, loss_scale="dynamic")
    before = whole(model.dense.weight).clone()
    loss = model.dense(torch.full((1, 2), 3.0)).sum().float()
    if dist.get_rank() == 1:
        loss = loss + model.expert.weight.float().sum() / 4
    with handle.scale_loss(loss, optimizer) as scaled:
        scaled.backward()
    optimizer.step()
    handle.deactivate()
    return optimizer.grad_norm, (before - whole(model.dense.weight)).flatten().tolist()


@pytest.mark.parametrize("shards", [True, False], ids=["FSDP2", "plain"])
def test_a_float16_expert_on_one_process_is_unscaled_there(shards: bool) -> None:
    """Only one process has float16 gradients."""
    right = math.sqrt(4 * 3.0**2 + 4 * 0.25**2)
    for norm, moved in on_ranks(2, float16_expert, shards):
        assert norm == pytest.approx(right, rel=NORM_ERROR)
        assert moved == pytest.approx([3.0 / right] * 4, abs=2.0**-20)


def scripts_of_copies(place: str) -> tuple[Any, Any]:
    """Experts as in Experts, and an optimizer or scaler that names the group in this place."""
    model = Experts(False)
    options: dict[str, Any] = {"lr": 0.5, "max_grad_norm": 1.0}
    if place == "the argument":  # of a stage; the dense layer has no optimizer
        own = {"process_groups": dist.group.WORLD}
        return model, amp.optim.SGD(model.expert.parameters(), **options, **own)
    if place == "LARC":
        del options["max_grad_norm"]
        # LARC's gradients are the same on both processes, of which a check would warn.
        inner = amp.optim.SGD(model.groups(), lr=0.5, check_overflow=False)
        return model, amp.apex.parallel.LARC(inner)
    return model, amp.optim.SGD(model.groups(), **options)


def stepped(model: Experts, optimizer: Any) -> list[list[float]]:
    model.expert.weight.grad = torch.full((2, 2), 2.0 + dist.get_rank(), dtype=torch.bfloat16)
    model.dense.weight.grad = torch.full((2, 2), 3.0, dtype=torch.bfloat16)
    optimizer.step()
    return [param.detach().flatten().tolist() for param in model.parameters()]


def copied(place: str) -> list[Any]:
    """Whether a deep copy and a pickle that is told the group step as the original does."""
    model, optimizer = scripts_of_copies(place)
    stepped(model, optimizer)
    twin, again = copy.deepcopy((model, optimizer))
    shallow = copy.copy(optimizer)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        data = pickle.dumps((model, optimizer))
        third, other = pickle.loads(data)
    groups = [group["process_groups"] for group in again.param_groups if "process_groups" in group]
    groups += [group.get("process_groups") for group in shallow.param_groups[-1:]]
    before = [param.detach().clone() for param in third.parameters()]
    refused = error(stepped, third, other)
    left = all(map(torch.equal, before, third.parameters()))
    saved = other.state_dict()["param_groups"][-1]["process_groups"]
    other.param_groups[-1]["process_groups"] = dist.group.WORLD
    results = [stepped(*each) for each in ((twin, again), (third, other), (model, optimizer))]
    return [
        results[0] == results[1] == results[2],
        all(group is optimizer.param_groups[-1]["process_groups"] for group in groups),
        [str(each.message) for each in found if "amp_mp" in str(each.message)],
        refused,
        left,
        saved,
    ]


@pytest.mark.parametrize("place", ["the argument", "a param_group", "LARC"])
def test_a_copy_has_the_group_and_a_pickle_is_told_it_again(place: str) -> None:
    """Until then it refuses to step: it would clip by the norm of its own process."""
    for same, kept, told, refused, left, saved in on_ranks(2, copied, place):
        assert same
        assert kept
        assert len(told) == 1
        assert "process_groups" in told[0]
        assert refused.startswith("ValueError: process_groups was left out of the pickle")
        assert left
        assert saved is None


def copied_scaler() -> list[Any]:
    found = []
    scaler = amp.GradScaler("cpu", init_scale=8.0, process_groups=dist.group.WORLD)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        unpickled = pickle.loads(pickle.dumps(scaler))
    found.append(len(told))
    for each in (scaler, copy.deepcopy(scaler), unpickled):
        stage = nn.Parameter(torch.ones(4))
        optimizer = torch.optim.SGD([stage], lr=0.1)
        each.scale((stage * (INF if dist.get_rank() == 0 else 1.0)).sum()).backward()
        found.append(error(each.step, optimizer) or bool((stage == 1).all()))
    return found


def test_a_copy_of_a_scaler_has_the_group_and_a_pickle_refuses_to_step() -> None:
    for told, *skipped, refused in on_ranks(2, copied_scaler):
        assert told == 1
        assert skipped == [True, True]
        assert refused.startswith("ValueError: process_groups was left out of the pickle")


def only_experts(way: str) -> list[Any]:
    """An optimizer that has experts on rank 0 alone: in each iteration the norm and the scale."""
    experts = [nn.Parameter(torch.full((2, 2), 0.5))] if dist.get_rank() == 0 else []
    model = nn.ParameterList(experts)
    groups = [{"params": experts, "process_groups": dist.group.WORLD}]
    if way == "LAMB":
        optimizer: Any = amp.optim.LAMB(groups, lr=0.1, max_grad_norm=1.0)
    elif way == "Muon":
        optimizer = amp.optim.Muon(groups, lr=0.1, max_grad_norm=1.0, hyperball=True)
    elif way == "LARC":
        optimizer = amp.apex.parallel.LARC(amp.optim.SGD(groups, lr=0.1, check_overflow=True))
    else:
        optimizer = amp.optim.SGD(groups, lr=0.1, momentum=0.9, max_grad_norm=1.0)
    if way == "release":
        optimizer.attach(model, clip="previous")
    around = amp.FP16_Optimizer(optimizer, verbose=False) if way == "FP16_Optimizer" else None
    policy = amp.scaling.Backoff(init_scale=8.0, step_window=2)
    handle = amp.init(dtype=torch.bfloat16, loss_scale=policy)
    wrapped = handle.wrap_optimizer(optimizer, num_loss=2) if way == "num_loss" else None
    scaler = amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
    found = []
    for number in range(6):
        loss: Any = sum([(each * (1 + number)).sum() for each in experts], torch.zeros(()))
        loss = loss + torch.zeros((), requires_grad=True)
        if number == 3 and way != "release":
            loss = loss * INF
        norm = None
        if way in ("two losses", "num_loss"):
            scale_loss = handle.scale_loss if wrapped is None else wrapped.scale_loss
            for _ in range(2):
                own = () if wrapped is not None else (optimizer,)
                with scale_loss(loss / 2, *own) as scaled:
                    scaled.backward(retain_graph=True)
            if wrapped is not None and number == 1:  # gives these two up
                optimizer.zero_grad()
                continue
            (wrapped or optimizer).step()
        elif around is not None:
            around.backward(loss)
            around.clip_master_grads(1.0)
            for each in experts:  # which only this rank can see
                each.grad *= 2
            around.step()
        elif way == "GradScaler":
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        else:
            loss.backward()
            optimizer.step()
        norm = None if way == "LARC" else optimizer.grad_norm
        optimizer.zero_grad()
        found.append((norm, scaler.get_scale(), handle.loss_scaler.scale))
        if wrapped is not None:
            found.append([each.loss_scaler.scale for each in wrapped.losses])
    handle.deactivate()
    return found


@pytest.mark.parametrize(
    "way",
    [
        *("SGD", "LAMB", "Muon", "LARC", "release"),
        *("FP16_Optimizer", "GradScaler", "two losses", "num_loss"),
    ],
)
def test_an_optimizer_without_any_parameter_steps_with_the_others(way: str) -> None:
    one, other = on_ranks(2, only_experts, way)
    assert repr(one) == repr(other)
    norms = [each[0] for each in one if isinstance(each, tuple)]
    if way in ("SGD", "LAMB", "Muon", "GradScaler"):
        assert norms[:3] == pytest.approx([2.0, 4.0, 6.0], rel=NORM_ERROR)


def without_the_group(name: str) -> str:
    """Rank 1 leaves out the param_group of experts, of which it has none."""
    reduction._compared.clear()  # as in a new run: over a group that was used this is not compared
    dense = nn.Linear(4, 4, bias=False)
    fully_shard(dense)
    groups: list[dict[str, Any]] = [{"params": dense.parameters()}]
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])] if dist.get_world_size() == 4 else None
    if dist.get_rank() != 1:
        own = dist.group.WORLD if pairs is None else pairs[dist.get_rank() // 2]
        groups.append({"params": [nn.Parameter(torch.ones(2))], "process_groups": own})
    optimizer = getattr(amp.optim, name)(groups, lr=0.1, max_grad_norm=1.0)
    dense(torch.ones(1, 4)).sum().backward()
    return error(optimizer.step)


@pytest.mark.parametrize(("name", "world", "sees_it"), [("LAMB", 2, [0, 1]), ("AdamW", 4, [0])])
def test_a_missing_param_group_is_named_where_processes_gather_anyway(
    name: str, world: int, sees_it: list[int]
) -> None:
    """Here for DTensors. It is before anything waits or is changed.

    Where other processes gather too, the one without the group does not know who waits.
    """
    for rank, raised in enumerate(on_ranks(world, without_the_group, name)):
        if rank not in sees_it:
            assert raised == ""
            continue
        assert raised.startswith(
            "RuntimeError: the optimizers of the ranks [1] have no param_group"
        )
        assert '{"params": [], "process_groups": group}' in raised


def waiting_in_vain() -> list[str]:
    group = dist.new_group(timeout=timedelta(seconds=1))
    param = nn.Parameter(torch.ones(2))
    param.grad = torch.ones(2)
    own = {"process_groups": group} if dist.get_rank() == 0 else {}
    optimizer = amp.optim.SGD([{"params": [param], **own}], lr=0.1, max_grad_norm=1.0)
    try:
        optimizer.step()
    except RuntimeError as raised:
        return raised.__notes__
    return []


def test_the_end_of_a_wait_says_what_may_be_missing() -> None:
    notes, none = on_ranks(2, waiting_in_vain)
    assert none == []
    assert '{"params": [], "process_groups": group}' in notes[0]
