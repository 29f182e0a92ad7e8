"""Scripts as their authors wrote them for Apex, run by the command `python -m amp_mp.apex`."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

import pytest
from forked import Script, run_each

# The names that each file of Apex defines, of those that are here; as of Apex's last version with
# amp.
NAMES = {
    "amp._amp_state": "_amp_state master_params",
    "amp.amp": (
        "init half_function float_function promote_function register_half_function "
        "register_float_function register_promote_function"
    ),
    "amp.frontend": "Properties initialize state_dict load_state_dict",
    "amp.handle": "scale_loss disable_casts AmpHandle",
    "amp.scaler": "LossScaler",
    "contrib.clip_grad.clip_grad": "clip_grad_norm_",
    "contrib.xentropy.softmax_xentropy": "SoftmaxCrossEntropyLoss",
    "fp16_utils.fp16_optimizer": "FP16_Optimizer",
    "fp16_utils.fp16util": (
        "tofp16 BN_convert_float network_to_half convert_network prep_param_lists "
        "model_grads_to_master_grads master_params_to_model_params to_python_float clip_grad_norm "
        "FP16Model convert_module"
    ),
    "fp16_utils.loss_scaler": "LossScaler DynamicLossScaler to_python_float",
    "multi_tensor_apply.multi_tensor_apply": "MultiTensorApply",
    "normalization.fused_layer_norm": (
        "manual_rms_norm fused_layer_norm_affine fused_layer_norm fused_rms_norm_affine "
        "fused_rms_norm mixed_dtype_fused_layer_norm_affine mixed_dtype_fused_rms_norm_affine "
        "FusedLayerNorm FusedRMSNorm MixedFusedLayerNorm MixedFusedRMSNorm"
    ),
    "optimizers.fused_adagrad": "FusedAdagrad",
    "optimizers.fused_adam": "FusedAdam",
    "optimizers.fused_lamb": "FusedLAMB",
    "optimizers.fused_mixed_precision_lamb": "FusedMixedPrecisionLamb",
    "optimizers.fused_novograd": "FusedNovoGrad",
    "optimizers.fused_sgd": "FusedSGD",
    "parallel.LARC": "LARC",
    "parallel.distributed": "DistributedDataParallel Reducer",
    "parallel.optimized_sync_batchnorm": "SyncBatchNorm",
    "parallel.sync_batchnorm": "SyncBatchNorm",
}


@pytest.mark.parametrize("file", sorted(NAMES))
def test_names_are_found_in_the_files_of_apex(file: str) -> None:
    package = import_module(f"amp_mp.apex.{file.rpartition('.')[0]}")
    for name in NAMES[file].split():
        found: dict[str, object] = {}
        exec(f"from amp_mp.apex.{file} import {name}", found)
        assert found[name] is getattr(package, name)


def test_scripts_import_by_file(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    lines = [f"from apex.{file} import {', '.join(n.split())}" for file, n in NAMES.items()]
    lines += [
        "import sys, apex",
        "import apex.optimizers.fused_adam",
        "import apex.parallel.LARC",
        "import apex.normalization.fused_layer_norm as norms",
        "from apex.amp import _amp_state as state",
        "assert apex.optimizers.fused_adam.FusedAdam is FusedAdam is apex.optimizers.FusedAdam",
        "assert norms.FusedRMSNorm is FusedRMSNorm and state is _amp_state",
        "assert apex.parallel.LARC.LARC is LARC is sys.modules['apex.parallel.LARC'].LARC",
        "import torch",
        "model = torch.nn.Linear(2, 1)",
        "sgd = FusedSGD(model.parameters(), lr=0.5)",
        "model, sgd = initialize(model, sgd, opt_level='O2', loss_scale=8.0)",
        "assert _amp_state.opt_properties.opt_level == 'O2'",
        "assert [s.loss_scale() for s in _amp_state.loss_scalers] == [8.0]",
        "with scale_loss(model(torch.ones(1, 2)).sum(), sgd) as scaled: scaled.backward()",
        "assert [p.dtype for p in master_params(sgd)] == [torch.float32] * 2",
        "print('ends')",
    ]
    script.write_text("\n".join(lines))
    (found,) = run_each([Script(["-m", "amp_mp.apex", str(script)])])
    assert (found.returncode, found.stdout.splitlines()[-1:]) == (0, ["ends"]), found.stderr


SAYS = """
import sys
from apex.optimizers import FusedSGD
class Kept:
    pass
import pickle
assert type(pickle.loads(pickle.dumps(Kept()))) is Kept and __name__ == "__main__"
print(sys.argv[1:], FusedSGD.__name__, 3 + beside.value if "beside" in globals() else "")
"""
# What follows the command; the exit code and what is printed, as without `-m amp_mp.apex`.
ENDS = {
    "a module": (["-m", "package.train", "-m", "--lr", "2"], 0, "['-m', '--lr', '2'] FusedSGD 7"),
    "a package": (["-m", "package", "a b"], 3, "['a b'] FusedSGD "),
    "code": (["-c", SAYS + "sys.exit('at the end')", "-c"], 1, "['-c'] FusedSGD "),
    "an error": (["-c", SAYS + "raise KeyError(4)"], 1, "[] FusedSGD "),
    "with a dtype": (["--dtype", "bfloat16", "-m", "package"], 3, "[] FusedSGD "),
    "no module": (["-m", "package.nothing"], 1, ""),
}


def test_modules_and_code_run_as_python_runs_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "package").mkdir()
    files = {"__init__": "", "beside": "value = 4", "__main__": f"{SAYS}sys.exit(3)"}
    files["train"] = f"from package import beside\n{SAYS}assert sys.argv[0] == __file__\n"
    for name, text in files.items():
        (tmp_path / "package" / f"{name}.py").write_text(text)
    monkeypatch.chdir(tmp_path)
    scripts = [Script(["-m", "amp_mp.apex", *given]) for given, _, _ in ENDS.values()]
    for (name, (_, code, printed)), found in zip(ENDS.items(), run_each(scripts), strict=True):
        assert (found.returncode, found.stdout.rstrip("\n")) == (code, printed), (name, found)
        assert ("at the end" in found.stderr) == (name == "code")
        assert ("KeyError: 4" in found.stderr) == (name == "an error")


# What scripts do, each after the imports of all; every one ends with a check of its own.
SCRIPTS = {
    "gradients are logged after the step": """
scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
optimizer = apex.optimizers.FusedAdam(model.parameters(), lr=0.125)
scaler.scale(model(x).sum()).backward()
scaler.step(optimizer)
scaler.update()
assert torch.equal(model.bias.grad, torch.full((2,), 4.0))
""",
    "each layer has its rate": """
groups = [{"params": [model.weight], "lr": 0.25}, {"params": [model.bias], "lr": 0.5}]
optimizer = apex.optimizers.FusedSGD(groups, momentum=0.125, weight_decay=0.5)
bias = model.bias.detach().clone()
model(x).sum().backward()
optimizer.step()
torch.testing.assert_close(model.bias, bias - 0.5 * (4 + 0.5 * bias))
""",
    "a half network below a loss": """
perceptual = torch.nn.Linear(2, 1).half()
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
(model, perceptual), optimizer = apex.amp.initialize(
    [model, perceptual], optimizer, opt_level="O1", cast_model_type=False, loss_scale=64.0
)
with apex.amp.scale_loss(perceptual(model(x)).sum(), optimizer) as scaled_loss:
    scaled_loss.backward()
optimizer.step()
torch.testing.assert_close(model.bias.grad, 4 * perceptual.weight[0].float())
""",
    "a loss scale to begin with": """
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
model, optimizer = apex.amp.initialize(model, optimizer, opt_level="O2")
state = apex.amp._amp_state
state.loss_scalers[0]._loss_scale = 2**20
assert state.loss_scalers[0]._loss_scale == state.loss_scalers[0].loss_scale() == 2.0**20
with apex.amp.scale_loss(model(x).sum() / 2**10, optimizer) as scaled_loss:
    assert scaled_loss.item() == 2**10 * model(x).sum()
    scaled_loss.backward()
properties = state.opt_properties
assert properties.master_weights and properties.options["cast_model_type"] is torch.float16
assert properties.options.get("cast_model_outputs", torch.float32) is torch.float32
""",
    "the loop of fp16_utils": """
from apex.fp16_utils.loss_scaler import DynamicLossScaler
half = apex.fp16_utils.FP16Model(model)
scaler = DynamicLossScaler(init_scale=2.0**40)
for step in range(40):
    half.zero_grad()
    scaler.backward(half(x).float().sum())
    overflow = scaler.has_overflow(half.parameters())
    scaler.update_scale(overflow)
assert not overflow and 1 < scaler.loss_scale < 2.0**16
""",
}


def test_scripts_end_as_with_apex(tmp_path: Path) -> None:
    before = "import torch, apex\nx, model = torch.ones(4, 3), torch.nn.Linear(3, 2)\n"
    for name, text in SCRIPTS.items():
        (tmp_path / f"{name}.py").write_text(f"{before}{text}\nprint('ends')\n")
    files = [str(tmp_path / f"{name}.py") for name in SCRIPTS]
    done = run_each([Script(["-m", "amp_mp.apex", file]) for file in files])
    assert [found.stdout.splitlines()[-1:] for found in done] == [["ends"]] * len(done), [
        found.stderr for found in done
    ]
