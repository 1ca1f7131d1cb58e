"""What the bound on unfinished calls costs, and how long SIGTERM takes: `train` with the bound
beside without it.

    python benchmarks/bench_in_flight.py

Steps of 0.1 to 1000 ms on the device. Without the bound, JAX hands over some 33 calls ahead on a
CPU. The times of one program vary by a tenth from turn to turn, and the bounds are a few
hundredths, so quick steps take many turns.
"""

import functools
import os
import signal
import sys
import threading
import time

import jax
import jax.numpy as jnp
from _timing import Timer, in_turn, report
from bounds import BOUNDS

import jstep
from jstep.metering.in_flight import InFlight

SIZE = 64


def main():
    optimizer = jstep.gradient_descent(1e-3)
    x = jnp.eye(SIZE)

    def loss_of(products):
        def loss_fn(params, x):
            # Without a gradient, which would keep each product: gigabytes in a long step.
            w = jax.lax.stop_gradient(params["w"])
            y, _ = jax.lax.scan(lambda y, _: (jnp.tanh(y @ w), None), x, None, length=products)
            return jnp.mean(params["w"] ** 2) + jnp.mean(y)

        return loss_fn

    def state():
        return jstep.TrainState.create({"w": jnp.eye(SIZE)}, optimizer)

    def run(calls, step, *, bounded):
        room = InFlight.make_room
        InFlight.make_room = room if bounded else lambda self: None
        timer = Timer(untimed=4)
        try:
            jstep.train(
                step, state(), lambda n: x, calls, hooks=[timer], log_steps=None, progress=False
            )
        finally:
            InFlight.make_room = room
        return timer.taken

    # Of many products, since a step of one is mostly the overhead of a call.
    many = jstep.minimize(loss_of(1000), optimizer)
    per_product = min(run(15, many, bounded=True) for _ in range(3)) / 1000
    is_quick = bool(os.environ.get("JSTEP_QUICK_BENCHMARKS"))
    times, ours, peers = {}, "with the bound", "without it"
    # Milliseconds of a step, calls of a turn, turns.
    sizes = [(0.1, 2000, 60), (1, 250, 60), (10, 60, 40)]
    if not is_quick:
        sizes.append((1000, 15, 2))
    for milliseconds, calls, rounds in sizes:
        step = jstep.minimize(loss_of(max(1, round(1e-3 * milliseconds / per_product))), optimizer)
        contenders = {
            f"{milliseconds} ms, {ours}": functools.partial(run, step=step, bounded=True),
            f"{milliseconds} ms, {peers}": functools.partial(run, step=step, bounded=False),
        }
        times |= in_turn(contenders, calls, rounds, warm_up=6)
    bounds = {pair: bound for pair, bound in BOUNDS["in_flight"].items() if pair[0] in times}
    good = report("In flight", times, bounds)
    if not is_quick:
        step = jstep.minimize(loss_of(round(2 / per_product)), optimizer)
        for bounded in (True, False):
            sent = []

            def kill(sent=sent):
                time.sleep(10)
                sent.append(time.perf_counter())
                os.kill(os.getpid(), signal.SIGTERM)

            threading.Thread(target=kill, daemon=True).start()
            try:
                run(30, step, bounded=bounded)
            except jstep.Preempted:
                words = ours if bounded else peers
                print(
                    f"  steps of 2 s, {words}: {time.perf_counter() - sent[0]:.1f} "
                    "s from SIGTERM to the end"
                )
    return good


if __name__ == "__main__":
    sys.exit(not main())
