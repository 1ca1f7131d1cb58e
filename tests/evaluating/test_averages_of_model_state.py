"""Averages of the model state, such as BatchNorm's statistics, and evaluations of parameters beside
their averages."""

import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jstep

SGD = jstep.sgd(0.1, 0.9)
BATCHES = np.random.default_rng(0).normal(1.0, size=(12, 8)).astype(np.float32)


def loss_fn(params, stats, x):
    new = {
        "mean": 0.9 * stats["mean"] + 0.1 * x.mean(),
        "seen": stats["seen"] + 1,
        "key": stats["key"],
    }
    return jnp.mean((params["w"] * x - 1) ** 2), new


def averaging(optimizer=SGD, **kwargs):
    return jstep.with_moving_average(
        optimizer, jstep.ExponentialMovingAverage(model_state=True, **kwargs)
    )


def make_state(optimizer, **kwargs):
    model_state = {"mean": 0.5, "seen": 0, "key": jax.random.key(0)}
    return jstep.TrainState.create(
        {"w": jnp.ones(3), "v": jnp.ones(2)}, optimizer, model_state=model_state, **kwargs
    )


def trained(optimizer, batches=BATCHES, **kwargs):
    """The last state, and what a NumPy loop keeps: the statistics after each step."""
    state, means = make_state(optimizer, **kwargs), []
    train_step = jstep.minimize(loss_fn, optimizer, has_model_state=True)
    for x in batches:
        state, _ = train_step(state, x[:3])
        means.append(float(state.model_state["mean"]))
    return state, means


ADAM = jstep.adamw(0.1)
WRAPPED = {
    "plain": lambda: averaging(decay=0.9),
    "guarded": lambda: jstep.skip_nonfinite(averaging(decay=0.9)),
    "scaled": lambda: jstep.dynamic_loss_scale(averaging(decay=0.9)),
    "in a chain": lambda: jstep.chain(
        jstep.clip_gradients(by_global_norm=1.0), averaging(decay=0.9)
    ),
    "masters": lambda: jstep.master_weights(averaging(decay=0.9)),
    "compact": lambda: jstep.compact(averaging(ADAM, decay=0.9)),
    "labels": lambda: averaging(
        jstep.partition({"a": SGD, "b": ADAM}, lambda path, p: "ab"[path == "v"]), decay=0.9
    ),
}


@pytest.mark.parametrize("name", WRAPPED)
def test_they_move_with_the_averages_of_the_parameters(name):
    state, means = trained(WRAPPED[name]())
    expected = 0.5
    for mean in means:
        expected += 0.1 * (mean - expected)
    averaged = jstep.averaged_model_state(state)
    np.testing.assert_allclose(averaged["mean"], expected, rtol=1e-5)
    assert averaged["seen"] == len(BATCHES), "integers have no average"
    assert averaged["key"] == jax.random.key(0)
    assert jax.tree.structure(averaged) == jax.tree.structure(state.model_state)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"decay": 0.999, "start_step": 12}, lambda means: means[-1]),
        ({"decay": 1.0, "zero_debias": True}, np.mean),
        (
            {"decay": 1.0, "zero_debias": True, "start_step": 3, "every": 4},
            lambda means: np.mean(means[6::4]),
        ),
    ],
)
def test_they_begin_and_wait_as_the_averages_of_the_parameters_do(arguments, expected):
    state, means = trained(averaging(**arguments))
    np.testing.assert_allclose(
        jstep.averaged_model_state(state)["mean"], expected(means), rtol=1e-5
    )


def test_a_skipped_update_leaves_them():
    optimizer = jstep.skip_nonfinite(averaging(decay=0.5))
    bad = BATCHES.copy()
    bad[5] = np.nan
    without, _ = trained(optimizer, np.delete(BATCHES, 5, axis=0))
    found, _ = trained(optimizer, bad)
    np.testing.assert_array_equal(
        jstep.averaged_model_state(found)["mean"], jstep.averaged_model_state(without)["mean"]
    )


def test_an_update_that_is_not_due_leaves_them():
    state, means = trained(jstep.update_every(averaging(decay=0.5), 4, accumulate=True))
    expected = 0.5
    for mean in means[3::4]:
        expected += 0.5 * (mean - expected)
    np.testing.assert_allclose(jstep.averaged_model_state(state)["mean"], expected, rtol=1e-5)


def test_a_step_by_hand():
    state = make_state(averaging(decay=0.5))
    state = state.replace(model_state=state.model_state | {"mean": 1.5})
    state = jstep.apply_gradients(
        state, jax.tree.map(jnp.ones_like, state.params), averaging(decay=0.5)
    )
    assert jstep.averaged_model_state(state)["mean"] == 1.0


def test_on_a_mesh():
    mesh = jax.make_mesh((len(jax.devices()),), ("data",))
    alone, _ = trained(averaging(decay=0.9))
    sharded, _ = trained(averaging(decay=0.9), mesh=mesh)
    mean = jstep.averaged_model_state(sharded)["mean"]
    np.testing.assert_allclose(mean, jstep.averaged_model_state(alone)["mean"], rtol=1e-5)


def test_checkpoints_have_them(tmp_path):
    optimizer = averaging(decay=0.9)
    state, _ = trained(optimizer)
    with jstep.Saver(tmp_path) as saver:
        saver.save(state)
        restored = saver.restore(make_state(optimizer))
        averaged = saver.restore(make_state(optimizer), use_averages=True)
    assert restored == state
    for found, expected in (
        (averaged.params, jstep.averaged_params(state)),
        (averaged.model_state, jstep.averaged_model_state(state)),
    ):
        jax.tree.map(
            lambda a, b: np.testing.assert_array_equal(np.asarray(a == b), True), found, expected
        )


def test_a_state_without_them():
    plain = jstep.with_moving_average(SGD, jstep.ExponentialMovingAverage(0.9))
    with pytest.raises(
        ValueError,
        match=r"no averages of its model state; keep them by jstep\.Exp",
    ):
        jstep.averaged_model_state(make_state(plain))
    with pytest.raises(ValueError, match=r"with_moving_average"):
        jstep.averaged_model_state(make_state(SGD))


# Evaluations.


def metric_fn(params, stats, x):
    return {"loss": (params["w"][0] * x - stats["mean"]) ** 2}


def expected_losses(params, stats):
    return float(np.mean((float(params["w"][0]) * BATCHES - float(stats["mean"])) ** 2))


@pytest.mark.parametrize("average", [True, False])
def test_both_in_one_pass(average, caplog):
    optimizer = (
        averaging(decay=0.9)
        if average
        else jstep.with_moving_average(SGD, jstep.ExponentialMovingAverage(0.9))
    )
    state, _ = trained(optimizer)
    traces, passes = [], []

    class Batches:
        def __iter__(self):
            passes.append(1)
            return iter(BATCHES)

    def counted(params, stats, x):
        traces.append(x.shape)
        return metric_fn(params, stats, x)

    evaluate = jstep.evaluator(counted, Batches(), use_averages="both", has_model_state=True)
    with caplog.at_level(logging.WARNING, "jstep"):
        results = evaluate(state)
        evaluate(state)
    assert len(traces) == 2, "both in one program, compiled once"
    assert len(passes) == 2, "one for each evaluation"
    stats = jstep.averaged_model_state(state) if average else state.model_state
    assert results["loss"] == pytest.approx(
        expected_losses(state.params, state.model_state), rel=1e-5
    )
    assert results["averaged/loss"] == pytest.approx(
        expected_losses(jstep.averaged_params(state), stats), rel=1e-5
    )
    warned = [
        record.message for record in caplog.records if "statistics of BatchNorm" in record.message
    ]
    assert len(warned) == (not average), "once"


def test_both_is_checked_and_named_before_the_first_step(tmp_path):
    optimizer = averaging(decay=0.9)
    evaluate = jstep.evaluator(metric_fn, list(BATCHES), use_averages="both", has_model_state=True)
    best = jstep.KeepBest(tmp_path / "best", "averaged/loss")
    hook = jstep.EvaluationHook(evaluate, every_n_steps=5, callbacks=[best])
    train_step = jstep.minimize(loss_fn, optimizer, has_model_state=True)
    state = jstep.train(
        train_step, make_state(optimizer), lambda n: BATCHES[n][:3], 10, hooks=[hook]
    )
    assert list(hook.results[10]) == ["loss", "averaged/loss"]
    assert (
        hook.results[10]["averaged/loss"]
        == jstep.evaluator(metric_fn, list(BATCHES), use_averages=True, has_model_state=True)(
            state
        )["loss"]
    )
    with pytest.raises(ValueError, match="has no averages of the parameters"):
        jstep.evaluator(metric_fn, [BATCHES[0]], use_averages="both", has_model_state=True)(
            make_state(SGD)
        )


def test_a_model_state_of_integers_needs_no_average(caplog):
    optimizer = jstep.with_moving_average(SGD, jstep.ExponentialMovingAverage(0.9))
    state = jstep.TrainState.create({"w": jnp.ones(3)}, optimizer, model_state={"seen": 3})
    evaluate = jstep.evaluator(
        lambda params, stats, x: {"loss": x * stats["seen"].astype(x.dtype)},
        [BATCHES[0]],
        use_averages=True,
        has_model_state=True,
    )
    with caplog.at_level(logging.WARNING, "jstep"):
        evaluate(state)
    assert "BatchNorm" not in caplog.text
