"""A machine for `make gpu` without a GPU: a bare copy of the tree, and tools that only pretend.

python3 stands for Python and for what only a GPU can do: it answers for pytest. nvcc, g++ and nm
make empty objects, and as the libraries copies of those that are built here. git, pip and curl are
not to be used: they fail, and who called them is written down.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
COPIED = ("Makefile", "setup.py", "pyproject.toml", "build_tools", "csrc", "python", "benchmarks",
          "README.md")  # fmt: skip
PATIENCE = 300  # seconds; a call that hangs is an error

COMPILER = """#!/bin/bash
echo "$0" >>"{calls}"
case "$*" in
  --version*) echo "Cuda compilation tools, release 13.0, V13.0.88"; exit ;;
  *--list-gpu-arch*) echo compute_90; exit ;;
  *--dryrun*) echo "#$ TOP={cuda}" >&2; exit ;;
esac
made=; for word in "$@"; do [ "$made" = next ] && made=$word; [ "$word" = -o ] && made=next; done
case "$*" in
  *-shared*version-script*) cp {kernels} "$made" ;;
  *-shared*) cp {binding} "$made" ;;
  *) : >"$made" ;;
esac
"""
FORBIDDEN = '#!/bin/bash\necho "$0 $*" >>"{calls}.forbidden"\nexit 127\n'
# Every bash reads this first. Time stands still for gpu.sh, whose limits then depend on no other
# process of the machine; an answer lets it pass by writing seconds into the file `clock`.
CLOCK = """
unset SECONDS
set -o functrace
trap 'read -r SECONDS <"{folder}/clock"' DEBUG
"""
# `make gpu` asks the GPU here: this answers without torch.
ENVIRONMENT = """
import json, os, sys
from pathlib import Path
import gpu_results
found = dict.fromkeys([*gpu_results.IDENTITY, "commit", "capability", "cuda"]) | {
    "gpu": "Made Up 9000", "commit": os.environ.get("AMP_MP_COMMIT"),
    "source": os.environ.get("MADE_UP_SOURCE", "abc"), "quick": False}
path = Path("benchmarks/results/Made-Up-9000.json")
gpu_results.begin(path, found)
Path(sys.argv[1]).write_text(json.dumps({**found, "results": str(path)}))
print("Made Up 9000, driver 1")
"""


class Machine:
    """The copied tree in `tree`; `make` calls it."""

    def __init__(self, folder: Path, answers: dict[str, str], whole: bool = False) -> None:
        """answers: what python3 does (bash) if its arguments match; the first that matches counts.

        whole: build, environment and benchmark are the real ones, on the CPU; else all are quick.
        """
        self.folder, self.tree, self.calls = folder, folder / "tree", folder / "calls"
        ignored = shutil.ignore_patterns("*.so", "__pycache__", "results", "*.egg-info")
        for name in COPIED if whole else ("Makefile", "benchmarks", "setup.py"):
            source = ROOT / name
            if source.is_dir():
                shutil.copytree(source, self.tree / name, ignore=ignored)
            else:
                self.tree.mkdir(parents=True, exist_ok=True)
                shutil.copy(source, self.tree / name)
        python = f'exec "{sys.executable}"'
        (folder / "environment.py").write_text(ENVIRONMENT)
        (folder / "clock").write_text("0\n")
        (folder / "clock.sh").write_text(CLOCK.format(folder=folder))
        cases = {f'*"{pattern}"*': answer for pattern, answer in answers.items()}
        if whole:
            cases["*gpu_environment.py*|*gpu_step.py*"] = f'{python} "$@" --device cpu --quick'
            cases["*gpu_syncs.py*"] = f'{python} "$@" --device cpu'
        else:
            environment = f'PYTHONPATH=benchmarks/gpu {python} {folder}/environment.py "$3"'
            cases["*gpu_environment.py*"] = environment
            cases["*gpu_build.py*|*gpu_step.py*|*gpu_syncs.py*"] = "echo done"
        cases['*"-m pytest"*'] = "echo '== 3 passed in 0.10s =='"
        branches = "".join(f"  {pattern}) {answer} ;;\n" for pattern, answer in cases.items())
        self.tool(
            "python3",
            f'#!/bin/bash\necho "$PYTHONPATH|$*" >>"{self.calls}"\ncase "$*" in\n{branches}'
            f'  *) {python} "$@" ;;\nesac\n',
        )
        built = ROOT / "python/amp_mp/native"
        words = {"calls": self.calls, "cuda": folder / "cuda", "kernels": next(built.glob("*.so"))}
        words["binding"] = next(built.glob("*/_C*.so"))
        for name in ("cuda/bin/nvcc", "bin/g++"):
            self.tool(name, COMPILER.format(**words))
        (folder / "cuda/lib64").mkdir()
        (folder / "cuda/lib64/libcudart_static.a").touch()
        self.tool("nm", "#!/bin/bash\n")
        self.tool("nvidia-smi", "#!/bin/bash\necho 580.1\n")
        for name in ("git", "pip", "pip3", "curl", "wget"):
            self.tool(name, FORBIDDEN.format(**words))

    def tool(self, name: str, text: str) -> None:
        path = self.folder / name if "/" in name else self.folder / "bin" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)

    def make(self, target: str, **environment: str) -> subprocess.CompletedProcess[str]:
        """`make target` in the tree; without network where this system can take it away."""
        return self.run(["make", "--no-print-directory", target], **environment)

    def run(self, command: list[str], **environment: str) -> subprocess.CompletedProcess[str]:
        """A command in the tree, as `make` runs one."""
        offline = ["unshare", "-rn"] if _can_unshare() else []
        own = ("AMP_MP_", "PYTHON", "MAKE", "MFLAGS", "GPU_SECONDS", "AGAIN", "OUT", "CXX")
        clean = {k: v for k, v in os.environ.items() if not k.startswith(own)}
        clean |= {
            "PATH": f"{self.folder / 'bin'}:/usr/bin:/bin",
            "CUDA_HOME": str(self.folder / "cuda"),
            "TORCH_CUDA_ARCH_LIST": "9.0",
            "OMP_NUM_THREADS": "1",
            "BASH_ENV": str(self.folder / "clock.sh"),
            **environment,
        }
        command = [*offline, *command]
        return subprocess.run(
            command, cwd=self.tree, env=clean, capture_output=True, text=True, timeout=PATIENCE
        )

    @property
    def results(self) -> dict[str, Any]:
        """The one file of results."""
        (path,) = (self.tree / "benchmarks/results").glob("*.json")
        return dict(json.loads(path.read_text()))

    def called(self, what: str) -> list[str]:
        """The lines of calls that have `what` in them."""
        return [line for line in self.calls.read_text().splitlines() if what in line]

    @property
    def forbidden(self) -> list[str]:
        """Calls of tools that need a network or a repository."""
        path = Path(f"{self.calls}.forbidden")
        return path.read_text().splitlines() if path.exists() else []


def _can_unshare() -> bool:
    try:
        return subprocess.run(["unshare", "-rn", "true"], capture_output=True).returncode == 0
    except OSError:
        return False
