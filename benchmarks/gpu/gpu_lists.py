"""What gpu_step.py steps: four lists of parameters, by their real shapes.

One tensor of 10^9 elements; a quarter of the layers of Llama 2 7B, so that torch's pipeline fits
into 80 GB as well; ResNet-50; 2,000 tensors of 1,000.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

Shape = tuple[int, ...]


@dataclass(frozen=True)
class ShapeList:
    """A model's parameters as an optimizer sees them.

    key: its name in results; title: in tables; large: steps are far longer than their launches, and
    candidates are so big that they are built and timed one after the other.
    """

    key: str
    title: str
    shapes: tuple[Shape, ...]
    large: bool

    @property
    def sizes(self) -> list[int]:
        return [math.prod(shape) for shape in self.shapes]

    @property
    def elements(self) -> int:
        return sum(self.sizes)


def llama_shapes(
    hidden: int = 4096, layers: int = 8, inner: int = 11008, words: int = 32000
) -> list[Shape]:
    """Llama 2 7B's shapes with 8 of its 32 layers: embedding, layers, norm, last matrix."""
    layer: list[Shape] = [
        (hidden, hidden),  # query
        (hidden, hidden),  # key
        (hidden, hidden),  # value
        (hidden, hidden),  # output
        (inner, hidden),  # gate
        (inner, hidden),  # up
        (hidden, inner),  # down
        (hidden,),  # norm before attention
        (hidden,),  # norm before the MLP
    ]
    return [(words, hidden), *(layer * layers), (hidden,), (words, hidden)]


def resnet50_shapes(width: int = 64, classes: int = 1000) -> list[Shape]:
    """ResNet-50's 161 parameters; `width`: channels of the first convolution."""
    shapes: list[Shape] = [(width, 3, 7, 7), (width,), (width,)]
    channels = width
    for stage, blocks in enumerate((3, 4, 6, 3)):
        inner = width * 2**stage
        outer = 4 * inner
        for block in range(blocks):
            convolutions = [(inner, channels, 1), (inner, inner, 3), (outer, inner, 1)]
            if block == 0:
                convolutions.append((outer, channels, 1))  # the shortcut
            for to, from_, side in convolutions:
                shapes += [(to, from_, side, side), (to,), (to,)]  # and its batch norm
            channels = outer
    return [*shapes, (classes, channels), (classes,)]


def shape_lists(quick: bool = False) -> list[ShapeList]:
    """The four lists; `quick`: with the same structure, a few thousand elements each."""
    if quick:
        return [
            ShapeList("one", "one tensor of 16,384", ((16_384,),), True),
            ShapeList("llama", "a tiny Llama", tuple(llama_shapes(16, 2, 32, 64)), True),
            ShapeList("resnet50", "a thin ResNet-50", tuple(resnet50_shapes(2, 10)), False),
            ShapeList("many", "20 tensors of 1,000", ((1000,),) * 20, False),
        ]
    return [
        ShapeList("one", "one tensor of 1,000,000,000", ((1_000_000_000,),), True),
        ShapeList("llama", "Llama 2 7B, 8 of 32 layers, 75 tensors", tuple(llama_shapes()), True),
        ShapeList("resnet50", "ResNet-50, 161 tensors", tuple(resnet50_shapes()), False),
        ShapeList("many", "2,000 tensors of 1,000", ((1000,),) * 2000, False),
    ]


def parameters(shapes: ShapeList, device: str, scale: float) -> list[torch.nn.Parameter]:
    """bfloat16 parameters like 0.02 N(0, 1) with bfloat16 gradients like 10^-3 scale N(0, 1)."""
    generator = torch.Generator(device).manual_seed(0)
    made = []
    for shape in shapes.shapes:
        tensors = [torch.empty(shape, dtype=torch.bfloat16, device=device) for _ in range(2)]
        param = torch.nn.Parameter(tensors[0].normal_(0, 0.02, generator=generator))
        param.grad = tensors[1].normal_(0, 1e-3 * scale, generator=generator)
        made.append(param)
    return made
