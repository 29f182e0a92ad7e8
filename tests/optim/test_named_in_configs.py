"""Optimizers that trainers make by a name, from the values that a YAML file or a command brings.

Each function makes one with the arguments that a trainer's source passes, in the versions below.
tests/zoo/test_configs.py does the same by the packages' own code, where they install.

| trainer | version | files read |
|---|---|---|
| NeMo Automodel | 0.7.0 | components/config/loader.py, components/optim/optimizer.py |
| NeMo-RL | 7ea279ab | models/automodel/setup.py, policy/workers/dtensor_policy_worker_v2.py |
| kohya sd-scripts | 48d368fa | library/train_util.py, networks/lora.py, sdxl_train.py |
| timm | 1.0.31 | optim/_optim_factory.py |
| axolotl, ms-swift | 0.19.0, 4.6.0 | by the Trainer of transformers 5.23.0: trainer.py |
| OmegaConf, Hydra | 2.3.0, 1.3.2 | their sequences are no lists |
"""

from __future__ import annotations

import ast
import importlib
import io
import random
import re
import shlex
import weakref
from collections import UserList
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import raw_bytes
from torch import nn

import amp_mp as amp

PAGE = Path(__file__).resolve().parents[2] / "docs" / "configs.md"
Numbers = dict[str, Any]


def named(path: str) -> Any:
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)


def literal(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def automodel(path: str, params: list[nn.Parameter], numbers: Numbers) -> Any:
    """Texts of YAML that read as Python's values become these; params go by name."""
    read = {name: literal(x) if isinstance(x, str) else x for name, x in numbers.items()}
    return named(path)(params=params, **read)


def nemo_rl(path: str, params: list[nn.Parameter], numbers: Numbers) -> Any:
    """A generator of parameters, and in most of its configurations foreach and fused."""
    return named(path)((p for p in params), **{**numbers, "foreach": False, "fused": False})


def hydra(path: str, params: list[nn.Parameter], numbers: Numbers) -> Any:
    """A configuration's sequences, which are no lists."""
    read = {n: UserList(x) if isinstance(x, list) else x for n, x in numbers.items()}
    return named(path)(params=iter(params), **read)


def kohya(path: str, params: list[nn.Parameter], numbers: Numbers) -> Any:
    """NAME=LITERAL of the command; groups with a rate, their parameters the values of a dict."""
    arguments = [f"{n}={x!r}".replace(" ", "") for n, x in numbers.items() if n != "lr"]
    return by_kohyas_arguments(path, params, arguments, numbers["lr"])


def by_kohyas_arguments(
    path: str, params: list[nn.Parameter], arguments: list[str], lr: float
) -> Any:
    read = {}
    for argument in arguments:
        name, value = argument.split("=")
        read[name] = ast.literal_eval(value)
    groups = [{"params": {str(i): p}.values(), "lr": lr} for i, p in enumerate(params)]
    return named(path)(groups, lr=lr, **read)


def timm(path: str, params: list[nn.Parameter], numbers: Numbers) -> Any:
    """Groups with decays, rates' factors and a mark of their own; the optimizer's decay is 0."""
    marks = {"lr_scale": 0.75, "use_fallback": False}
    groups = [{"params": [p], "weight_decay": numbers["weight_decay"], **marks} for p in params]
    return named(path)(groups, **{**numbers, "weight_decay": 0.0, "foreach": True})


def trainer_of_transformers(path: str, params: list[nn.Parameter], numbers: Numbers) -> Any:
    """Two groups, with and without decay, one of which may be empty."""
    groups = [{"params": params, "weight_decay": numbers["weight_decay"]}, {"params": []}]
    return named(path)(groups, **numbers)


def automodels_groups(path: str, params: list[nn.Parameter], numbers: Numbers) -> Any:
    """param_group_overrides: factors that its schedule reads."""
    groups = [{"params": params[:1]}, {"params": params[1:], "lr_mult": 0.1, "wd_mult": 0.0}]
    return named(path)(params=groups, **numbers)


TRAINERS: list[Callable[[str, list[nn.Parameter], Numbers], Any]] = [
    automodel,
    automodels_groups,
    nemo_rl,
    hydra,
    kohya,
    timm,
    trainer_of_transformers,
]


def parameters(device: str, seed: int) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    shapes = [((8, 32), torch.bfloat16), ((40,), torch.float32), ((3, 5, 7), torch.bfloat16)]
    made = [torch.randn(shape, generator=generator).to(device, dtype) for shape, dtype in shapes]
    return [nn.Parameter(tensor) for tensor in made]


def trained(params: list[nn.Parameter], optimizer: Any, seed: int) -> Any:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(3):
        for p in params:
            p.grad = torch.randn(p.shape, generator=generator).to(p)
        optimizer.step()
    return raw_bytes([p.detach() for p in params]), raw_bytes(optimizer.state_dict()["state"])


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("trainer", TRAINERS, ids=lambda trainer: trainer.__name__)
def test_it_steps_as_one_made_by_hand_and_its_state_is_a_file(
    device: str, trainer: Callable[[str, list[nn.Parameter], Numbers], Any], seed: int
) -> None:
    chosen = random.Random(seed)
    name = ["AdamW", "Adam", "LAMB", "NAdam"][seed]
    numbers: Numbers = {
        "lr": chosen.choice([1e-4, 3e-3]),
        "betas": [chosen.choice([0.8, 0.9]), chosen.choice([0.95, 0.98])],
        "eps": chosen.choice([1e-8, 1e-5]),
        "weight_decay": chosen.choice([0, 0.1]),
        "memory": chosen.choice(["exact", "lean", "tiny", "micro", "nano"]),
    }
    mine, theirs = parameters(device, seed), parameters(device, seed)
    optimizer = trainer(f"amp_mp.optim.{name}", theirs, numbers)
    wanted = trained(mine, getattr(amp.optim, name)(mine, **numbers), seed)
    assert trained(theirs, optimizer, seed) == wanted
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    optimizer.load_state_dict(torch.load(file))


def test_a_number_that_yaml_reads_as_text_is_a_number_for_automodel(device: str) -> None:
    texts = {"lr": "1e-5", "eps": "1e-8", "betas": [0.9, 0.95], "weight_decay": 0}
    optimizer = automodel("amp_mp.optim.AdamW", parameters(device, 0), texts)
    assert optimizer.param_groups[0]["lr"] == 1e-5


def test_the_command_of_the_page_is_what_kohya_reads(device: str) -> None:
    section = PAGE.read_text().partition("\n## kohya's sd-scripts\n")[2]
    words = shlex.split(re.search(r"```bash\n(.*?)```", section, re.DOTALL)[1])  # type: ignore[index]
    path = words[words.index("--optimizer_type") + 1]
    lr = float(words[words.index("--learning_rate") + 1])
    arguments = words[words.index("--optimizer_args") + 1 :]
    optimizer = by_kohyas_arguments(path, parameters(device, 0), arguments, lr)
    group = optimizer.param_groups[0]
    assert type(optimizer) is amp.optim.AdamW
    found = group["lr"], group["betas"], group["weight_decay"], group["eps"], group["master"]
    assert found == (1e-5, (0.9, 0.99), 0.1, 1e-8, "split24")
    with pytest.raises(ValueError, match="malformed node or string"):  # Python's words, and kohya's
        by_kohyas_arguments(path, parameters(device, 0), ["memory=lean"], lr)


@pytest.mark.parametrize("memory", ["exact", "lean"])
def test_a_model_that_becomes_bfloat16_after_the_optimizer_is_made_begins_rounded(
    device: str, memory: str
) -> None:
    """kohya's --full_bf16. Later updates are all kept, by masters that begin at the weights."""
    torch.manual_seed(0)
    late, early = (nn.Linear(32, 8, device=device) for _ in "ab")
    early.load_state_dict(late.state_dict())
    options = {"lr": 1e-4, "memory": memory}
    optimizer = kohya("amp_mp.optim.AdamW", list(late.parameters()), options)
    late.to(torch.bfloat16)
    early.to(torch.bfloat16)
    by_hand = kohya("amp_mp.optim.AdamW", list(early.parameters()), options)
    found = [trained(list(m.parameters()), o, 1) for m, o in ((late, optimizer), (early, by_hand))]
    assert found[0] == found[1]
    assert {"exact": "remainder16", "lean": "remainder8"}[memory] in optimizer.state[late.weight]


def test_states_that_nemo_rl_moves_free_their_memory_and_keep_every_bit(device: str) -> None:
    """By the class of the page: its zero_grad forgets the tensors of the last step.

    Weights are float32 there. A remainder would stay with its weight until the next step.
    """
    section = PAGE.read_text().partition("\n## NeMo-RL\n")[2]
    code = re.search(r"```python\n(.*?)```", section, re.DOTALL)[1]  # type: ignore[index]
    names: dict[str, Any] = {}
    exec(code, names)

    def run(kind: Any, moves: bool) -> Any:
        params = [nn.Parameter(p.detach().float()) for p in parameters(device, 0)]
        optimizer = kind((p for p in params), lr=1e-2, memory="lean")
        generator = torch.Generator().manual_seed(0)
        for _ in range(3):
            for p in params:
                p.grad = torch.randn(p.shape, generator=generator).to(p)
            optimizer.step()
            optimizer.zero_grad()
            old = []
            for state in optimizer.state.values() if moves else ():
                old += map(weakref.ref, state.values())
                state.update({name: value.clone() for name, value in state.items()})
            assert [ref() for ref in old] == [None] * len(old)
        return raw_bytes([p.detach() for p in params]), raw_bytes(optimizer.state_dict()["state"])

    assert run(names["AdamW"], True) == run(amp.optim.AdamW, False)
    with pytest.raises(AssertionError):
        run(amp.optim.AdamW, True)  # else the page's class is not needed


class TestTextsInPlaceOfValues:
    """What a loader leaves a text is refused by name, before anything is changed."""

    YAML = ", which is text; YAML reads 1e-4 as text and 1.0e-4 as a number"

    @pytest.mark.parametrize(
        ("wrong", "message"),
        [
            ({"lr": "1e-4"}, f"lr must be a number, found '1e-4'{YAML}"),
            ({"eps": "1e-8"}, f"eps must be a number, found '1e-8'{YAML}"),
            ({"betas": ["0.9", "0.95"]}, f"betas[0] must be a number, found '0.9'{YAML}"),
            ({"betas": "0.9,0.95"}, "betas must be two numbers, found '0.9,0.95'"),
            ({"betas": UserList([0.9])}, "betas must be two numbers, found (0.9,)"),
            ({"max_grad_norm": "1"}, f"max_grad_norm must be a number, found '1'{YAML}"),
            ({"lr": "fast"}, "lr must be a number, found 'fast'"),
            ({"amsgrad": "False"}, "amsgrad must be True or False, found 'False'"),
            ({"check_overflow": "False"}, "check_overflow must be True or False, found 'False'"),
            ({"amp_scaling": "no"}, "amp_scaling must be True or False, found 'no'"),
            ({"maximize": "False"}, "maximize must be True or False, found 'False'"),
            ({"seed": "1"}, "seed must be a whole number of [0, 2^64), found '1'"),
        ],
        ids=str,
    )
    def test_refused_by_name(self, device: str, wrong: Numbers, message: str) -> None:
        params = parameters(device, 0)
        before = raw_bytes([p.detach() for p in params])
        with pytest.raises(ValueError) as error:
            amp.optim.AdamW(params, **wrong)
        assert str(error.value) == message
        assert raw_bytes([p.detach() for p in params]) == before

    def test_a_group_with_a_configurations_sequence(self, device: str) -> None:
        first, *others = parameters(device, 0)
        optimizer = amp.optim.AdamW([{"params": [first], "betas": UserList([0.5, 0.9])}])
        optimizer.add_param_group({"params": others, "betas": UserList([0.6, 0.9])})
        assert [g["betas"] for g in optimizer.param_groups] == [(0.5, 0.9), (0.6, 0.9)]
        with pytest.raises(ValueError, match=r"betas\[1\] must be in"):
            optimizer.add_param_group({"params": [], "betas": UserList([0.5, 1.0])})

    def test_muons_sequences_are_tuples(self, device: str) -> None:
        model = nn.Sequential(nn.Linear(32, 96), nn.Linear(96, 32)).to(device)
        optimizer = amp.optim.Muon(
            model,
            ns_coefficients=UserList([UserList([3.4, -4.7, 2.0]), UserList([3.0, -4.0, 2.0])]),
            others={"betas": UserList([0.8, 0.9])},
            matrices=UserList(["*weight"]),
            split={"0.weight": UserList([32, 64])},
        )
        by_name = {g["param_names"][0]: g for g in optimizer.param_groups}
        assert by_name["0.weight"]["split"] == (32, 64)
        assert by_name["0.weight"]["ns_coefficients"] == ((3.4, -4.7, 2.0), (3.0, -4.0, 2.0))
        assert by_name["0.bias"]["betas"] == (0.8, 0.9)
