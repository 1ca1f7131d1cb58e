"""Optimizers compared with Optax's: a step over large leaves, chains of blocks, matrices.
What clipping and Lion gain helps only on CPUs: on a TPU both move the same bytes, see the table of
memory traffic.

    python benchmarks/bench_optimizers.py [words of titles]
"""

import os
import sys
from functools import partial

import jax
import jax.numpy as jnp
import optax
from _timing import interleaved, optax_step, report, runner
from optax import contrib

import jstep

LEAVES, SIDE = 16, 2048


def big():
    return [jnp.full((SIDE, SIDE), 0.1) for _ in range(LEAVES)]


def noise(params):
    return [jax.random.normal(jax.random.key(i), leaf.shape) for i, leaf in enumerate(params)]


def by_jstep(optimizer, params):
    step = jax.jit(
        lambda state, grads: jstep.apply_gradients(state, grads, optimizer), donate_argnums=0
    )
    return runner(step, jstep.TrainState.create(params(), optimizer), noise(params()))


def by_optax(transformation, params):
    step = jax.jit(optax_step(transformation), donate_argnums=0)
    return runner(step, (params(), transformation.init(params())), noise(params()))


def matrices():
    return [jnp.full((256, 512), 0.1) for _ in range(24)]


def squares():
    return [jnp.full((128, 128), 0.1) for _ in range(8)]


OPTIMIZERS = {
    "Adam": (lambda: jstep.adam(1e-3), lambda: optax.adam(1e-3)),
    "global-norm clipping and Adam": (
        lambda: jstep.chain(jstep.clip_gradients(by_global_norm=1.0), jstep.adam(1e-3)),
        lambda: optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3)),
    ),
    "AdamW": (lambda: jstep.adamw(1e-3), lambda: optax.adamw(1e-3, weight_decay=1e-2)),
    "Lion": (
        lambda: jstep.lion(1e-4, weight_decay=0.1),
        lambda: optax.lion(1e-4, weight_decay=0.1),
    ),
    "SGD, momentum": (lambda: jstep.sgd(0.1, 0.9), lambda: optax.sgd(0.1, 0.9)),
    "SGD, Nesterov": (
        lambda: jstep.sgd(0.1, 0.9, use_nesterov=True),
        lambda: optax.sgd(0.1, 0.9, nesterov=True),
    ),
}
LIMITS = {"Adam": 1.0, "global-norm clipping and Adam": 0.6}
"""Bounds other than 1.03."""
BLOCKS = {
    "AdamW": (
        lambda: jstep.adamw(1e-3),
        lambda: jstep.chain(
            jstep.scale_by_adam(), jstep.add_weight_decay(1e-2), jstep.scale_by_learning_rate(1e-3)
        ),
    ),
    "Lion": (
        lambda: jstep.lion(1e-4, weight_decay=0.1),
        lambda: jstep.chain(
            jstep.scale_by_lion(), jstep.add_weight_decay(0.1), jstep.scale_by_learning_rate(1e-4)
        ),
    ),
    "SGD, momentum": (
        lambda: jstep.sgd(0.1, 0.9),
        lambda: jstep.chain(jstep.trace(0.9), jstep.scale_by_learning_rate(0.1)),
    ),
}


def versus_optax(name):
    ours, theirs = OPTIMIZERS[name]
    return interleaved({"jstep": by_jstep(ours(), big), "Optax": by_optax(theirs(), big)}, 1, 9)


def blocks(name):
    whole, chain = BLOCKS[name]
    return interleaved({"chain": by_jstep(chain(), big), "whole": by_jstep(whole(), big)}, 1, 9)


def adafactor():
    return interleaved(
        {
            "jstep": by_jstep(jstep.adafactor(1e-2), big),
            "Optax": by_optax(optax.adafactor(1e-2), big),
        },
        1,
        9,
    )


def muon():
    ours = jstep.muon(1e-2, scale=None, weight_decay=0.0)
    theirs = contrib.muon(1e-2, weight_decay=0.0)
    return interleaved(
        {"jstep": by_jstep(ours, matrices), "Optax": by_optax(theirs, matrices)}, 1, 9
    )


def soap_step(beta=0.95, epsilon=1e-8, frequency=10):
    """Return a step of SOAP for matrices, hand-written in JAX."""

    def leaf(p, g, s, t):
        def project(x):
            return s["q0"].T @ x @ s["q1"]

        m = beta * s["m"] + (1 - beta) * g
        v = beta * s["v"] + (1 - beta) * jnp.square(project(g))
        u = s["q0"] @ (project(m) / (jnp.sqrt(v) + epsilon)) @ s["q1"].T
        k = (t + 1).astype(jnp.float32)
        size = 3e-3 * jnp.sqrt(1 - beta**k) / (1 - beta**k)
        p = (p - size * u) * (1 - 3e-5)
        grams = (beta * s["gg0"] + (1 - beta) * g @ g.T, beta * s["gg1"] + (1 - beta) * g.T @ g)

        def rotate(v):
            new = []
            for axis, (gg, q) in enumerate(zip(grams, (s["q0"], s["q1"]), strict=True)):
                product = gg @ q
                order = jnp.argsort(jnp.sum(q * product, 0), descending=True)
                v = jnp.take(v, order, axis)
                new.append(jnp.linalg.qr(product[:, order])[0])
            return *new, v

        q0, q1, v = jax.lax.cond(
            (t + 1) % frequency == 0, rotate, lambda v: (s["q0"], s["q1"], v), v
        )
        return p, {"m": m, "v": v, "gg0": grams[0], "gg1": grams[1], "q0": q0, "q1": q1}

    def step(state, grads):
        params, slots, t = state
        new = [leaf(*args, t) for args in zip(params, grads, slots, strict=True)]
        return [p for p, _ in new], [s for _, s in new], t + 1

    return step


def soap():
    params, grads = squares(), noise(squares())
    first = [jnp.linalg.eigh(0.05 * g @ g.T)[1] for g in grads]
    slots = [
        {
            "m": 0 * p,
            "v": 0 * p,
            "gg0": 0.05 * g @ g.T,
            "gg1": 0.05 * g.T @ g,
            "q0": q + 0,
            "q1": q + 0,
        }
        for p, g, q in zip(params, grads, first, strict=True)
    ]
    plain = runner(jax.jit(soap_step(), donate_argnums=0), (params, slots, jnp.int32(0)), grads)
    return interleaved({"jstep": by_jstep(jstep.soap(), squares), "plain JAX": plain}, 20, 9)


def batched():
    """Time Newton–Schulz for 24 matrices of equal shape, one by one and in one batch."""
    from jstep.optimizers.muon import Iteration, newton_schulz

    times = {}
    iteration = Iteration(((3.4445, -4.775, 2.0315),) * 5, None)
    for shape in ((32, 32), (64, 64), (256, 512)):
        members = [jax.random.normal(jax.random.key(i), shape) for i in range(24)]
        together = jax.jit(lambda members: list(newton_schulz(jnp.stack(members), 1e-7, iteration)))
        single = jax.jit(
            lambda members: [newton_schulz(member, 1e-7, iteration) for member in members]
        )
        for name, function in (("one by one", single), ("in one batch", together)):
            times[f"{shape}, {name}"] = lambda calls, f=function, m=members: [
                f(m) for _ in range(calls)
            ][-1]
    return interleaved(times, 2, 7)


def main(words):
    peer, parts = ("jstep", "Optax"), ("chain", "whole")
    rows: list = [
        (
            f"16 leaves of 4M floats, {name}",
            partial(versus_optax, name),
            {peer: LIMITS.get(name, 1.03)},
        )
        for name in OPTIMIZERS
    ]
    rows += [
        (f"blocks beside the whole, {name}", partial(blocks, name), {parts: 1.03})
        for name in BLOCKS
    ]
    rows += [
        ("16 leaves of 4M floats, Adafactor", adafactor, {peer: 1.05}),
        ("24 matrices of 256 × 512, Muon", muon, {peer: 1.05}),
        ("8 matrices of 128 × 128, SOAP", soap, {("jstep", "plain JAX"): 1.05}),
        ("24 equal matrices, Newton–Schulz", batched, {}),
    ]
    good = True
    for title, measure, bounds in rows:
        if not words or any(word.lower() in title.lower() for word in words):
            times = measure()
            good &= report(title, times, bounds, 1e3)
            jax.clear_caches()
    return good


if __name__ == "__main__":
    print(f"{jax.default_backend()}, load {os.getloadavg()[0]:.1f}")
    sys.exit(not main(sys.argv[1:]))
