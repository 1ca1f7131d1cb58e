"""Hooks and `then` functions find their own memory across restarts, and no other's, whatever the lists look like."""

import logging
import random

import jax.numpy as jnp
import numpy as np
import pytest

import jstep

OPTIMIZER = jstep.momentum(jstep.held("learning_rate", 0.25), 0.5)
STEP = jstep.minimize(lambda params, x: jnp.mean((params["w"] - x) ** 2), OPTIMIZER)
PART = 3
"""Steps, and evaluations, between two restarts."""


def train(last_step, hooks, directory, **kwargs):
    state = jstep.TrainState.create({"w": jnp.zeros(2)}, OPTIMIZER)
    batches = [np.ones(2, np.float32)] * 40
    return jstep.train(STEP, state, batches, last_step, hooks=hooks, checkpoint_dir=directory, progress=False, **kwargs)


def results_at(step):
    """Nothing gets better after the first evaluations, each metric in its own way."""
    return {"a": 1.0 / min(step, 4), "b": 3.0 + min(step, 5), "a/b": 5.0}


class Remembers:
    """Remembers the steps that it saw; a hook, and a function in `then`."""

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


class Other(Remembers):
    """Of another class."""


def of_another_module():
    class Remembers(Other):
        pass

    Remembers.__module__, Remembers.__qualname__ = "elsewhere", "Remembers"
    return Remembers()


THEN = {
    "stop a": lambda: jstep.EarlyStopping("a", 30),
    "stop b": lambda: jstep.EarlyStopping("b", 30, mode="max"),
    "stop a/b": lambda: jstep.EarlyStopping("a/b", 30),
    "keyed": lambda: jstep.EarlyStopping("a", 30, key="mine"),
    "keyed twin": lambda: jstep.EarlyStopping("a", 30, key="mine too"),
    "plateau a": lambda: jstep.ReduceOnPlateau("a", "learning_rate", 0.9, patience=30),
    "plateau b": lambda: jstep.ReduceOnPlateau("b", "learning_rate", 0.9, patience=30, mode="max"),
    "own": Remembers,
    "other": Other,
    "own, elsewhere": of_another_module,
    "own, keyed": lambda: Remembers("Remembers"),
    "plain": lambda: lambda step, state, results: None,
}


def alone(make, steps):
    """What one remembers that saw these evaluations, with nothing around it."""
    one = make()
    for step in steps:
        one(step, jstep.TrainState.create({"w": 1.0}, OPTIMIZER), results_at(step))
    return one.get_state()


def lists(names, seed):
    """Three lists: one, one with some taken out and some put in, and another; each in an order of its own."""
    rng = random.Random(seed)
    return [rng.sample(list(names), rng.randint(2, len(names))) for _ in range(3)]


def expected_steps(name, parts):
    """The steps since which one has been there without a gap."""
    steps = []
    for number, part in enumerate(parts):
        steps = steps + list(range(number * PART + 1, (number + 1) * PART + 1)) if name in part else []
    return steps


@pytest.mark.parametrize("steps_per_call", [1, 3])
@pytest.mark.parametrize("seed", range(6))
def test_then_functions_remember_what_each_would_alone(seed, steps_per_call, tmp_path):
    parts = lists(THEN, seed)
    for number, part in enumerate(parts):
        then = {name: THEN[name]() for name in part}
        hook = jstep.EvaluationHook(
            lambda state: results_at(jstep.global_step(state)), every_n_steps=1, then=list(then.values())
        )
        train((number + 1) * PART, [hook], tmp_path, steps_per_call=steps_per_call)
        for name, one in then.items():
            if name != "plain":
                steps = expected_steps(name, parts[: number + 1])
                assert one.get_state() == alone(THEN[name], steps), (name, parts)


def evaluation(prefix, key=None):
    """With functions like those of the others."""
    then = [jstep.EarlyStopping("a", 30), Remembers()]
    hook = jstep.EvaluationHook(
        lambda state: results_at(jstep.global_step(state)), every_n_steps=1, prefix=prefix, key=key, then=then
    )
    hook.stop, hook.own = then
    return hook


HOOKS = {
    "eval": lambda: evaluation("eval"),
    "eval/train": lambda: evaluation("eval/train"),
    "train": lambda: evaluation("train"),
    "keyed": lambda: evaluation("keyed", key="EvaluationHook(eval)"),
    "own": Remembers,
    "other": Other,
    "own, keyed": lambda: Remembers("Other"),
    "every": lambda: jstep.every(2, lambda step, state, metrics: None),
}


@pytest.mark.parametrize("seed", range(6))
def test_hooks_remember_what_each_would_alone(seed, tmp_path):
    parts = lists(HOOKS, seed)
    for number, part in enumerate(parts):
        hooks = {name: HOOKS[name]() for name in part}
        train((number + 1) * PART, list(hooks.values()), tmp_path)
        for name, one in hooks.items():
            steps = expected_steps(name, parts[: number + 1])
            if isinstance(one, Remembers):
                assert one.seen == steps, (name, parts)
            elif isinstance(one, jstep.EvaluationHook):
                assert one.own.seen == steps, (name, parts)
                assert one.stop.get_state() == alone(THEN["stop a"], steps), (name, parts)


# Twins


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1), (3, 2), (2, 3)])
def test_where_the_number_of_twins_changed_none_remembers(before, after, tmp_path, caplog):
    train(2, [Other(), *(Remembers() for _ in range(before))], tmp_path)
    twins, other = [Remembers() for _ in range(after)], Other()
    train(4, [*twins, other], tmp_path)
    assert [one.seen for one in twins] == [[3, 4]] * after
    assert other.seen == [1, 2, 3, 4]
    assert f"the checkpoint remembers {before} of Remembers, and there are {after} now" in caplog.text


def test_twins_are_told_apart_by_how_they_were_made(tmp_path):
    """Swapped, each finds its own."""

    def then():
        return [
            jstep.EarlyStopping("a", 30, min_delta=0.4),
            jstep.EarlyStopping("a", 30, mode="max"),
            jstep.EarlyStopping("a", 20),
        ]

    def run(last_step, then):
        hook = jstep.EvaluationHook(
            lambda state: results_at(jstep.global_step(state)), every_n_steps=1, then=then, prefix="x"
        )
        train(last_step, [hook], tmp_path)
        return then

    run(3, then())
    swapped = run(6, then()[::-1])[::-1]
    for make, one in zip(range(3), swapped, strict=True):
        assert one.get_state() == alone(lambda make=make: then()[make], range(1, 7))


def test_two_of_one_key_are_refused(tmp_path):
    for hooks in (
        [Remembers("mine"), Other("mine")],
        [jstep.EvaluationHook(lambda s: {}, every_n_steps=1, then=[Remembers("mine"), Remembers("mine")])],
    ):
        for directory in (tmp_path, None):
            with pytest.raises(ValueError, match="key='mine': must be the key of one"):
                train(2, hooks, directory)


# What cannot be given back


def stop_of(directory, stop, last_step=4):
    hook = jstep.EvaluationHook(lambda state: results_at(jstep.global_step(state)), every_n_steps=1, then=[stop])
    train(last_step, [hook], directory)
    return stop.get_state()


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (lambda: jstep.EarlyStopping("a", 30), lambda: jstep.EarlyStopping("a", 30, mode="max")),
        (lambda: jstep.EarlyStopping("a", 30, key="k"), lambda: jstep.EarlyStopping("b", 30, key="k")),
        (lambda: jstep.EarlyStopping("a", 30, key="k"), lambda: Remembers("k")),
        (lambda: Remembers("k"), lambda: jstep.EarlyStopping("a", 30, key="k")),
        (
            lambda: jstep.ReduceOnPlateau("a", "learning_rate", patience=30, key="k"),
            lambda: jstep.ReduceOnPlateau("a", "learning_rate", patience=30, mode="max", key="k"),
        ),
        (lambda: Remembers("k"), lambda: Other("k")),
    ],
)
def test_another_mode_metric_or_class_starts_fresh_and_says_so(first, second, tmp_path, caplog):
    stop_of(tmp_path, first(), 2)
    caplog.clear()
    assert stop_of(tmp_path, second()) == alone(second, [3, 4])
    assert any("starts fresh" in record.getMessage() for record in caplog.records if record.name == "jstep")


def test_memories_of_older_versions_start_fresh(tmp_path, caplog):
    state = jstep.TrainState.create({"w": jnp.zeros(2)}, OPTIMIZER, global_step=2)
    old = {"EvaluationHook": {"step": 2, "then": {"EarlyStopping": {"best": 1.0, "bad": 30}}}, "Remembers#1": [1]}
    with jstep.Saver(tmp_path) as saver:
        saver.save(state, extra={"hooks": old})
    assert stop_of(tmp_path, jstep.EarlyStopping("a", 30)) == alone(THEN["stop a"], [3, 4])
    assert "written by an older version of jstep: all start fresh" in caplog.text


@pytest.mark.parametrize("value", [None, 3, [], {}, {"best": 1.0, "bad": 2}, {"metric": "a", "mode": "min"}])
@pytest.mark.parametrize("broken", [{}, {"best": "low"}, {"bad": -1}, {"bad": None}, {"best": [1]}, {"cooling": 0.5}])
def test_stock_objects_start_fresh_where_a_memory_is_nonsense(value, broken, caplog):
    for one in (THEN["stop a"](), THEN["plateau a"]()):
        fresh = one.get_state()
        nonsense = {**fresh, **broken} if broken else value
        if broken and not (broken.keys() <= fresh.keys()):
            continue
        caplog.clear()
        assert not one.set_state(nonsense)
        assert one.get_state() == fresh
        assert "starts fresh" in caplog.text
    hook = evaluation("eval")
    assert not hook.set_state(value if value != {} else {"step": "2", "owed": None, "then": []})
    assert "starts fresh" in caplog.text


def test_a_state_whose_hook_is_gone_is_a_line_in_the_log(tmp_path, caplog):
    caplog.set_level(logging.WARNING)
    train(2, [Remembers(), Other()], tmp_path)
    train(4, [Other()], tmp_path)
    assert "hooks: the checkpoint has the state of Remembers, which is not among them any more" in caplog.text
