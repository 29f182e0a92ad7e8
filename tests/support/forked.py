"""Runs scripts as processes of their own that need not import torch each: that takes 2 s and more.

One process imports it, once in a pytest process, and is forked for each script. What amp_mp does
when it is imported happens in the script's process, with the script's environment.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple


class Script(NamedTuple):
    """What follows `python` in a command: a path, -c and code, or -m and a module; arguments."""

    arguments: Sequence[str]
    environment: Mapping[str, str] = MappingProxyType({})
    """What differs from this process's."""


# torch's optimizers import torch._dynamo, which takes as long as torch itself. At its end a
# script's process does what atexit has, and frees no module: that would take a second.
PROCESS = """
import atexit, importlib, json, os, runpy, sys, threading
for name in "torch", "torch._dynamo", "torch.distributed.tensor":
    importlib.import_module(name)


def wanted():
    while line := sys.stdin.readline():
        folder, path, scripts = json.loads(line)
        codes = []
        for number, (arguments, environment) in enumerate(scripts):
            process = os.fork()
            if process == 0:
                for file, name in ((1, "out"), (2, "error")):
                    os.dup2(os.open(f"{folder}/{name}{number}", os.O_CREAT | os.O_WRONLY), file)
                os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
                os.environ.update(environment)
                os.chdir(path)
                return arguments
            codes.append(os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]))
        print(json.dumps(codes), flush=True)


def run(first, given):
    if first in ("-c", "-m"):
        del sys.argv[1]
        sys.path.insert(0, "")
    if first == "-c":
        exec(given[0], {"__name__": "__main__"})
    elif first == "-m":
        runpy.run_module(given[0], run_name="__main__", alter_sys=True)
    else:
        sys.path.insert(0, os.path.dirname(first))
        runpy.run_path(first, run_name="__main__")


if arguments := wanted():
    first, *given = sys.argv = arguments
    code = 0
    try:
        run(first, given)
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
        if code and not isinstance(stop.code, int):
            print(stop.code, file=sys.stderr)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        code = 1
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
"""


@cache
def forking() -> subprocess.Popen[str]:
    """The process that is forked; it ends with this one, whose end closes its standard input."""
    return subprocess.Popen(
        [sys.executable, "-c", PROCESS],
        env={**os.environ, "OMP_NUM_THREADS": "1"},  # torch reads it when it is imported
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )


def run_each(scripts: Sequence[Script]) -> list[subprocess.CompletedProcess[str]]:
    """Runs one script after the other in this folder; how each ended, as of subprocess.run."""
    process = forking()
    assert process.stdin is not None
    assert process.stdout is not None
    with tempfile.TemporaryDirectory() as folder:
        wanted = [(s.arguments, dict(s.environment)) for s in scripts]
        process.stdin.write(json.dumps((folder, str(Path.cwd()), wanted)) + "\n")
        process.stdin.flush()
        codes = json.loads(process.stdout.readline())
        texts = [
            [Path(folder, f"{name}{n}").read_text() for name in ("out", "error")]
            for n in range(len(scripts))
        ]
    return [
        subprocess.CompletedProcess([sys.executable, *script.arguments], code, *text)
        for script, code, text in zip(scripts, codes, texts, strict=True)
    ]
