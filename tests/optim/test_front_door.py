"""What an optimizer shows: torch's names and few of its own, in its help, type hints and repr."""

from __future__ import annotations

import inspect
import pydoc
import typing

import pytest
import torch
from torch import nn

import amp_mp as amp

OWN = {
    # arguments that may be changed
    *("max_grad_norm", "check_overflow", "process_groups", "skip_norm_above", "raise_after_skips"),
    *("memory_report", "grad_norm", "step_was_skipped", "last_report", "attach", "init_state"),
    *("torch_state_dict", "amp_scaling", "masters"),
}
KINDS = sorted(
    name
    for name in amp.optim.__all__
    if isinstance(getattr(amp.optim, name), type)
    and issubclass(getattr(amp.optim, name), amp.optim.FusedOptimizer)
    and name != "FusedOptimizer"
)


@pytest.mark.parametrize("kind", KINDS)
def test_an_optimizer_shows_torchs_names_and_few_of_its_own(kind: str) -> None:
    param = nn.Parameter(torch.zeros(2, 2))
    optimizer = getattr(amp.optim, kind)([param], lr=0.1)
    shown = {name for name in dir(optimizer) if not name.startswith("_")}
    assert shown >= OWN
    own = {"SGD": {"momentum_form"}, "Muon": {"param_summary"}}.get(kind, set())
    assert shown - set(dir(torch.optim.AdamW([param]))) == OWN | own


def test_the_help_of_adamw_shows_its_options_and_fits_two_screens() -> None:
    names = inspect.signature(amp.optim.AdamW).parameters
    assert {"memory", "max_grad_norm", "check_overflow", "process_groups"} <= set(names)
    text = pydoc.plain(pydoc.render_doc(amp.optim.AdamW))
    assert len(text[: text.index("Method resolution order")].splitlines()) <= 2 * 40


def test_memory_is_a_literal() -> None:
    hint = inspect.signature(amp.optim.AdamW).parameters["memory"].annotation
    hint = next(each for each in typing.get_args(hint) if typing.get_args(each))
    assert set(typing.get_args(hint)) >= {"exact", "lean", "tiny", "micro", "float32"}


def test_the_repr_shows_preset_clipping_and_checking() -> None:
    param = nn.Parameter(torch.zeros(2, 2, dtype=torch.bfloat16))
    options = {"memory": "lean", "max_grad_norm": 0.5, "check_overflow": True}
    shown = repr(amp.optim.AdamW([param], **options))
    assert "lean" in shown
    assert "0.5" in shown
    assert "check_overflow" in shown
