"""Cost of summaries, compared with tensorboardX and with writing none, in one run and interleaved.

    pip install tensorboardX
    python benchmarks/bench_summary.py

Bounds: a scalar costs the training thread at most 0.2 of tensorboardX's `add_scalar`, and 0.4 with
the flush; a histogram of 10 M values transfers only its buckets; a loop that writes five scalars
every 100 steps takes at most 1.02 times as long as one that writes none.
"""

import statistics
import tempfile
import time

import jax
import jax.numpy as jnp
import numpy as np
from _timing import report_ratio

from jstep import summary

ROUNDS = 15
SCALARS = 2000


def timed(fn):
    start = time.perf_counter()
    fn()
    return time.perf_counter() - start


def scalars_of_jstep(logdir, value):
    writer = summary.SummaryWriter(logdir)

    def add():
        for step in range(SCALARS):
            writer.add_summary(summary.scalar("loss", value), step)

    return add, writer


def scalars_of_tensorboardx(logdir, value):
    from tensorboardX import SummaryWriter

    writer = SummaryWriter(logdir)

    def add():
        for step in range(SCALARS):
            writer.add_scalar("loss", value, step)

    return add, writer


def bench_scalars(name, ours_value, theirs_value):
    ratios, flushed, ours_us, theirs_us = [], [], [], []
    for _ in range(ROUNDS):
        times = []
        for make, value in (
            (scalars_of_jstep, ours_value),
            (scalars_of_tensorboardx, theirs_value),
        ):
            with tempfile.TemporaryDirectory() as logdir:
                add, writer = make(logdir, value)
                writer.flush()
                adding = timed(add)
                times.append((adding, adding + timed(writer.flush)))
                writer.close()
        ours, theirs = times
        ratios.append(ours[0] / theirs[0])
        flushed.append(ours[1] / theirs[1])
        ours_us.append(ours[0] / SCALARS * 1e6)
        theirs_us.append(theirs[0] / SCALARS * 1e6)
    print(
        f"{name}: {statistics.median(ours_us):.2f} µs, tensorboardX "
        f"{statistics.median(theirs_us):.2f} µs; "
        f"ratio median {statistics.median(ratios):.3f}, best {min(ratios):.3f} (bound 0.2); "
        f"with flush median {statistics.median(flushed):.3f}, best {min(flushed):.3f} (bound 0.4)"
    )
    print(f"\nSummaries: {name}, on the thread that trains")
    report_ratio("SummaryWriter", "tensorboardX", statistics.median(ratios), 0.2)
    report_ratio(
        "SummaryWriter, with the flush",
        "tensorboardX, with the flush",
        statistics.median(flushed),
        0.4,
    )


def bench_histogram():
    values = jnp.asarray(np.random.default_rng(0).standard_normal(10_000_000).astype(np.float32))
    encoded = jax.block_until_ready(summary.histogram("h", values))
    leaves = jax.tree.leaves(encoded)
    call, wait = [], []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        encoded = summary.histogram("h", values)
        call.append(time.perf_counter() - start)
        jax.block_until_ready(encoded)
        wait.append(time.perf_counter() - start)
    on_host = np.asarray(values)
    numpy = [timed(lambda: np.histogram(on_host, bins=30)) for _ in range(ROUNDS)]
    call, wait, numpy = (statistics.median(times) * 1e3 for times in (call, wait, numpy))
    print(
        f"histogram of 10 M float32 ({values.nbytes} bytes): "
        f"{sum(leaf.nbytes for leaf in leaves)} bytes "
        f"travel; the call {call:.2f} ms, counted after {wait:.1f} ms; "
        f"np.histogram, 30 bins, {numpy:.1f} ms"
    )


def bench_loop():
    steps, every = 500, 100

    def step(state, batch):
        def loss_fn(params):
            h = batch
            for w in params:
                h = jnp.tanh(h @ w)
            return jnp.mean(h**2)

        loss, grads = jax.value_and_grad(loss_fn)(state)
        encoded = summary.merge(
            [
                summary.scalar("loss", loss),
                *(summary.scalar(f"norm/{i}", jnp.linalg.norm(g)) for i, g in enumerate(grads)),
            ]
        )
        return jax.tree.map(lambda p, g: p - 0.1 * g, state, grads), encoded

    step = jax.jit(step, donate_argnums=0)
    batch = jnp.ones((64, 128))

    def run(writer):
        state = [jnp.full((128, 128), 0.01) for _ in range(4)]
        for n in range(1, steps + 1):
            state, encoded = step(state, batch)
            if writer is not None and n % every == 0:
                writer.add_summary(encoded, n)
        jax.block_until_ready(state)
        if writer is not None:
            writer.flush()

    run(None)
    # CPU time is more reliable on a busy machine.
    clocks = {"wall": time.perf_counter, "CPU": time.process_time}
    ratios: dict[str, list[float]] = {name: [] for name in clocks}
    without = []
    with tempfile.TemporaryDirectory() as logdir, summary.SummaryWriter(logdir) as writer:
        run(writer)
        for i in range(6 * ROUNDS):
            times = {}
            for w in (None, writer) if i % 2 else (writer, None):
                start = {name: clock() for name, clock in clocks.items()}
                run(w)
                times[w is not None] = {
                    name: clock() - start[name] for name, clock in clocks.items()
                }
            without.append(times[False]["wall"] / steps * 1e6)
            for name in clocks:
                ratios[name].append(times[True][name] / times[False][name])
    print(
        f"loop, five scalars each {every} steps, "
        f"{statistics.median(without):.0f} µs a step (bound 1.02):"
    )
    for name, found in ratios.items():
        low, middle, high = statistics.quantiles(found, n=4)
        print(f"  ratio of {name} time: median {middle:.4f}, quartiles {low:.4f} to {high:.4f}")
    print(f"\nSummaries: five scalars at each {every}th step")
    report_ratio("with summaries", "without", statistics.median(ratios["wall"]), 1.02)


if __name__ == "__main__":
    print(f"jax {jax.__version__} on {jax.devices()[0].device_kind}")
    bench_scalars("scalar from a float", 0.5, 0.5)
    on_device = jax.block_until_ready(jnp.float32(0.5))
    bench_scalars("scalar from an array of the device", on_device, on_device)
    bench_histogram()
    bench_loop()
