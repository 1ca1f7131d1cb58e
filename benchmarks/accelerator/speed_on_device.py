"""The part speed: times of steps, optimizers, checkpoints and the loop, beside Optax and raw JAX in
the same process.

Bytes per second are also given as a share of what a copy of 1 GB reaches in the same run,
operations as a share of a large product in bfloat16. PyTorch's fused optimizers run in another
process (torch_speed.py).
"""

import functools
import itertools
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from part_report import QUICK, PartReport, each, installed, last_line, run_child, seconds_left
from small_networks import network

import jstep
from jstep.watching.utilization import PEAKS

REPORT = PartReport("speed")
MILLION = 2**20 // 64 if QUICK else 2**20
SHAPES = {
    "16 × 4M": [(2048, 2048 // (64 if QUICK else 1))] * 16,
    "1000 × 1000": [(1000,)] * (20 if QUICK else 1000),
}
HAS_OPTAX = installed(REPORT, "optax")
measured: dict[str, float] = {}
"""Bytes per second of a copy, operations per second of a product."""


def timed(
    contenders: dict[str, Callable[[], Any]], rounds: int = 11, calls: int = 5
) -> dict[str, float]:
    """Return the median seconds of a call of each contender; they take turns."""
    rounds = 3 if QUICK else rounds
    for run in contenders.values():
        jax.block_until_ready([run() for _ in range(2)][-1])  # compiled and warm
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for _, (name, run) in itertools.product(range(rounds), contenders.items()):
        began = time.perf_counter()
        for _ in range(calls):
            last = run()
        jax.block_until_ready(last)
        times[name].append((time.perf_counter() - began) / calls)
    return {name: statistics.median(seconds) for name, seconds in times.items()}


def rows(title: str, times: dict[str, float], bytes_moved: float = 0.0) -> None:
    """Add a row for each contender, with its time beside that of the first."""
    first = next(iter(times.values()))
    for name, seconds in times.items():
        values: dict[str, Any] = {"ms": seconds * 1e3, "jstep / it": first / seconds}
        if bytes_moved and "copy" in measured:
            values["of a copy's bandwidth"] = bytes_moved / seconds / measured["copy"]
        REPORT.row(f"{title}: {name}", **values)


def stepping(step: Callable[..., Any], state: Any, *args: Any) -> Callable[[], Any]:
    """Return a function that runs a step on the state that the one before returned."""
    held = [state]

    def run() -> Any:
        held[0], metrics = step(held[0], *args)
        return held[0], metrics

    return run


# What the device can do.


def bandwidth() -> None:
    x = jnp.ones((256 * MILLION,), jnp.float32)
    seconds = timed({"copy": functools.partial(jax.jit(lambda x: x * 1.5), x)})["copy"]
    measured["copy"] = 2 * x.nbytes / seconds
    REPORT.row("copy of 1 GB, read and written", **{"GB/s": measured["copy"] / 1e9})


def products() -> None:
    n = 512 if QUICK else 8192
    a = jnp.ones((n, n), jnp.bfloat16)
    seconds = timed({"product": functools.partial(jax.jit(lambda a: a @ a), a)})["product"]
    measured["product"] = 2 * n**3 / seconds
    REPORT.row(f"bfloat16 product, {n} × {n}", **{"TFLOP/s": measured["product"] / 1e12})


# Steps and optimizers.


def raw_adam(loss_fn: Callable[..., Any], rate: float = 1e-3) -> Callable[..., Any]:
    """Return AdamW's step as one writes it by hand, compiled, with a donated state."""

    def step(state: Any, *batch: Any) -> Any:
        params, m, v, n = state
        loss, grads = jax.value_and_grad(loss_fn)(params, *batch)
        t = (n + 1).astype(jnp.float32)
        m = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, m, grads)
        v = jax.tree.map(lambda v, g: 0.999 * v + 0.001 * g * g, v, grads)

        def updated(p: Any, m: Any, v: Any) -> Any:
            return p - rate * (m / (1 - 0.9**t) / (jnp.sqrt(v / (1 - 0.999**t)) + 1e-8) + 1e-2 * p)

        return (jax.tree.map(updated, params, m, v), m, v, n + 1), {"loss": loss}

    return jax.jit(step, donate_argnums=0)


def raw_state(params: Any) -> Any:
    new = jax.tree.map(jnp.array, params)
    return new, jax.tree.map(jnp.zeros_like, new), jax.tree.map(jnp.zeros_like, new), jnp.int32(0)


def jstep_state(params: Any, optimizer: Any) -> Any:
    return jstep.TrainState.create(jax.tree.map(jnp.array, params), optimizer)


def steps_of_networks() -> None:
    for name in ("dense",) if QUICK else ("dense", "attention", "convolutions"):
        params, loss_fn, examples = network(name, "bfloat16")
        batch = jstep.batches(examples, batch_size=64, seed=0)[0]
        batch = jax.tree.map(jnp.asarray, batch if isinstance(batch, tuple) else (batch,))
        optimizer = jstep.adamw(1e-3, weight_decay=1e-2)
        contenders = {
            "jstep": stepping(
                jstep.minimize(loss_fn, optimizer), jstep_state(params, optimizer), *batch
            ),
            "raw JAX": stepping(raw_adam(loss_fn), raw_state(params), *batch),
        }
        if HAS_OPTAX:
            contenders["Optax"] = optax_step(loss_fn, params, "adamw", batch)
        ways = {"lanes=8": {"lanes": 8}, "num_microbatches=8": {"num_microbatches": 8}}
        for way, more in ways.items():
            step = jstep.minimize(loss_fn, optimizer, **more)
            contenders[f"jstep, {way}"] = stepping(step, jstep_state(params, optimizer), *batch)
        rows(f"step, {name}", timed(contenders, calls=2 if QUICK else 20))


def optax_step(
    loss_fn: Any, params: Any, name: str, batch: Any, clip: bool = False
) -> Callable[[], Any]:
    import optax

    made = {
        "adamw": lambda: optax.adamw(1e-3, weight_decay=1e-2),
        "lion": lambda: optax.lion(1e-4, weight_decay=0.1),
        "sgd": lambda: optax.sgd(0.1, 0.9),
    }[name]()
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), made) if clip else made

    def step(state: Any, *batch: Any) -> Any:
        params, slots = state
        loss, grads = jax.value_and_grad(loss_fn)(params, *batch)
        updates, slots = optimizer.update(grads, slots, params)
        return (optax.apply_updates(params, updates), slots), {"loss": loss}

    new = jax.tree.map(jnp.array, params)
    return stepping(jax.jit(step, donate_argnums=0), (new, optimizer.init(new)), *batch)


def linear_loss(params: Any, targets: Any) -> Any:
    """A loss whose gradient costs one read of the parameters."""
    return sum(jnp.sum(p * t) for p, t in zip(params, targets, strict=True))


OPTIMIZERS = {
    # name: (how, passes over the parameters: reads of p, its gradient (a target) and slots, writes
    # of p and slots)
    "adamw": (lambda: jstep.adamw(1e-3, weight_decay=1e-2), 7),
    "lion": (lambda: jstep.lion(1e-4, weight_decay=0.1), 5),
    "sgd": (lambda: jstep.sgd(0.1, 0.9), 5),
}


def optimizers() -> None:
    for sizes, shapes in SHAPES.items():
        params = [jnp.full(shape, 0.1) for shape in shapes]
        batch = ([jnp.full(shape, 0.01) for shape in shapes],)
        size = sum(leaf.nbytes for leaf in params)
        for name, (make, passes) in OPTIMIZERS.items():
            contenders = {
                "jstep": stepping(
                    jstep.minimize(linear_loss, make()), jstep_state(params, make()), *batch
                )
            }
            if HAS_OPTAX:
                contenders["Optax"] = optax_step(linear_loss, params, name, batch)
            if name == "adamw":
                contenders["raw JAX"] = stepping(raw_adam(linear_loss), raw_state(params), *batch)
            rows(f"{name}, {sizes}", timed(contenders), passes * size)
        clipped = jstep.chain(
            jstep.clip_gradients(by_global_norm=1.0), jstep.adamw(1e-3, weight_decay=1e-2)
        )
        compact = jstep.compact(jstep.adamw(1e-3, weight_decay=1e-2))
        contenders = {
            "jstep": stepping(
                jstep.minimize(linear_loss, clipped), jstep_state(params, clipped), *batch
            ),
            **(
                {"Optax": optax_step(linear_loss, params, "adamw", batch, clip=True)}
                if HAS_OPTAX
                else {}
            ),
        }
        rows(f"clip and adamw, {sizes}", timed(contenders), 9 * size)
        step = stepping(jstep.minimize(linear_loss, compact), jstep_state(params, compact), *batch)
        rows(f"compact(adamw), {sizes}", timed({"jstep": step}), 3 * size)
        if seconds_left() < 60:
            return


def torch_optimizers() -> None:
    """PyTorch's fused optimizers, in a process that may take the memory which this one leaves."""
    script = Path(__file__).with_name("torch_speed.py")
    done = run_child(
        [sys.executable, str(script), json.dumps(SHAPES)], dict(os.environ), seconds_left()
    )
    if done.returncode:
        REPORT.left_out("PyTorch's fused optimizers", last_line(done.stderr))
        return
    for row in json.loads(done.stdout.splitlines()[-1]):
        REPORT.row(row.pop("name"), **row)


# Fingerprints and checkpoints.


def fingerprints() -> None:
    tree = {"w": jnp.ones((256 * MILLION,), jnp.float32)}
    seconds = timed({"jstep": lambda: jstep.fingerprint(tree)})["jstep"]
    rows("fingerprint of 1 GB", {"jstep": seconds}, tree["w"].nbytes)


def second(run: Callable[[int], Any]) -> float:
    """Return the seconds of a second call; the first imports and compiles."""
    run(1)
    began = time.perf_counter()
    run(2)
    return time.perf_counter() - began


def checkpoints() -> None:
    params = [jnp.full((2048, 2048 // (64 if QUICK else 1)), float(i)) for i in range(16)]
    optimizer = jstep.adamw(1e-3)
    state = jstep_state(params, optimizer)  # some 0.8 GB
    directory = Path(tempfile.mkdtemp(prefix="jstep-speed-"))
    times: dict[str, dict[str, float]] = {"save": {}, "restore": {}}
    try:
        with jstep.Saver(directory / "jstep") as saver:

            def save(step: int) -> None:
                saver.save(state, step)
                saver.wait()

            times["save"]["jstep"] = second(save)
            times["restore"]["jstep"] = second(
                lambda step: jax.block_until_ready(saver.restore(state))
            )
        if installed(REPORT, "orbax.checkpoint"):
            orbax_checkpoints(state, directory / "orbax", times)
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    for what, seconds in times.items():
        rows(
            f"{what} of a state of {sum(x.nbytes for x in jax.tree.leaves(state)) / 1e9:.2g} GB",
            seconds,
        )


def orbax_checkpoints(state: Any, directory: Path, times: dict[str, dict[str, float]]) -> None:
    import orbax.checkpoint as ocp

    with ocp.CheckpointManager(directory) as manager:
        tree = {"params": state.params, "slots": state.slots}

        def save(step: int) -> None:
            manager.save(step, args=ocp.args.StandardSave(tree))
            manager.wait_until_finished()

        times["save"]["Orbax"] = second(save)
        restored = ocp.args.StandardRestore(tree)
        times["restore"]["Orbax"] = second(
            lambda step: jax.block_until_ready(manager.restore(step, args=restored))
        )


# The loop.


def loops() -> None:
    """`train` with checkpoints, logs and prefetched host batches beside bare loops, for steps of
    0.1, 1 and 10 ms."""
    for milliseconds in (0.1,) if QUICK else (0.1, 1.0, 10.0):
        loop(milliseconds)


def loop(milliseconds: float) -> None:
    """One size of steps: as many products as take that long."""
    n = 256 if QUICK else 2048
    optimizer = jstep.adam(1e-3)
    params = {"w": 0.5 * jnp.eye(n, dtype=jnp.float32)}
    x = np.ones((64, n), np.float32)

    def loss_fn(params: Any, x: Any, repeats: int) -> Any:
        return jnp.mean(
            jax.lax.scan(lambda x, _: (jnp.tanh(x @ params["w"]), None), x, length=repeats)[0] ** 2
        )

    repeats = 1
    while repeats < 4096:
        step = jstep.minimize(functools.partial(loss_fn, repeats=repeats), optimizer)
        state = jstep_state(params, optimizer)
        once = timed({"step": stepping(step, state, jnp.asarray(x))}, 3)["step"]
        if once * 1e3 >= milliseconds:
            break
        repeats *= 2
    count = 30 if QUICK else max(100, int(1e3 / milliseconds))
    data = jstep.batches(np.tile(x, (8, 1)), batch_size=64, seed=0)

    there = jax.block_until_ready(jnp.asarray(data[0]))

    def bare(batch: Any = lambda index: data[index]) -> float:
        state, _ = step(jstep_state(params, optimizer), batch(0))
        jax.block_until_ready(state)
        began = time.perf_counter()
        for index in range(1, count):
            state, _ = step(state, batch(index))
        jax.block_until_ready(state)
        return (time.perf_counter() - began) / (count - 1)

    def looped(steps_per_call: Any) -> float:
        directory, clock = tempfile.mkdtemp(prefix="jstep-speed-"), Clock()
        try:
            jstep.train(
                step, jstep_state(params, optimizer), data, count, checkpoint_dir=directory,
                progress=False, steps_per_call=steps_per_call, hooks=[clock],
            )  # fmt: skip
        finally:
            shutil.rmtree(directory, ignore_errors=True)
        return clock.seconds

    ways = {"train": lambda: looped(1), 'train, "auto"': lambda: looped("auto"),
            "a bare loop": bare,
            "a bare loop, its batch on the device": lambda: bare(lambda index: there)}  # fmt: skip
    rounds = [{name: run() for name, run in ways.items()} for _ in range(1 if QUICK else 5)]
    medians = {name: statistics.median(one[name] for one in rounds) for name in ways}
    rows(f"loop, steps of {milliseconds:g} ms, NumPy batches", medians)


class Clock(jstep.Hook):
    """Times steps from the end of the first call to that of the last, without files at both
    ends."""

    def begin(self, state: Any) -> None:
        self.began: float | None = None

    def after_step(self, step: int, state: Any, metrics: Any) -> None:
        if self.began is None:
            jax.block_until_ready(state)
            self.began, self.first = time.perf_counter(), step

    def end(self, step: int, state: Any) -> None:
        jax.block_until_ready(state)
        self.seconds = (time.perf_counter() - (self.began or 0.0)) / max(1, step - self.first)

    def next_due(self, step: int) -> int:
        return step + 1 if self.began is None else 2**62


# A transformer of some 100M parameters.


def attention(heads: int, context: int) -> str | None:
    """Return the implementation of attention for all contenders: cuDNN's where it runs, else XLA's.

    There is none on TPUs, on AMD's and older GPUs, and without its library.
    """
    if REPORT.backend != "gpu":
        return None
    x = jnp.ones((1, context, heads, 64), jnp.bfloat16)

    def total(x: Any) -> Any:
        return jnp.sum(
            jax.nn.dot_product_attention(x, x, x, is_causal=True, implementation="cudnn")
        )

    try:
        jax.block_until_ready(jax.jit(jax.grad(total))(x))
    except Exception as error:
        REPORT.say(
            f"  cuDNN's attention does not run here ({type(error).__name__}: "
            f"{str(error)[:100]}): XLA's is used"
        )
        return None
    return "cudnn"


def transformer() -> None:
    width, layers, context, rows_of_batch, vocabulary = (
        (64, 2, 64, 4, 256) if QUICK else (768, 12, 1024, 16, 32_768)
    )
    rng = np.random.default_rng(0)

    def new(*shape: int) -> Any:
        return jnp.asarray(rng.normal(size=shape, scale=0.02), jnp.float32)

    params = {
        "embed": new(vocabulary, width), "position": new(context, width),
        "layers": {"qkv": new(layers, width, 3 * width), "out": new(layers, width, width),
                   "up": new(layers, width, 4 * width), "down": new(layers, 4 * width, width)},
    }  # fmt: skip
    heads = width // 64
    implementation = attention(heads, context)

    def block(x: Any, p: Any) -> Any:
        p = jax.tree.map(lambda w: w.astype(x.dtype), p)
        q, k, v = jnp.split(
            (jax.nn.standardize(x) @ p["qkv"]).reshape(*x.shape[:2], 3 * heads, -1), 3, axis=2
        )
        attended = jax.nn.dot_product_attention(
            q, k, v, is_causal=True, implementation=implementation
        )
        x = x + attended.reshape(x.shape) @ p["out"]
        return x + jax.nn.gelu(jax.nn.standardize(x) @ p["up"]) @ p["down"], None

    def loss_fn(params: Any, tokens: Any) -> Any:
        x = (params["embed"][tokens[:, :-1]] + params["position"]).astype(jnp.bfloat16)
        x, _ = jax.lax.scan(block, x, params["layers"])
        logits = (jax.nn.standardize(x) @ params["embed"].T.astype(x.dtype)).astype(jnp.float32)
        scores = jax.nn.log_softmax(logits)
        return -jnp.mean(jnp.take_along_axis(scores, tokens[:, 1:, None], axis=-1))

    tokens = jnp.asarray(rng.integers(0, vocabulary, (rows_of_batch, context + 1)), jnp.int32)
    optimizer = jstep.adamw(1e-3, weight_decay=1e-2)
    contenders = {
        "jstep": stepping(
            jstep.minimize(loss_fn, optimizer), jstep_state(params, optimizer), tokens
        ),
        "raw JAX": stepping(raw_adam(loss_fn), raw_state(params), tokens),
    }
    if HAS_OPTAX:
        contenders["Optax"] = optax_step(loss_fn, params, "adamw", (tokens,))
    times = timed(contenders, 7, 3)
    size = sum(leaf.size for leaf in jax.tree.leaves(params)) - params["position"].size
    # Causal attention: half of 12 · layers · context · width.
    per_token = 6 * size + 6 * layers * context * width
    kind = jax.devices()[0].device_kind
    sheet = PEAKS.get(kind, {}).get("bf16")
    if sheet is None:
        REPORT.say(
            f"  no data sheet of {kind!r} is known: "
            "no MFU, only the share of what a product reaches"
        )
    for name, seconds in times.items():
        rate = rows_of_batch * context / seconds
        share = {} if sheet is None else {"MFU": rate * per_token / sheet}
        if "product" in measured:
            share["of the product's TFLOP/s"] = rate * per_token / measured["product"]
        REPORT.row(f"transformer, {size / 1e6:.0f}M parameters: {name}", ms=seconds * 1e3,
                   **{"tokens/s": rate, "TFLOP/s": rate * per_token / 1e12}, **share)  # fmt: skip


if __name__ == "__main__":
    MEASURED = {
        "bandwidth": bandwidth, "product": products, "optimizers": optimizers,
        "transformer": transformer, "steps": steps_of_networks, "fingerprint": fingerprints,
        "checkpoints": checkpoints, "loop": loops, "torch": torch_optimizers,
    }  # fmt: skip
    wanted = sys.argv[1:] or list(MEASURED)
    if unknown := [name for name in wanted if name not in MEASURED]:
        REPORT.say(f"  {unknown[0]}: must be one of {', '.join(MEASURED)}")
        sys.exit(2)
    # Shares of the device's bandwidth and products need these two, which take seconds.
    has_failed = each(REPORT, {name: MEASURED[name] for name in ["bandwidth", "product", *wanted]})
    sys.exit(1 if has_failed else 0)
