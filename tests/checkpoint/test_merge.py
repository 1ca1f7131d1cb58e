"""`merge_checkpoints`: weights by hand, exact sums, masters, what is refused, the command."""

import json
import logging
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jstep
from jstep.checkpoint import merge
from jstep.checkpoint.directory import DirectoryStore
from jstep.checkpoint.merge import decay_weights
from jstep.tools import cli


def state_at(step, optimizer=None, **params):
    return jstep.TrainState.create(params or {"w": float(step)}, optimizer or jstep.adam(), global_step=step)


def saved(where, states, **options):
    with jstep.Saver(where, max_to_keep=None, **options) as saver:
        for state in states:
            saver.save(state)
    return where


@pytest.mark.parametrize(
    ("steps", "decay", "expected"),
    [
        ([0, 10, 20, 30], "linear", [0.25] * 4),
        ([0, 10, 40], "linear", [10 / 60, 20 / 60, 30 / 60]),
        ([0, 10], "1-sqrt", [math.sqrt(0.5), 1 - math.sqrt(0.5)]),
        ([0, 10], "cosine", [0.5, 0.5]),
        ([0, 10, 20], lambda step: 2.0 - step / 10, [0.25, 0.5, 0.25]),
        ([1, 4], lambda step: float(5 - step), [0.25, 0.75]),  # at ⌊2.5⌋ = 2
    ],
)
def test_weights_by_hand(steps, decay, expected):
    found = decay_weights(steps, decay)
    assert found == pytest.approx(expected)
    assert sum(found) == pytest.approx(1)


@pytest.mark.parametrize(
    ("decay", "error", "said"),
    [
        ("quadratic", ValueError, "'linear'"),
        (3, TypeError, "got an int"),
        (lambda step: step + 1.0, ValueError, "must not rise"),
        (lambda step: 0.0, ValueError, "above 0"),
        (lambda step: math.nan, ValueError, "above 0"),
    ],
)
def test_curves_that_are_refused(decay, error, said):
    with pytest.raises(error, match=said):
        decay_weights([0, 10], decay)


def test_the_mean(tmp_path, caplog):
    saved(tmp_path, [state_at(step) for step in (1, 2, 3, 6)])
    with caplog.at_level(logging.INFO, "jstep"):
        assert jstep.merge_checkpoints(tmp_path, [3, 1, 2]) == {"w": np.float32(2)}
    assert "with the weights 1: 0.333333, 2: 0.333333, 3: 0.333333" in caplog.text
    all_of_them = jstep.merge_checkpoints(tmp_path)
    assert all_of_them["w"] == pytest.approx(np.dot(decay_weights([1, 2, 3, 6], "linear"), [1, 2, 3, 6]))
    assert jstep.merge_checkpoints(tmp_path, [1, 6], decay=lambda step: 1.0)["w"] == 6


def test_equal_checkpoints_are_themselves_bit_for_bit(tmp_path):
    w = jax.random.normal(jax.random.key(0), (1000,))
    saved(tmp_path, [state_at(step, w=w, b=w.astype(jnp.bfloat16)) for step in range(7)])
    found = jstep.merge_checkpoints(tmp_path, decay="cosine")
    assert (found["w"] == np.asarray(w)).all()
    assert (found["b"] == np.asarray(w.astype(jnp.bfloat16))).all()


def test_a_target_has_its_structure_and_dtypes(tmp_path):
    saved(tmp_path, [state_at(step, layers=[jnp.full(3, step + 0.0), jnp.full(2, step + 1.0)]) for step in (1, 2)])
    target = {"layers": [jax.ShapeDtypeStruct((3,), jnp.bfloat16), np.zeros(2, np.float32)]}
    found = jstep.merge_checkpoints(tmp_path, target=target)
    assert found["layers"][0].dtype == jnp.bfloat16
    assert found["layers"][1].tolist() == [2.5, 2.5]
    assert jstep.merge_checkpoints(tmp_path)["layers"]["0"].tolist() == [1.5] * 3
    with pytest.raises(ValueError, match="does not fit"):
        jstep.merge_checkpoints(tmp_path, target={"layers": [target["layers"][0]]})
    with pytest.raises(TypeError, match=r"pass state\.params"):
        jstep.merge_checkpoints(tmp_path, target=state_at(1))


@pytest.mark.thorough(except_for=["compact"])
@pytest.mark.parametrize("wrapper", [jstep.master_weights, jstep.compact])
def test_the_full_precision_of_parameters_is_merged(wrapper, tmp_path):
    optimizer = wrapper(jstep.adam(1e-3))
    params = {"w": jnp.linspace(0.1, 1, 512).astype(jnp.bfloat16)}
    state, states, wide = jstep.TrainState.create(params, optimizer), [], []
    step = jstep.minimize(lambda params, x: jnp.sum((params["w"].astype(jnp.float32) - x) ** 2), optimizer)
    for _ in range(4):
        state, _ = step(state, jnp.float32(3.0))
        states.append(jax.tree.map(jnp.copy, state))
        if wrapper is jstep.master_weights:
            wide.append(np.asarray(jstep.get_slot(state, "master", "w"), np.float64))
    saved(tmp_path, states)
    found = jstep.merge_checkpoints(tmp_path, target={"w": np.zeros(512, np.float32)})["w"]
    low = np.mean([np.asarray(one.params["w"], np.float64) for one in states], 0)
    assert not np.array_equal(found, low.astype(np.float32))
    if wide:
        np.testing.assert_array_equal(found, np.sum([0.25 * one for one in wide], 0).astype(np.float32))


def test_averages(tmp_path):
    optimizer = jstep.with_moving_average(jstep.sgd(0.1), jstep.ExponentialMovingAverage(0.5))
    states = []
    for step in (1, 2):
        state = state_at(step, optimizer, w=float(step))
        name = next(one for one in state.slots if "Average" in one)
        states.append(state.replace(slots={**state.slots, name: {"w": jnp.float32(10.0 * step)}}))
    saved(tmp_path, states)
    assert jstep.merge_checkpoints(tmp_path, use_averages=True)["w"] == 15
    assert jstep.merge_checkpoints(tmp_path)["w"] == 1.5


def test_integers_must_be_equal(tmp_path):
    saved(tmp_path / "a", [state_at(step, w=1.0, n=jnp.int32(3)) for step in (1, 2)])
    assert jstep.merge_checkpoints(tmp_path / "a")["n"] == 3
    saved(tmp_path / "b", [state_at(step, w=1.0, n=jnp.int32(step)) for step in (1, 2)])
    with pytest.raises(ValueError, match="params/n"):
        jstep.merge_checkpoints(tmp_path / "b")


@pytest.mark.parametrize(
    ("steps", "error", "said"),
    [
        ([1], ValueError, "two or more"),
        ([1, 1, 2], ValueError, "1 more than once"),
        ([1, 9], FileNotFoundError, r"\[9\].*\[1, 2\]"),
        (3, TypeError, "got an int"),
        ([1, "x"], TypeError, "integer"),
    ],
)
def test_steps_that_are_refused(steps, error, said, tmp_path):
    saved(tmp_path, [state_at(step) for step in (1, 2)])
    with pytest.raises(error, match=said):
        jstep.merge_checkpoints(tmp_path, steps)


def test_what_does_not_fit_together(tmp_path):
    saved(tmp_path, [state_at(1, w=1.0), state_at(2, v=1.0)])
    with pytest.raises(ValueError, match="have other parameters"):
        jstep.merge_checkpoints(tmp_path)
    saved(tmp_path / "nan", [state_at(1), state_at(2, w=math.nan)], allow_nonfinite=True)
    with pytest.raises(ValueError, match="not finite; leave"):
        jstep.merge_checkpoints(tmp_path / "nan")


def test_a_target_that_does_not_fit_is_an_error_of_this_function(tmp_path):
    saved(tmp_path, [state_at(1), state_at(2)])
    with pytest.raises(ValueError, match=r"^target does not fit the parameters of .*'params/x'") as refused:
        jstep.merge_checkpoints(tmp_path, target={"x": np.zeros(3, np.float32)})
    text = str(refused.value)
    assert "merge_checkpoints without target" in text
    assert not any(name in text for name in ("target_params", "restore", "names="))


def test_damage_is_an_error_and_nothing_older_is_taken(tmp_path):
    large = jax.random.normal(jax.random.key(0), (300, 300))
    saved(tmp_path, [state_at(step, w=large) for step in (1, 2, 3)])
    path = max((one for one in (tmp_path / "model-2").rglob("*") if one.is_file()), key=lambda one: one.stat().st_size)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    with pytest.raises(jstep.CheckpointError, match="model-2 is corrupted"):
        jstep.merge_checkpoints(tmp_path)
    (tmp_path / "model-3" / "manifest.json").unlink()
    with pytest.raises(jstep.CheckpointError, match="model-3"):
        jstep.merge_checkpoints(tmp_path)
    with pytest.raises(FileNotFoundError):
        jstep.merge_checkpoints(tmp_path, [1, 3])


def test_model_state_is_not_merged(tmp_path, caplog):
    states = [jstep.TrainState.create({"w": 1.0}, jstep.adam(), step, model_state={"mean": 0.0}) for step in (1, 2)]
    saved(tmp_path, states)
    jstep.merge_checkpoints(tmp_path)
    assert "take those of step 2, the newest" in caplog.text


def test_the_command(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    saved(tmp_path / "run", [state_at(step, layer={"w": jnp.full(2, step + 0.0)}) for step in (10, 20, 30, 35)])
    assert cli.main(["merge", "run", "--steps", "10:30:10", "-o", "out.safetensors"]) == 0
    assert capsys.readouterr().out.splitlines()[0] == "model-10  0.333333"
    found = jstep.load_weights("out.safetensors", {"layer": {"w": np.zeros(2, np.float32)}})
    assert found["layer"]["w"].tolist() == [20, 20]
    assert cli.main(["merge", "run", "--json", "-o", "all.safetensors"]) == 0
    assert json.loads(capsys.readouterr().out)["steps"] == [10, 20, 30, 35]
    for wrong in (["--steps", "10:40:10"], ["--steps", "x"], ["--steps", "30:10"], ["--decay", "none"]):
        assert cli.main(["merge", "run", *wrong, "-o", "wrong.safetensors"]) == 2
    (tmp_path / "run" / "timeline.jsonl").touch()
    for path, said in {"nothing": "nothing: no such directory", ".": " is a directory of runs (run)"}.items():
        capsys.readouterr()
        assert cli.main(["merge", path, "-o", "wrong.safetensors"]) == 2
        assert said in capsys.readouterr().err
    assert not (tmp_path / "wrong.safetensors").exists()
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize("when", ["found", "read"])
def test_checkpoints_that_are_replaced_meanwhile_are_listed_again(when, tmp_path, monkeypatch):
    saved(tmp_path, [state_at(step) for step in (1, 2, 3)])
    called = {"found": "find", "read": "contents"}[when]
    kind = {"found": merge.CheckpointReader, "read": DirectoryStore}[when]
    method, goes_on = getattr(kind, called), [True, True]

    def late(self, *args, **kwargs):
        result = method(self, *args, **kwargs) if when == "read" else None
        if goes_on and goes_on.pop():  # the run evicts its oldest checkpoint, and saves another one
            with jstep.Saver(tmp_path, max_to_keep=None) as saver:
                steps = saver.all_steps()
                saver.save(state_at(steps[-1] + 1))
                saver.delete(steps[0])
        return method(self, *args, **kwargs) if result is None else result

    monkeypatch.setattr(kind, called, late)
    merged = jstep.merge_checkpoints(tmp_path)
    assert not goes_on
    left = jstep.Saver(tmp_path).all_steps()
    assert merged["w"] == np.mean(left, dtype=np.float32)
    goes_on.append(True)
    with pytest.raises((jstep.CheckpointError, FileNotFoundError)):
        jstep.merge_checkpoints(tmp_path, left)  # steps that were named


def written(where, rates, configs=None):
    """Checkpoints of a run whose timeline has a rate for each."""
    with jstep.Saver(where, max_to_keep=None) as saver:
        for step in rates:
            saver.save(state_at(step), extra=None if configs is None else {"config": configs[step]})
    lines = [
        {"kind": "parts", "prefix": "model", "checkpoint": step, "values": {"loss": 1.0, "learning_rate": rate}}
        for step, rate in rates.items()
    ]
    (where / "timeline.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return where


@pytest.mark.parametrize("rates", [{1: 0.1, 2: 0.1, 3: 0.1}, {1: 0.05, 2: 0.1}, {1: "nan", 2: None, 3: [], 4: {}}])
def test_a_constant_rate_is_no_warning(rates, tmp_path, caplog):
    written(tmp_path, rates, {step: {"lr": 0.1, "late": "(not ready)" if step == 1 else 7} for step in rates})
    jstep.merge_checkpoints(tmp_path)
    assert not [one for one in caplog.records if one.levelno >= logging.WARNING]


def test_a_rate_that_fell_and_options_that_changed_are_one_warning(tmp_path, caplog, capsys):
    configs = {1: {"lr": 0.1, "seed": 0}, 2: {"lr": 0.1, "seed": 0}, 3: {"lr": 0.05, "steps": 9, "seed": 0}, 4: {}}
    written(tmp_path, {1: 0.1, 2: 0.1, 3: 0.08, 4: 0.05}, configs)
    assert cli.main(["merge", str(tmp_path), "-o", str(tmp_path / "x.safetensors"), "--steps", "1:3"]) == 0
    (one,) = [one.getMessage() for one in caplog.records if one.levelno >= logging.WARNING]
    assert "an estimate for a constant rate, and learning_rate fell from 0.1 at step 2 to 0.08 at step 3; " in one
    assert "options changed between the steps 2 and 3: lr, steps; give the steps of a stretch" in one
    caplog.clear()
    jstep.merge_checkpoints(tmp_path, [1, 2])
    assert not caplog.records[1:]
    (tmp_path / "timeline.jsonl").unlink()
    jstep.merge_checkpoints(tmp_path, [2, 4])
    assert "2 and 4: lr, seed" in caplog.text
