"""apex.contrib.xentropy: the cross entropy of each row, with label smoothing."""

import torch
from torch import Tensor
from torch.nn import functional

__all__ = ["SoftmaxCrossEntropyLoss"]


class SoftmaxCrossEntropyLoss:
    """`SoftmaxCrossEntropyLoss.apply(logits, labels, ...)`, by torch's cross_entropy."""

    @staticmethod
    def apply(
        logits: Tensor,
        labels: Tensor,
        smoothing: float = 0.0,
        padding_idx: int = 0,
        half_to_float: bool = False,
    ) -> Tensor:
        """-sum_c q_c log softmax(logits)_c; q = smoothing / C, plus 1 - smoothing at the label.

        logits: [N, C], floating-point; computed in float32, of float64 in float64. labels: int64
        [N]; where they are padding_idx loss and gradient are 0. half_to_float: float32 losses for
        low-precision logits, else they have the logits' dtype. Returns [N]. IndexError for a label
        beyond C.
        """
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        options = {"ignore_index": padding_idx, "label_smoothing": smoothing, "reduction": "none"}
        losses = functional.cross_entropy(wide, labels, **options)  # type: ignore[arg-type]
        return losses if half_to_float else losses.to(logits.dtype)
