"""Restore converts step counters between 32 and 64 bits, and initializes the slots of a guard added later."""

import logging
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jstep

ADAM = jstep.adam(0.1)


def _state(optimizer: Any, step: int = 0, params: Any = None) -> Any:
    return jstep.TrainState.create(params or {"a": jnp.ones(3, jnp.float32)}, optimizer, global_step=step)


def _save(directory: Any, state: Any) -> jstep.Saver:
    saver = jstep.Saver(directory, async_save=False)
    saver.save(state)
    return saver


@pytest.mark.parametrize("partial", [False, True])
def test_step_counters_convert_both_ways(tmp_path: Any, partial: bool) -> None:
    saver = _save(tmp_path / "32", _state(ADAM, 6))
    with jax.enable_x64(True):
        wide = saver.restore(_state(ADAM), partial=partial)
        assert (wide.global_step.dtype, int(wide.global_step)) == (jnp.int64, 6)
        assert (wide.slots["start_step"].dtype, int(wide.slots["start_step"])) == (jnp.int64, 6)
        other = _save(tmp_path / "64", wide)
    narrow = other.restore(_state(ADAM), partial=partial)
    assert (narrow.global_step.dtype, int(narrow.global_step)) == (jnp.int32, 6)
    assert (narrow.slots["start_step"].dtype, int(narrow.slots["start_step"])) == (jnp.int32, 6)


def test_a_step_that_overflows_32_bits_is_an_error(tmp_path: Any) -> None:
    with jax.enable_x64(True):
        saver = _save(tmp_path, _state(ADAM).replace(global_step=jnp.asarray(2**40)))
    with pytest.raises(
        ValueError, match=r"'global_step' is int32 and cannot represent 1099511627776; enable jax_enable_x64"
    ):
        saver.restore(_state(ADAM))


def test_weights_never_convert(tmp_path: Any) -> None:
    params = {"n": jnp.int32(7), "table": jnp.arange(3, dtype=jnp.int32), "a": jnp.ones(3, jnp.float32)}
    saver = _save(tmp_path, _state(ADAM, 6, params))
    with jax.enable_x64(True):
        for name in ("n", "table"):
            target = _state(ADAM, 0, params | {name: params[name].astype(jnp.int64)})
            with pytest.raises(ValueError, match=rf"params/{name}' \(int32\[.*int64"):
                saver.restore(target)
        with pytest.raises(ValueError, match=r"differing .*'slots/m/a'"):
            saver.restore(_state(ADAM, 0, params | {"a": jnp.ones(3, jnp.float64)}))


def test_a_partial_restore_requires_a_step_that_fits(tmp_path: Any) -> None:
    saver = _save(tmp_path, _state(ADAM, 6))
    target = {"global_step": jnp.zeros(2, jnp.int32), "params": {"a": jnp.zeros(3)}}
    with pytest.raises(ValueError, match=r"no global_step that fits.*int32\[2\] in target.*without a step"):
        saver.restore(target, partial=True)
    assert saver.restore({"params": {"a": jnp.zeros(3)}}, partial=True)["params"]["a"].tolist() == [1, 1, 1]


GUARDS = {
    "skip": jstep.skip_nonfinite(ADAM),
    "scale": jstep.dynamic_loss_scale(ADAM, initial=8.0),
    "both": jstep.dynamic_loss_scale(jstep.skip_nonfinite(ADAM), initial=8.0),
    "scope": jstep.scope("x/y", jstep.skip_nonfinite(jstep.gradient_descent(0.1))),
}


@pytest.mark.thorough(except_for=["False-both", "True-scale"])
@pytest.mark.parametrize("name", GUARDS)
@pytest.mark.parametrize("abstract", [False, True])
def test_a_guard_added_later(tmp_path: Any, caplog: Any, name: str, abstract: bool) -> None:
    plain = _state(jstep.gradient_descent(0.1) if name == "scope" else ADAM, 6)
    saver = _save(tmp_path, plain)
    target = _state(GUARDS[name])
    if abstract and name in ("scale", "both"):  # shapes have no initial loss scale
        with pytest.raises(ValueError, match=r"loss_scale'.* must have a value, got a shape"):
            saver.restore(jax.eval_shape(lambda: target))
        return
    with caplog.at_level(logging.INFO, "jstep"):
        restored = saver.restore(jax.eval_shape(lambda: target) if abstract else target)
    assert restored.global_step == 6
    assert {one.levelname for one in caplog.records} == {"INFO"}
    assert "saved without a guard" in caplog.text
    fresh = {slot for slot in restored.slots if slot not in plain.slots}
    assert fresh
    for slot in fresh:
        assert restored.slots[slot] == (8.0 if slot.endswith("loss_scale") else 6)
    updated = jstep.apply_gradients(restored, {"a": jnp.full(3, jnp.nan)}, GUARDS[name])
    assert updated.params["a"].tolist() == [1, 1, 1]


EMA = jstep.ExponentialMovingAverage(0.5, zero_debias=True)


def loss(params: Any) -> Any:
    return jnp.sum((params["w"] - 1.0) ** 2)


@pytest.mark.parametrize("scope", [None, "a/b"])
@pytest.mark.parametrize(
    "inner", [jstep.gradient_descent(0.1), jstep.update_every(2, jstep.adam(0.1))], ids=["sgd", "own age"]
)
def test_restore_averages_into_a_plain_state(tmp_path: Any, inner: jstep.Optimizer, scope: str | None) -> None:
    averaged = jstep.with_moving_average(inner, EMA)
    optimizer = jstep.scope(scope, averaged) if scope else averaged
    state = jstep.TrainState.create({"w": jnp.zeros(3)}, optimizer)
    step = jstep.minimize(loss, optimizer)
    for _ in range(3):
        state, _ = step(state)
    slot = f"{scope}/{EMA.name}" if scope else EMA.name
    with jstep.Saver(tmp_path) as saver:
        saver.save(state)
    plain = jstep.TrainState.create({"w": jnp.zeros(3)}, jstep.scope(scope, inner) if scope else inner)
    restored = jstep.Saver(tmp_path).restore(plain, use_averages=slot)
    np.testing.assert_array_equal(restored.params["w"], state.slots[slot]["w"])
