"""What amp.Changes costs, and handing weights to a sampler with it or with a second copy.

1. An AdamW step with max_grad_norm while an amp.Changes watches, against the same step without.
2. From the weights after one step and after eight to a receiver with the same ones: `take` and
   `apply_changes`, against a snapshot of all weights (torch.ne of the bits, nonzero, the values;
   written into the receiver and into the snapshot), against one in the host's pinned memory, as
   trainers keep it (copied to the device, compared there, and all weights copied back), and against
   copying all weights.
3. Bytes a weight: held from one hand-over to the next, and the most while changes are looked for.
4. The share of the demo's bfloat16 weights that a step changes (examples/demo.py).

The weights of 1 to 3 are matrices of Llama's shapes like N(0, .02), with float32 masters that are
no bfloat16 numbers; the learning rate is so small that about 2 % of the weights change at a step,
as in reinforcement learning. Candidates take turns. With one thread the times are CPU time.

    OMP_NUM_THREADS=1 python benchmarks/changes.py
    python benchmarks/changes.py --quick    # the code, not the speed
"""

from __future__ import annotations

import argparse
import copy
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from timing import Candidate, quartiles, samples
from torch import Tensor, nn

import amp_mp as amp

sys.path.append(str(Path(__file__).resolve().parent.parent / "examples"))
from demo import ARMS
from gpt_settings import Settings
from gpt_trainer import Trainer

# By name: the weights' dtype and memory=.
KINDS = {
    "exact": (torch.bfloat16, "exact"),
    "lean": (torch.bfloat16, "lean"),
    "tiny": (torch.bfloat16, "tiny"),
    "micro": (torch.bfloat16, "micro"),
    "float32 weights": (torch.float32, "exact"),
}
PARTS = ("step", "handing", "bytes", "training")
LR = 5e-7
SIZES = {"cpu": (1024, 2), "cuda": (4096, 4), "quick": (64, 1)}  # width, layers
MS = "{:.3g} ({:.3g} to {:.3g})"
TINY_DEMO = {"layers": 1, "width": 32, "batch": 4, "context": 16}


def shapes(width: int, layers: int) -> list[tuple[int, int]]:
    """The matrices of layers of Llama."""
    inner = width * 11 // 4
    attention = [(width, width)] * 4
    return [*attention, (inner, width), (inner, width), (width, inner)] * layers


def model_of(kind: str, size: str, device: str) -> tuple[nn.Module, amp.optim.AdamW]:
    """A model with gradients and its optimizer, after a step."""
    dtype, memory = KINDS[kind]
    source = torch.Generator(device).manual_seed(0)

    def normal(shape: tuple[int, ...], spread: float) -> Tensor:
        return spread * torch.randn(shape, generator=source, device=device)

    model = nn.ParameterList(nn.Parameter(normal(s, 0.02)) for s in shapes(*SIZES[size]))
    if dtype != torch.float32:
        amp.prepare(model, dtype)  # keeps the float32 values for the masters
    optimizer = amp.optim.AdamW(model.parameters(), LR, max_grad_norm=1.0, memory=memory)
    for param in model.parameters():
        param.grad = normal(param.shape, 1e-3).to(param.dtype)
    optimizer.step()
    return model, optimizer


def count_of(model: nn.Module) -> int:
    return sum(param.numel() for param in model.parameters())


def clock_of(device: str) -> Callable[[], float]:
    alone = device == "cpu" and torch.get_num_threads() == 1
    return time.process_time if alone else time.perf_counter


def table(title: str, *columns: str) -> Table:
    made = Table(title=title, title_justify="left")
    for column in columns:
        made.add_column(column, justify="right" if column else "left")
    return made


# ---- a step --------------------------------------------------------------------------------------


def steps(size: str, device: str, rounds: int) -> Table:
    """Each kind's step without and with an amp.Changes, in turns."""
    made = table(
        f"AdamW.step without and with an amp.Changes, ms: median (quartiles) of {rounds} in turns",
        *("", "changed", "alone", "watched", "watched / alone"),
    )
    for kind in KINDS:
        (_, alone), (model, watched) = (model_of(kind, size, device) for _ in range(2))
        changes = amp.Changes(model, torch.bfloat16)
        watched.step()
        share = changes.share()
        candidates = [Candidate("alone", alone.step, 0), Candidate("watched", watched.step, 0)]
        found = samples(candidates, rounds, device, clock=clock_of(device))
        ratio = [w / a for a, w in zip(found["alone"], found["watched"], strict=True)]
        times = (quartiles([1e3 * s for s in found[name]], MS) for name in ("alone", "watched"))
        made.add_row(kind, f"{share:.1%}", *times, quartiles(ratio))
    return made


# ---- handing over --------------------------------------------------------------------------------


class Snapshot:
    """A second copy of the weights beside them, compared with them."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.copies = {name: param.detach().clone() for name, param in model.named_parameters()}

    def find(self) -> dict[str, tuple[Tensor, Tensor]]:
        return {n: self.find_in(n, param) for n, param in self.model.named_parameters()}

    def find_in(self, name: str, param: Tensor) -> tuple[Tensor, Tensor]:
        now, before = param.detach().flatten(), self.copies[name].flatten()
        differ = torch.ne(now.view(torch.int16), before.view(torch.int16))
        places = differ.nonzero().flatten()
        return places, now.index_select(0, places)

    def hand_over(self, receiver: nn.Module, found: dict[str, tuple[Tensor, Tensor]]) -> None:
        """Into the receiver and into the copies."""
        for name, (places, values) in found.items():
            own = [self.copies[name]] if name in self.copies else []
            for to in (receiver.get_parameter(name).detach(), *own):
                to.view(-1).index_copy_(0, places, values)


class HostSnapshot(Snapshot):
    """What trainers do: the copy is in the host's memory, and goes to the device and back."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.held = {name: self.on_host(each) for name, each in self.copies.items()}
        self.copies = {}

    @staticmethod
    def on_host(tensor: Tensor) -> Tensor:
        pinned = tensor.is_cuda
        return torch.empty_like(tensor, device="cpu", pin_memory=pinned).copy_(tensor)

    def find(self) -> dict[str, tuple[Tensor, Tensor]]:
        found = {}
        for name, param in self.model.named_parameters():
            self.copies = {name: self.held[name].to(param.device, copy=True, non_blocking=True)}
            found[name] = self.find_in(name, param)
            self.held[name].copy_(param.detach(), non_blocking=True)
        self.copies = {}
        return found


@torch.no_grad()
def copy_all(receiver: nn.Module, model: nn.Module) -> None:
    for to, weights in zip(receiver.parameters(), model.parameters(), strict=True):
        to.copy_(weights)


def handing(size: str, device: str, rounds: int) -> Iterable[Table]:
    """Each way of handing over, after one step and after eight."""
    model, optimizer = model_of("exact", size, device)
    weights = count_of(model)
    receivers = [copy.deepcopy(model) for _ in range(4)]
    changes, snapshot, pinned = amp.Changes(model), Snapshot(model), HostSnapshot(model)
    clock = clock_of(device)
    finish = torch.cuda.synchronize if device == "cuda" else (lambda: None)

    def timed(run: Callable[..., Any], *given: Any) -> tuple[float, Any]:
        finish()
        start = clock()
        result = run(*given)
        finish()
        return 1e3 * (clock() - start), result

    def bytes_of(found: dict[str, Any]) -> float:
        return sum(p.nbytes + v.nbytes for p, v in found.values()) / weights

    # Each returns the milliseconds of both parts, and the bytes a weight that go over.
    def by_changes() -> list[float]:
        find, taken = timed(changes.take)
        return [find, timed(amp.apply_changes, receivers[0], taken)[0], bytes_of(taken)]

    def by(own: Snapshot, receiver: nn.Module) -> list[float]:
        find, found = timed(own.find)
        return [find, timed(own.hand_over, receiver, found)[0], bytes_of(found)]

    def by_copy() -> list[float]:
        return [0.0, timed(copy_all, receivers[3], model)[0], 2.0]

    ways = {
        "amp.Changes": by_changes,
        "snapshot, compared": lambda: by(snapshot, receivers[1]),
        "snapshot on the host": lambda: by(pinned, receivers[2]),
        "all weights": by_copy,
    }
    for count in (1, 8):
        found: dict[str, list[list[float]]] = {name: [] for name in ways}
        share = 0.0
        for number in range(-2, rounds):
            for _ in range(count):
                optimizer.step()
            share = changes.share()
            order = list(ways)
            for name in order[number % 4 :] + order[: number % 4]:
                find, write, bytes_ = ways[name]()
                if number >= 0:
                    found[name].append([find, write, find + write, bytes_])
        for receiver in receivers:
            for ours, theirs in zip(model.parameters(), receiver.parameters(), strict=True):
                assert torch.equal(ours.view(torch.int16), theirs.view(torch.int16))
        made = table(
            f"Handing over after {count} step(s), {share:.1%} changed, ms: median (quartiles) of "
            f"{rounds} in turns",
            *("", "finding", "writing", "both", "bytes a weight"),
        )
        for name, rows in found.items():
            *times, sizes = (list(each) for each in zip(*rows, strict=True))
            cells = (quartiles(each, MS) if any(each) else "" for each in times)
            made.add_row(name, *cells, f"{statistics.median(sizes):.2f}")
        yield made


# ---- bytes ---------------------------------------------------------------------------------------


def most_bytes(run: Callable[[], object], device: str) -> int:
    """The most memory that tensors take at one time of a call, above what they took before."""
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run()
        return torch.cuda.max_memory_allocated() - before
    with torch.profiler.profile(profile_memory=True) as profile:
        result = run()  # kept as long as the profile
    del result
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    most = now = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    return most


def held_bytes(size: str, device: str) -> Table:
    """Of Changes and of a snapshot."""
    model, optimizer = model_of("exact", size, device)
    changes, snapshot = amp.Changes(model), Snapshot(model)
    count = count_of(model)
    notes = [amp._C.changes_of(param) for param in model.parameters()]
    held = {
        "amp.Changes": sum(each.memory.nbytes for each in notes),
        "snapshot, compared": sum(each.nbytes for each in snapshot.copies.values()),
    }
    optimizer.step()
    share = changes.share()
    meanwhile = {
        "snapshot, compared": most_bytes(snapshot.find, device),
        "amp.Changes": most_bytes(changes.take, device),
    }
    made = table(
        f"Bytes a weight, {share:.1%} changed",
        *("", "held", "more while looking, with what is found"),
    )
    for name in held:
        made.add_row(name, f"{held[name] / count:.3f}", f"{meanwhile[name] / count:.3f}")
    return made


# ---- training ------------------------------------------------------------------------------------


def shares(rate: float, **settings: Any) -> list[float]:
    """The share of bfloat16 weights that each step of the demo's training changes."""
    trainer = Trainer(Settings(**ARMS["amp_mp"], **settings, lr=rate, eval_every=10**6))
    params = dict(trainer.model.named_parameters())
    names = {name for name, param in params.items() if param.dtype == torch.bfloat16}
    whole = sum(params[name].numel() for name in names)
    changes = amp.Changes(trainer.model)
    found = []
    for _ in range(trainer.settings.steps):
        trainer.step()
        taken = changes.take()
        found.append(sum(taken[name].values.numel() for name in names & taken.keys()) / whole)
    return found


def training(rates: list[float], steps: int, **settings: Any) -> Table:
    """Shares at some of the steps, a column for each learning rate."""
    found = [shares(rate, steps=steps, **settings) for rate in rates]
    made = table(
        "Share of the demo's bfloat16 weights that a step changes",
        *("", *(f"largest learning rate {rate:g}" for rate in rates)),
    )
    wanted = [1, 10, *(math.ceil(steps * part / 10) for part in (1, 2, 4, 6, 8, 10))]
    for at in sorted({step for step in wanted if step <= steps}):
        made.add_row(f"step {at}", *(f"{each[at - 1]:.2%}" for each in found))
    made.add_row("median of all", *(f"{statistics.median(each):.2%}" for each in found))
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"], help="where (cpu)")
    parser.add_argument("--threads", type=int, default=1, help="threads for all candidates (1)")
    parser.add_argument("--rounds", type=int, default=15, help="timed rounds (15)")
    parser.add_argument("--parts", choices=PARTS, nargs="*", default=PARTS, help="of these (all)")
    parser.add_argument(
        "--rates", type=float, nargs="*", default=[1.5e-3, 3e-6], help="of trainings (1.5e-3 3e-6)"
    )
    parser.add_argument("--steps", type=int, default=250, help="of each training (250)")
    parser.add_argument("--quick", action="store_true", help="tiny tensors, few rounds and steps")
    arguments = parser.parse_args()
    device, rounds = arguments.device, 2 if arguments.quick else arguments.rounds
    size = "quick" if arguments.quick else device
    torch.set_num_threads(arguments.threads)
    print(f"torch {torch.__version__}, {arguments.threads} thread(s), amp_mp {amp.build_info()}")
    matrices = shapes(*SIZES[size])
    weights = sum(rows * columns for rows, columns in matrices)
    print(f"{len(matrices)} matrices, {weights:,} weights, learning rate {LR:g}")
    console = Console(width=150)
    if "step" in arguments.parts:
        console.print(steps(size, device, rounds))
    if "handing" in arguments.parts:
        for made in handing(size, device, rounds):
            console.print(made)
    if "bytes" in arguments.parts:
        console.print(held_bytes(size, device))
    if "training" in arguments.parts:
        small = TINY_DEMO if arguments.quick else {}
        count = 3 if arguments.quick else arguments.steps
        options = {"device": device, "threads": arguments.threads, **small}
        console.print(training(arguments.rates, count, **options))


if __name__ == "__main__":
    main()
