"""Scripts with Apex's calls alone run under `python -m amp_mp.apex`, and train as in float32.

The tolerance is the spread of float32 runs over seeds: rounding may change a run as much as another
seed does, and no more.
"""

from __future__ import annotations

import runpy
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from forked import Script, run_each
from tiers import paired

import amp_mp.apex
from amp_mp.apex import amp
from amp_mp.apex.__main__ import main
from amp_mp.apex.opt_levels import DTYPE

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = ROOT / "examples" / "apex" / "unchanged"
LOW = ["bfloat16", "float16"]

Runner = Callable[..., dict[str, Any]]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Iterator[Runner]:
    """Runs a script as the command does, in this process; returns its global names."""
    found: dict[str, Any] = {}

    def run_path(path: str, run_name: str) -> dict[str, Any]:
        found.update(true_run_path(path, run_name=run_name))
        return found

    def script(name: str, *options: str, dtype: str = "float16") -> dict[str, Any]:
        found.clear()
        main(["--dtype", dtype, str(SCRIPTS / f"{name}.py"), *options])
        return dict(found)

    true_run_path = runpy.run_path
    monkeypatch.setattr(runpy, "run_path", run_path)
    monkeypatch.setattr(sys, "argv", sys.argv)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv(DTYPE, "")
    before = set(sys.modules)
    yield script
    for name in set(sys.modules) - before:
        if name.split(".")[0] in ("apex", "amp_C"):
            del sys.modules[name]


# What each script reaches, in float32 with several seeds: as many numbers for every seed.
RESULTS: dict[str, tuple[Callable[[dict[str, Any]], list[float]], list[str], str]] = {
    "simple_distributed": (lambda r: [r["losses"][-1]], ["--steps", "30"], "--seed"),
    "imagenet": (lambda r: r["losses"][-4:], ["--images", "512"], "--seed"),
    "dcgan": (lambda r: [sum(r["outputs"][-20:]) / 20], ["--niter", "40"], "--manualSeed"),
}
LEVEL = {"dcgan": "--opt_level"}
_float32: dict[str, torch.Tensor] = {}


def result(run: Runner, name: str, level: str, seed: int, dtype: str = "float16") -> torch.Tensor:
    """The mean of the numbers of a run."""
    numbers, options, seeds = RESULTS[name]
    options = [LEVEL.get(name, "--opt-level"), level, seeds, str(seed), *options]
    return torch.tensor(numbers(run(name, *options, dtype=dtype))).mean()


@pytest.mark.slow
@pytest.mark.parametrize(("name", "level", "dtype"), paired(RESULTS, ["O1", "O2"], LOW))
def test_scripts_follow_float32_within_the_spread_of_seeds(
    run: Runner, name: str, level: str, dtype: str
) -> None:
    if name not in _float32:
        _float32[name] = torch.stack([result(run, name, "O0", seed) for seed in range(4)])
    spread = (_float32[name].max() - _float32[name].min()).item()
    assert spread > 0
    found = result(run, name, level, 0, dtype)
    assert abs(found - _float32[name][0]).item() <= spread
    assert found.isfinite()


@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_an_overflow_in_the_middle_is_survived(
    run: Runner, level: str, dtype: str, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--opt-level", level, "--images", "512", "--loss-scale", "dynamic", "--epochs", "1"]
    scale = []
    for overflow in ("-1", "3"):
        found = run("imagenet", *options, "--overflow-at", overflow, dtype=dtype)
        skipped = capsys.readouterr().out.count("Gradient overflow.  Skipping step")
        scale.append((amp.state_dict()["loss_scaler0"]["loss_scale"], skipped))
        finite = [torch.isfinite(p).all() for p in found["model"].parameters()]
        assert all(finite)
    assert scale[1] == (scale[0][0] / 2, scale[0][1] + 1)


# What says how long each script runs, of a whole run and of its first part; how many losses are
# left then, and the models.
EPOCHS = ["--images", "256", "--loss-scale", "dynamic", "--epochs"]
RESUMED = {
    "imagenet": (EPOCHS, "2", "1", 4, ["model"]),
    "simple_distributed": (["--steps"], "8", "5", 3, ["model"]),
    "dcgan": (["--niter"], "8", "5", 3, ["netD", "netG"]),
}


@pytest.mark.parametrize(("name", "level", "dtype"), paired(RESUMED, ("O0", "O1", "O2"), LOW))
def test_a_resumed_script_goes_on_bit_for_bit(
    run: Runner, name: str, level: str, dtype: str, tmp_path: Path
) -> None:
    length, all_of_it, part, left, models = RESUMED[name]
    file = str(tmp_path / "checkpoint.pt")
    options = [LEVEL.get(name, "--opt-level"), level, *length]
    whole = run(name, *options, all_of_it, dtype=dtype)
    run(name, *options, part, "--save", file, dtype=dtype)
    resumed = run(name, *options, all_of_it, "--resume", file, dtype=dtype)
    assert resumed["losses"] == whole["losses"][-left:]
    for model in models:
        states = [each[model].state_dict().values() for each in (whole, resumed)]
        assert all(torch.equal(a, b) for a, b in zip(*states, strict=True))


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_one_overflow_of_the_simple_script_skips_one_step(run: Runner, level: str) -> None:
    options = ["--opt-level", level, "--steps", "6", "--overflow-at"]
    clean, broken = (run("simple_distributed", *options, at) for at in ("-1", "2"))
    assert broken["losses"][2] == torch.inf
    assert broken["losses"][3:] == clean["losses"][2:5]
    assert amp.state_dict()["loss_scaler0"] == {"loss_scale": 2.0**15, "unskipped": 3}


def test_dcgan_has_a_scale_for_each_loss(run: Runner) -> None:
    scales = []
    for overflow in ("-1", "5"):
        found = run("dcgan", "--opt_level", "O2", "--niter", "6", "--overflow_at", overflow)
        scales.append([(s["loss_scale"], s["unskipped"]) for s in found["scales"].values()])
    clean, broken = scales
    assert len(clean) == 3
    assert broken == [(clean[0][0] / 2, 0), *clean[1:]]


@pytest.mark.full
@pytest.mark.parametrize("dtype", LOW)
def test_a_gpt_in_two_processes(run: Runner, dtype: str) -> None:
    """Losses put off, clipped masters, equal weights on both; tolerance as above, in one process.

    The script itself compares the processes' masters.
    """
    one = [run("gpt", "--opt-level", "O0", "--seed", str(seed))["losses"] for seed in range(3)]
    ends = [sum(losses[-5:]) / 5 for losses in one]
    found = {}
    for level in ("O0", "O2"):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = str(free.getsockname()[1])
        line = [sys.executable, "-m", "torch.distributed.run", "--master-port", port]
        line += ["--nproc-per-node", "2", "-m", "amp_mp.apex", "--dtype", dtype]
        line += [str(SCRIPTS / "gpt.py"), "--opt-level", level, "--accumulate", "2"]
        done = subprocess.run(line, capture_output=True, text=True, timeout=250, check=False)
        assert done.returncode == 0, done.stderr
        found[level] = float(done.stdout.split("first, ")[1].split()[0])
    assert abs(found["O2"] - found["O0"]) <= max(ends) - min(ends)
    assert found["O2"] < one[0][0] / 2


@pytest.mark.parametrize("script", sorted(SCRIPTS.glob("*.py")), ids=lambda path: path.stem)
def test_the_scripts_know_nothing_of_amp_mp(script: Path) -> None:
    code = [line for line in script.read_text().splitlines() if "python" not in line]
    code = [line for line in code if "-m amp_mp.apex" not in line]
    assert "amp_mp" not in "\n".join(code)
    assert "from apex import amp" in code


# The command, and register.


@pytest.mark.slow
def test_the_command_runs_a_script_as_python_does(tmp_path: Path) -> None:
    folder = tmp_path / "folder with a space"
    folder.mkdir()
    (folder / "beside.py").write_text("value = 3\n")
    script = folder / "script.py"
    script.write_text(
        "import sys, beside, amp_C, apex\n"
        "from apex.optimizers import FusedAdam\n"
        "from apex.contrib.clip_grad import clip_grad_norm_\n"
        "from apex.normalization import FusedLayerNorm\n"
        "print(__name__, sys.argv, beside.value, apex.optimizers.FusedAdam is FusedAdam)\n"
        "try:\n"
        "    import apex.mlp\n"
        "except ModuleNotFoundError as error:\n"
        "    print(error)\n"
        "sys.exit(3)\n"
    )
    (found,) = run_each([Script(["-m", "amp_mp.apex", str(script), "--dtype", "mine"])])
    assert found.returncode == 3, found.stderr
    lines = found.stdout.splitlines()
    assert lines[0] == f"__main__ ['{script}', '--dtype', 'mine'] 3 True"
    assert "apex.mlp is not there" in lines[1]


def test_a_script_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["nowhere.py"])
    assert stopped.value.code == 2
    assert "there is no script nowhere.py" in capsys.readouterr().err


def test_register_says_which_apex_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: Runner
) -> None:
    (tmp_path / "apex").mkdir()
    (tmp_path / "apex" / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.warns(UserWarning, match=f"not the one in {tmp_path}"):
        amp_mp.apex.register()
    assert sys.modules["apex"] is amp_mp.apex
    amp_mp.apex.register()  # a second time it says nothing
    monkeypatch.setitem(sys.modules, "apex", sys)
    with pytest.raises(RuntimeError, match="was imported before"):
        amp_mp.apex.register()


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
        "_amp_state.loss_scalers[0]._loss_scale = 2**20",
        "assert [s._loss_scale for s in _amp_state.loss_scalers] == [2.0**20]",
        "loss = model(torch.ones(1, 2)).sum() / 2**10",
        "with scale_loss(loss, sgd) as scaled: scaled.backward()",
        "assert scaled.item() == 2**20 * loss.item()",
        "properties = _amp_state.opt_properties",
        "assert properties.master_weights",
        "assert properties.options['cast_model_type'] is torch.float16",
        "assert properties.options.get('cast_model_outputs', torch.float32) is torch.float32",
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
