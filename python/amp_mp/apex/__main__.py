"""The command line: runs a script that imports Apex, unchanged, with amp_mp in its place."""

import argparse
import os
import runpy
import sys
from pathlib import Path

from amp_mp.apex import register
from amp_mp.apex.opt_levels import DTYPE


def main(arguments: list[str] | None = None) -> None:
    """Runs the script as `python script.py` would, with `apex` and `amp_C` from here."""
    parser = argparse.ArgumentParser(
        prog="python -m amp_mp.apex",
        description="Run a script written for NVIDIA Apex unchanged. Under torchrun: "
        "torchrun --nproc-per-node 2 -m amp_mp.apex script.py",
    )
    help = "low precision of amp.initialize, where the script does not say: float16"
    parser.add_argument("--dtype", choices=["float16", "bfloat16"], help=help)
    parser.add_argument("script", type=Path, help="the script, run.py")
    parser.add_argument("args", nargs=argparse.REMAINDER, help="the script's own arguments")
    options = parser.parse_args(arguments)
    if not options.script.is_file():
        parser.error(f"there is no script {options.script}")
    if options.dtype:
        os.environ[DTYPE] = options.dtype
    register()
    sys.argv = [str(options.script), *options.args]
    sys.path[0] = str(options.script.resolve().parent)
    runpy.run_path(str(options.script), run_name="__main__")


if __name__ == "__main__":
    main()
