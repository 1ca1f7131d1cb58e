"""Unit tests of the evaluation callbacks: `EarlyStopping`, `ReduceOnPlateau` and `KeepBest`,
without a loop."""

import json
import logging
import math
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jstep
from jstep.evaluating.callbacks import use_run
from jstep.hooks.hook_states import get_states, set_states
from jstep.hooks.origin import Kind, Origin
from jstep.record.starts import StartFile
from jstep.stores import tagged_json


def state_at(step=0, rate=0.5):
    optimizer = jstep.gradient_descent(jstep.held("learning_rate", rate))
    return jstep.TrainState.create({"w": jnp.full(3, float(step))}, optimizer, global_step=step)


def through_json(value):
    """Return a state as a checkpoint keeps it."""
    text = json.dumps(tagged_json.as_json(tagged_json.copy_encodable(value)), allow_nan=False)
    return tagged_json.decode(json.loads(text))


# EarlyStopping


def stops_at(values, **kwargs):
    """Return the index of the evaluation at which EarlyStopping stops, or None."""
    stop = jstep.EarlyStopping("loss", **kwargs)
    return next((i for i, value in enumerate(values) if stop(i, None, {"loss": value})), None)


@pytest.mark.parametrize(
    ("values", "kwargs", "expected"),
    [
        ([3, 2, 1, 1, 1, 1], {"patience": 3}, 5),
        ([3, 2, 1, 1, 1], {"patience": 3}, None),
        ([1, 2, 2, 0.5, 2, 2, 2], {"patience": 3}, 6),
        ([1, 1], {"patience": 1}, 1),
        ([1, 0.9, 0.8], {"patience": 1, "min_delta": 0.1}, 1),
        ([1, 0.95, 0.85, 0.8], {"patience": 2, "min_delta": 0.1}, None),
        ([1, 2, 3, 3, 3], {"patience": 2, "mode": "max"}, 4),
        ([math.nan, math.nan], {"patience": 2}, 1),
        ([math.nan, 1, math.nan, 0.5, math.nan, math.nan], {"patience": 2}, 5),
        ([math.inf, 5, 5, 5], {"patience": 2}, 3),
        ([-math.inf, -math.inf], {"patience": 1}, 1),
    ],
)
def test_it_stops_when_patience_is_exhausted(values, kwargs, expected):
    assert stops_at(values, **kwargs) == expected


def test_a_metric_that_was_never_a_number_is_told_so(caplog):
    stop = jstep.EarlyStopping("loss", patience=2)
    with caplog.at_level(logging.INFO, "jstep"):
        assert [stop(step, None, {"loss": math.nan}) for step in (3, 6)] == [None, True]
    assert caplog.messages == ["step 6: loss has been NaN in 2 evaluations; stopping"]
    assert "at step 6: loss had been NaN in 2 evaluations" in stop.stop_reason


@pytest.mark.parametrize("cut", range(1, 6))
def test_patience_continues_counting_after_a_restart(cut):
    values = [math.inf, 2, 1, 1.5, 1.5, 1.5]
    first = jstep.EarlyStopping("loss", patience=3)
    assert not any(first(i, None, {"loss": value}) for i, value in enumerate(values[:cut]))
    second = jstep.EarlyStopping("loss", patience=3)
    second.begin(state_at())
    assert not second.set_state(through_json(first.get_state()))
    results = [second(i, None, {"loss": value}) for i, value in enumerate(values[cut:], cut)]
    assert results[-1] is True
    assert not any(results[:-1])
    third = jstep.EarlyStopping("loss", patience=3)
    assert third.set_state(through_json(second.get_state())) is True  # it stays stopped
    # With more patience, the run continues.
    assert jstep.EarlyStopping("loss", patience=4).set_state(second.get_state()) is False


# ReduceOnPlateau


def rates(values, **kwargs):
    """Return the learning rate after each evaluation."""
    reduce, state, found = jstep.ReduceOnPlateau("loss", "learning_rate", **kwargs), state_at(), []
    reduce.begin(state)
    for i, value in enumerate(values):
        state = reduce(i, state, {"loss": value}) or state
        found.append(jstep.get_hyperparameter(state, "learning_rate"))
    return found


def torch_rates(values, factor, patience, mode, threshold, cooldown, min_value):
    """Return the rates of torch's ReduceLROnPlateau (threshold_mode="rel"), as transcribed.

    But for the threshold below 0, where torch's `best * (1 - threshold)` is worse than the best in
    mode "min".
    """
    rate, best, bad, cooling, found = 0.5, math.inf if mode == "min" else -math.inf, 0, 0, []
    for value in values:
        margin = threshold * abs(best) if math.isfinite(best) else 0.0
        good = value < best - margin if mode == "min" else value > best + margin
        if good:
            best, bad = value, 0
        else:
            bad += 1
        if cooling > 0:
            cooling -= 1
            bad = 0
        if bad > patience:
            new = max(rate * factor, min_value)
            if rate - new > 1e-8:
                rate = new
            cooling, bad = cooldown, 0
        found.append(rate)
    return found


@pytest.mark.parametrize("seed", range(10))
def test_reduce_on_plateau_matches_the_transcribed_torch_scheduler(seed):
    rng = np.random.default_rng(seed)
    values = np.round(rng.normal(size=60).cumsum() * rng.choice([0.1, 1.0]), 2).tolist()
    for at in rng.choice(60, 3):
        values[at] = math.nan
    kwargs = {
        "factor": float(rng.choice([0.1, 0.5, 0.9])),
        "patience": int(rng.integers(0, 4)),
        "mode": str(rng.choice(["min", "max"])),
        "threshold": float(rng.choice([0.0, 1e-4, 0.1])),
        "cooldown": int(rng.integers(0, 4)),
        "min_value": float(rng.choice([0.0, 0.01])),
    }
    assert rates(values, **kwargs) == pytest.approx(torch_rates(values, **kwargs), rel=1e-5)


@pytest.mark.parametrize(("mode", "worse"), [("min", 5e-5), ("max", -5e-5)])
@pytest.mark.parametrize("first", [-1.0, 0.0, 1.0])
def test_a_metric_that_is_flat_or_gets_worse_is_on_a_plateau_at_any_sign(first, mode, worse):
    for values in ([first] * 6, [first + i * worse for i in range(6)]):
        reduce = jstep.ReduceOnPlateau("loss", "learning_rate", factor=0.5, patience=2, mode=mode)
        state = state_at()
        for i, value in enumerate(values):
            state = reduce(i, state, {"loss": value}) or state
        assert jstep.get_hyperparameter(state, "learning_rate") == 0.25
        assert reduce.best == first


# KeepBest


def steps(directory, prefix="best"):
    with jstep.Saver(directory, prefix=prefix) as saver:
        return {step: saver.extra(step) for step in saver.all_steps()}


def keep(directory, values, start=1, *, mode="min", **kwargs):
    best = jstep.KeepBest(directory, "accuracy", mode=mode, **kwargs)
    best.begin(state_at())
    for step, value in enumerate(values, start):
        best(step, state_at(step), {"accuracy": value, "loss": 1.0})
    best.close()


def test_a_better_checkpoint_is_on_the_disk_before_a_worse_one_is_deleted(tmp_path, monkeypatch):
    order = []
    for name in ("save", "wait", "delete"):
        method = getattr(jstep.Saver, name)

        def recorded(self, *args, name=name, method=method, **kwargs):
            if name != "save":
                order.append(name)
            result = method(self, *args, **kwargs)
            if name == "save":
                order.append(name)
            return result

        monkeypatch.setattr(jstep.Saver, name, recorded)
    best = jstep.KeepBest(tmp_path, "accuracy", mode="min")
    best.begin(state_at())
    for step, value in enumerate([0.5, 0.4], 1):
        best(step, state_at(step), {"accuracy": value})
    saved = len(order) - order[::-1].index("save")
    assert order[saved : order.index("delete") + 1] == ["wait", "delete"]
    best.close()
    assert steps(tmp_path) == {2: {"accuracy": 0.4}}


@pytest.mark.thorough(
    except_for=[
        "0-values9-kwargs9-expected9",
        "1-values4-kwargs4-expected4",
        "2-values2-kwargs2-expected2",
        "0-values6-kwargs6-expected6",
    ]
)
@pytest.mark.parametrize(
    ("values", "kwargs", "expected"),
    [
        ([0.5, 0.9, 0.7], {"mode": "max"}, {2: 0.9}),
        ([0.5, 0.9, 0.4], {}, {3: 0.4}),
        ([0.5, 0.9, 0.9], {"mode": "max"}, {2: 0.9}),  # on a tie, the earlier step
        ([0.9, 0.5, 0.7, 0.8], {"mode": "max", "max_to_keep": 2}, {1: 0.9, 4: 0.8}),
        (
            [0.5, 0.5, 0.5, 0.6],
            {"mode": "max", "max_to_keep": 2},
            {1: 0.5, 4: 0.6},
        ),  # on a tie, the later step is deleted
        ([math.nan, 0.1, math.nan], {"mode": "max"}, {2: 0.1}),
        ([math.nan], {}, {}),
        ([math.inf, 3.0], {}, {2: 3.0}),
        ([1, 2], {"max_to_keep": 3}, {1: 1.0, 2: 2.0}),
        (
            [7, 6, 5, 4, 3, 2, 1],
            {"max_to_keep": 6},
            {2: 6.0, 3: 5.0, 4: 4.0, 5: 3.0, 6: 2.0, 7: 1.0},
        ),
    ],
)
@pytest.mark.parametrize("cut", [0, 1, 2])
def test_the_best_are_kept_across_a_restart(values, kwargs, expected, cut, tmp_path):
    keep(tmp_path, values[:cut], **kwargs)
    keep(tmp_path, values[cut:], start=1 + min(cut, len(values)), **kwargs)
    assert steps(tmp_path) == {step: {"accuracy": value} for step, value in expected.items()}


def test_keep_best_saves_the_state_of_that_step(tmp_path):
    directory = tmp_path / "sweep[lr=0.01]"
    keep(directory, [0.5, 0.9, 0.7], mode="max", prefix="top[a]")
    assert set(steps(directory, "top[a]")) == {2}
    restored = jstep.Saver(directory, prefix="top[a]").restore(state_at())
    assert restored.params["w"].tolist() == [2, 2, 2]


def test_checkpoints_without_the_metric_are_not_deleted(tmp_path, caplog):
    keep(tmp_path, [0.5], mode="max")
    other = jstep.KeepBest(tmp_path, "f1", mode="max")
    other.begin(state_at())
    other(9, state_at(9), {"f1": 0.1})
    other.close()
    assert set(steps(tmp_path)) == {1, 9}
    assert "KeepBest skips best-1" in caplog.text
    assert "Saver.restore may still return it" in caplog.text


_BEST = (
    "best-2 of another run with accuracy=0.9",
    ("best-2 of an earlier start of this run with accuracy=0.9"),
)


@pytest.mark.thorough(except_for=[f"0-max-{_BEST[0]}", f"0-max-{_BEST[1]}", "60-min-best-1 "])
@pytest.mark.parametrize(
    ("mode", "best"), [("max", _BEST[0]), ("max", _BEST[1]), ("min", "best-1 ")]
)
@pytest.mark.parametrize("start", [0, 60])
def test_a_fresh_run_warns_of_the_best_of_another_run(mode, best, start, tmp_path, caplog):
    keep(tmp_path, [0.5, 0.9], mode=mode, max_to_keep=2)
    kept = f"{tmp_path}/best-2" if "earlier" in best else "best-9"
    earlier = [{"problem": None, "run": "", "best": {"accuracy": (0.9, 2, kept)}}]
    for restored in (60, None):
        assert not caplog.records
        origin = Origin() if restored is None else Origin(kind=Kind.RESUMED, step=restored)
        one = jstep.KeepBest(tmp_path, "accuracy", mode=mode)
        use_run(
            one,
            types.SimpleNamespace(
                saver=None,
                origin=origin,
                config=None,
                background=None,
                log_failed=None,
                check_no_links=lambda path: None,
                shared={StartFile: types.SimpleNamespace(earlier=earlier)},
            ),
        )
        one.begin(state_at(start))
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert (
        f"this run starts at step {start}, not from its own checkpoint, "
        f"but {tmp_path} contains {best}"
    ) in caplog.text


def test_parameters_with_nan_are_not_kept(tmp_path, caplog):
    best = jstep.KeepBest(tmp_path, "error")
    best.begin(state_at())
    best(1, state_at(1), {"error": 0.5})
    state = state_at(2)
    nan_params = jax.tree.map(lambda x: x * math.nan, state.params)
    best(2, state.replace(params=nan_params), {"error": 0.0})
    best.close()
    assert set(steps(tmp_path)) == {1}
    assert "step 2 is not kept, though error=0: NaN in params" in caplog.text


def test_hashes_of_the_data_are_matched_in_any_order(tmp_path):
    def make(metric, prefix):
        best = jstep.KeepBest(tmp_path, metric, prefix=prefix)
        best.values = {1: 0.5}
        return best

    names = [("loss", "a"), ("loss", "b"), ("error", "a")]
    before, after = ([make(*name) for name in names] for _ in range(2))
    for best, name in zip(before, names, strict=True):
        best._measured_on = {1: " of ".join(name)}
    set_states(after[::-1], get_states(before))
    assert [best.get_state() for best in after] == [
        {"measured_on": {"1": " of ".join(name)}} for name in names
    ]


def test_what_is_kept_is_on_the_disk_before_a_checkpoint_of_the_run(tmp_path, monkeypatch):
    """A run that resumes from that checkpoint does not evaluate its step again."""
    settled = []
    monkeypatch.setattr(jstep.Saver, "wait", lambda saver: settled.append(saver.prefix))
    best = jstep.KeepBest(tmp_path, "loss")
    flush = jstep.EvaluationHook(
        lambda state: {"loss": 1.0}, every_n_steps=1, callbacks=[best]
    ).flush
    flush()
    assert settled == []  # nothing is open yet
    claimed = []
    monkeypatch.setattr(jstep.Saver, "claim", lambda saver: claimed.append(saver.prefix))
    best.begin(state_at())
    assert claimed == ["best"]  # no other run that lives may keep its own there
    settled.clear()  # the Saver itself waits for its own writes
    flush()
    assert settled == ["best"]
    best.close()


# Metrics that are missing or no numbers, and states that cannot be used

D = "directory"


CALLBACKS = {
    "stop": lambda metric, **mode: jstep.EarlyStopping(metric, **mode),
    "plateau": lambda metric, **mode: jstep.ReduceOnPlateau(metric, "learning_rate", **mode),
    "best": lambda metric, **mode: jstep.KeepBest(D, metric, **mode),
}


@pytest.mark.parametrize("name", CALLBACKS)
def test_without_a_mode_only_losses_errors_and_perplexities_are_minimized(name):
    make = CALLBACKS[name]
    for metric in ("loss", "val/loss", "test_error", "perplexity", "error"):
        make(metric)
    for metric in ("accuracy", "auc", "loss_scale", "errors", "lossy"):
        with pytest.raises(
            ValueError,
            match=rf'mode=None: must be "max" if higher values of {metric!r} are better',
        ):
            make(metric)
        with pytest.raises(ValueError, match="mode=None"):
            make(metric, mode=None)
        make(metric, mode="max")
    make("loss", mode="max")


def test_a_state_of_another_metric_or_mode_is_logged_and_ignored(caplog):
    saved = {
        "metric": "loss",
        "mode": "min",
        "best": 2.0,
        "bad": 1,
        "stopped_at": None,
        "cooling": 0,
    }
    stop = jstep.EarlyStopping("loss", patience=3)
    assert stop.set_state(saved) is False
    assert (stop.best, stop.wait, stop.get_state()) == (2.0, 1, saved)
    for change in ({"metric": "accuracy"}, {"mode": "max"}):
        assert stop.set_state(saved | change) is False
        assert stop.get_state() == saved
    why = (
        "is for {'metric': 'accuracy', 'mode': 'min'}, but it has {'metric': 'loss', 'mode': 'min'}"
    )
    assert caplog.messages[0] == (
        f"EarlyStopping(loss) starts fresh: its state in the checkpoint {why}"
    )
    assert len(caplog.messages) == 2


def test_reset_forgets_the_state_in_the_checkpoint(caplog):
    stop = jstep.EarlyStopping("loss", patience=3, reset=True)
    assert (
        stop.set_state({**stop.get_state(), "best": math.inf, "bad": 9, "stopped_at": 0}) is False
    )
    assert (stop.wait, stop.stop_reason) == (0, None)
    assert caplog.messages == [
        "EarlyStopping(loss) starts fresh: its state in the checkpoint "
        "is forgotten because of reset=True"
    ]


def test_a_plateau_of_tiny_changes_and_its_line(caplog):
    caplog.set_level("INFO", "jstep")
    reduce = jstep.ReduceOnPlateau("loss", "learning_rate", factor=0.5, patience=0, min_value=1e-8)
    state = state_at(rate=2.5e-8)
    assert reduce(1, state, {"loss": 1.0}) is None
    state = reduce(2, state, {"loss": 1.0})
    assert jstep.get_hyperparameter(state, "learning_rate") == pytest.approx(1.25e-8)
    assert reduce(3, state, {"loss": 1.0}) is None  # it would change by less than 1e-8
    assert [record.getMessage() for record in caplog.records] == [
        "step 2: loss is on a plateau; learning_rate 1.25e-08, was 2.5e-08"
    ]
