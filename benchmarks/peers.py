"""Other libraries' AdamW in the whole step of step.py: bfloat16 weights from bfloat16 gradients.

Every candidate unscales, checks for overflow, clips by the global norm, steps, and leaves bfloat16
weights, by the peer's own means where it has them and torch's where it has not; "alone" is
`optimizer.step()` and nothing else. They do not all train alike: what a peer gives up for its
fewer bytes stands beside it. Whichever of them is installed takes part; DeepSpeed and torchao
compile on first use, with ninja and a C++ compiler:

    pip install torch-optimi==0.3.3 torchao==0.18.0
    DS_BUILD_OPS=0 pip install --no-build-isolation deepspeed==0.19.8
    OMP_NUM_THREADS=1 python benchmarks/peers.py
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import importlib
import warnings
from collections.abc import Callable
from typing import Any

import torch
from step import SCALE, STEP_BYTES, our_step, torch_pipeline, weights
from timing import Candidate, in_place, medians, show

MAX_NORM = 1.0
Build = Callable[[list[int], str], Candidate]
Parameters = list[torch.nn.Parameter]
Make = Callable[[Parameters], Any]
Bytes = Callable[[int], int]


@dataclasses.dataclass(frozen=True)
class Peer:
    """A candidate, and in one line why it cannot run here: empty if it can."""

    name: str
    build: Build
    reason: str = ""


# ---- DeepSpeed ----------------------------------------------------------------------------------
#
# Bytes a parameter, read + write, as ZeRO-Offload's step goes (runtime/zero/stage_1_and_2.py):
# gradients to float32 2 + 4; norm 4; one multiplication unscales and clips 4 + 4; CPUAdam: gradient
# 4 + 0, master, m and v 4 + 4 each; weights back 4 + 2.
CPU_ADAM = 4 + 24
ZERO_OFFLOAD = 6 + 4 + 8 + CPU_ADAM + 6
# On bfloat16 weights: norm 2; multiplication 2 + 2; gradient 2 + 0, weight 2 + 2, m and v 4 + 4.
CPU_ADAM_BF16 = 2 + 4 + 16
NO_MASTERS = 2 + 4 + CPU_ADAM_BF16


def gradients(params: Parameters) -> list[torch.Tensor]:
    return [p.grad for p in params if p.grad is not None]


def cpu_adam(params: Parameters) -> Any:
    """DeepSpeed's CPUAdam, states in float32, with torch's weight decay (its default is none)."""
    make = importlib.import_module("deepspeed.ops.adam").DeepSpeedCPUAdam
    return make(params, lr=1e-4, weight_decay=1e-2, fp32_optimizer_states=True)


def unscale_and_clip(grads: list[torch.Tensor], scale: float) -> bool:
    """DeepSpeed's: the norm of what is still scaled, then one multiplication; False: overflow."""
    norm = torch.nn.utils.get_total_norm(grads).item() / scale
    if not norm < float("inf"):  # nor is a NaN
        return False
    torch._foreach_mul_(grads, 1 / (scale * max(1.0, (norm + 1e-6) / MAX_NORM)))
    return True


def zero_offload(name: str, flat: bool, sizes: list[int], device: str) -> Candidate:
    """CPUAdam on float32 masters: the training of torch's pipeline and of amp_mp's.

    `flat`: all masters in one tensor, as ZeRO keeps them, so that 500 tensors cost one call.
    """
    model = weights(sizes, device)
    low = [p.detach().flatten() for p in model]  # views
    low_grads = [g.flatten() for g in gradients(model)]
    whole = torch.nn.Parameter(torch.cat(low).float())
    whole.grad = torch.zeros_like(whole)
    values, grads = list(torch.split(whole.detach(), sizes)), list(torch.split(whole.grad, sizes))
    masters = [whole]
    if not flat:
        masters = [torch.nn.Parameter(v) for v in values]
        for master, grad in zip(masters, grads, strict=True):
            master.grad = grad
    optimizer = cpu_adam(masters)
    master_grads = gradients(masters)

    def step() -> None:
        torch._foreach_copy_(grads, low_grads)
        if unscale_and_clip(master_grads, SCALE):
            optimizer.step()
            torch._foreach_copy_(low, values)

    return Candidate(name, step, ZERO_OFFLOAD * sum(sizes))


def no_masters(name: str, sizes: list[int], device: str) -> Candidate:
    """CPUAdam on bfloat16 weights, against its documentation: small updates are lost."""
    params = weights(sizes, device)
    optimizer, grads = cpu_adam(params), gradients(params)

    def step() -> None:
        if unscale_and_clip(grads, 1.0):  # not SCALE: see low_precision
            optimizer.step()

    return Candidate(name, step, NO_MASTERS * sum(sizes))


def cpu_adam_alone(name: str, masters: bool, sizes: list[int], device: str) -> Candidate:
    """CPUAdam on float32 masters that have their gradients already, or on bfloat16 weights."""
    params = weights(sizes, device)
    moved = CPU_ADAM_BF16
    if masters:
        moved, low_grads = CPU_ADAM, gradients(params)
        params = [torch.nn.Parameter(p.detach().float()) for p in params]
        for master, grad in zip(params, low_grads, strict=True):
            master.grad = grad.float()
    return Candidate(name, cpu_adam(params).step, moved * sum(sizes))


# ---- torch-optimi and torchao -------------------------------------------------------------------
#
# Neither scales nor clips, so torch does: unscale 2 + 2; norm 2; clip 2 + 2.
UNSCALE_AND_CLIP = 4 + 2 + 4
# optimi/adam.py's operations, each over whole bfloat16 tensors: decay 4, lerp 6, mul 4, addcmul 6,
# sqrt 4, add 4, addcdiv 8, copy 4, add 6, sub 6, add 6; with foreach one more copy.
OPTIMI = 4 + 6 + 4 + 6 + 4 + 4 + 8 + 4 + 6 + 6 + 6
OPTIMI_FOREACH = OPTIMI + 4
# Of what torch 2.13 compiles for torchao. bfloat16 states, one loop: gradient 2 + 0; weight, m and
# v 2 + 2 each. 8 bits, two loops: gradient 2, codes of m and v 2, m and v in float32 0 + 8; then
# gradient 2, m and v 8, codes 2 + 2, weight 2 + 2. Scales, 4 bytes for each 256, are left out.
TORCHAO = 2 + 12
TORCHAO_8BIT = (2 + 2 + 8) + (2 + 8 + 4 + 4)


def optimi(foreach: bool, params: Parameters) -> Any:
    """AdamW with states and a Kahan compensation in bfloat16, every operation rounded to it.

    It uses the gradients as scratch space, so that the next call finds rounding errors in them:
    numbers of a gradient's size, which take as long.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # foreach; its successor needs a GPU
        adamw = importlib.import_module("optimi").AdamW
        return adamw(params, lr=1e-4, kahan_sum=True, triton=False, foreach=foreach)


def torchao(optimizer: str, stochastic: bool, params: Parameters) -> Any:
    """torchao's AdamW, one compiled call a parameter.

    Stochastic rounding stands in for masters; on a CPU its random numbers are drawn one by one.
    Without it whatever is below half a weight's last bit is lost.
    """
    make = getattr(importlib.import_module("torchao.optim"), optimizer)
    return make(params, lr=1e-4, bf16_stochastic_round=stochastic)


def eight_bit_bytes(size: int) -> int:
    """AdamW8bit gives tensors it cannot cut into blocks of 256 bfloat16 states, silently."""
    return (TORCHAO_8BIT if size >= 4096 and size % 256 == 0 else TORCHAO) * size


def low_precision(
    name: str, make: Make, moved: Bytes, alone: bool, sizes: list[int], device: str
) -> Candidate:
    """An optimizer on bfloat16 weights without masters, after torch's unscaling and clipping."""
    params = weights(sizes, device)
    optimizer, grads = make(params), gradients(params)
    own = sum(map(moved, sizes))
    if alone:
        return Candidate(name, optimizer.step, own)

    def step() -> None:
        # By 1: these are the gradients of the call before, and divided by SCALE in place again and
        # again they would soon be subnormal, and slow. A multiplication by 1 takes as long as any.
        torch._foreach_mul_(grads, 1.0)
        norm = torch.nn.utils.clip_grad_norm_(params, MAX_NORM)
        if norm.isfinite():
            optimizer.step()

    return Candidate(name, step, own + UNSCALE_AND_CLIP * sum(sizes))


def named(name: str, function: Callable[..., Candidate], *options: object) -> Peer:
    """A peer whose name is written once."""
    return Peer(name, functools.partial(function, name, *options))


def both(name: str, make: Make, moved: Bytes) -> list[Peer]:
    """The whole step and the step alone."""
    alone = named(f"  {name}, alone", low_precision, make, moved, True)
    return [named(name, low_precision, make, moved, False), alone]


PEERS = [
    named("DeepSpeed", zero_offload, False),
    named("DeepSpeed, flat", zero_offload, True),
    named("  DeepSpeed, alone", cpu_adam_alone, True),
    named("DeepSpeed, no masters", no_masters),
    named("  DeepSpeed, no masters, alone", cpu_adam_alone, False),
    *both("optimi", functools.partial(optimi, False), lambda n: OPTIMI * n),
    *both("optimi, foreach", functools.partial(optimi, True), lambda n: OPTIMI_FOREACH * n),
    *both("torchao, stochastic", functools.partial(torchao, "_AdamW", True), lambda n: TORCHAO * n),
    *both("torchao, 8 bits", functools.partial(torchao, "AdamW8bit", False), eight_bit_bytes),
]


def available(device: str) -> list[Peer]:
    """PEERS after a step of a small tensor: where one fails, the first line of why."""
    peers = []
    for peer in PEERS:
        try:
            peer.build([256], device).run()
            peers.append(peer)
        except Exception as error:  # not installed, not compiled, not for this device
            reason = str(error.__cause__ or error).partition("\n")[0]
            peers.append(dataclasses.replace(peer, reason=reason))
    return peers


def compare(title: str, sizes: list[int], rounds: int, peers: list[Peer]) -> None:
    """One table: torch, amp_mp and the peers, taking turns. About 250 bytes of memory a weight."""
    ours = (functools.partial(our_step, memory=memory) for memory in STEP_BYTES)
    builds: list[Build] = [torch_pipeline, *ours, *(p.build for p in peers if not p.reason)]
    candidates = [*(build(sizes, "cpu") for build in builds), in_place(sum(sizes))]
    show(title, candidates, medians(candidates, rounds), "torch")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15, help="timed rounds (15)")
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    peers = available("cpu")
    for peer in (p for p in peers if p.reason):
        print(f"{peer.name.strip()}: {peer.reason}")
    compare("50 tensors of 1,000,000", [1_000_000] * 50, rounds, peers)
    compare("48 tensors of 1,048,576, which 8 bits can hold", [1 << 20] * 48, rounds, peers)
    compare("500 tensors of 256", [256] * 500, 10 * rounds, peers)


if __name__ == "__main__":
    main()
