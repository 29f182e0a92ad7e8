"""The command line: runs a script that imports Apex, unchanged, with amp_mp in its place."""

import argparse
import os
import runpy
import sys
from pathlib import Path
from types import ModuleType

from amp_mp.apex import register
from amp_mp.apex.opt_levels import DTYPE


def main(arguments: list[str] | None = None) -> None:
    """Runs a script, `-m module` or `-c code` as python would, with apex and amp_C from here."""
    parser = argparse.ArgumentParser(
        prog="python -m amp_mp.apex",
        description="Run a script written for NVIDIA Apex unchanged. Under torchrun: "
        "torchrun --nproc-per-node 2 -m amp_mp.apex script.py",
    )
    help = "low precision of amp.initialize, where the script does not say: float16"
    parser.add_argument("--dtype", choices=["float16", "bfloat16"], help=help)
    for flag, help in (("-m", "script is a module's name"), ("-c", "script is code")):
        parser.add_argument(flag, dest="flag", action="store_const", const=flag, help=help)
    parser.add_argument("script", help="the script, run.py")
    parser.add_argument("args", nargs=argparse.REMAINDER, help="the script's own arguments")
    options = parser.parse_args(arguments)
    script, flag = options.script, options.flag
    if not flag and not Path(script).is_file():
        parser.error(f"there is no script {script}")
    if options.dtype:
        os.environ[DTYPE] = options.dtype
    register()
    sys.argv = [flag or script, *options.args]
    if flag == "-m":
        runpy.run_module(script, run_name="__main__", alter_sys=True)
    elif flag == "-c":
        module = sys.modules["__main__"] = ModuleType("__main__")
        exec(compile(script, "<string>", "exec"), vars(module))
    else:
        sys.path[0] = str(Path(script).resolve().parent)
        runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main()
