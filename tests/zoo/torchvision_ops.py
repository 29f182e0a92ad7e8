"""Makes torchvision importable beside a torch for which its native library was not built.

torchvision's packages of PyPI are for CUDA, and their library does not load into torch's CPU build.
Detection needs one native operator in training, nms. It is defined here in Python, from its
documentation, where the native one is missing; roi_align has a Python form in torchvision itself.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import torch
from torch import Tensor


def nms(boxes: Tensor, scores: Tensor, iou_threshold: float) -> Tensor:
    """Indices of the boxes that no box of a higher score overlaps by more than the threshold."""
    order = scores.argsort(descending=True, stable=True)
    area = (boxes[:, 2:] - boxes[:, :2]).prod(1)
    kept = []
    while order.numel():
        first, order = order[0], order[1:]
        kept.append(first)
        low = torch.maximum(boxes[first, :2], boxes[order, :2])
        high = torch.minimum(boxes[first, 2:], boxes[order, 2:])
        common = (high - low).clamp(min=0).prod(1)
        order = order[common / (area[first] + area[order] - common) <= iou_threshold]
    return torch.stack(kept) if kept else torch.empty(0, dtype=torch.int64)


def install() -> None:
    """Defines the operator if torchvision's library does not load."""
    found = importlib.util.find_spec("torchvision")
    if found is None or found.origin is None:
        return
    for library in Path(found.origin).parent.glob("_C*.so"):
        try:
            torch.ops.load_library(str(library))
        except OSError:
            continue
        return
    define = torch.library.Library("torchvision", "FRAGMENT")
    define.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    define.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    define.impl("nms", nms, "CPU")
    globals()["_kept"] = define  # the definitions end with this object
    from torchvision import extension
    from torchvision.ops import boxes

    boxes._assert_has_ops = lambda: None
    assert not extension._has_ops()
