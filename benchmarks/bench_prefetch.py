"""`prefetch_to_device` in a loop of 2.2 ms host work and 2.2 ms device work, compared with each of
the two alone.

The peer is a thread with a queue of two items, as one would write it by hand. It copies nothing, so
its source must not reuse buffers.

Host work comes in three kinds: waiting (a disk, a network), NumPy, and Python, which holds the GIL.

python benchmarks/bench_prefetch.py
"""

import queue
import sys
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
from _timing import interleaved, report

import jstep

TARGET_SECS = 2.2e-3


def waiting(amount):
    time.sleep(amount * 1e-5)


def in_numpy(amount):
    a = np.ones(4096, np.float32)
    for _ in range(amount):
        np.sqrt(a, out=a)


def in_python(amount):
    x = 0
    for i in range(amount * 10):
        x += i
    return x


@jax.jit
def device_step(state, batch, amount):
    def body(_, x):
        return jnp.sin(x) + 1e-3

    return state + jax.lax.fori_loop(0, amount, body, batch).sum()


def by_hand(items):
    """A thread that reads and transfers items, two ahead."""
    ahead, end = queue.Queue(2), object()

    def read():
        for item in items:
            ahead.put(jax.device_put(item))
        ahead.put(end)

    threading.Thread(target=read, daemon=True).start()
    return iter(ahead.get, end)


def calibrated(run):
    """Return the amount of work that takes the target time."""
    amount = 16
    for _ in range(4):
        run(amount)
        start = time.perf_counter()
        for _ in range(20):
            run(amount)
        amount = max(1, round(amount * TARGET_SECS * 20 / (time.perf_counter() - start)))
    return amount


def main():
    batch = np.ones(64, np.float32)
    zero = jnp.float32(0)
    device_amount = calibrated(lambda amount: device_step(zero, batch, amount).block_until_ready())

    def source(work, amount, count):
        for _ in range(count):
            work(amount)
            yield batch.copy()

    def device_alone(calls):
        state, on_device = zero, jax.device_put(batch)
        for _ in range(calls):
            state = device_step(state, on_device, device_amount)
            state.block_until_ready()

    def loop(items):
        state = zero
        for item in items:
            state = device_step(state, item, device_amount)
            state.block_until_ready()

    good = True
    for work in (waiting, in_numpy, in_python):
        amount = calibrated(work)
        times = interleaved(
            {
                "host alone": lambda calls, work=work, amount=amount: (
                    list(source(work, amount, calls)) and None
                ),
                "device alone": device_alone,
                "one after the other": lambda calls, work=work, amount=amount: loop(
                    source(work, amount, calls)
                ),
                "prefetch_to_device": lambda calls, work=work, amount=amount: loop(
                    jstep.prefetch_to_device(source(work, amount, calls))
                ),
                "a thread by hand": lambda calls, work=work, amount=amount: loop(
                    by_hand(source(work, amount, calls))
                ),
            },
            150,
        )
        slower = [
            max(pair) for pair in zip(times["host alone"], times["device alone"], strict=True)
        ]
        times["the slower of the two"] = slower
        bounds = {
            ("prefetch_to_device", "the slower of the two"): 1.10,
            ("prefetch_to_device", "a thread by hand"): 1.02,
        }
        good &= report(f"A step, host work {work.__name__}", times, bounds, 1e3)
    return good


if __name__ == "__main__":
    sys.exit(not main())
