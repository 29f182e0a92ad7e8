"""Apex's optimizers in float64 NumPy, from their formulas."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import nn

SHAPES = [(7, 5), (5,), (3, 2, 2), ()]
Arrays = list[Any]


def parameters(device: str, dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    source = torch.Generator().manual_seed(3)
    return [nn.Parameter(torch.randn(s, generator=source).to(device, dtype)) for s in SHAPES]


def gradients(step: int, size: float = 1.0) -> Arrays:
    source = np.random.default_rng(step)
    return [(source.standard_normal(s) * size).astype(np.float32) for s in SHAPES]


def adam(w: Arrays, steps: int, a: dict[str, Any]) -> Arrays:
    b1, b2 = a["betas"]
    m, v = ([np.zeros(x.shape) for x in w] for _ in range(2))
    for t in range(1, steps + 1):
        c1, c2 = (1 - b1**t, 1 - b2**t) if a["bias_correction"] else (1.0, 1.0)
        for i, g in enumerate(gradients(t - 1)):
            g = g.astype(np.float64)
            if not a["adam_w_mode"]:
                g = g + a["weight_decay"] * w[i]
            m[i] = b1 * m[i] + (1 - b1) * g
            v[i] = b2 * v[i] + (1 - b2) * g * g
            update = m[i] / c1 / (np.sqrt(v[i] / c2) + a["eps"])
            if a["adam_w_mode"]:
                update = update + a["weight_decay"] * w[i]
            w[i] = w[i] - a["lr"] * update
    return w


def lamb(w: Arrays, steps: int, a: dict[str, Any], size: float) -> Arrays:
    b1, b2 = a["betas"]
    m, v = ([np.zeros(x.shape) for x in w] for _ in range(2))
    for t in range(1, steps + 1):
        c1, c2 = (1 - b1**t, 1 - b2**t) if a["bias_correction"] else (1.0, 1.0)
        grads = [g.astype(np.float64) for g in gradients(t - 1, size)]
        norm = np.sqrt(sum((g * g).sum() for g in grads))
        clip = max(1.0, norm / a["max_grad_norm"]) if a["max_grad_norm"] else 1.0
        for i, g in enumerate(grads):
            decay = a["weight_decay"] * w[i]
            g = g / clip + (0 if a["adam_w_mode"] else decay)
            m[i] = b1 * m[i] + (1 - b1 if a["grad_averaging"] else 1.0) * g
            v[i] = b2 * v[i] + (1 - b2) * g * g
            update = m[i] / c1 / (np.sqrt(v[i] / c2) + a["eps"])
            update = update + (decay if a["adam_w_mode"] else 0)
            adapts = a["weight_decay"] != 0 or a["use_nvlamb"]
            ratio = np.linalg.norm(w[i]) / np.linalg.norm(update) if adapts else 1.0
            w[i] = w[i] - a["lr"] * ratio * update
    return w


def sgd(w: Arrays, steps: int, a: dict[str, Any]) -> Arrays:
    buffers: Arrays = [None] * len(w)
    for t in range(steps):
        for i, g in enumerate(gradients(t)):
            decay, after = a["weight_decay"] * w[i], a["wd_after_momentum"]
            g = g.astype(np.float64) + (0 if after else decay)
            if a["momentum"]:
                first, damp = buffers[i] is None, 1 - a["dampening"]
                buffers[i] = g if first else a["momentum"] * buffers[i] + damp * g
                g = g + a["momentum"] * buffers[i] if a["nesterov"] else buffers[i]
            w[i] = w[i] - a["lr"] * (g + (decay if after else 0))
    return w


def novograd(w: Arrays, steps: int, a: dict[str, Any]) -> Arrays:
    b1, b2 = a["betas"]
    m: Arrays = [np.zeros(x.shape) for x in w]
    v = [0.0] * len(w)
    for t in range(steps):
        for i, g in enumerate(gradients(t)):
            g = g.astype(np.float64)
            square = float((g * g).sum())
            v[i] = square if t == 0 else b2 * v[i] + (1 - b2) * square
            c1, c2 = (1 - b1 ** (t + 1), 1 - b2 ** (t + 1)) if a["bias_correction"] else (1.0, 1.0)
            denominator = np.sqrt(v[i]) / np.sqrt(c2) + a["eps"]
            inside = a["reg_inside_moment"]
            g = g / denominator + a["weight_decay"] * w[i] if inside else g
            m[i] = b1 * m[i] + (1 - b1 if a["grad_averaging"] else 1.0) * g
            update = m[i] / c1 if inside else m[i] / c1 / denominator + a["weight_decay"] * w[i]
            w[i] = w[i] - a["lr"] * update
    return w


def adagrad(w: Arrays, steps: int, a: dict[str, Any]) -> Arrays:
    h: Arrays = [np.zeros(x.shape) for x in w]
    for t in range(steps):
        for i, g in enumerate(gradients(t)):
            decay, decoupled = a["weight_decay"] * w[i], a["adagrad_w_mode"]
            g = g.astype(np.float64) + (0 if decoupled else decay)
            h[i] = h[i] + g * g
            update = g / (np.sqrt(h[i]) + a["eps"]) + (decay if decoupled else 0)
            w[i] = w[i] - a["lr"] * update
    return w


def start(params: list[nn.Parameter]) -> Arrays:
    return [p.detach().double().cpu().numpy() for p in params]
