"""The command line: runs a script unchanged and says what its gradients and updates look like."""

from __future__ import annotations

import argparse
import runpy
import sys
from pathlib import Path

from amp_mp.diagnose.recording import EnoughError, Recording
from amp_mp.scaling.policies import check_scale


def main(arguments: list[str] | None = None) -> None:
    """Ends as the script ends: its exit status, its exception."""
    parser = argparse.ArgumentParser(
        prog="python -m amp_mp.diagnose",
        description="Run a training script unchanged; then print which gradients float16 would "
        "lose or overflow, which updates weights without float32 masters would lose, and which "
        "gradients are inf or NaN.",
    )
    parser.add_argument("--out", metavar="DIR", default="diagnosis", help="folder for the pictures")
    parser.add_argument("--steps", metavar="N", type=_steps, help="end after N backward passes")
    parser.add_argument(
        "--scale",
        metavar="auto|S",
        type=_scale,
        help="loss scale to judge at; auto, the default: the script's own, seen where it uses a "
        "GradScaler or amp_mp",
    )
    parser.add_argument("script", type=Path, help="the script, run.py")
    parser.add_argument("args", nargs=argparse.REMAINDER, help="the script's own arguments")
    options = parser.parse_args(arguments)
    if not options.script.is_file():
        parser.error(f"there is no script {options.script}")

    sys.argv = [str(options.script), *options.args]
    sys.path[0] = str(options.script.resolve().parent)
    recording = Recording(options.scale, options.steps)
    found = False
    try:
        runpy.run_path(str(options.script), run_name="__main__")
    except EnoughError:
        pass
    finally:  # also where the script raises or exits: that goes on from here as it came
        sys.stdout.flush()
        found = recording.finish(options.out)
    if not found:
        sys.exit(1)


def _steps(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number above 0, found {text!r}")
    return int(text)


def _scale(text: str) -> float | None:
    if text == "auto":
        return None
    try:
        return check_scale(float(text), "the loss scale")
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"expected auto or a finite number above 0, found {text!r}"
        ) from None


if __name__ == "__main__":
    main()
