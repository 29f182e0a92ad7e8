"""Optimizers for the Trainer of transformers, and for trainers built on it, such as trl's."""

from inspect import signature
from typing import Any

from amp_mp.optim import AdamW
from amp_mp.optim.base import FusedOptimizer


def optimizer(
    args: Any, kind: type[FusedOptimizer] = AdamW, **options: Any
) -> tuple[type[FusedOptimizer], dict[str, Any]]:
    """For `Trainer(model, args, optimizer_cls_and_kwargs=optimizer(args, memory="lean"))`.

    The Trainer makes the optimizer, with its groups of parameters with and without weight decay.
    The optimizer clips, in the pass that updates: its max_grad_norm is that of `args` if you give
    none, and `args.max_grad_norm` becomes 0, so that the Trainer does not clip as well.

    Args:
        args: the TrainingArguments; learning rate, betas and eps are taken from there.
        kind: a class of amp_mp.optim. (Muon wants the model: pass Trainer's `optimizers`.)
        options: other arguments of that class, and any that `args` should not decide.
    """
    numbers = {
        "lr": args.learning_rate,
        "betas": (args.adam_beta1, args.adam_beta2),
        "eps": args.adam_epsilon,
    }
    known = {name: value for name, value in numbers.items() if name in signature(kind).parameters}
    known["max_grad_norm"] = args.max_grad_norm or None
    args.max_grad_norm = 0.0
    return kind, {**known, **options}
