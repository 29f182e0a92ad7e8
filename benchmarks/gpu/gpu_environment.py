"""What has to be known to read figures later: commit, code, GPU, driver, versions of libraries.

    python benchmarks/gpu/gpu_environment.py --json build/gpu/environment.json

begins the file of the results as well. Exit status 1 if torch finds no GPU.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import gpu_results
import torch
from gpu_peers_folder import PEERS

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path.append(str(ROOT))

from build_tools.metadata import commit  # noqa: E402

RESULTS = HERE.parent / "results"
NATIVE = ("csrc", "build_tools", "setup.py")  # what the compiled library is made of
SOURCE = (*NATIVE, "python/amp_mp", "benchmarks/gpu", "benchmarks/step.py")
MODULES = {  # a package's module, where it has another name
    "triton": "triton",
    "flashoptim": "flashoptim",
    "torch-optimi": "optimi",
    "bitsandbytes": "bitsandbytes",
    "torchao": "torchao",
    "numpy": "numpy",
    "setuptools": "setuptools",
    "pytest": "pytest",
    "pytest-timeout": "pytest_timeout",
    "pytest-xdist": "xdist",
}


def command_output(*command: str) -> str | None:
    """What a command prints; None if it is not there or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, cwd=HERE, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None if done.returncode == 0 else None


def digest(names: Iterable[str], root: Path = ROOT) -> str:
    """16 digits that differ if a file differs; of a folder, all sources in it are taken."""
    whole = hashlib.sha256()
    for name in names:
        found = [root / name] if (root / name).is_file() else (root / name).rglob("*")
        for path in sorted(found):
            if path.suffix in (".py", ".h", ".cpp", ".cu"):
                content = path.read_bytes()
                whole.update(f"{path.relative_to(root)} {len(content)}\n".encode() + content)
    return whole.hexdigest()[:16]


def versions() -> dict[str, str]:
    """Of the libraries that are here; PYTHONPATH's count, and those without metadata."""
    found = {}
    for package, module in MODULES.items():
        if importlib.util.find_spec(module) is None:
            continue
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "of unknown version"
    return found


CLOCKS = {
    "sm_mhz": "clocks.sm",
    "memory_mhz": "clocks.mem",
    "celsius": "temperature.gpu",
    "watts": "power.draw",
}


def clocks() -> dict[str, float] | None:
    """The GPU's clocks, temperature and power now; None where nvidia-smi does not tell them."""
    query = ["nvidia-smi", f"--query-gpu={','.join(CLOCKS.values())}"]
    if uuid := getattr(torch.cuda.get_device_properties(0), "uuid", None):
        query.append(f"--id=GPU-{uuid}")
    said = command_output(*query, "--format=csv,noheader,nounits") or ""
    values = said.partition("\n")[0].split(", ")
    told = zip(CLOCKS, values, strict=False)
    return {name: float(v) for name, v in told if re.fullmatch(r"[0-9.]+", v)} or None


def environment(device: str, quick: bool = False) -> dict[str, Any]:
    """All of it; `quick`: of figures that only try the code."""
    query = ("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    on_gpu = device == "cuda"
    return {
        "commit": commit() or None,
        "source": digest(SOURCE),
        "gpu": torch.cuda.get_device_name() if on_gpu else None,
        "driver": command_output(*query) if on_gpu else None,
        "capability": "{}.{}".format(*torch.cuda.get_device_capability()) if on_gpu else None,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cores": os.cpu_count(),
        "clocks": clocks() if on_gpu else None,
        "packages": versions(),
        "quick": quick,
    }


def describe(found: dict[str, Any]) -> str:
    """For people, with what is missing."""
    lines = [f"{found['gpu'] or 'CPU'}, driver {found['driver']}, {found['cores']} cores"]
    lines.append(f"python {found['python']}, torch {found['torch']}, CUDA {found['cuda']}")
    lines.append(f"commit {found['commit'] or 'unknown'}, code {found['source']}")
    if found["clocks"]:
        lines.append(", ".join(f"{name} {value:g}" for name, value in found["clocks"].items()))
    here = found["packages"]
    for what, names in (("peers", PEERS), ("libraries", [m for m in MODULES if m not in PEERS])):
        lines.append(f"{what}: " + ", ".join(f"{n} {here[n]}" for n in names if n in here))
        if missing := [name for name in names if name not in here]:
            lines[-1] += f"; not here: {', '.join(missing)}"
    if not set(PEERS) & here.keys():
        lines.append("make gpu-peers makes a folder of them where there is a network: build/peers")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda", choices=["cpu", "cuda"], help="where (cuda)")
    parser.add_argument("--quick", action="store_true", help="figures will only try the code")
    parser.add_argument("--json", type=Path, required=True, help="where it goes, for other parts")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the results")
    arguments = parser.parse_args()
    if arguments.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("make gpu: torch finds no GPU here")
    found = environment(arguments.device, arguments.quick)
    if not found["commit"]:
        raise SystemExit(
            "make gpu: no git and no file COMMIT says which commit this is; name it, "
            "AMP_MP_COMMIT=$(git rev-parse HEAD) make gpu, or write AMP_MP_COMMIT=unknown"
        )
    path = arguments.out / gpu_results.file_name(found["gpu"])
    gpu_results.begin(path, found)
    arguments.json.write_text(json.dumps({**found, "results": str(path)}) + "\n")
    print(describe(found))


if __name__ == "__main__":
    main()
