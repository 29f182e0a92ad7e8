"""Loss scaling: policies, and a torch.amp.GradScaler that reads gradients once."""

from amp_mp.scaling.grad_scaler import GradScaler
from amp_mp.scaling.policies import Backoff, Policy, Static, make_policy

__all__ = ["Backoff", "GradScaler", "Policy", "Static", "make_policy"]
