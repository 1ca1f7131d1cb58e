"""What the bound on unfinished calls costs, and how long SIGTERM takes: `train` with the bound beside without it.

    python benchmarks/bench_in_flight.py

Steps of 0.1 to 1000 ms on the device. Without the bound, JAX hands over some 33 calls ahead on a CPU.
"""

import os
import signal
import sys
import threading
import time

import jax
import jax.numpy as jnp
from _timing import Timer, report
from bounds import BOUNDS

import jstep
from jstep.metering.in_flight import InFlight

SIZE = 256


def main():
    optimizer = jstep.gradient_descent(1e-3)
    x = jnp.eye(SIZE)

    def loss_of(products):
        def loss_fn(params, x):
            return jnp.mean(jax.lax.scan(lambda y, _: (jnp.tanh(y @ params["w"]), None), x, None, length=products)[0])

        return loss_fn

    def state():
        return jstep.TrainState.create({"w": jnp.eye(SIZE)}, optimizer)

    def run(step, calls, *, bounded, hooks=()):
        room = InFlight.make_room
        InFlight.make_room = room if bounded else lambda self: None
        timer = Timer(untimed=4)
        try:
            jstep.train(step, state(), lambda n: x, calls, hooks=[timer, *hooks], log_steps=None, progress=False)
        finally:
            InFlight.make_room = room
        return timer.taken

    one = jstep.minimize(loss_of(1), optimizer)
    run(one, 200, bounded=True)
    per_product = min(run(one, 200, bounded=True) for _ in range(3))
    is_quick = bool(os.environ.get("JSTEP_QUICK_BENCHMARKS"))
    times, ours, peers = {}, "with the bound", "without it"
    for milliseconds in (0.1, 1, 10) if is_quick else (0.1, 1, 10, 1000):
        step = jstep.minimize(loss_of(max(1, round(1e-3 * milliseconds / per_product))), optimizer)
        calls = max(15, min(2000, round(1000 / milliseconds)))
        run(step, 15, bounded=True)
        with_it, without = times[f"{milliseconds} ms, {ours}"], times[f"{milliseconds} ms, {peers}"] = [], []
        for _ in range(2 if is_quick else 7 if milliseconds < 1000 else 2):
            without.append(run(step, calls, bounded=False))
            with_it.append(run(step, calls, bounded=True))
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
                run(step, 30, bounded=bounded)
            except jstep.Preempted:
                words = ours if bounded else peers
                print(f"  steps of 2 s, {words}: {time.perf_counter() - sent[0]:.1f} s from SIGTERM to the end")
    return good


if __name__ == "__main__":
    sys.exit(not main())
