"""A GPT's training step on processors with and without fast low-precision products.

    python benchmarks/products_step.py                      each instruction set, two threads
    python benchmarks/products_step.py --isa AVX2 --rounds 30

Everything is held to an instruction set (held.py), in a process of its own. Times are medians over
rounds in which the arms take turns, as a part of float32's, with the range of the middle half;
memory is what autograd keeps of a step.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from held import ISAS, outputs
from rich.console import Console
from rich.table import Table
from timing import kept_bytes, quartiles

import amp_mp as amp
from amp_mp import _C
from amp_mp.casting.products import choose_products, describe_products

sys.path.append(str(Path(__file__).resolve().parent.parent / "examples"))
from gpt_settings import Settings
from gpt_trainer import Trainer

FLOAT32 = {"precision": "float32", "optimizer": "torch-adamw"}
OURS = {"precision": "bfloat16", "optimizer": "adamw"}
# By name: the settings, whether amp.init's casts are on, and the products of low precision.
ARMS: dict[str, tuple[dict[str, Any], bool, str]] = {
    "float32": (FLOAT32, False, "native"),
    "torch.autocast": ({**FLOAT32, "precision": "autocast"}, False, "native"),
    "prepare, native": (OURS, False, "native"),
    "prepare": (OURS, False, "auto"),
    "amp.init": (FLOAT32, True, "auto"),
}


@contextmanager
def set_up(casts: bool, products: str) -> Iterator[None]:
    """A block with amp.init's casts, if `casts`, and these products."""
    handle = amp.init(device_type="cpu", enabled=casts, loss_scale=1.0)
    choose_products(products, torch.bfloat16)
    yield
    handle._deactivate()


def measure(rounds: int, threads: int) -> dict[str, Any]:
    """Seconds of each arm's steps, and its bytes; the processor's speeds beside them."""
    torch.set_num_threads(threads)
    choose_products("auto", torch.bfloat16)
    auto = _C.products.choice(torch.bfloat16)
    arms = {
        name: (Trainer(Settings(**settings, steps=10**6, eval_every=10**6)), casts,
               auto if products == "auto" else products)
        for name, (settings, casts, products) in ARMS.items()
    }  # fmt: skip
    seconds: dict[str, list[float]] = {name: [] for name in arms}
    for number in range(rounds + 2):
        for name, (trainer, casts, products) in arms.items():
            if number > 3 and min(seconds[name]) > 5 * min(seconds["float32"]):
                continue  # far slower: two rounds tell
            with set_up(casts, products):
                before = time.perf_counter()
                trainer.step()
                if number >= 2:
                    seconds[name].append(time.perf_counter() - before)
    found: dict[str, Any] = {"products": describe_products(), "chosen": auto, "seconds": seconds}
    found["bytes"] = {}
    for name, (trainer, casts, products) in arms.items():
        with set_up(casts, products):
            kept = kept_bytes(trainer.model, trainer._loss, *trainer.batch(0))
            found["bytes"][name] = kept
    return found


def show(title: str, found: dict[str, Any]) -> None:
    """Prints the table of one instruction set."""
    base = found["seconds"]["float32"]
    table = Table("", "ms", "of float32's time", "kept of a step, of float32's")
    for name, seconds in found["seconds"].items():
        ratios = [own / other for own, other in zip(seconds, base, strict=False)]
        kept = found["bytes"][name] / found["bytes"]["float32"]
        cells = f"{1e3 * statistics.median(seconds):.1f}", quartiles(ratios)
        table.add_row(name, *cells, f"{kept:.0%}")
    console = Console(width=100)
    console.print(f"{title}; auto: {found['chosen']}")
    console.print(found["products"], highlight=False)
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--isa", choices=ISAS, nargs="*", default=ISAS)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        print(json.dumps(measure(arguments.rounds, arguments.threads)))
        return
    child = [__file__, "--child", f"--rounds={arguments.rounds}", f"--threads={arguments.threads}"]
    for title, printed in outputs(arguments.isa, *child):
        show(title, json.loads(printed.splitlines()[-1]))


if __name__ == "__main__":
    main()
