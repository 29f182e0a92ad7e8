"""FusedOptimizer.attach: checks its arguments and makes the attachment."""

from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from amp_mp.dtypes import check_choice
from amp_mp.optim.backward.attachment import Attachment, Measure, Scaler
from amp_mp.optim.backward.release import Release, refuse_shards
from amp_mp.optim.step.stepper import Stepper
from amp_mp.sharding.shards import is_dtensor


def attach(
    stepper: Stepper, model: Any, release: bool, measure: bool, scaler: Any, clip: str
) -> Attachment:
    """See FusedOptimizer.attach. Every argument is checked before anything is changed."""
    optimizer = stepper.optimizer
    if stepper.attachment is not None:
        raise RuntimeError("the optimizer is attached already; remove() that attachment first")
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, found {type(model)}")
    if release == measure:
        raise ValueError(
            "release and measure: exactly one of them has to be True, found "
            f"{release!r} and {measure!r}; release=True measures where anything needs it"
        )
    check_choice("clip", clip, ("parameter", "previous"))
    if scaler is not None and not isinstance(scaler, Scaler):
        raise TypeError(
            f"scaler must be an amp_mp.GradScaler, found {type(scaler)}: torch's own asserts that "
            "it has seen gradients, which are gone by then"
        )
    if scaler is not None and measure:
        raise ValueError("scaler= is for release=True; with measure=True leave it out")
    if scaler is not None and not optimizer.amp_scaling:
        raise ValueError(
            "scaler= needs amp_scaling=True: without it the scaler unscales gradients, now freed"
        )
    own = {p for group in optimizer.param_groups for p in group["params"]}
    if not any(p in own for p in model.parameters()):
        raise ValueError("model holds none of the optimizer's parameters; pass the one it updates")
    wrapped = [m for m in model.modules() if isinstance(m, DistributedDataParallel)]
    if wrapped and measure:
        raise ValueError(
            "measure=True does not go with DistributedDataParallel: gradients are averaged after "
            "they could be measured"
        )
    if wrapped and not isinstance(model, DistributedDataParallel):
        raise ValueError("model holds a DistributedDataParallel; attach to that one itself")
    if any(m.find_unused_parameters for m in wrapped):
        raise ValueError(
            "model: release=True does not go with find_unused_parameters=True; which parameters "
            "have no gradient is known only after the last one has been averaged"
        )
    if release and any(is_dtensor(p) and p in own for p in model.parameters()):
        refuse_shards(stepper, scaler, clip)
    if release and any(group.get("offload") for group in optimizer.param_groups):
        optimizer.init_state()  # a hook would pin memory while NCCL works
    return Release(stepper, model, scaler, clip) if release else Measure(stepper, model)
