"""Newton-Schulz iterations on stacks of matrices, in the order of torch.optim.Muon's operations."""

import torch
from torch import Tensor

# A stack takes three to four times its own bytes while it is worked on, so large ones are cut.
STACK_BYTES = 1 << 28
# On a CPU a product of two large matrices fills the caches, and a stack of them would leave these.
LARGE_ON_CPU = 256


def orthogonalise_(
    stack: Tensor, coefficients: tuple[float, float, float], steps: int, eps: float
) -> None:
    """Makes each matrix of a stack nearly orthogonal, in place.

    stack: bfloat16 [n, rows, columns]. Singular values become about 1. Queues products on the
    device and waits for nothing. On a CPU the bits do not depend on what else is in the stack.
    """
    rows, columns = stack.shape[1:]
    most = max(1, STACK_BYTES // max(1, 2 * rows * columns))
    if stack.device.type == "cpu" and min(rows, columns) >= LARGE_ON_CPU:
        most = 1
    with torch.autocast(stack.device.type, enabled=False):
        for begin in range(0, stack.shape[0], most):
            _orthogonalise_part_(stack[begin : begin + most], coefficients, steps, eps)


def _orthogonalise_part_(
    stack: Tensor, coefficients: tuple[float, float, float], steps: int, eps: float
) -> None:
    a, b, c = coefficients
    is_one = stack.shape[0] == 1
    own = stack[0] if is_one else stack
    product, add_product = (torch.mm, torch.addmm) if is_one else (torch.bmm, torch.baddbmm)
    is_tall = own.shape[-2] > own.shape[-1]
    x = own.mT if is_tall else own
    # no singular value is above 1
    x.div_(torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True).clamp(min=eps))
    for _ in range(steps):
        gram = product(x, x.mT)
        polynomial = add_product(gram, gram, gram, beta=b, alpha=c)
        x = add_product(x, polynomial, x, beta=a)
    if steps > 0:
        own.copy_(x.mT if is_tall else x)
