"""Newton-Schulz iterations on stacks of matrices, in the order of torch.optim.Muon's operations."""

import torch
from torch import Tensor

# A stack takes three to four times its own bytes while it is worked on, so large ones are cut.
STACK_BYTES = 1 << 28


def orthogonalise_(
    stack: Tensor, coefficients: tuple[float, float, float], steps: int, eps: float
) -> None:
    """Makes each matrix of a stack nearly orthogonal, in place.

    stack: bfloat16 [n, rows, columns]. Singular values become about 1. Queues products on the
    device and waits for nothing.
    """
    most = max(1, STACK_BYTES // max(1, 2 * stack.shape[1] * stack.shape[2]))
    with torch.autocast(stack.device.type, enabled=False):
        for begin in range(0, stack.shape[0], most):
            _orthogonalise_part_(stack[begin : begin + most], coefficients, steps, eps)


def _orthogonalise_part_(
    stack: Tensor, coefficients: tuple[float, float, float], steps: int, eps: float
) -> None:
    a, b, c = coefficients
    is_tall = stack.shape[1] > stack.shape[2]
    x = stack.mT if is_tall else stack
    # no singular value is above 1
    x.div_(torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True).clamp(min=eps))
    for _ in range(steps):
        gram = torch.bmm(x, x.mT)
        polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.baddbmm(x, polynomial, x, beta=a)
    if steps > 0:
        stack.copy_(x.mT if is_tall else x)
