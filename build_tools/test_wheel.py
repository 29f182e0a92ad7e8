"""Installs the wheel of dist/ beside a version of torch, as a user does, and runs tests against it.

    python build_tools/test_wheel.py --torch 2.15.0    # make test-wheel TORCH=2.15.0 PYTHON=python

The environment, with torch, stays in build/wheel-test (5.5 GB with CUDA's libraries); the wheel is
installed each time. Tests, README and docs are copied to a folder without the package's source, so
that only the wheel can be imported. First the README's example runs with nothing set (`env -i`),
then the README's recipes, the test of torch's private names, and the tests of contract, casting,
grad_scaler, state and checkpoints.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT))

from build_tools.packages import packages  # noqa: E402

COPIED = (
    "README.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    "pyproject.toml",
    "docs",
    "tests",
    "examples",
    "benchmarks",
    "csrc",
)
TESTS = (
    "tests/project/test_docs.py::test_the_recipes_of_the_readme_run",
    "tests/project/test_torch_private.py",
    "tests/contract",
    "tests/casting",
    "tests/grad_scaler",
    "tests/optim/state",
    "tests/checkpoint",
)
ABOUT = (
    "import amp_mp, torch; print('torch', torch.__version__, '; amp_mp', amp_mp.__version__, "
    "amp_mp.__file__, amp_mp.build_info())"
)


def run(*command: str | Path, cwd: Path | None = None, env: dict[str, str] | None = None) -> None:
    """A command, shown; on failure this program ends with its status."""
    print("+", *command, flush=True)
    done = subprocess.run([str(part) for part in command], cwd=cwd, env=env)
    if done.returncode:
        raise SystemExit(done.returncode)


def environment(torch: str) -> Path:
    """The Python of an environment with this torch and what the tests need; made once."""
    folder = ROOT / f"build/wheel-test/{torch}-{sys.implementation.cache_tag}"
    python = folder / "bin/python"
    if not (folder / "made").exists():
        print(f"installing torch {torch}: up to 5.5 GB with CUDA's libraries", flush=True)
        run(sys.executable, "-m", "venv", folder)
        run(python, "-m", "pip", "install", f"torch=={torch}")
        run(python, "-m", "pip", "install", "--quiet", *packages("test", "examples"))
        (folder / "made").touch()
    return python


def newest_wheel() -> Path:
    """The wheel for this Python in dist/."""
    tag = f"cp{sys.version_info[0]}{sys.version_info[1]}"
    found = sorted((ROOT / "dist").glob(f"amp_mp-*-{tag}-*.whl"), key=lambda p: p.stat().st_mtime)
    if not found:
        raise SystemExit(
            f"dist/ has no wheel for {tag}; make it: {sys.executable} build_tools/wheel.py"
        )
    return found[-1]


def copy_tree(tree: Path) -> None:
    """Copies what tests read, without the package, and the README's first block as example.py."""
    for name in COPIED:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, tree / name)
    example = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)[0]
    (tree / "example.py").write_text(example)


def main() -> None:
    """What the text above says."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--torch", required=True, help="a version, such as 2.15.0")
    parser.add_argument("tests", nargs="*", default=TESTS, help="default: what the text above says")
    arguments = parser.parse_args()
    wheel, python = newest_wheel(), environment(arguments.torch)
    run(python, "-m", "pip", "install", "--quiet", "--force-reinstall", "--no-deps", wheel)
    run(python, "-m", "pip", "check")
    with tempfile.TemporaryDirectory(prefix="amp_mp-wheel-") as folder:
        tree = Path(folder)
        copy_tree(tree)
        run(python, "-c", ABOUT, cwd=tree)
        run(python, "example.py", cwd=tree, env={})
        clean = {k: v for k, v in os.environ.items() if not k.startswith(("AMP_MP_", "PYTHON"))}
        command = ["-m", "pytest", "-p", "no:cacheprovider", "-q", "-n", "2", "--dist", "loadgroup"]
        run(python, *command, "-m", "not full", *arguments.tests, cwd=tree, env=clean)


if __name__ == "__main__":
    main()
