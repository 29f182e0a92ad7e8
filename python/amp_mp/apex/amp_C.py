"""amp_C: Apex's functions over lists of tensors, by the native passes.

Arguments are Apex's. chunk_size has no effect. noop_flag, an int32 tensor of one element, becomes 1
where an input is inf or NaN, and is never cleared. Tensors are float32, float16 or bfloat16, also
mixed in a list, dense in any layout, and all on one device; results that share memory otherwise
than as a whole are refused. Computed in float32 and rounded once; empty lists and tensors are
skipped. ValueError where lists differ in length or shapes, before anything is written.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from amp_mp import _C
from amp_mp.scaling.policies import FLOOR, KINDS, Hysteresis

# fmt: off
__all__ = [
    "multi_tensor_adagrad", "multi_tensor_adam", "multi_tensor_axpby", "multi_tensor_l2norm",
    "multi_tensor_lamb", "multi_tensor_novograd", "multi_tensor_scale", "multi_tensor_sgd",
    "multi_tensor_unscale_l2norm", "update_scale_hysteresis",
]
# fmt: on
Lists = Sequence[Sequence[Tensor]]


def _check(lists: Lists, *counts: int) -> None:
    if len(lists) not in counts:
        wanted = " or ".join(map(str, counts))
        raise ValueError(f"tensor_lists must be {wanted} lists, found {len(lists)}")
    for i, each in enumerate(lists):
        if len(each) != len(lists[0]):
            raise ValueError(
                f"tensor_lists[{i}] has {len(each)} tensors, but tensor_lists[0] {len(lists[0])}"
            )
        for j, (tensor, first) in enumerate(zip(each, lists[0], strict=True)):
            if tensor.shape != first.shape:
                found = f"tensor_lists[{i}][{j}] has shape {tuple(tensor.shape)}"
                raise ValueError(f"{found}, but tensor_lists[0][{j}] {tuple(first.shape)}")


def _measure(noop_flag: Tensor, tensors: Sequence[Tensor]) -> Tensor:
    """float64 [n + 1], the 2-norms of the tensors and of all (inf with inf or NaN); the flag."""
    rows = _C.measure(tensors).to(noop_flag.device)
    noop_flag.masked_fill_(rows[-1, 2] > 0, 1)
    return rows[:, 0].sqrt().masked_fill(rows[:, 2] > 0, torch.inf)


@torch.no_grad()
def multi_tensor_scale(chunk_size: int, noop_flag: Tensor, lists: Lists, scale: float) -> None:
    """out = in * scale; lists: in, out, which may be the same."""
    _check(lists, 2)
    _measure(noop_flag, lists[0])
    _C.copy_(lists[1], lists[0], multiplier=float(scale))


@torch.no_grad()
def multi_tensor_axpby(
    chunk_size: int, noop_flag: Tensor, lists: Lists, a: float, b: float, arg_to_check: int = -1
) -> None:
    """out = a x + b y; lists: x, y, out. arg_to_check: 0 looks at x alone, 1 at y, -1 at both."""
    _check(lists, 3)
    checked = {-1: [*lists[0], *lists[1]], 0: lists[0], 1: lists[1]}
    if arg_to_check not in checked:
        raise ValueError(f"arg_to_check must be -1, 0 or 1, found {arg_to_check!r}")
    _measure(noop_flag, checked[arg_to_check])
    if lists[0]:
        sums = torch._foreach_mul([x.float() for x in lists[0]], float(a))
        torch._foreach_add_(sums, [y.float() for y in lists[1]], alpha=float(b))
        _C.copy_(lists[2], sums)


@torch.no_grad()
def multi_tensor_l2norm(
    chunk_size: int, noop_flag: Tensor, lists: Lists, per_tensor: bool | None = False
) -> tuple[Tensor, Tensor]:
    """The 2-norm of all tensors, float32 [1], and with per_tensor of each, float32 [n], else [0].

    Summed in double where float32 would overflow: finite elements have a finite norm below 2^128.
    """
    _check(lists, 1)
    norms = _measure(noop_flag, lists[0]).float()
    return norms[-1:].clone(), norms[:-1] if per_tensor else norms[:0]


def multi_tensor_unscale_l2norm(
    chunk_size: int, noop_flag: Tensor, lists: Lists, inv_scale: Tensor, per_tensor: bool = False
) -> tuple[Tensor, Tensor]:
    """multi_tensor_l2norm of the tensors times inv_scale, a tensor of one element."""
    _check(lists, 1)
    norms = (_measure(noop_flag, lists[0]) * inv_scale.abs().double()).float()
    return norms[-1:].clone(), norms[:-1] if per_tensor else norms[:0]


@torch.no_grad()
def _step(op: str, lists: Lists, verdict: Tensor, step: int = 1, own: Any = 0, **h: Any) -> Tensor:
    """A rule's step on gradients, parameters and states; returns their clocks, float64 [n, 4]."""
    params = [p.detach() for p in lists[1]]  # which share memory, and get a .grad of their own
    for param, grad in zip(params, lists[0], strict=True):
        param.grad_dtype = None  # any
        param.grad = grad.detach()
    count, before = len(params), step - 1
    corrected = h.pop("bias_correction", False)
    powers = [h.get(name, 0.0) ** before if corrected else 0.0 for name in ("beta1", "beta2")]
    clocks = verdict.new_tensor([before, *powers, 0.0]).repeat(count, 1)
    clocks[:, 3] = own
    slots = _C.Slots(
        params=params,
        masters=[None] * count,
        states=lists[2:],
        scales=[[None] * count] * len(lists[2:]),
        formats=[[str(s.dtype).removeprefix("torch.") for s in each] for each in lists[2:]],
        stochastic=[False] * count,
        clocks=list(clocks),
        groups=[0] * count,
        tensor_indices=range(count),
        firsts=[0] * count,
        names=[f"tensor_lists[1][{i}]" for i in range(count)],
        device=verdict.device,
    )
    # Rules that need norms measure; the others have the verdict.
    needs_norms = op in ("lamb_", "novograd_")
    _C.operators[op](slots, [_C.Hyper(**h)] if count else [], verdict, measure=needs_norms)
    return clocks


def _verdict(lists: Lists, skip: Any = 0, multiplier: Any = 1) -> Tensor:
    """Of the native step: whether it is skipped, and what gradients are multiplied by."""
    device = lists[1][0].device if lists[1] else None
    verdict = torch.zeros(5, dtype=torch.float64, device=device)
    verdict[0], verdict[1], verdict[4] = skip, multiplier, 1
    return verdict


def _named(names: str, numbers: Sequence[Any], **only: Any) -> dict[str, Any]:
    """The numbers by name; removes those that the rule lacks, ValueError unless they are `only`."""
    if len(numbers) != len(names.split()):
        raise TypeError(f"after tensor_lists there must be {names}, found {len(numbers)} arguments")
    found = dict(zip(names.split(), numbers, strict=True))
    for name, value in only.items():
        if found.pop(name) != value:
            raise ValueError(f"{name} must be {value}: the rule of amp_mp.optim has no other")
    return found


def multi_tensor_adam(chunk_size: int, noop_flag: Tensor, lists: Lists, *numbers: Any) -> None:
    """amp_mp.optim.Adam's step, in mode 1 AdamW's, also where gradients are inf or NaN.

    lists: gradients, parameters, exp_avg, exp_avg_sq. numbers: lr, beta1, beta2, eps, step (from
    1), mode, bias_correction, weight_decay.
    """
    _check(lists, 4)
    names = "lr beta1 beta2 eps step mode bias_correction weight_decay"
    h = _named(names, numbers)
    _step("adamw_" if h.pop("mode") else "adam_", lists, _verdict(lists), **h)


def multi_tensor_adagrad(chunk_size: int, noop_flag: Tensor, lists: Lists, *numbers: Any) -> None:
    """amp_mp.optim.Adagrad's step; lists: gradients, parameters, sum.

    numbers: lr, eps, mode (0, L2; another with a weight decay is a ValueError), weight_decay.
    """
    _check(lists, 3)
    h = _named("lr eps mode weight_decay", numbers, **({"mode": 0} if numbers[-1] else {}))
    h.pop("mode", None)
    _step("adagrad_", lists, _verdict(lists), **h)


def multi_tensor_lamb(chunk_size: int, noop_flag: Tensor, lists: Lists, *numbers: Any) -> None:
    """amp_mp.optim.LAMB's step; lists: gradients, parameters, exp_avg, exp_avg_sq.

    numbers: lr, beta1, beta2, eps, step, bias_correction, weight_decay, grad_averaging (1), mode (1
    with weight decay), global_grad_norm, max_grad_norm, use_nvlamb. Gradients are not written.
    """
    _check(lists, 4)
    names = "lr beta1 beta2 eps step bias_correction weight_decay grad_averaging mode norm"
    only = {"grad_averaging": 1, **({"mode": 1} if len(numbers) > 6 and numbers[6] else {})}
    h = _named(f"{names} max_norm always_adapt", numbers, **only)
    h.pop("mode", None)
    ratio = h.pop("max_norm") / torch.as_tensor(h.pop("norm")).double()
    h["always_adapt"] = bool(h["always_adapt"])
    _step("lamb_", lists, _verdict(lists, multiplier=ratio.clamp(max=1).squeeze()), **h)


def multi_tensor_novograd(
    chunk_size: int, noop_flag: Tensor, lists: Lists, grad_norms: Tensor, *numbers: Any
) -> None:
    """amp_mp.optim.NovoGrad's step; lists: gradients, parameters, exp_avg.

    grad_norms: roots of the averages of squared norms, float32 [n], updated. numbers: lr, beta1,
    beta2, eps, step, bias_correction (0), weight_decay, grad_averaging, moment_mode (0), norm_type
    (2).
    """
    _check(lists, 3)
    names = "lr beta1 beta2 eps step bias_correction weight_decay grad_averaging moment_mode"
    only = {"bias_correction": 0, "moment_mode": 0, "norm_type": 2}
    h = _named(f"{names} norm_type", numbers, **only)
    h["dampening"] = h["beta1"] if h.pop("grad_averaging") else 0.0
    h["step"] = 2  # the rule's first step would ignore grad_norms
    clocks = _step("novograd_", lists, _verdict(lists), own=grad_norms.double().square(), **h)
    grad_norms.copy_(clocks[:, 3].sqrt())


@torch.no_grad()
def multi_tensor_sgd(chunk_size: int, noop_flag: Tensor, lists: Lists, *numbers: Any) -> None:
    """amp_mp.optim.SGD's step of the gradients times scale; nothing where noop_flag is not 0.

    lists: gradients, parameters, momentum_buffer, and low-precision copies of the parameters or
    nothing. numbers: weight_decay, momentum, dampening, lr, nesterov, first_run (ignore what the
    buffers hold), wd_after_momentum (0 with momentum and weight decay), scale.
    """
    _check(lists, 3, 4)
    after = {"wd_after_momentum": 0} if all(numbers[:2]) else {}
    names = "weight_decay momentum dampening lr nesterov first_run wd_after_momentum scale"
    h = _named(names, numbers, **after)
    h.pop("wd_after_momentum", None)
    first, skip = h.pop("first_run"), noop_flag.squeeze()
    for buffer in lists[2] if first else ():
        buffer.masked_fill_(skip.to(buffer.device) == 0, 0)
    op, used = ("sgd_", lists[:3]) if h["momentum"] else ("plain_sgd_", lists[:2])
    h["nesterov"], verdict = bool(h["nesterov"]), _verdict(lists, skip, h.pop("scale"))
    _step(op, used, verdict, step=1 if first else 2, **h)
    if len(lists) == 4:
        _C.copy_(lists[3], lists[1], verdict=_verdict(lists, skip), saturate=True)


def update_scale_hysteresis(
    current_scale: Tensor,
    growth_tracker: Tensor,
    hysteresis_tracker: Tensor,
    found_inf: Tensor,
    *numbers: Any,
) -> Tensor:
    """amp_mp.scaling.Hysteresis on tensors of one element, in place; returns current_scale.

    numbers: growth_factor, backoff_factor, growth_interval, hysteresis.
    """
    h = _named("growth_factor backoff_factor growth_interval hysteresis", numbers)
    policy = Hysteresis(1.0, **h, scale_min=FLOOR).to(current_scale.device)
    fields = ("scale", "growth_tracker", "hysteresis_tracker")
    places = [1 + KINDS["hysteresis"].index(name) for name in fields]
    given = current_scale, growth_tracker, hysteresis_tracker
    for place, tensor in zip(places, given, strict=True):
        policy.state_tensor[place] = tensor.squeeze()
    policy.update(found_inf > 0)
    for place, tensor in zip(places, given, strict=True):
        tensor.fill_(policy.state_tensor[place])
    return current_scale
