"""Runs scripts as processes of their own that need not import torch each: that takes 2 s and more.

One process imports it, and is forked for each script. What amp_mp does when it is imported happens
in the script's process, with the script's environment.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple


class Script(NamedTuple):
    """What follows `python` in a command: a path, or -c and code, with arguments."""

    arguments: Sequence[str]
    environment: Mapping[str, str] = MappingProxyType({})
    """What differs from this process's."""


# The loop ends early in a script's process, so that the script is the last thing that runs there:
# its exception, its exit status and what it does at its end are those of any script.
PROCESS = """
import importlib, json, os, runpy, sys
folder, *modules = sys.argv[1:]
for name in modules:
    importlib.import_module(name)
scripts, codes = json.load(sys.stdin), []
for number, (arguments, environment) in enumerate(scripts):
    process = os.fork()
    if process == 0:
        for file, name in ((1, "out"), (2, "error")):
            os.dup2(os.open(f"{folder}/{name}{number}", os.O_CREAT | os.O_WRONLY), file)
        os.environ.update(environment)
        break
    codes.append(os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]))
else:
    print(json.dumps(codes))
    sys.exit()
sys.argv = list(arguments)
if arguments[0] == "-c":
    del sys.argv[1]
    exec(arguments[1], {"__name__": "__main__"})
else:
    sys.path.insert(0, os.path.dirname(arguments[0]))
    runpy.run_path(arguments[0], run_name="__main__")
"""


def run_each(
    scripts: Sequence[Script], modules: Sequence[str] = ("torch",)
) -> list[subprocess.CompletedProcess[str]]:
    """Runs one script after the other; how each ended and what it printed, as subprocess.run.

    modules: what is imported once for all of them, nothing of amp_mp.
    """
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [sys.executable, "-c", PROCESS, folder, *modules],
            input=json.dumps([(s.arguments, dict(s.environment)) for s in scripts]),
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        codes = json.loads(done.stdout)
        texts = [
            [Path(folder, f"{name}{n}").read_text() for name in ("out", "error")]
            for n in range(len(scripts))
        ]
    return [
        subprocess.CompletedProcess([sys.executable, *script.arguments], code, *text)
        for script, code, text in zip(scripts, codes, texts, strict=True)
    ]
