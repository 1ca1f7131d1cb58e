"""Hooks and callbacks restore their own state across restarts, whatever else is in the lists."""

import random

import jax.numpy as jnp
import numpy as np
import pytest

import jstep

OPTIMIZER = jstep.momentum(jstep.held("learning_rate", 0.25), 0.5)
STEP = jstep.minimize(lambda params, x: jnp.mean((params["w"] - x) ** 2), OPTIMIZER)
STEPS_PER_RUN = 3
"""Number of steps, and of evaluations, between two restarts."""


def train(last_step, hooks, directory, **kwargs):
    state = jstep.TrainState.create({"w": jnp.zeros(2)}, OPTIMIZER)
    batches = [np.ones(2, np.float32)] * 40
    return jstep.train(
        STEP,
        state,
        batches,
        last_step,
        hooks=hooks,
        checkpoint_dir=directory,
        progress=False,
        **kwargs,
    )


def results_at(step):
    """Return metrics that stop improving after the first evaluations, each in another way."""
    return {"a": 1.0 / min(step, 4), "b": 3.0 + min(step, 5), "a/b": 5.0}


class Recorder:
    """Records the steps that it saw; a hook, and a callback of `EvaluationHook`."""

    def __init__(self, key=None):
        if key is not None:
            self.key = key
        self.seen = []

    def begin(self, state):
        self.seen = []

    def after_step(self, step, state, metrics):
        self.seen.append(step)

    def __call__(self, step, state, results):
        self.seen.append(step)

    def get_state(self):
        return self.seen

    def set_state(self, value):
        self.seen = list(value)


class Other(Recorder):
    """The same, of another class."""


def recorder_of_another_module():
    class Recorder(Other):
        pass

    Recorder.__module__, Recorder.__qualname__ = "elsewhere", "Recorder"
    return Recorder()


CALLBACKS = {
    "stop a": lambda: jstep.EarlyStopping("a", patience=30, mode="min"),
    "stop b": lambda: jstep.EarlyStopping("b", patience=30, mode="max"),
    "keyed": lambda: jstep.EarlyStopping("a", patience=30, mode="min", key="mine"),
    "plateau a": lambda: jstep.ReduceOnPlateau(
        "a", "learning_rate", factor=0.9, patience=30, mode="min"
    ),
    "recorder": Recorder,
    "other": Other,
    "recorder of another module": recorder_of_another_module,
    "recorder, keyed": lambda: Recorder("Recorder"),
}


def standalone_state(make, steps):
    """Return the state of a callback that saw these evaluations."""
    one = make()
    for step in steps:
        one(step, jstep.TrainState.create({"w": 1.0}, OPTIMIZER), results_at(step))
    return one.get_state()


def random_selections(names, seed):
    """Return three random selections of the names, each in random order."""
    rng = random.Random(seed)
    return [rng.sample(list(names), rng.randint(2, len(names))) for _ in range(3)]


def expected_steps(name, parts):
    """Return the steps that `name` has seen without a gap until now."""
    steps = []
    for number, part in enumerate(parts):
        steps = (
            steps + list(range(number * STEPS_PER_RUN + 1, (number + 1) * STEPS_PER_RUN + 1))
            if name in part
            else []
        )
    return steps


@pytest.mark.thorough
@pytest.mark.parametrize("steps_per_call", [1, 3])
@pytest.mark.parametrize("seed", range(6))
def test_callbacks_restore_their_own_state(seed, steps_per_call, tmp_path):
    parts = random_selections(CALLBACKS, seed)
    for number, part in enumerate(parts):
        then = {name: CALLBACKS[name]() for name in part}
        hook = jstep.EvaluationHook(
            lambda state: results_at(jstep.global_step(state)),
            every_n_steps=1,
            callbacks=list(then.values()),
        )
        train((number + 1) * STEPS_PER_RUN, [hook], tmp_path, steps_per_call=steps_per_call)
        for name, one in then.items():
            steps = expected_steps(name, parts[: number + 1])
            assert one.get_state() == standalone_state(CALLBACKS[name], steps), (name, parts)


def evaluation(prefix, key=None):
    """Return an evaluation hook; all have the same callbacks."""
    then = [jstep.EarlyStopping("a", patience=30, mode="min"), Recorder()]
    hook = jstep.EvaluationHook(
        lambda state: results_at(jstep.global_step(state)),
        every_n_steps=1,
        prefix=prefix,
        key=key,
        callbacks=then,
    )
    hook.stop, hook.recorder = then
    return hook


HOOKS = {
    "eval": lambda: evaluation("eval"),
    "eval/train": lambda: evaluation("eval/train"),
    "train": lambda: evaluation("train"),
    "keyed": lambda: evaluation("keyed", key="EvaluationHook(eval)"),
    "recorder": Recorder,
    "other": Other,
    "recorder, keyed": lambda: Recorder("Other"),
    "every": lambda: jstep.every(2, lambda step, state, metrics: None),
}


@pytest.mark.thorough(except_for=["2"])
@pytest.mark.parametrize("seed", range(6))
def test_hooks_restore_their_own_state(seed, tmp_path):
    parts = random_selections(HOOKS, seed)
    for number, part in enumerate(parts):
        hooks = {name: HOOKS[name]() for name in part}
        train((number + 1) * STEPS_PER_RUN, list(hooks.values()), tmp_path)
        for name, one in hooks.items():
            steps = expected_steps(name, parts[: number + 1])
            if isinstance(one, Recorder):
                assert one.seen == steps, (name, parts)
            elif isinstance(one, jstep.EvaluationHook):
                assert one.recorder.seen == steps, (name, parts)
                assert one.stop.get_state() == standalone_state(CALLBACKS["stop a"], steps), (
                    name,
                    parts,
                )


def test_callbacks_of_one_class_are_identified_by_settings(tmp_path):
    """Each one restores its own state when the order changes."""

    def then():
        return [
            jstep.EarlyStopping("a", patience=30, mode="min", min_delta=0.4),
            jstep.EarlyStopping("a", patience=30, mode="max"),
            jstep.EarlyStopping("a", patience=20, mode="min"),
        ]

    def run(last_step, then):
        hook = jstep.EvaluationHook(
            lambda state: results_at(jstep.global_step(state)),
            every_n_steps=1,
            callbacks=then,
            prefix="x",
        )
        train(last_step, [hook], tmp_path)
        return then

    run(3, then())
    swapped = run(6, then()[::-1])[::-1]
    for make, one in zip(range(3), swapped, strict=True):
        assert one.get_state() == standalone_state(lambda make=make: then()[make], range(1, 7))
