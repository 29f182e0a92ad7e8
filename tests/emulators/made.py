"""Runs g++ for what is not there yet: objects and programs stay in build/emulators between runs.

A target is made again where its command, the compiler, or a byte of what it was made from differs.
Processes that want the same target at the same time make it once.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import json
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
KEPT = ROOT / "build/emulators"


def compiled(source: Path, command: Sequence[str]) -> Path:
    """The object that `command` makes of a source; who asks with the same command shares it.

    A change of system headers, torch's among them, is not seen: a version belongs in the command.

    Raises:
        RuntimeError: the compiler refused something; its output is in the message.
    """
    command = [*command, "-c", str(source)]
    name = hashlib.sha256("\0".join(command).encode()).hexdigest()[:16]
    target = KEPT / f"objects/{source.name}-{name}.o"
    depends = target.with_suffix(".d")
    return _made([*command, "-MMD", "-MF", str(depends)], target, depends)


def librarys(name: str, *needed: str) -> Path | None:
    """An object of build/native; None where it is older than its sources, or made otherwise.

    name: without its ending. needed: options that its command must have.
    """
    target = ROOT / f"build/native/{name}.o"
    recipe, depends = target.with_suffix(".cmd"), target.with_suffix(".d")
    made = recipe.read_text() if recipe.exists() else ""
    if not target.exists() or not all(option in made for option in ("-c", *needed)):
        return None
    when = target.stat().st_mtime
    sources = map(Path, _of_depends(depends))
    return target if all(s.exists() and s.stat().st_mtime < when for s in sources) else None


def linked(command: Sequence[str], target: Path) -> Path:
    """The program or library `target`, which `command` links; its objects are in the command.

    Raises:
        RuntimeError: the linker refused something; its output is in the message.
    """
    return _made(command, target, None)


def _made(command: Sequence[str], target: Path, depends: Path | None) -> Path:
    recipe = [*command, "-o", str(target)]
    record = target.with_name(f"{target.name}.made")
    target.parent.mkdir(parents=True, exist_ok=True)
    with _alone(target):
        if not (target.exists() and record.exists() and _is_current(record, recipe)):
            record.unlink(missing_ok=True)
            _run(recipe)
            files = _of_depends(depends) if depends else [a for a in command if a.endswith(".o")]
            record.write_text(
                json.dumps(
                    {
                        "compiler": _version(command[0]),
                        "recipe": recipe,
                        "files": {f: _digest(f) for f in files},
                    }
                )
            )
    return target


def _is_current(record: Path, recipe: list[str]) -> bool:
    made = json.loads(record.read_text())
    return (
        made["recipe"] == recipe
        and made["compiler"] == _version(recipe[0])
        and all(Path(f).exists() and _digest(f) == digest for f, digest in made["files"].items())
    )


def _of_depends(depends: Path) -> list[str]:
    """What -MMD wrote: the source and its headers."""
    return depends.read_text().replace("\\\n", " ").split(":", 1)[1].split()


def _digest(file: str) -> str:
    status = Path(file).stat()
    return _digest_of(file, status.st_mtime_ns, status.st_size)


@functools.cache
def _digest_of(file: str, *_: int) -> str:
    """A file's contents; read once per process while it stays as it is."""
    return hashlib.sha256(Path(file).read_bytes()).hexdigest()


@functools.cache
def _version(compiler: str) -> str:
    return _run([compiler, "--version"])


def _run(command: Sequence[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}\n{done.stdout}{done.stderr}")
    return done.stdout


@contextmanager
def _alone(target: Path) -> Iterator[None]:
    """Other processes that make the same target wait, and find it made."""
    with open(target.with_name(f"{target.name}.lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
