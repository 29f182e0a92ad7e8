"""Watching a whole script without changing it: what the command line and `start` share."""

import atexit
import sys
import weakref
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

from amp_mp.diagnose.gradient_watch import GradientReport, OverflowTracker, Watch, scale_of
from amp_mp.diagnose.plot import new_figure, plot_gradients, plot_updates
from amp_mp.diagnose.updates import UpdateRatios
from amp_mp.scaling.policies import ScalePolicy, check_scale


class EnoughError(BaseException):
    """Ends a script after the steps asked for; no Exception, because scripts may catch those."""


class Recording(ExitStack):
    """Hooks on every module that is called and trained, and on every optimizer, until `close`.

    A module that is called from outside any other, with gradients on and parameters to train, is
    watched with everything in it, under its class's name. Compiled code runs uncompiled.

    scale: the loss scale to judge gradients at; default: that of the policy or GradScaler last used
    before backward. steps: the number of backward passes after which EnoughError is raised. dtype:
    the format to judge for; default: float16, for updates the parameter's own low precision. Raises
    ValueError for a scale that is not finite or not above 0, steps below 1, and a dtype other than
    float32, float16 and bfloat16.
    """

    def __init__(
        self, scale: float | None = None, steps: int | None = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        if scale is not None:
            check_scale(scale, "scale")
        if steps is not None and steps < 1:
            raise ValueError(f"steps must be above 0, found {steps}")
        self._scale = scale
        self._steps = steps
        self._dtype = dtype
        self.backwards = 0
        self._scaler: Any = None
        self._known: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._roots: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()
        self._watched: dict[str, tuple[Watch, OverflowTracker]] = {}  # by root name
        self.ratios = self.enter_context(UpdateRatios(dtype=dtype))
        self.callback(register_module_forward_pre_hook(self._on_call).remove)
        self.enter_context(torch.compiler.set_stance("force_eager"))
        self._wrap(torch.autograd, "backward", self._backward)
        self._wrap(torch.amp.GradScaler, "scale", self._use_scale)
        self._wrap(torch.amp.GradScaler, "_maybe_opt_step", self._step)
        self._wrap(ScalePolicy, "scale", self._use_scale)
        self._wrap(ScalePolicy, "scale_tensor", self._use_scale)

    def _wrap(self, owner: Any, name: str, around: Callable[..., Any]) -> None:
        """Replaces a function, or the reading of a property, by around(function, *arguments)."""
        original = vars(owner)[name]
        is_property = isinstance(original, property)
        function = original.fget if is_property else original

        def wrapper(*args: Any, **kwargs: Any) -> Any:
            return around(function, *args, **kwargs)

        setattr(owner, name, original.getter(wrapper) if is_property else wrapper)
        self.callback(setattr, owner, name, original)

    def _use_scale(self, function: Callable[..., Any], scaler: Any, *args: Any, **kw: Any) -> Any:
        self._scaler = scaler
        return function(scaler, *args, **kw)

    def _step(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        before = self.ratios.steps
        result = function(*args, **kwargs)
        self.ratios.skipped += self.ratios.steps == before  # torch's calls no optimizer then
        return result

    def _backward(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self.backwards == self._steps:
            raise EnoughError
        result = function(*args, **kwargs)
        self.backwards += 1
        for _, tracker in self._watched.values():
            tracker.update()
        return result

    def _on_call(self, module: nn.Module, _: Any) -> None:
        # Every module inside a watched one is known, so only modules called from outside go on,
        # also where checkpointing calls an inner module on its own.
        known = module in self._known or not torch.is_grad_enabled()
        if known or not any(p.requires_grad and p.is_leaf for p in module.parameters()):
            return
        for inner in module.modules():
            self._known.add(inner)
            if inner in self._roots:  # it was called on its own before
                self._watched.pop(self._roots.pop(inner))[0].close()
        kind = type(module).__name__
        names = (kind, *(f"{kind}{i}" for i in range(2, len(self._watched) + 2)))
        name = next(name for name in names if name not in self._watched)
        watch = self.enter_context(Watch(module, self._current_scale))
        self._roots[module] = name
        self._watched[name] = watch, OverflowTracker(module, self._current_scale)
        self.ratios.name(module, f"{name}.")

    def _current_scale(self) -> float:
        return scale_of(self._scaler)

    def report(self) -> GradientReport:
        """The gradients of every module watched."""
        kinds: dict[str, dict[str, Any]] = {"weights": {}, "activations": {}, "left_out": {}}
        for name, (watch, _) in self._watched.items():
            for kind, seen in kinds.items():
                seen.update({f"{name}.{key}": value for key, value in vars(watch)[kind].items()})
        scale = self._current_scale() if self._scale is None else self._scale
        return GradientReport(**kinds, scale=scale, dtype=self._dtype or torch.float16)

    def finish(self, out: str | Path | None = None) -> bool:
        """Closes, prints all tables, saves pictures in `out`; False if there was no gradient."""
        self.close()
        report, updates = self.report(), self.ratios.report()
        if not report:
            never = "never called backward()" if self.backwards == 0 else "trained no nn.Module"
            print(f"amp_mp.diagnose: the script {never}, so no gradient was seen", file=sys.stderr)
            return False
        print(f"\n{report}\n\n{updates}")
        print(f"\nSteps skipped because of inf or NaN: {self.ratios.skipped}")
        for name, (watch, tracker) in self._watched.items():
            if watch.nonfinite is not None:
                print(f"\nThe first output with inf or NaN was that of {name}.{watch.nonfinite}.")
            if tracker.report:
                print(f"\nIn the last backward pass of {name}:\n{tracker.report}")
            if tracker.verdict:
                print(tracker.verdict)
        if out is not None:
            try:
                pictures = {"gradients": plot_gradients(report)}
                if updates:
                    pictures["updates"] = plot_updates(updates)
                Path(out).mkdir(parents=True, exist_ok=True)
                for name, figure in pictures.items():
                    figure.savefig(Path(out) / f"{name}.png")
                print(f"\nPictures: {Path(out)}")
            except (ImportError, OSError) as error:  # the tables are printed without pictures too
                print(f"amp_mp.diagnose: no pictures: {error}", file=sys.stderr)
        return True


def start(
    out: str | Path | None = None, scale: float | None = None, dtype: torch.dtype | None = None
) -> Recording:
    """Watches the rest of this script, and prints what was found when it ends.

    out: a folder for pictures; default: none. scale: the loss scale to judge gradients at; default:
    the script's own. dtype: the format to judge for, float16, bfloat16 or float32; default:
    float16. Raises ImportError for pictures without matplotlib, ValueError for another dtype and a
    scale that is not finite or not above 0.
    """
    if out is not None:
        new_figure(1, 1.0)  # imports matplotlib now: at exit some modules cannot be imported
    recording = Recording(scale, dtype=dtype)
    atexit.register(recording.finish, out)
    return recording
