"""How many bytes a training run holds in this process, counted from its tensors."""

from __future__ import annotations

from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer


def state_bytes(model: nn.Module, optimizer: Optimizer) -> int:
    """Bytes of the model's parameters and of every tensor in the optimizer's state."""
    tensors: list[Tensor] = [*model.parameters()]
    for state in optimizer.state.values():
        tensors += [value for value in state.values() if isinstance(value, Tensor)]
    return _bytes(tensors)


def gradient_bytes(model: nn.Module) -> int:
    """Bytes of the gradients that the parameters have now."""
    return _bytes([p.grad for p in model.parameters() if p.grad is not None])


def _bytes(tensors: list[Tensor]) -> int:
    own = [t.to_local() if isinstance(t, DTensor) else t for t in tensors]
    return sum(tensor.numel() * tensor.element_size() for tensor in own)
