"""Writes what all trainings compute with the amp_mp of PYTHONPATH: pickles to standard output.

Usage: write_bits.py [ROW ...], which leaves out all other rows. build_tools/same_bits.py runs it
with two versions of the package. First comes the package's file
and the instruction set; then, for each case of trainings.py, its row, its column and its tensors by
name, each as (dtype, shape, bytes), or in place of the tensors the text of an error.
"""

from __future__ import annotations

import io
import pickle
import sys
import warnings
from contextlib import redirect_stderr, redirect_stdout
from typing import Any

import torch
from torch import Tensor

import amp_mp as amp


def absent(name: str) -> Any:
    """In place of an optimizer that this version of the package does not have yet."""
    if name.startswith("_"):
        raise AttributeError(name)

    def make(*_: Any, **__: Any) -> None:
        raise NotImplementedError(f"amp_mp.optim has no {name}")

    return make


def bits(tensor: Tensor) -> tuple[str, tuple[int, ...], bytes]:
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    return str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), flat.numpy().tobytes()


if __name__ == "__main__":
    out = sys.stdout.buffer
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    amp.optim.__getattr__ = absent  # rules.py names every optimizer
    import trainings

    pickle.dump((amp.__file__, amp.build_info()["cpu"]), out)
    rows = sys.argv[1:]
    for row, column, train in trainings.cases():
        if rows and row not in rows:
            continue
        try:
            with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):  # of overflows
                found: Any = {name: bits(tensor) for name, tensor in train().items()}
        except Exception as error:
            found = f"{type(error).__name__}: {error}".splitlines()[0]
        pickle.dump((row, column, found), out)
        out.flush()
