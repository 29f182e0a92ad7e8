"""How orthogonal Muon's updates are: their smallest and largest singular value, by coefficients.

Random matrices of five shapes and three spectra, whose singular values are at least .002 of the
matrix' norm, for which the sets of coefficients are made. What the polynomials themselves make of
[.002, 1], in float64, stands beside it. The column "gram" is of ns_gram=True; on a CPU it is the
same for every dtype. Its error is the largest distance, in the spectral norm, to float64's update.

With --speed: milliseconds of one matrix in turns, each on its own, with and without ns_gram.

    OMP_NUM_THREADS=1 python benchmarks/orthogonality.py
    OMP_NUM_THREADS=1 python benchmarks/orthogonality.py --speed
"""

from __future__ import annotations

import argparse
from time import perf_counter
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table
from torch import Tensor

from amp_mp._C import ns_iterations, orthogonalise_
from amp_mp.casting.products import choose_products

SHAPES = [(64, 64), (256, 256), (96, 300), (128, 512), (512, 128)]
SPECTRA = ("gaussian", "geometric", "spike")
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
SPEED_SHAPES = [(256, n) for n in (256, 384, 512, 1024, 2048)] + [(512, 2048), (768, 3072)]
LEAST = 2e-3  # of the norm
SETS: dict[str, dict[str, Any]] = {
    "quintic": {"ns_coefficients": "quintic"},
    "cans": {"ns_coefficients": "cans"},
    "polar_express, 5 steps": {"ns_coefficients": "polar_express", "ns_steps": 5},
    "polar_express": {"ns_coefficients": "polar_express"},
    "deepseek": {"ns_coefficients": "deepseek"},
}


def spectrum_of(name: str, count: int, source: torch.Generator) -> Tensor:
    """Singular values: a Gaussian matrix', from 1 down to .003, or one of 1 over equal ones."""
    if name == "gaussian":
        values = torch.linalg.svdvals(torch.randn(count, count, generator=source).double())
    elif name == "geometric":
        values = torch.logspace(0, np.log10(3e-3), count, dtype=torch.float64)
    else:
        values = torch.full((count,), 3e-3, dtype=torch.float64)
        values[0] = 1
    return values.clamp_min(1.1 * LEAST * float(values.norm()))


def matrices(shape: tuple[int, int], spectrum: str, count: int, seed: int) -> Tensor:
    """A stack of random matrices of a spectrum, as Muon's directions are: bfloat16."""
    source = torch.Generator().manual_seed(seed)
    least = min(shape)
    sides = [
        torch.linalg.qr(torch.randn(count, n, least, generator=source).double())[0] for n in shape
    ]
    values = torch.stack([spectrum_of(spectrum, least, source) for _ in range(count)])
    return (sides[0] * values[:, None] @ sides[1].mT).bfloat16()


def orthogonal(stack: Tensor, dtype: torch.dtype, group: dict[str, Any]) -> Tensor:
    """What becomes of the stack."""
    made = stack.clone()
    orthogonalise_(made, {**group, "ns_dtype": dtype})
    return made


def singular_values(stack: Tensor) -> NDArray[np.float64]:
    """Those of all matrices."""
    return torch.linalg.svdvals(stack.double()).numpy()


def composed(group: dict[str, Any], values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Where the polynomials send singular values."""
    for a, b, c in ns_iterations(group):
        values = a * values + b * values**3 + c * values**5
    return values


def parts_of(stack: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Float64 singular vectors of each matrix and, between them, values by its norm."""
    left, values, right = torch.linalg.svd(stack.double(), full_matrices=False)
    return left, values / values.norm(dim=-1, keepdim=True), right


def polar(parts: tuple[Tensor, Tensor, Tensor], group: dict[str, Any]) -> Tensor:
    """The polynomials' updates in float64, of matrices with these parts."""
    left, values, right = parts
    return left * torch.from_numpy(composed(group, values.numpy()))[:, None] @ right


def distance(found: Tensor, wanted: Tensor) -> float:
    """The largest singular value of what stacks differ by."""
    return float(torch.linalg.matrix_norm(found.double() - wanted, 2).max())


def text(values: NDArray[np.float64]) -> str:
    """The range of values."""
    return f"{values.min():.4f} to {values.max():.4f}"


def show_speed(rounds: int) -> None:
    """A table of medians, with the fastest and slowest round."""
    table = Table(title=f"milliseconds, median of {rounds} rounds", title_justify="left")
    ways = [(dtype, on_gram) for dtype in (DTYPES[0], DTYPES[2]) for on_gram in (False, True)]
    for column in ("coefficients", "shape", "bfloat16", "with ns_gram", "float32", "with ns_gram"):
        table.add_column(column)
    for name in ("quintic", "polar_express"):
        for shape in SPEED_SHAPES:
            stack = torch.randn(1, *shape).bfloat16()
            taken: dict[Any, list[float]] = {way: [] for way in ways}
            for _ in range(rounds + 1):
                for dtype, on_gram in ways:
                    start = perf_counter()
                    orthogonal(stack, dtype, {**SETS[name], "ns_gram": on_gram})
                    taken[dtype, on_gram].append(1e3 * (perf_counter() - start))
            cells = [
                f"{np.median(times[1:]):.1f} ({min(times[1:]):.1f} to {max(times[1:]):.1f})"
                for times in taken.values()
            ]
            table.add_row(name, "{} x {}".format(*shape), *cells)
    Console(width=130).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=1005, help="matrices (1005)")
    parser.add_argument("--seed", type=int, default=0, help="of the matrices (0)")
    parser.add_argument("--speed", action="store_true", help="measure milliseconds instead")
    parser.add_argument("--rounds", type=int, default=9, help="of --speed (9)")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    for dtype in DTYPES[:2]:
        choose_products("auto", dtype)
    if arguments.speed:
        show_speed(arguments.rounds)
        return
    each = max(1, arguments.count // (len(SHAPES) * len(SPECTRA)))
    title = f"{each * len(SHAPES) * len(SPECTRA)} matrices: singular values of the updates"
    table = Table(title=title, title_justify="left")
    columns = ("coefficients", "steps", "polynomials", *map(str, DTYPES), "gram", "its error")
    for column in columns:
        table.add_column(column.replace("torch.", ""))
    stacks = [
        matrices(shape, spectrum, each, arguments.seed) for shape in SHAPES for spectrum in SPECTRA
    ]
    parts = [parts_of(stack) for stack in stacks]
    grid = np.geomspace(LEAST, 1.0, 200_001)
    for name, group in SETS.items():
        ranges = []
        for dtype in DTYPES:
            found = [singular_values(orthogonal(stack, dtype, group)) for stack in stacks]
            ranges.append(text(np.concatenate([values.ravel() for values in found])))
        made = [orthogonal(stack, DTYPES[0], {**group, "ns_gram": True}) for stack in stacks]
        ranges.append(text(np.concatenate([singular_values(each).ravel() for each in made])))
        errors = [distance(a, polar(b, group)) for a, b in zip(made, parts, strict=True)]
        ranges.append(f"{max(errors):.4f}")
        steps, whole = str(len(ns_iterations(group))), text(composed(group, grid))
        table.add_row(name, steps, whole, *ranges)
    Console(width=150).print(table)


if __name__ == "__main__":
    main()
