"""What layer types cost: time and kept activations of every combination, float32 being 1.

OMP_NUM_THREADS=1 python benchmarks/layer_types.py
python benchmarks/layer_types.py --device cuda --batch 256
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable

import torch
from timing import Candidate, kept_bytes, medians
from torch import Tensor, nn

from amp_mp.compat import set_layer_types

TYPES, MATHS = ("DOUBLE", "FLOAT", "FLOAT16"), ("FLOAT", "FLOAT16")
PLAIN = "without types"
NETS: dict[str, Callable[[], nn.Module]] = {
    "convolutions": lambda: nn.Sequential(
        *(nn.Conv2d(3, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(32, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(64 * 8 * 8, 10)),
    ),
    "linear layers": lambda: nn.Sequential(
        *(nn.Flatten(), nn.Linear(3 * 32 * 32, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU()),
        nn.Linear(512, 10),
    ),
}


def candidate(name: str, net: nn.Module, x: Tensor) -> Candidate:
    def run() -> None:
        net.zero_grad()
        net(x).float().square().mean().backward()

    return Candidate(name, run, kept_bytes(net, net, x))


def candidates(make: Callable[[], nn.Module], x: Tensor, device: str) -> list[Candidate]:
    found = [candidate(PLAIN, make().to(device), x)]
    for words in itertools.product(TYPES, TYPES, MATHS, MATHS):
        net = make().to(device)
        forward, backward, forward_math, backward_math = words
        set_layer_types(
            net,
            default_forward_type=forward,
            default_backward_type=backward,
            default_forward_math=forward_math,
            default_backward_math=backward_math,
        )
        found.append(candidate(" ".join(words), net, x))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=9)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    x = torch.randn(arguments.batch, 3, 32, 32, device=arguments.device)
    cells: dict[str, list[str]] = {}
    for make in NETS.values():
        found = candidates(make, x, arguments.device)
        seconds = medians(found, arguments.rounds, arguments.device)
        plain = found[0]
        print(f"# {1e3 * seconds[PLAIN]:.1f} ms, {plain.moved / 1e6:.2f} MB without types")
        for each in found[1:]:
            time, memory = seconds[each.name] / seconds[PLAIN], each.moved / plain.moved
            cells.setdefault(each.name, []).extend((f"{time:.2f}", f"{memory:.2f}"))
    heads = [f"{name}: {what}" for name in NETS for what in ("time", "memory")]
    print("| " + " | ".join(["forward", "backward", "forward math", "backward math", *heads]), "|")
    print("|---" * (4 + len(heads)) + "|")
    for name, numbers in cells.items():
        print("| " + " | ".join([*name.split(), *numbers]), "|")


if __name__ == "__main__":
    main()
