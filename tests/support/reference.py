"""What correct means: each rule, format, reduction and policy in plain NumPy, from its formula.

Knows nothing of amp_mp. Rules work in float32 with constants rounded once from double, in the order
the papers write; formats round by the definition of their numbers, not by bit tricks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

F32 = np.float32
Floats = NDArray[np.float32]


# Formats


@dataclass(frozen=True)
class FloatFormat:
    """A binary floating-point format, by its mantissa bits and exponent range."""

    mantissa_bits: int
    min_exponent: int  # of normal numbers
    max_exponent: int

    @property
    def largest(self) -> float:
        """The largest finite number."""
        return (2.0 - 2.0**-self.mantissa_bits) * 2.0**self.max_exponent

    def round(self, x: Floats) -> NDArray[np.float64]:
        """Nearest representable number, ties to even, as IEEE 754 says: exact in double."""
        with np.errstate(invalid="ignore"):  # signalling NaN
            wide = x.astype(np.float64)
        _, exponent = np.frexp(wide)  # x = f * 2^exponent, 0.5 <= |f| < 1
        quantum = np.exp2(np.maximum(exponent - 1, self.min_exponent) - self.mantissa_bits)
        with np.errstate(invalid="ignore", over="ignore"):
            rounded = np.rint(wide / quantum) * quantum
            rounded = np.where(np.isfinite(wide), rounded, wide)
            infinite = np.copysign(np.inf, wide)
        return np.where(np.abs(rounded) > self.largest, infinite, rounded)


FORMATS = {
    "float32": FloatFormat(23, -126, 127),
    "float16": FloatFormat(10, -14, 15),
    "bfloat16": FloatFormat(7, -126, 127),
}
FLOAT16_MAX = F32(65504)


def saturate(x: Floats) -> Floats:
    """Clamped to the largest finite float16; NaN stays."""
    return np.where(np.isnan(x), x, np.clip(x, -FLOAT16_MAX, FLOAT16_MAX))


def store(x: Floats, name: str, *, saturating: bool) -> Floats:
    """The float32 value of what a weight of that format holds after storing x."""
    if name == "float32":
        return x
    x = saturate(x) if saturating and name == "float16" else x
    return FORMATS[name].round(x).astype(np.float32)


def averaged(average: Floats, x: Floats, decay: float) -> Floats:
    """An average's next value, reckoned from whichever end is nearer; a decay of 0 copies."""
    keep, take = F32(decay), F32(1 - decay)
    if keep == 0:
        return x
    with np.errstate(invalid="ignore", over="ignore"):
        difference = x - average
        return average + take * difference if take < F32(0.5) else x - keep * difference


# Rules. Each takes the gradient as the step sees it (unscaled, clipped), float32.


@dataclass
class Clock:
    """A parameter's applied steps, the powers of the betas, and NovoGrad's moment."""

    step: int = 0
    beta1_power: float = 1.0
    beta2_power: float = 1.0
    layer: float = 0.0
    mu_product: float = 1.0  # NAdam's
    radius: float = 0.0  # of hyperball, 0 before the first step

    def tick(self, beta1: float, beta2: float) -> None:
        self.step += 1
        self.beta1_power = beta1**self.step
        self.beta2_power = beta2**self.step


@dataclass(frozen=True)
class Numbers:
    """What a group says of its rule, under torch's names. What it does not say is NaN."""

    lr: float
    betas: tuple[float, float] = (math.nan, math.nan)
    eps: float = math.nan
    weight_decay: float = math.nan
    momentum: float = math.nan
    dampening: float = math.nan
    nesterov: bool = False
    momentum_decay: float = math.nan
    lr_decay: float = math.nan
    alpha: float = math.nan
    rho: float = math.nan
    decoupled_weight_decay: bool = False
    cautious: bool = False
    trust_coefficient: float = math.nan
    clip: bool = False
    always_adapt: bool = False
    grad_averaging: bool = False
    bias_correction: bool = False
    reg_inside_moment: bool = True


def add_decay(x: Floats, decay: float, w: Floats) -> Floats:
    """x + decay * w, where weights count as 0 without decay, also infinite ones."""
    return x + F32(decay) * (w if decay else F32(0))


def kept(update: Floats, w: Floats, decay: float, cautious: bool) -> Floats:
    """The factors of weights under decoupled decay; 1 against a cautious one (Chen et al. 2025)."""
    return np.where((update * w >= 0) | (not cautious), F32(1 - decay), F32(1))


def adam_moments(g: Floats, m: Floats, v: Floats, n: Numbers) -> tuple[Floats, Floats]:
    """Kingma & Ba 2015: the averages of the gradient and of its square."""
    m = F32(n.betas[0]) * m + F32(1 - n.betas[0]) * g
    return m, F32(n.betas[1]) * v + (F32(1 - n.betas[1]) * g) * g


def adam(
    g: Floats,
    w: Floats,
    m: Floats,
    v: Floats,
    largest: Floats | None,
    clock: Clock,
    n: Numbers,
    decoupled: bool,
) -> tuple[Floats, ...]:
    """Kingma & Ba 2015; with `decoupled`, Loshchilov & Hutter 2019. Returns w, m, v.

    With the largest v so far, Reddi et al. 2018 in torch's form; it is returned too.
    """
    step_size = F32(n.lr / (1 - clock.beta1_power))
    inverse_root = F32(1 / math.sqrt(1 - clock.beta2_power))
    if not decoupled:
        g = add_decay(g, n.weight_decay, w)
    m, v = adam_moments(g, m, v, n)
    divisor = v if largest is None else np.maximum(largest, v)  # a NaN is the largest
    update = m / (np.sqrt(divisor) * inverse_root + F32(n.eps))
    factor = kept(update, w, n.lr * n.weight_decay, n.cautious) if decoupled else F32(1)
    w = factor * w - step_size * update
    return (w, m, v) if largest is None else (w, m, v, divisor)


def nadam(
    g: Floats, w: Floats, m: Floats, v: Floats, clock: Clock, n: Numbers
) -> tuple[Floats, Floats, Floats]:
    """Dozat 2016 in torch's form. Returns w, m, v."""
    decoupled = n.decoupled_weight_decay
    mu, following = (
        n.betas[0] * (1 - 0.5 * 0.96 ** (step * n.momentum_decay))
        for step in (clock.step, clock.step + 1)
    )
    clock.mu_product *= mu
    of_g = F32(n.lr * (1 - mu) / (1 - clock.mu_product))
    of_m = F32(n.lr * following / (1 - clock.mu_product * following))
    g = add_decay(g, 0 if decoupled else n.weight_decay, w)
    m, v = adam_moments(g, m, v, n)
    root = np.sqrt(v) * F32(1 / math.sqrt(1 - clock.beta2_power)) + F32(n.eps)
    update = (of_g * g + of_m * m) / root
    return kept(update, w, n.lr * n.weight_decay if decoupled else 0, n.cautious) * w - update, m, v


def rectification(clock: Clock, beta2: float) -> float | None:
    """r_t of Liu et al. 2020; None while their rho_t does not exceed torch's 5."""
    longest = 2 / (1 - beta2) - 1
    length = longest - 2 * clock.step * clock.beta2_power / (1 - clock.beta2_power)
    if length <= 5:
        return None
    shares = (length - 4) * (length - 2) * longest, (longest - 4) * (longest - 2) * length
    return math.sqrt(shares[0] / shares[1])


def radam(
    g: Floats, w: Floats, m: Floats, v: Floats, clock: Clock, n: Numbers
) -> tuple[Floats, Floats, Floats]:
    """Liu et al. 2020, algorithm 2, in torch's form. Returns w, m, v."""
    g = add_decay(g, 0 if n.decoupled_weight_decay else n.weight_decay, w)
    m, v = adam_moments(g, m, v, n)
    rate, rectified = n.lr / (1 - clock.beta1_power), rectification(clock, n.betas[1])
    update = m
    if rectified is not None:
        rate *= rectified * math.sqrt(1 - clock.beta2_power)
        update = m / (np.sqrt(v) + F32(n.eps))
    decay = n.lr * n.weight_decay if n.decoupled_weight_decay else 0
    return kept(update, w, decay, n.cautious) * w - F32(rate) * update, m, v


def adadelta(
    g: Floats, w: Floats, square_avg: Floats, acc_delta: Floats, clock: Clock, n: Numbers
) -> tuple[Floats, Floats, Floats]:
    """Zeiler 2012 with torch's learning rate. Returns w and the averages of g^2 and delta^2."""
    g = add_decay(g, n.weight_decay, w)
    square_avg = F32(n.rho) * square_avg + (F32(1 - n.rho) * g) * g
    delta = np.sqrt(acc_delta + F32(n.eps)) * g / np.sqrt(square_avg + F32(n.eps))
    acc_delta = F32(n.rho) * acc_delta + (F32(1 - n.rho) * delta) * delta
    return w - F32(n.lr) * delta, square_avg, acc_delta


def sgd(g: Floats, w: Floats, buffer: Floats, clock: Clock, n: Numbers) -> tuple[Floats, Floats]:
    """Sutskever et al. 2013 in torch's form. Returns w, buffer."""
    g = add_decay(g, n.weight_decay, w)
    if n.momentum == 0:
        return w - F32(n.lr) * g, buffer
    gain = 1.0 if clock.step == 1 else 1 - n.dampening
    buffer = F32(n.momentum) * buffer + F32(gain) * g
    return w - F32(n.lr) * (g + F32(n.momentum) * buffer if n.nesterov else buffer), buffer


def scaled_sgd(g: Floats, w: Floats, buffer: Floats, n: Numbers) -> tuple[Floats, Floats]:
    """The same with the learning rate inside the buffer, as Caffe has it. Returns w, buffer."""
    g = add_decay(g, n.weight_decay, w)
    buffer = F32(n.momentum) * buffer + F32(n.lr) * g
    return w - (F32(n.lr) * g + F32(n.momentum) * buffer if n.nesterov else buffer), buffer


def adagrad(g: Floats, w: Floats, total: Floats, clock: Clock, n: Numbers) -> tuple[Floats, Floats]:
    """Duchi et al. 2011 in torch's form. Returns w and the sum of squares."""
    g = add_decay(g, n.weight_decay, w)
    total = total + g * g
    rate = F32(n.lr / (1 + (clock.step - 1) * n.lr_decay))
    return w - rate * (g / (np.sqrt(total) + F32(n.eps))), total


def adamax(
    g: Floats, w: Floats, m: Floats, u: Floats, clock: Clock, n: Numbers
) -> tuple[Floats, Floats, Floats]:
    """Kingma & Ba 2015, algorithm 2, in torch's form. Returns w, m, u."""
    g = add_decay(g, n.weight_decay, w)
    m = F32(n.betas[0]) * m + F32(1 - n.betas[0]) * g
    u = np.maximum(F32(n.betas[1]) * u, np.abs(g) + F32(n.eps))
    return w - F32(n.lr / (1 - clock.beta1_power)) * (m / u), m, u


def rmsprop(
    g: Floats,
    w: Floats,
    buffer: Floats,
    square_avg: Floats,
    n: Numbers,
    grad_avg: Floats | None = None,
) -> tuple[Floats, ...]:
    """Tieleman & Hinton 2012 in torch's form. Returns w, buffer, square_avg.

    With the gradient's average, the variance in place of the square (Graves 2013); it is returned
    too.
    """
    g = add_decay(g, n.weight_decay, w)
    square_avg = F32(n.alpha) * square_avg + (F32(1 - n.alpha) * g) * g
    centred = square_avg
    if grad_avg is not None:
        grad_avg = F32(n.alpha) * grad_avg + F32(1 - n.alpha) * g
        centred = square_avg - grad_avg * grad_avg
    normalised = g / (np.sqrt(centred) + F32(n.eps))
    if n.momentum == 0 and grad_avg is None:
        return w - F32(n.lr) * normalised, buffer, square_avg
    buffer = F32(n.momentum) * buffer + normalised
    w = w - F32(n.lr) * buffer
    return (w, buffer, square_avg) if grad_avg is None else (w, buffer, square_avg, grad_avg)


def lion(g: Floats, w: Floats, m: Floats, n: Numbers) -> tuple[Floats, Floats]:
    """Chen et al. 2023, algorithm 2. Returns w, m."""
    direction = np.sign(F32(n.betas[0]) * m + F32(1 - n.betas[0]) * g)
    m = F32(n.betas[1]) * m + F32(1 - n.betas[1]) * g
    return kept(direction, w, n.lr * n.weight_decay, n.cautious) * w - F32(n.lr) * direction, m


# Rules that look at a tensor's norms, in double: sqrt(measure(tensor)[0])


def lars(g: Floats, w: Floats, buffer: Floats, clock: Clock, n: Numbers) -> tuple[Floats, Floats]:
    """You, Gitman & Ginsburg 2017 in the form of Apex's LARC around torch's SGD."""
    grad, weight = norm(g), norm(w)
    ratio, decay = 1.0, 0.0
    if grad > 0 and weight > 0:
        ratio = n.trust_coefficient * weight / (grad + n.weight_decay * weight + n.eps)
        ratio = min(ratio / n.lr, 1.0) if n.clip else ratio
        decay = n.weight_decay
    g = add_decay(g, decay, w) * F32(ratio)
    gain = 1.0 if clock.step == 1 else 1 - n.dampening
    buffer = F32(n.momentum) * buffer + F32(gain) * g
    return w - F32(n.lr) * (g + F32(n.momentum) * buffer if n.nesterov else buffer), buffer


def lamb(w: Floats, m: Floats, v: Floats, clock: Clock, n: Numbers) -> Floats:
    """You et al. 2020, algorithm 2, phi the identity, from adam_moments as they are stored."""
    r = m * F32(1 / (1 - clock.beta1_power))
    r = r / (np.sqrt(v) * F32(1 / math.sqrt(1 - clock.beta2_power)) + F32(n.eps))
    decays = (r * w >= 0) | (not n.cautious)
    direction = np.where(decays, add_decay(r, n.weight_decay, w), r + F32(0))
    weight, update, _ = update_norms(direction, w)
    adapts = weight > 0 and update > 0 and (n.always_adapt or n.weight_decay != 0)
    return w - F32(n.lr * (weight / update if adapts else 1.0)) * direction


def update_norms(u: Floats, w: Floats) -> tuple[float, float, float]:
    """The 2-norms of weights and update, and the sum of their products, without any rounding.

    Elements of which either is inf or NaN do not count.
    """
    finite = np.isfinite(u) & np.isfinite(w)
    a, b = u[finite].astype(np.float64), w[finite].astype(np.float64)
    return math.sqrt(math.fsum(b * b)), math.sqrt(math.fsum(a * a)), math.fsum(a * b)


def hyperball(u: Floats, w: Floats, clock: Clock, lr: float) -> Floats:
    """Wen et al. 2026: R Normalize(w - lr R Normalize(u)), R the norm of the first w."""
    weight, update, along = update_norms(u, w)
    clock.radius = clock.radius or float(F32(weight))
    rate = lr * clock.radius / update if update > 0 else 0.0
    moved = math.sqrt(weight * weight - 2 * rate * along + rate * rate * (update * update))
    keep = clock.radius / moved if moved > 0 else 1.0
    return F32(keep) * w - F32(keep * rate) * u


def adamh(w: Floats, m: Floats, v: Floats, clock: Clock, n: Numbers) -> Floats:
    """Adam's update by hyperball, from adam_moments as they are stored."""
    u = m / (np.sqrt(v) * F32(1 / math.sqrt(1 - clock.beta2_power)) + F32(n.eps))
    return hyperball(u, w, clock, n.lr)


def novograd(g: Floats, w: Floats, m: Floats, clock: Clock, n: Numbers) -> tuple[Floats, Floats]:
    """Ginsburg et al. 2019, algorithm 1; its second moment is the clock's layer. Returns w, m."""
    square = norm(g) * norm(g)
    first = clock.step == 1 and clock.layer == 0
    clock.layer = square if first else n.betas[1] * clock.layer + (1 - n.betas[1]) * square
    power1, power2 = (clock.beta1_power, clock.beta2_power) if n.bias_correction else (0.0, 0.0)
    inverse = F32(1 / (math.sqrt(clock.layer / (1 - power2)) + n.eps))
    step_size, gain = F32(n.lr / (1 - power1)), F32(1 - (n.betas[0] if n.grad_averaging else 0.0))
    if n.reg_inside_moment:
        m = F32(n.betas[0]) * m + gain * add_decay(g * inverse, n.weight_decay, w)
        return w - step_size * m, m
    m = F32(n.betas[0]) * m + gain * g
    return add_decay(w - step_size * (m * inverse), -n.lr * n.weight_decay, w), m


# Reductions


def _halve(lanes: NDArray[np.float64]) -> float:
    lanes = lanes.copy()
    d = lanes.size // 2
    while d:
        lanes[:d] += lanes[d : 2 * d]
        d //= 2
    return float(lanes[0])


def block_squares(block: Floats) -> float:
    """A block of at most 4,096: 64 float lanes, row by row; in double where float would lose."""
    finite = np.isfinite(block)
    rows = np.zeros((-(-block.size // 64), 64), np.float32)
    rows.flat[: block.size] = block
    if finite.all():
        lanes = np.zeros(64, np.float32)
        with np.errstate(over="ignore"):
            for row in rows:
                lanes = lanes + row * row
        total = _halve(lanes.astype(np.float64))
        if math.isfinite(total) and (total >= 2.0**-100 or not block.any()):
            return total
    wide = np.where(np.isfinite(rows), rows, 0).astype(np.float64)
    lanes64 = np.zeros(64)
    for row in wide:
        lanes64 = lanes64 + row * row
    return _halve(lanes64)


def combine(parts: Sequence[float]) -> float:
    """Part i to double lane i mod 256, then the halving tree."""
    lanes = np.zeros(256)
    for i, part in enumerate(parts):
        lanes[i % 256] += part
    return _halve(lanes)


def measure(tensor: Floats) -> tuple[float, float, float]:
    """Sum of squares of the finite elements, largest finite |x|, number of non-finite elements."""
    spans = []
    for first in range(0, tensor.size, 65536):
        total = 0.0
        for at in range(first, min(first + 65536, tensor.size), 4096):
            total += block_squares(tensor[at : min(at + 4096, tensor.size)])
        spans.append(total)
    finite = tensor[np.isfinite(tensor)]
    largest = float(np.abs(finite).max()) if finite.size else 0.0
    return combine(spans), largest, float(tensor.size - finite.size)


def norm(tensor: Floats) -> float:
    """The 2-norm of the finite elements."""
    return math.sqrt(measure(tensor)[0])


def multiplier(norm: float, scale: float, max_norm: float | None) -> np.float32:
    """1 / scale times clip_grad_norm_'s coefficient, rounded once."""
    coefficient = 1.0 if max_norm is None else min(1.0, max_norm / (norm + 1e-6))
    return F32(1 / scale * coefficient)
