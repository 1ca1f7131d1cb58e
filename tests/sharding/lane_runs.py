"""Small runs in lanes on 1 to 8 devices, whose states and metrics are compared bit by bit.

As a program, in a process with XLA's default optimizations, which the tests lower elsewhere:
without fusion, layouts would round alike anyway.

    python tests/sharding/lane_runs.py '[{"model": "mlp", "places": ["none", "fsdp:8"]}]'
"""

import contextlib
import hashlib
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import types

ROOT = pathlib.Path(__file__).parents[2]


def digests(*cases, timeout=600):
    """Run cases in one process and return, for each, place → path of a leaf → hash of its bits."""
    env = dict(
        os.environ, XLA_FLAGS="--xla_force_host_platform_device_count=8", JAX_PLATFORMS="cpu"
    )
    env["PYTHONPATH"] = os.pathsep.join(
        [str(ROOT), str(ROOT / "tests"), str(ROOT / "tests/sharding")]
    )
    command = [sys.executable, __file__, json.dumps(cases)]
    done = subprocess.run(
        command, env=env, capture_output=True, text=True, timeout=timeout, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


def differing(found):
    """Return the leaves of each place that differ from those of the first one."""
    first, *_ = found.values()
    assert len(first) > 3
    return {
        place: [path for path in leaves | first if leaves.get(path) != first.get(path)]
        for place, leaves in found.items()
        if leaves != first
    }


def main(cases):
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import AxisType, NamedSharding
    from jax.sharding import PartitionSpec as P

    import jstep

    def dense(key, rows, columns, dtype):
        return (jax.random.normal(key, (rows, columns)) / np.sqrt(rows)).astype(dtype)

    def cross_entropy(logits, labels):
        logits = jax.nn.log_softmax(logits.astype(jnp.float32))
        return -jnp.mean(jnp.take_along_axis(logits, labels[..., None], axis=-1))

    random = np.random.default_rng(0)

    class Tiny:
        model_state = None

        @staticmethod
        def batch():
            return random.standard_normal((16, 64), np.float32), random.standard_normal(
                (16, 8), np.float32
            )

        @staticmethod
        def init(dtype):
            return {"w": dense(jax.random.key(0), 64, 8, dtype)}

        @staticmethod
        def loss(params, x, y):
            return jnp.mean((jnp.tanh(x @ params["w"]) - y) ** 2)

    class MLP:
        rows = 32
        model_state = None

        @staticmethod
        def batch():
            x = random.standard_normal((32, 16), np.float32)
            return x, random.integers(0, 8, 32).astype(np.int32)

        @staticmethod
        def init(dtype):
            keys = jax.random.split(jax.random.key(0), 2)
            return {
                "a": dense(keys[0], 16, 32, dtype),
                "bias": jnp.zeros(32, dtype),
                "deep": {"x": dense(keys[1], 32, 8, dtype), "y": jnp.zeros(8, dtype)},
                "scale": jnp.ones((), dtype),
            }

        @staticmethod
        def loss(params, x, labels, **more):
            h = jax.nn.gelu(x.astype(params["a"].dtype) @ params["a"] + params["bias"])
            if "rng" in more:
                h = h * jax.random.bernoulli(more["rng"], 0.8, h.shape)
            if "averages" in more:
                h = h + 0.1 * (x.astype(h.dtype) @ more["averages"]["a"])
            return cross_entropy(
                params["scale"] * (h @ params["deep"]["x"] + params["deep"]["y"]), labels
            )

    class Transformer:
        model_state = None

        @staticmethod
        def batch():
            return tuple(random.integers(0, 32, (2, 16, 8)).astype(np.int32))

        @staticmethod
        def init(dtype):
            keys = jax.random.split(jax.random.key(1), 6)

            def stack(key, rows, columns):
                return jnp.stack(
                    [dense(one, rows, columns, dtype) for one in jax.random.split(key, 2)]
                )

            return {
                "embed": dense(keys[0], 32, 16, dtype),
                "layers": {
                    "qkv": stack(keys[1], 16, 48),
                    "out": stack(keys[2], 16, 16),
                    "up": stack(keys[3], 16, 32),
                    "down": stack(keys[4], 32, 16),
                    "gain": jnp.ones((2, 16), dtype),
                },
            }

        @staticmethod
        def loss(params, tokens, labels, rng=None):
            def norm(x, gain):
                x = x.astype(jnp.float32)
                scale = jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-5)
                return (x * scale).astype(gain.dtype) * gain

            def layer(carry, w):
                h, key = carry
                q, k, v = jnp.split(
                    (norm(h, w["gain"]) @ w["qkv"]).reshape(*h.shape[:2], 4, 12), 3, axis=-1
                )
                scores = jnp.einsum("bthd,bshd->bhts", q, k).astype(jnp.float32) / 2
                weights = jax.nn.softmax(
                    jnp.where(jnp.tril(jnp.ones((8, 8), bool)), scores, -1e9), -1
                ).astype(h.dtype)
                h = h + jnp.einsum("bhts,bshd->bthd", weights, v).reshape(h.shape) @ w["out"]
                h = h + jax.nn.gelu(norm(h, w["gain"]) @ w["up"]) @ w["down"]
                if key is not None:
                    key, drop = jax.random.split(key)
                    h = h * jax.random.bernoulli(drop, 0.9, h.shape)
                return (h, key), None

            (h, _), _ = jax.lax.scan(layer, (params["embed"][tokens], rng), params["layers"])
            return cross_entropy(h @ params["embed"].T, labels)

    class Conv:
        model_state = types.MappingProxyType(
            {"mean": jnp.zeros(8), "count": jnp.zeros((), jnp.int32)}
        )

        @staticmethod
        def batch():
            x = random.standard_normal((16, 6, 6, 3), np.float32)
            return x, random.integers(0, 8, 16).astype(np.int32)

        @staticmethod
        def init(dtype):
            kernel = (jax.random.normal(jax.random.key(2), (3, 3, 3, 8)) / 5).astype(dtype)
            return {
                "kernel": kernel,
                "gain": jnp.ones(8, dtype),
                "w": dense(jax.random.key(3), 8, 8, dtype),
            }

        @staticmethod
        def loss(params, model_state, x, labels):
            x = x.astype(params["w"].dtype)
            numbers = ("NHWC", "HWIO", "NHWC")
            h = jax.lax.conv_general_dilated(
                x, params["kernel"], (1, 1), "SAME", dimension_numbers=numbers
            )
            mean = jnp.mean(h.astype(jnp.float32), (0, 1, 2))
            moved = {
                "mean": 0.9 * model_state["mean"] + 0.1 * mean,
                "count": model_state["count"] + 1,
            }
            h = jax.nn.relu((h - mean.astype(h.dtype)) * params["gain"])
            return cross_entropy(jnp.mean(h, (1, 2)) @ params["w"], labels), moved

    models = {"tiny": Tiny, "mlp": MLP, "transformer": Transformer, "conv": Conv}
    data = {name: [model.batch() for _ in range(4)] for name, model in models.items()}

    def users_rule():
        """A rule that combines the elements of a leaf in several ways, written by somebody who
        never heard of lanes."""

        def init(params, step):
            return {"v": jax.tree.map(jnp.zeros_like, params)}

        def update(grads, slots, params, step):
            def leaf(g, v):
                v = 0.9 * v + 0.1 * (g - jnp.mean(g)) ** 2
                unit = g / (jnp.sqrt(v) + 1e-3 * jnp.linalg.norm(g) + 1e-6)
                return -0.01 * (
                    unit - jnp.mean(unit, axis=-1, keepdims=True) if g.ndim else unit
                ), v

            pairs = jax.tree.map(leaf, grads, slots["v"])
            updates, v = jax.tree.transpose(
                jax.tree.structure(params), jax.tree.structure((0, 0)), pairs
            )
            return updates, {"v": v}

        return jstep.Optimizer(init, update, lambda step: {})

    def with_optax():
        import optax

        return jstep.from_optax(optax.chain(optax.clip_by_global_norm(0.5), optax.lamb(1e-2)))

    def with_line_search():
        import optax

        return jstep.from_optax(optax.lbfgs(memory_size=3))

    clipped = jstep.clip_gradients(by_global_norm=0.5)
    optimizers = {
        "adamw": lambda: jstep.chain(clipped, jstep.adamw(jstep.exponential_decay(1e-2, 10, 0.5))),
        "momentum": lambda: jstep.chain(clipped, jstep.momentum(0.1, 0.9)),
        "master": lambda: jstep.master_weights(jstep.chain(clipped, jstep.adamw(1e-2))),
        "averages": lambda: jstep.with_moving_average(
            jstep.adam(1e-2), jstep.ExponentialMovingAverage(0.9)
        ),
        "noise": lambda: jstep.with_noise_scale(jstep.chain(clipped, jstep.adam(1e-2))),
        "users": users_rule,
        "optax": with_optax,
        "lbfgs": with_line_search,
        "compact": lambda: jstep.compact(jstep.chain(clipped, jstep.adamw(1e-2)), min_size=64),
    }

    def of_table(name):
        from optimizer_table import TABLE

        entry = TABLE[name.removeprefix("table/")]
        return entry.make(entry.rate)

    def aux(loss):
        def with_aux(params, x, labels, **more):
            jstep.summary.scalar("mean", jnp.mean(x))
            return loss(params, x, labels, **more), {
                "rows": x.shape[0],
                "positive": jnp.sum(x > 0),
                "x": jnp.mean(x),
            }

        return with_aux

    def placed(place, model, optimizer, dtype):
        """Return a new state in its place, and the sharding of its batches."""
        kind, n, *axes = [*place.split(":"), "1"]
        n, kind_of_axis = int(n), AxisType.Explicit if "explicit" in axes else AxisType.Auto
        state = jstep.TrainState.create(
            model.init(dtype), optimizer, model_state=model.model_state and dict(model.model_state)
        )
        if kind == "none":
            return state, None
        if kind == "two":
            mesh = jax.make_mesh(
                (n // 2, 2), ("data", "fsdp"), (kind_of_axis,) * 2, devices=jax.devices()[:n]
            )
            specs = jstep.fsdp_specs(state.params, mesh, axis="fsdp", min_size=1)
            return jstep.shard_state(state, mesh, specs), NamedSharding(mesh, P(("data", "fsdp")))
        mesh = jax.make_mesh((n,), ("data",), (kind_of_axis,), devices=jax.devices()[:n])
        specs = jstep.fsdp_specs(state.params, mesh, min_size=1) if kind == "fsdp" else None
        slot_axis = "data" if kind == "zero1" else None
        return jstep.shard_state(state, mesh, specs, slot_axis=slot_axis), NamedSharding(
            mesh, P("data")
        )

    def hashes(tree):
        whole = jax.device_get(
            jax.tree.map(lambda x: jax.random.key_data(x) if _is_key(x) else x, tree)
        )
        leaves = jax.tree_util.tree_flatten_with_path(whole)[0]
        found = {}
        for path, leaf in leaves:
            array = np.ascontiguousarray(leaf)
            found[jax.tree_util.keystr(path)] = (
                f"{array.dtype}{array.shape}{hashlib.md5(array.tobytes()).hexdigest()}"
            )
        return found

    def _is_key(x):
        return jnp.issubdtype(getattr(x, "dtype", None), jax.dtypes.prng_key)

    def make(case, place):
        """Return the step of a case, a new state, and the sharding of its batches."""
        model, dtype = models[case.get("model", "mlp")], jnp.dtype(case.get("dtype", "float32"))
        name = case.get("optimizer", "adamw")
        optimizer = optimizers[name]() if name in optimizers else of_table(name)
        options = {
            "metrics": ("grad_norm", "update_norm", "param_norm"),
            "lanes": 8,
            **case.get("options", {}),
        }
        loss = model.loss
        if options.pop("several", False):
            loss = {
                "first": (model.loss, "a"),
                "second": (lambda *args: 2 * model.loss(*args), "deep/*"),
            }
        if options.pop("weighted", False):
            options["weight_fn"] = lambda x, labels: jnp.sum(labels > 3)
        if options.get("rng"):
            options["rng"] = jax.random.key(7)
        if options.get("has_aux"):
            loss = aux(model.loss)
        options["has_model_state"] = model.model_state is not None
        return jstep.minimize(loss, optimizer, **options), *placed(place, model, optimizer, dtype)

    def run(case, place):
        step, state, sharding = make(case, place)
        seen = []
        for i in range(case.get("steps", 4)):
            batch = data[case.get("model", "mlp")][i % 4]
            batch = batch if sharding is None else jax.device_put(batch, sharding)
            state, metrics = step(state, *batch)
            seen.append(metrics)
        return hashes(
            {
                "params": state.params,
                "slots": state.slots,
                "step": state.global_step,
                "metrics": seen,
            }
        )

    def train(case):
        """Runs that are cut and continued on other places; each is a list of (place, steps per
        call, last step)."""
        found = {}
        for label, pieces in case["runs"].items():
            with tempfile.TemporaryDirectory() as directory:
                for place, k, last in pieces:
                    step, state, sharding = make(case, place)
                    hooks = [
                        jstep.FingerprintHook(every_n_steps=2, path=pathlib.Path(directory, "log"))
                    ]
                    rows = tuple(map(np.concatenate, zip(*data["mlp"], strict=True)))
                    batches = jstep.batches(rows, MLP.rows, seed=1)
                    options = {
                        "steps_per_call": k,
                        "batch_sharding": sharding,
                        "checkpoint_dir": directory,
                    }
                    state = jstep.train(
                        step, state, batches, last, hooks=hooks, progress=False, **options
                    )
                found[label] = hashes(
                    {"params": state.params, "slots": state.slots, "step": state.global_step}
                )
                found[label]["fingerprints"] = hashlib.md5(
                    b"".join(_logged(pathlib.Path(directory)))
                ).hexdigest()
        return found

    def _logged(directory):
        for path in sorted(directory.rglob("log*")):
            if path.is_file():
                yield path.read_bytes()

    results = []
    for case in cases:
        if "runs" in case:
            results.append(train(case))
        else:
            results.append({place: run(case, place) for place in case["places"]})
    return results


if __name__ == "__main__":
    with contextlib.redirect_stdout(sys.stderr):
        found = main(json.loads(sys.argv[1]))
    print(json.dumps(found))
