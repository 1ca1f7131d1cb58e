"""A resumed run warns once if its past batches have changed; changes of future batches are not
reported."""

import logging

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jstep

OPTIMIZER = jstep.gradient_descent(0.1)
STEP = jstep.minimize(lambda params, x: params["w"] * jnp.mean(x), OPTIMIZER)
WEB = {"web": 1.0, "code": 0.0}
BOTH = {"web": 1.0, "code": 1.0}


def batches(rows=100, batch_size=8, seed=1, skip=None, **more):
    data = jstep.batches(np.ones(rows, np.float32), batch_size, seed=seed, **more)
    return data if skip is None else data.skip(*skip)


def mixture(weights, rows=64, batch_size=4, sources=("web", "code"), **more):
    return jstep.mixture(
        {name: np.ones(rows, np.float32) for name in sources}, batch_size, weights, **more
    )


def run(directory, data, last_step, **more):
    state = jstep.TrainState.create({"w": 1.0}, OPTIMIZER)
    jstep.train(STEP, state, data, last_step, checkpoint_dir=directory, progress=False, **more)


def warnings(caplog):
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


CHANGED = {
    "seed": (batches(), batches(seed=2), "seed: 1 before, 2 now"),
    "a grown source that started over": (
        batches(20, shuffle=False),
        batches(24, shuffle=False),
        "rows: 20 before, 24",
    ),
    "batch size": (
        batches(),
        batches(batch_size={0: 8, 2: 4}),
        "batch_size[2]: absent before, 4 now",
    ),
    "skip": (
        batches(),
        batches(skip=(2, 3)),
        "steps: [[0, 4, 1]] before, [[0, 2, 1], [3, 5, 1]] now",
    ),
    "kind": (batches(), mixture(BOTH), "kind: Batches before, Mixture now"),
    "weights": (
        mixture({0: WEB, 2: BOTH}),
        mixture({0: WEB, 3: BOTH}),
        "weights[2][code]: 0.5 before, absent now; weights[2][web]: "
        "0.5 before, absent now; weights[3][code]: absent",
    ),
    "dropped rows after another batch size": (
        batches(22, batch_size={0: 4, 1: 8}),
        batches(22, batch_size={0: 4, 1: 8}, drop_remainder=False),
        "drop_remainder: true before, false now",
    ),
}


@pytest.mark.thorough(except_for=["seed"])
@pytest.mark.parametrize("name", CHANGED)
def test_a_change_of_past_batches_is_named_once(name, tmp_path, caplog):
    before, after, text = CHANGED[name]
    run(tmp_path, before, 4)
    run(tmp_path, after, 6)
    found = warnings(caplog)
    assert len(found) == 1, found
    _, line = found[0].splitlines()
    assert line.startswith(
        f"  batches: those before step 4 are not the ones that model-4 was trained on: {text}"
    )
    run(tmp_path, after, 8)  # its past batches are those of the previous run
    assert warnings(caplog) == found


UNCHANGED = {
    "the same": (batches(), batches()),
    "batch size": (batches(), batches(batch_size={0: 8, 4: 4})),
    "skip": (batches(), batches(skip=(4, 6))),
    "dropped rows of an epoch that is not over": (batches(), batches(drop_remainder=False)),
    "no rows to drop": (batches(16), batches(16, drop_remainder=False)),
    "a source that grows before its end": (
        batches(shuffle=False),
        batches(rows=200, shuffle=False),
    ),
    "a seed without a use": (batches(shuffle=False), batches(shuffle=False, seed=2)),
    "weights": (mixture(WEB), mixture({0: WEB, 4: BOTH})),
    "a new source": (mixture({"web": 1.0}, sources=["web"]), mixture({0: WEB, 4: BOTH})),
    "a source without rows so far": (
        mixture(WEB),
        mixture({0: {**WEB, "other": 0}}, sources=[*WEB, "other"]),
    ),
    "a loader": ([np.ones(2)] * 9, batches()),
}


@pytest.mark.thorough(except_for=["a loader"])
@pytest.mark.parametrize("name", UNCHANGED)
def test_a_change_of_future_batches_is_not_reported(name, tmp_path, caplog):
    before, after = UNCHANGED[name]
    run(tmp_path, before, 4)
    run(tmp_path, after, 6)
    assert not warnings(caplog)


@pytest.mark.thorough(except_for=["extra2"])
@pytest.mark.parametrize("extra", [None, {"past": 1}, {"held": {}}])
def test_checkpoints_without_a_past_are_resumed_silently(extra, tmp_path, caplog):
    with jstep.Saver(tmp_path) as saver:
        saver.save(
            jstep.TrainState.create({"w": 1.0}, OPTIMIZER).replace(global_step=jnp.int32(4)),
            extra=extra,
        )
    run(tmp_path, batches(seed=2), 6)
    assert not warnings(caplog)


@pytest.mark.parametrize(
    "size", [4, {0: 4, 1: 2}, {0: 2, 3: 4}, {0: 4, 2: 3, 4: 5}, {0: 3, 1: 4, 5: 1}]
)
def test_drop_remainder_counts_from_the_first_batch_that_differs(size):
    for rows in (5, 8, 12, 13):
        dropped, kept = (
            jstep.batches(np.arange(rows), size, shuffle=False, drop_remainder=drop)
            for drop in (True, False)
        )
        differ = [dropped[step].tolist() != kept[step].tolist() for step in range(12)]
        for step in range(1, 13):
            assert (dropped[:step].rows_hash() != kept[:step].rows_hash()) == any(differ[:step])


# The warning about a learning rate that is 0 in the last steps of a run.

ENDS = jstep.linear(0.1, 0.0, steps=5)
WARNED = {
    "scheduled": lambda: jstep.adam(ENDS),
    "wrapped": lambda: jstep.skip_nonfinite(jstep.sgd(ENDS)),
    "Optax, whose last rate is -1.5e-9": lambda: jstep.sgd(optax.linear_schedule(0.1, 0.0, 5)),
}
NOT_WARNED = {
    "plain": lambda: jstep.sgd(0.0),
    "held": lambda: jstep.sgd(jstep.held("learning_rate", 0.0)),
    "one part learns": lambda: jstep.partition(
        {"a": jstep.sgd(ENDS), "b": jstep.sgd(0.1)}, lambda path, leaf: "a" if path == "w" else "b"
    ),
    "it ends with the run": lambda: jstep.sgd(jstep.linear(0.1, 0.0, steps=8)),
    "a warmup": lambda: jstep.sgd(jstep.linear(0.0, 0.1, steps=9)),
}


def warnings_of(caplog, *optimizers, **given):
    caplog.clear()
    steps = [
        jstep.minimize(lambda params: (params["w"] + params["v"]) ** 2, optimizer)
        for optimizer in optimizers
    ]
    state = jstep.TrainState.create({"w": jnp.zeros(()), "v": jnp.zeros(())}, optimizers[0])
    train_step = dict(zip((0, 4), steps, strict=False)) if len(steps) > 1 else steps[0]
    with caplog.at_level(logging.WARNING, "jstep"):
        jstep.train(
            train_step, state, lambda step: (), given.pop("last_step", 9), progress=False, **given
        )
    return sum(
        "learning rate is 0 in the last steps" in record.getMessage() for record in caplog.records
    )


@pytest.mark.thorough(except_for=["scheduled", "one part learns", "held", "it ends with the run"])
@pytest.mark.parametrize("name", [*WARNED, *NOT_WARNED])
def test_a_rate_that_is_0_in_the_last_steps(name, caplog):
    assert warnings_of(caplog, (WARNED | NOT_WARNED)[name]()) == (name in WARNED)


def test_only_the_last_stage_counts(caplog):
    assert warnings_of(caplog, jstep.sgd(ENDS), jstep.sgd(0.1), steps_per_call=2) == 0
    assert warnings_of(caplog, jstep.sgd(0.1), jstep.sgd(ENDS), steps_per_call=2) == 1
