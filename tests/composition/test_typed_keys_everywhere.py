"""A state that holds typed PRNG keys, trained and not, goes through every hook, tool and option."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from problems import ROWS as X
from problems import loss_with_keys as loss
from problems import state_with_keys

import jstep

RATE = "learning_rate"
AVERAGE = jstep.ExponentialMovingAverage(0.9)
OPTIMIZER = jstep.with_moving_average(jstep.adam(jstep.held(RATE, 0.1)), AVERAGE)


def plain_loss(params: Any, batch: Any) -> Any:
    return jnp.mean(batch["x"] @ params["w"]) + jnp.mean(jax.random.normal(batch["key"][0]))


def make_state(optimizer: jstep.Optimizer = OPTIMIZER, **options: Any) -> jstep.TrainState:
    params = {"seed": jax.random.key(7), "other": jax.random.key(3, impl="rbg"), "none": None}
    return state_with_keys(optimizer, **params, **options)


def make_step(optimizer: jstep.Optimizer = OPTIMIZER, **options: Any) -> Any:
    return jstep.minimize(loss, optimizer, has_model_state=True, **options)


def at(step: int) -> Any:
    return X * step


def with_keys(step: int) -> Any:
    return {"x": X, "key": jax.random.split(jax.random.fold_in(jax.random.key(0), step), 8)}


def run(step: Any = None, hooks: Any = (), batches: Any = at, state: Any = None, **options: Any) -> jstep.TrainState:
    state = make_state() if state is None else state
    return jstep.train(make_step() if step is None else step, state, batches, 6, hooks=hooks, progress=False, **options)


def evaluate(d: Path) -> Any:
    def metric(params: Any, keys: Any, x: Any) -> Any:
        return {"value": jnp.mean(x @ params["w"]) + jax.random.uniform(keys["key"])}

    return jstep.evaluator(metric, [X, X], has_model_state=True)


HOOKS: dict[str, Callable[[Path], list[Any]]] = {
    "counter": lambda d: [jstep.StepCounterHook(every_n_steps=2)],
    "summaries": lambda d: [jstep.SummarySaverHook(jstep.summary.SummaryWriter(d), save_steps=2, histograms="*")],
    "logging": lambda d: [jstep.LoggingHook(every_n_steps=2)],
    "fingerprint": lambda d: [jstep.FingerprintHook(d / "fingerprints.jsonl", every_n_steps=2)],
    "audit": lambda d: [jstep.AuditHook(every_n_steps=2)],
    "checkpoints": lambda d: [jstep.CheckpointSaverHook(d, save_steps=2)],
    "profiler": lambda d: [jstep.ProfilerHook(d, start_step=2, stop_step=4)],
    "evaluation": lambda d: [
        jstep.EvaluationHook(
            evaluate(d),
            every_n_steps=2,
            callbacks=[
                jstep.KeepBest(d / "best", "value", mode="min"),
                jstep.EarlyStopping("value", mode="min"),
                jstep.ReduceOnPlateau("value", RATE, patience=1, mode="min"),
            ],
        )
    ],
}


@pytest.mark.thorough(except_for=["audit", "evaluation"])
@pytest.mark.parametrize("hook", list(HOOKS))
def test_hooks(hook: str, tmp_path: Path) -> None:
    assert int(run(hooks=HOOKS[hook](tmp_path)).global_step) == 6


def mesh() -> Any:
    return jax.make_mesh((2,), ("data",))


OPTIONS: dict[str, Callable[[Path], Any]] = {
    "steps_per_call": lambda d: run(steps_per_call=3, checkpoint_dir=d),
    "microbatches": lambda d: run(make_step(num_microbatches=2)),
    "mesh": lambda d: run(state=make_state(mesh=mesh()), checkpoint_dir=d),
    "slots in host memory": lambda d: run(state=jstep.shard_state(make_state(), mesh(), slots_memory="pinned_host")),
    "batches with keys": lambda d: run(jstep.minimize(plain_loss, OPTIMIZER), batches=with_keys, checkpoint_dir=d),
    "stacked batches with keys": lambda d: run(
        jstep.minimize(plain_loss, OPTIMIZER, num_microbatches=2), batches=with_keys, steps_per_call=3
    ),
    "shuffled batches with keys": lambda d: run(
        jstep.minimize(plain_loss, OPTIMIZER), batches=jstep.batches(with_keys(0), 4, seed=0)
    ),
    "skipped": lambda d: run(
        make_step(jstep.dynamic_loss_scale(OPTIMIZER)),
        state=make_state(jstep.dynamic_loss_scale(OPTIMIZER)),
        batches=lambda step: X * np.nan,
    ),
}


@pytest.mark.thorough(except_for=["stacked batches with keys"])
@pytest.mark.parametrize("option", list(OPTIONS))
def test_options(option: str, tmp_path: Path) -> None:
    assert int(OPTIONS[option](tmp_path).global_step) == 6


def saved(d: Path) -> Path:
    run(checkpoint_dir=d)
    return d


def restored(d: Path) -> None:
    state = make_state()
    with jstep.Saver(d, leave_out=["seed"]) as saver:
        saver.save(state)
    for target in (make_state(), jax.eval_shape(make_state)):
        if isinstance(target.params["w"], jax.Array):
            assert saver.restore(target) == state
    saver.restore(make_state(), use_averages=True)
    saver.restore(make_state(), partial=True)


def inspected(d: Path) -> None:
    for command in ("inspect", "goodput"):
        given = [sys.executable, "-m", "jstep", command, str(saved(d))]
        subprocess.run(given, check=True, timeout=120, capture_output=True)


def a_population(d: Path) -> None:
    def one(key: Any) -> jstep.TrainState:
        return jstep.TrainState.create({"w": jax.random.normal(key, (4,))}, jstep.adam(), model_state=key)

    states = jax.vmap(one)(jax.random.split(jax.random.key(0), 3))
    assert states == jax.vmap(one)(jax.random.split(jax.random.key(0), 3))
    jstep.fingerprint(states)


TOOLS: dict[str, Callable[[Path], Any]] = {
    "repr and ==": lambda d: (repr(make_state()), make_state()._repr_html_(), make_state() == make_state()),
    "evaluator": lambda d: evaluate(d)(make_state()),
    "scan_steps": lambda d: jstep.scan_steps(make_step())(make_state(), np.stack([X, X])),
    "fingerprint": lambda d: jstep.fingerprint(make_state()),
    "replay": lambda d: jstep.replay(make_step(), make_state(), at, saved(d), 4),
    "verify_resume": lambda d: jstep.verify_resume(make_state, make_step(), at, 2, 4),
    "plan": lambda d: str(jstep.plan(OPTIMIZER, 6, train_step=make_step(), batches=at)),
    "find_nonfinite": lambda d: str(jstep.find_nonfinite(make_step(donate=False), make_state(), X * 1e38)),
    "Saver": restored,
    "command line": inspected,
    "load_weights": lambda d: jstep.load_weights(
        jstep.save_weights(d / "w.safetensors", {"w": X}), {"w": X, "key": jax.random.key(0)}, partial=True
    ),
    "shard_state": lambda d: jstep.shard_state(make_state(), mesh()),
    "prefetch_to_device": lambda d: list(jstep.prefetch_to_device(iter([with_keys(0)]), 2)),
    "a population": a_population,
}


@pytest.mark.thorough(except_for=["replay", "Saver"])
@pytest.mark.parametrize("tool", list(TOOLS))
def test_tools(tool: str, tmp_path: Path) -> None:
    TOOLS[tool](tmp_path)


@pytest.mark.thorough(except_for=["True-1"])
@pytest.mark.parametrize("steps_per_call", [1, 3])
@pytest.mark.parametrize("jit", [True, False])
def test_a_metric_may_be_a_key(jit: bool, steps_per_call: int, tmp_path: Path) -> None:
    def step(state: jstep.TrainState, x: Any) -> Any:
        state, _ = jstep.minimize(loss, OPTIMIZER, has_model_state=True, jit=False)(state, x)
        return state, {"key": state.slots["model_state"]["key"]}

    hooks = [hook for name in ("counter", "logging", "summaries") for hook in HOOKS[name](tmp_path)]
    run(jax.jit(step) if jit else step, hooks, steps_per_call=steps_per_call)


def test_keys_cannot_be_written_as_weights_or_summaries(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"'key' is key<fry>.*None to leave a leaf out"):
        jstep.save_weights(tmp_path / "w.safetensors", {"w": X, "key": jax.random.key(0)})
    with pytest.raises(TypeError, match="must be real numbers, not key<fry>"):
        jstep.summary.histogram("key", jax.random.key(0))
