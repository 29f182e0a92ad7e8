"""The names at the top of amp_mp, and what `import amp_mp` loads."""

from __future__ import annotations

import importlib
import inspect
import pydoc
import re
import subprocess
import sys
import typing

import pytest
import torch
from torch import nn

import amp_mp as amp

ELSEWHERE = {
    "apex.amp": {"master_params"},
    "apex.fp16_utils": {
        "BN_convert_float",
        "convert_network",
        "network_to_half",
        "tofp16",
        "master_params_to_model_params",
        "model_grads_to_master_grads",
        "prep_param_lists",
    },
    "apex.contrib.clip_grad": {"clip_grad_norm_"},
    "apex.contrib.xentropy": {"SoftmaxCrossEntropyLoss"},
    "apex.multi_tensor_apply": {"MultiTensorApply", "multi_tensor_applier"},
    "apex.normalization": {"FusedLayerNorm", "FusedRMSNorm", "MixedFusedLayerNorm"},
    "apex.optimizers": {"FusedAdam", "FusedLAMB", "FusedSGD", "FusedNovoGrad", "FusedAdagrad"},
    "apex.parallel": {"LARC", "DistributedDataParallel", "Reducer", "convert_syncbn_model"},
    "casting": {
        "backward",
        "clear_cache",
        "disable_casts",
        "uninstall",
        "half_function",
        "float_function",
        "promote_function",
        "register_half_function",
        "register_float_function",
        "register_promote_function",
    },
    "optim": {"AdamW", "SGD", "Muon", "qk_clip_"},
    "scaling": {"Backoff", "Static"},
    "compat": {
        "MixedPrecisionOptimizerWrapper",
        "TypedTensor",
        "l1",
        "l2_half",
        "l2_sum",
        "mixed_precision",
        "mp_regularizer_wrapper",
        "set_layer_types",
        "shift_for_scale",
    },
}


def test_the_names_at_the_top() -> None:
    assert set(dir(amp)) == set(amp.__all__)
    assert [name for name in amp.__all__ if getattr(amp, name, None) is None] == []


@pytest.mark.parametrize("folder", ELSEWHERE)
def test_a_name_that_is_elsewhere_says_where(folder: str) -> None:
    package = importlib.import_module(f"amp_mp.{folder}")
    assert ELSEWHERE[folder] <= set(package.__all__)
    for name in sorted(ELSEWHERE[folder]):
        assert callable(getattr(package, name))
        with pytest.raises(AttributeError, match=rf"'{name}'; use amp_mp\.{folder}\.{name}$"):
            getattr(amp, name)


@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("initialize", "amp_mp.init for casts in operators, or amp_mp.prepare"),
        ("scale_loss", "the method of the handle that amp_mp.init returns"),
        ("wrap_optimizer", "the method of the handle that amp_mp.init returns"),
    ],
)
def test_apexs_other_names_say_what_takes_their_place(name: str, place: str) -> None:
    with pytest.raises(AttributeError, match=f"no attribute '{name}'; use {place}"):
        getattr(amp, name)


def test_an_unknown_name_has_no_hint() -> None:
    with pytest.raises(AttributeError, match=r"^module 'amp_mp' has no attribute 'nothing'$"):
        amp.nothing  # noqa: B018
    assert not hasattr(amp.scaling, "GradScaler")


@pytest.mark.slow
def test_import_leaves_out_what_is_seldom_used() -> None:
    """torch._dynamo and sympy take seconds, and torch alone loads neither."""
    rooms = ("amp_mp.apex", "amp_mp.compat", "amp_mp.diagnose", "amp_mp.integrations")
    seldom = (*rooms, "torch._dynamo", "sympy")
    code = f"""
import sys, amp_mp
print([m for m in {seldom} if m in sys.modules])
print(*(getattr(amp_mp, name.split(".")[1]).__name__ for name in {rooms}))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["[]", " ".join(rooms)]


OWN = {
    "max_grad_norm",
    "check_overflow",
    "skip_norm_above",
    "raise_after_skips",
    "memory_report",
    "grad_norm",
    "step_was_skipped",
    "last_report",
    "attach",
    "init_state",
    "torch_state_dict",
    "amp_scaling",
    "masters",
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


def test_the_help_of_adamw_shows_its_options() -> None:
    names = inspect.signature(amp.optim.AdamW).parameters
    assert {"memory", "max_grad_norm", "check_overflow", "process_groups"} <= set(names)
    shown = pydoc.render_doc(amp.optim.AdamW, renderer=pydoc.plaintext)
    shown = shown[: shown.index("Method resolution order")]
    # The signature has one line up to Python 3.12, and from 3.13 on one for each argument.
    _, text = re.split(r"\n \| *\n", shown, maxsplit=1)
    assert names.keys() <= set(re.findall(r"\w+", text))


def test_memory_is_a_literal() -> None:
    hint = inspect.signature(amp.optim.AdamW).parameters["memory"].annotation
    hint = next(each for each in typing.get_args(hint) if typing.get_args(each))
    assert set(typing.get_args(hint)) >= {
        "exact",
        "lean",
        "tiny",
        "micro",
        "nano",
        "masterless",
        "float32",
    }


def test_the_repr_shows_preset_clipping_and_checking() -> None:
    param = nn.Parameter(torch.zeros(2, 2, dtype=torch.bfloat16))
    options = {"memory": "lean", "max_grad_norm": 0.5, "check_overflow": True}
    shown = repr(amp.optim.AdamW([param], **options))
    assert "lean" in shown
    assert "0.5" in shown
    assert "check_overflow" in shown
