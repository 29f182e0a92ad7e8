"""python -m amp_mp.diagnose, and the two lines that do the same."""

from __future__ import annotations

import runpy
import sys
import warnings
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from forked import Script, run_each
from torch import nn
from torch.optim import optimizer as torch_optimizer

import amp_mp as amp
from amp_mp.diagnose.__main__ import main
from amp_mp.diagnose.recording import Recording, start

SCRIPT = """
import sys
import torch
import beside  # a module next to the script
from torch import nn
import amp_mp as amp

assert __name__ == "__main__"
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
scaler = amp.GradScaler("cpu", init_scale=2.0**7)
with torch.no_grad():
    model(torch.ones(1, 4))
for step in range(3):
    print("step", step)
    scaler.scale(nn.functional.mse_loss(model(torch.randn(8, 4)), torch.zeros(8, 1))).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
print("weight", float(model[0].weight[0, 0].detach()), sys.argv)
"""


def script(folder: Path, end: str = "", text: str = SCRIPT) -> str:
    (folder / "beside.py").write_text("")
    (folder / "run.py").write_text(text + end)
    return str(folder / "run.py")


@pytest.fixture(autouse=True)
def _process_is_left_as_it_was(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "argv", sys.argv)
    monkeypatch.setattr(sys, "path", sys.path.copy())
    monkeypatch.delitem(sys.modules, "beside", raising=False)
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def _no_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """They take a second each."""
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)


def rows(text: str) -> list[str]:
    """The first three cells of every line."""
    return [" ".join(line.split()[:3]) for line in text.splitlines()]


@pytest.mark.slow
def test_a_script_runs_as_ever_and_is_reported_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = script(tmp_path)
    out = tmp_path / "new" / "pictures"
    options = ["--out", str(out), path, "--out", "its own"]
    (done,) = run_each([Script(["-m", "amp_mp.diagnose", *options])])
    assert done.returncode == 0, done.stderr
    monkeypatch.setattr(sys, "argv", [path, "--out", "its own"])
    monkeypatch.syspath_prepend(tmp_path)
    runpy.run_path(path, run_name="__main__")
    plain = capsys.readouterr().out
    assert done.stdout.startswith(plain), "every bit, its arguments too"
    report = done.stdout.removeprefix(plain)
    assert "in float16 at loss scale 2^7" in report
    assert {
        "weight Sequential.0.weight 96",
        "activation Sequential.2 24",
        "Sequential.2.bias float16 3",
    } <= set(rows(report))
    for name in ("gradients.png", "updates.png"):
        assert (out / name).read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
@pytest.mark.usefixtures("_no_pictures")
def test_the_exit_status_and_the_exception_stay(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="3"):
        main([script(tmp_path, "sys.exit(3)")])
    assert "weight Sequential.0.weight 96" in rows(capsys.readouterr().out)
    with pytest.raises(ValueError, match="boom"):
        main([script(tmp_path, "raise ValueError('boom')")])
    assert "weight Sequential.0.weight 96" in rows(capsys.readouterr().out)


@pytest.mark.usefixtures("_no_pictures")
def test_steps_end_the_script_and_scale_is_what_to_judge_at(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["--steps", "2", "--scale", "1024", script(tmp_path)])
    out = capsys.readouterr().out
    assert "step 2" in out
    assert "weight -" not in out
    assert "in float16 at loss scale 2^10" in out
    assert "weight Sequential.0.weight 64" in rows(out)
    assert "Sequential.2.bias float16 2" in rows(out), "the second step was completed"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("print('hello')", "the script never called backward(), so no gradient was seen"),
        (
            "import torch; torch.ones(1, requires_grad=True).backward()",
            "the script trained no nn.Module, so no gradient was seen",
        ),
    ],
)
def test_a_script_with_nothing_to_report_is_an_error(
    text: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="1"):
        main([script(tmp_path, text=text)])
    assert capsys.readouterr().err.endswith(f"amp_mp.diagnose: {message}\n")
    with pytest.raises(SystemExit, match="0"):  # the script's own word
        main([script(tmp_path, "; import sys; sys.exit(0)", text=text)])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["missing.py"], "there is no script missing.py"),
        (["--steps", "0", "x.py"], "--steps: expected a whole number above 0, found '0'"),
        (["--scale", "-1", "x.py"], "--scale: expected auto or a finite number above 0"),
        (["--scale", "big", "x.py"], "expected auto or a finite number above 0, found 'big'"),
        ([], "the following arguments are required: script"),
    ],
)
def test_bad_arguments(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(arguments)
    assert message in capsys.readouterr().err


def test_without_matplotlib_the_tables_are_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    main(["--scale", "auto", script(tmp_path)])
    out, err = capsys.readouterr()
    assert "Sequential.0.weight" in out
    assert "no pictures: pictures need matplotlib" in err
    with pytest.raises(ImportError, match="pip install matplotlib"):
        start(tmp_path)


@pytest.mark.slow
def test_two_lines_at_the_top_do_the_same(tmp_path: Path) -> None:
    lines = "from amp_mp import diagnose\ndiagnose.start('pictures')\n"
    (done,) = run_each([Script([script(tmp_path, "sys.exit(4)", text=lines + SCRIPT)])])
    assert done.returncode == 4, done.stderr
    assert "weight Sequential.0.weight 96" in rows(done.stdout)
    assert not done.stderr
    assert (tmp_path / "pictures" / "gradients.png").exists()


# A recording by itself.


def hooks_of_the_process() -> list[object]:
    return [
        torch.autograd.backward,
        torch.amp.GradScaler.scale,
        amp.scaling.ScalePolicy.scale,
        amp.scaling.ScalePolicy.scale_tensor,
        len(torch.nn.modules.module._global_forward_pre_hooks),
        len(torch_optimizer._global_optimizer_pre_hooks),
        len(torch_optimizer._global_optimizer_post_hooks),
    ]


def test_a_recording_leaves_the_process_as_it_was() -> None:
    before = hooks_of_the_process()
    recording = Recording()
    assert all(a != b for a, b in zip(before, hooks_of_the_process(), strict=True))
    model = nn.Linear(1, 1)
    model(torch.ones(1, 1)).sum().backward()
    recording.close()
    recording.close()
    assert hooks_of_the_process() == before
    assert not model._forward_hooks
    assert recording.backwards == 1
    for arguments in ({"scale": 0.0}, {"steps": 0}):
        with pytest.raises(ValueError, match="above 0, found 0"):
            Recording(**arguments)
    assert hooks_of_the_process() == before


def scale_by_handle(model: nn.Module, policy: amp.scaling.ScalePolicy) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss = model(torch.ones(1, 4)).sum()
    handle = amp.init(loss_scale=policy, device_type="cpu")
    with handle, handle.scale_loss(loss, optimizer) as scaled:
        scaled.backward()


def scale_by_optimizer(model: nn.Module, policy: amp.scaling.ScalePolicy) -> None:
    optimizer = amp.FP16_Optimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), loss_scale=policy, verbose=False
    )
    optimizer.backward(model(torch.ones(1, 4)).sum())


@pytest.mark.parametrize("scale_loss", [scale_by_handle, scale_by_optimizer])
def test_the_scale_of_every_kind_of_training_is_found(scale_loss: object) -> None:
    model = nn.Linear(4, 1)
    with closing(Recording()) as recording:
        scale_loss(model, amp.scaling.Backoff(init_scale=2.0**9))  # type: ignore[operator]
    report = recording.report()
    assert report.scale == 2.0**9
    assert report.weights.amax == 1


def test_roots_are_told_apart_and_parts_are_not_roots() -> None:
    model, other = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1)), nn.Linear(1, 1)
    frozen = nn.Linear(1, 1).requires_grad_(False)
    x = torch.ones(1, 1)
    with closing(Recording()) as recording:
        model[0](x).sum().backward()  # a part first
        for _ in range(2):
            y = torch.utils.checkpoint.checkpoint(model[0], frozen(x), use_reentrant=False)
            (model(y) + other(x) + nn.Linear(1, 1)(x)).sum().backward()
    names = {row.name for row in recording.report() if row.kind == "weight"}
    assert {"Sequential.0.weight", "Sequential.1.weight", "Linear2.weight"} < names
    assert sum(name.startswith("Linear") for name in names) == 2 * 3


def test_compiled_code_is_seen() -> None:
    model = torch.compile(nn.Linear(2, 1))
    with closing(Recording()) as recording:
        model(torch.ones(1, 2)).sum().backward()
    assert [row.kind for row in recording.report()].count("activation") == 2


def test_overflows_are_reported(capsys: pytest.CaptureFixture[str]) -> None:
    recording = Recording()
    model = nn.Linear(1, 1)
    for _ in range(5):
        model.zero_grad()
        (model(torch.ones(1, 1)).sum() * float("nan")).backward()
    assert recording.finish()
    out = capsys.readouterr().out
    assert "In the last backward pass of Linear:\nparameter  shape" in out
    assert "No loss scale can cure this: the gradient of bias has been inf or NaN in each" in out


SKIPPING = """
import torch
from torch import nn
import amp_mp as amp


class Logarithm(nn.Module):
    def forward(self, x):
        return x.log()  # of a negative number


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.log, self.out = nn.Linear(4, 4), Logarithm(), nn.Linear(4, 1)

    def forward(self, x, bad):
        x = self.inner(x)
        return self.out(self.log(-x.abs() if bad else x.abs() + 1))


model = Model()
optimizer = MAKE(model.parameters())
scaler = SCALER("cpu", init_scale=2.0**7)
for step in range(5):
    optimizer.zero_grad()
    scaler.scale(model(torch.ones(2, 4), step in (1, 4)).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
"""


def skipped(model: nn.Module, optimizer: Any, scaler: Any, steps: int = 30) -> str:
    """What a loop whose gradients are infinite is told; the one warning, at this file's line."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for _ in range(steps):
            for param in model.parameters():
                param.grad = torch.full_like(param, torch.inf)
            scaler.scale(torch.zeros((), requires_grad=True))  # makes the scale
            scaler.step(optimizer)
            scaler.update()
    (only,) = [each for each in found if "in a row" in str(each.message)]
    assert only.filename == __file__
    return str(only.message)


@pytest.mark.parametrize("kind", [torch.optim.SGD, amp.optim.SGD])
def test_a_grad_scaler_is_not_told_that_there_is_no_loss_scale(kind: Any) -> None:
    model = nn.Linear(3, 2)
    message = skipped(model, kind(model.parameters(), lr=0.1), amp.GradScaler("cpu"))
    assert "without a loss scale" not in message
    assert "at loss scale 2^-" in message


def test_parameters_of_a_prepared_model_are_named_by_their_path() -> None:
    model = amp.prepare(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2)), torch.bfloat16)
    optimizer = amp.optim.AdamW(model.parameters())
    message = skipped(model, optimizer, amp.GradScaler("cpu"))
    assert {"0.weight", "1.bias"} <= {line.split()[0] for line in message.splitlines()}


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", None])
@pytest.mark.parametrize("make", ["torch.optim.SGD", "amp.optim.SGD"])
@pytest.mark.parametrize("scaler", ["torch.amp.GradScaler", "amp.GradScaler"])
@pytest.mark.usefixtures("_no_pictures")
def test_the_command_line_counts_skipped_steps_and_finds_the_module(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], make: str, scaler: str, dtype: str | None
) -> None:
    text = SKIPPING.replace("MAKE(", f"{make}(lr=0.1, params=").replace("SCALER", scaler)
    main([*(["--dtype", dtype] if dtype else []), script(tmp_path, text=text)])
    out = capsys.readouterr().out
    assert f"what becomes of them in {dtype or 'float16'} at loss scale" in out
    assert "Steps skipped because of inf or NaN: 2" in out
    assert "The first output with inf or NaN was that of Model.log." in out
