"""Bytes a process for models of 1 to 405 billion parameters under fully_shard, as a table."""

from __future__ import annotations

from dataclasses import dataclass

import amp_mp as amp

RANKS = (8, 64, 256, 1024)
GIB = 2**30
# Of sharded_memory's recipes.
SHORT = ("float32", "float32, lean states", "exact", "lean", "tiny", "micro", "nano", "masterless")


@dataclass(frozen=True)
class Shape:
    """A decoder with gated feed-forward layers and grouped keys and values, as Llama 3's."""

    name: str
    layers: int
    width: int
    hidden: int  # of the feed-forward layers
    keys: int  # columns of the key and of the value projection
    vocabulary: int = 128_256
    tied: bool = False

    @property
    def block(self) -> int:
        """Parameters of one block: the projections, the feed-forward layers, two norms."""
        attention = 2 * self.width * (self.width + self.keys)
        return attention + 3 * self.width * self.hidden + 2 * self.width

    @property
    def embedding(self) -> int:
        """Parameters of the embedding; the output layer has as many, unless they are tied."""
        return self.vocabulary * self.width

    @property
    def parameters(self) -> int:
        """All parameters."""
        tables = self.embedding * (1 if self.tied else 2)
        return self.layers * self.block + tables + self.width


SHAPES = (
    Shape("1 B", 16, 2048, 8192, 512, tied=True),
    Shape("8 B", 32, 4096, 14336, 1024),
    Shape("70 B", 80, 8192, 28672, 1024),
    Shape("405 B", 126, 16384, 53248, 1024),
)


def rows(shape: Shape, replicas: int = 1) -> list[str]:
    """The table's rows for one model: GiB held, by recipe, and GiB received in a step."""
    largest = max(shape.block, shape.embedding)
    found = []
    for ranks in (each for each in RANKS if each > replicas):
        memory = amp.diagnose.sharded_memory(
            shape.parameters, ranks, replicas=replicas, largest_unit=largest
        )
        held = [f"{row.held / GIB:,.1f}" for row in memory.rows]
        first = memory.rows[0]
        received = [f"{first.all_gather / GIB:,.1f}", f"{first.reduce / GIB:,.1f}"]
        gathered = f"{first.gathered / GIB:.1f}"
        cells = [shape.name, f"{ranks:,}", *held, gathered, *received, f"{first.verdict:,.0f} B"]
        found.append("| " + " | ".join(cells) + " |")
    return found


def table(replicas: int = 1) -> str:
    """A Markdown table for all models and numbers of processes."""
    named = ["parameters", "processes", *SHORT, "of it gathered", "all-gather", "reduce", "norm"]
    lines = ["| " + " | ".join(named) + " |", "|" + "---|" * len(named)]
    for shape in SHAPES:
        lines += rows(shape, replicas)
    return "\n".join(lines)


def main() -> None:
    print("fully_shard over all processes (GiB):", table(), sep="\n\n")
    print("\nHSDP with 8 replicas (GiB):", table(replicas=8), sep="\n\n")


if __name__ == "__main__":
    main()
