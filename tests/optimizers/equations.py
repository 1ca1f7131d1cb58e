"""The optimizers' equations in NumPy float64, leaf by leaf: the reference of the golden tests.

Each rule is a function `rule(g, p, s, h) -> p'`: s holds the state of the leaf, h the
hyperparameters at the step, with t, the age of the slots, and wd, which is 0 for a leaf that does
not decay. `averages` at the end follows a parameter.
"""

import math
from collections.abc import Callable
from typing import Any

import numpy as np

Rule = Callable[[Any, Any, dict[str, Any], Any], Any]


def ema(s, name, new, beta, first=0.0):
    s[name] = beta * s.get(name, first) + (1 - beta) * new
    return s[name]


def adam_direction(g, s, h):
    m, v = ema(s, "m", g, h.beta1), ema(s, "v", g * g, h.beta2)
    return m / (1 - h.beta1**h.t) / (np.sqrt(v / (1 - h.beta2**h.t)) + h.epsilon)


def adamw(g, p, s, h):
    return p - h.lr * (adam_direction(g, s, h) + h.wd * p)


def lion(g, p, s, h):
    u = np.sign(h.beta1 * s.get("m", 0.0) + (1 - h.beta1) * g)
    ema(s, "m", g, h.beta2)
    return p - h.lr * (u + h.wd * p)


def ratio(p, u, coefficient=1.0, epsilon=0.0):
    norms = np.sqrt(np.sum(np.square(p))), np.sqrt(np.sum(np.square(u)))
    return coefficient * norms[0] / (norms[1] + epsilon) if min(norms) > 0 else 1.0


def lamb(g, p, s, h):
    r = adam_direction(g, s, h) + h.wd * p
    return p - h.lr * ratio(p, r) * r


def lars(g, p, s, h, nesterov=False):
    g = g + h.wd * p
    g = h.lr * (ratio(p, g, h.trust_coefficient, h.epsilon) if h.trusts else 1.0) * g
    s["a"] = h.momentum * s.get("a", 0.0) + g
    return p - (g + h.momentum * s["a"] if nesterov else s["a"])


def ademamix(g, p, s, h):
    m1, m2 = ema(s, "m1", g, h.beta1) / (1 - h.beta1**h.t), ema(s, "m2", g, h.beta3)
    v = ema(s, "v", g * g, h.beta2) / (1 - h.beta2**h.t)
    return p - h.lr * ((m1 + h.alpha * m2) / (np.sqrt(v) + h.epsilon) + h.wd * p)


def rms(x):
    return math.sqrt(np.mean(np.square(x)))


def adafactor(g, p, s, h):
    beta, square = 1 - h.t**-h.decay_rate, np.square(g) + h.epsilon
    order = np.argsort(np.shape(p), kind="stable")
    if np.ndim(p) >= 2 and np.shape(p)[order[-2]] >= h.factor:
        d1, d0 = int(order[-2]), int(order[-1])
        row, col = (
            ema(s, "row", square.mean(d0, keepdims=True), beta),
            ema(s, "col", square.mean(d1, keepdims=True), beta),
        )
        u = g / np.sqrt(row / row.mean(d1, keepdims=True) * col)
    else:
        u = g / np.sqrt(ema(s, "v", square, beta))
    u = u / max(1.0, rms(u) / h.clip_threshold)
    u = u * (min(h.lr, 1 / math.sqrt(h.t)) if h.relative else h.lr)
    u = u * (max(h.epsilon_scale, rms(p)) if h.scales else 1.0)
    u = u if h.momentum is None else ema(s, "m", u, h.momentum)
    return p - u - h.lr * h.wd * p


def polynomials(x, triples):
    turned = x.shape[0] > x.shape[1]
    x = x.T if turned else x
    for a, b, c in triples:
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.T if turned else x


def newton_schulz(x, coefficients, steps, epsilon):
    return polynomials(x / max(np.linalg.norm(x), epsilon), [coefficients] * steps)


def muon(g, p, s, h):
    m = ema(s, "m", g, h.momentum)
    u = newton_schulz(
        (1 - h.momentum) * g + h.momentum * m if h.nesterov else m,
        h.coefficients,
        h.steps,
        h.epsilon,
    )
    return p - h.lr * (h.scale(*p.shape) * u + h.wd * p)


def schedule_free(g, p, s, h, adam=True):
    """Schedule-free by Facebook, where p is y."""
    z, weight = s.setdefault("z", p), h.t**h.r * h.lr_max**h.weight_lr_power
    c = weight / h.weight_sum if h.weight_sum else 0.0
    if adam:
        g = g / (np.sqrt(ema(s, "v", g * g, h.beta2) / (1 - h.beta2**h.t)) + h.epsilon)
    g = g + h.wd * p
    y = (1 - c) * p + c * z + h.lr * (h.beta1 * (1 - c) - 1) * g
    s["z"] = z - h.lr * g
    return y


def adadelta(g, p, s, h):
    e = ema(s, "e", g * g, h.rho)
    d = g * np.sqrt(s.get("x", 0.0) + h.epsilon) / np.sqrt(e + h.epsilon)
    ema(s, "x", d * d, h.rho)
    return p - h.lr * d


def signum(g, p, s, h):
    return p - h.lr * np.sign(ema(s, "m", g, h.beta))


def adan(g, p, s, h):
    change = g - s.get("g", g)
    s["g"] = g
    m, d = ema(s, "m", g, h.beta1), ema(s, "d", change, h.beta2)
    n = ema(s, "n", np.square(g + h.beta2 * change), h.beta3)
    u = m / (1 - h.beta1**h.t) + h.beta2 * d / (1 - h.beta2**h.t)
    return (p - h.lr * u / (np.sqrt(n / (1 - h.beta3**h.t)) + h.epsilon)) / (1 + h.lr * h.wd)


def madgrad(g, p, s, h):
    """MADGRAD, as in the code of its authors."""
    x0, lamb = s.setdefault("x0", p), (h.lr + h.epsilon) * math.sqrt(h.t)
    g = g + h.weight_decay * p
    s["G"] = s.get("G", 0.0) + lamb * g * g
    s["s"] = s.get("s", 0.0) + lamb * g
    z = x0 - s["s"] / (np.cbrt(s["G"]) + h.epsilon)
    return h.momentum * p + (1 - h.momentum) * z


def on_ball(u, p, h):
    radius = getattr(h, "radius", None) or np.linalg.norm(p)
    q = p - h.lr * radius * u / max(np.linalg.norm(u), 1e-10)
    return radius * q / max(np.linalg.norm(q), 1e-10)


def adamh(g, p, s, h):
    return on_ball(adam_direction(g, s, h), p, h)


def nesterov_polar(g, s, h):
    """The common part of the variants of Muon: Nesterov momentum and the Newton–Schulz
    iteration."""
    s["M"] = h.momentum * s.get("M", 0.0) + g
    return newton_schulz(g + h.momentum * s["M"], JORDAN, 5, 1e-7)


JORDAN = (3.4445, -4.775, 2.0315)


def per_neuron(o, s, h):
    """Rows are inputs and columns are neurons: the transpose of the matrices of the authors."""
    axis = 1 if h.over == "short" and o.shape[1] < o.shape[0] else 0
    v = ema(s, "neurons", np.mean(o * o, axis=axis, keepdims=True), h.beta2)
    u = o / (np.sqrt(v) + 1e-10)
    return u * np.linalg.norm(o) / (np.linalg.norm(u) + 1e-10)


def normuonh(g, p, s, h):
    return on_ball(per_neuron(nesterov_polar(g, s, h), s, h), p, h)


def averages(ema, first, moves):
    """The averages after each update: `moves` has its step and the new parameter, or None where
    they do not move."""
    average, entered, found = 0.0 if ema._starts_at_zeros else first, 0, []
    for move in moves:
        if move is not None:
            (step, p), n = move, move[0] + 1
            due = n > ema.start_step and (n - ema.start_step) % ema.every == 0
            entered += due
            rate = 1 - ema.decay if ema.rate is None else float(ema.rate(step))
            rate = max(rate, 9 / (10 + n)) if ema.num_updates else rate
            if ema.zero_debias and due:
                rate = 1 / entered if rate == 0 else rate / (1 - (1 - rate) ** entered)
            rate = 1.0 if n <= ema.start_step else rate if due else 0.0
            average += rate * (p - average)
        found.append(average)
    return found
