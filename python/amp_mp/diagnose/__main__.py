"""The command line: runs a script unchanged and reports on its gradients and updates."""

import argparse
import runpy
import sys
from pathlib import Path

import torch

from amp_mp.casting.products import describe_products
from amp_mp.diagnose.recording import EnoughError, Recording
from amp_mp.scaling.policies import check_scale


def main(arguments: list[str] | None = None) -> None:
    """Runs the script and ends as it does; with status 1 if it ends well with nothing to report."""
    parser = argparse.ArgumentParser(
        prog="python -m amp_mp.diagnose",
        description="Run a training script unchanged; then print which gradients low precision "
        "would lose or overflow, which updates weights without float32 masters would lose, which "
        "gradients are inf or NaN, and how many steps were skipped.",
    )
    parser.add_argument("--out", metavar="DIR", default="diagnosis", help="folder for the pictures")
    parser.add_argument("--steps", metavar="N", type=_steps, help="end after N backward passes")
    scale_help = "loss scale to judge at; default: auto, that of the script's GradScaler or policy"
    parser.add_argument("--scale", metavar="auto|S", type=_scale, help=scale_help)
    parser.add_argument("--dtype", choices=["float16", "bfloat16"], help="to judge for: float16")
    parser.add_argument("script", type=Path, help="the script, run.py")
    parser.add_argument("args", nargs=argparse.REMAINDER, help="the script's own arguments")
    options = parser.parse_args(arguments)
    if not options.script.is_file():
        parser.error(f"there is no script {options.script}")

    sys.argv = [str(options.script), *options.args]
    sys.path[0] = str(options.script.resolve().parent)
    dtype = getattr(torch, options.dtype) if options.dtype else None
    recording = Recording(options.scale, options.steps, dtype)
    try:
        runpy.run_path(str(options.script), run_name="__main__")
    except EnoughError:
        pass
    finally:  # the script's exception or exit then goes on unchanged
        sys.stdout.flush()
        found = recording.finish(options.out)
        print(describe_products())
    if not found:
        sys.exit(1)


def _steps(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number above 0, found {text!r}")
    return int(text)


def _scale(text: str) -> float | None:
    try:
        return None if text == "auto" else check_scale(float(text), "the loss scale")
    except ValueError:
        message = f"expected auto or a finite number above 0, found {text!r}"
        raise argparse.ArgumentTypeError(message) from None


if __name__ == "__main__":
    main()
