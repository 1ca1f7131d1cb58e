"""Moving averages with a start step, an interval or a `var_list`."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jstep

PARAMS = {"w": jnp.array([1.0, 2.0]), "deep": {"b": jnp.array(3.0)}, "n": jnp.array(4)}


def run(optimizer: Any, steps: int, start: int = 0, skipped: tuple[int, ...] = ()) -> tuple[Any, list[Any]]:
    """Return the last state and the states after each step."""
    state = jstep.TrainState.create(PARAMS, optimizer, start)
    step = jax.jit(lambda s, g: jstep.apply_gradients(s, g, optimizer))
    states = []
    for i in range(steps):
        g = jnp.float32(jnp.nan if i in skipped else 1.0 + i)
        state = step(state, {"w": jnp.full(2, g), "deep": {"b": g}, "n": None})
        states.append(state)
    return state, states


@pytest.mark.thorough(except_for="each value once")
@pytest.mark.parametrize("every", [1, 2, 3])
@pytest.mark.parametrize("start_step", [0, 1, 4])
@pytest.mark.parametrize("created", [0, 7])
def test_swa_is_the_plain_mean(every: int, start_step: int, created: int) -> None:
    ema = jstep.ExponentialMovingAverage(1.0, zero_debias=True, start_step=start_step, every=every)
    _, states = run(jstep.with_moving_average(jstep.gradient_descent(0.1), ema), 9, created)
    for state in states:
        n = int(state.global_step)
        due = [
            s for s in states if start_step < int(s.global_step) <= n and (int(s.global_step) - start_step) % every == 0
        ]
        if n <= start_step:
            np.testing.assert_array_equal(jstep.averaged_params(state)["w"], state.params["w"])
        elif due:
            mean = np.mean([s.params["w"] for s in due], 0)
            np.testing.assert_allclose(jstep.averaged_params(state)["w"], mean, rtol=1e-5)


@pytest.mark.parametrize("num_updates", [False, True])
def test_averages_move_every_k_steps_after_the_start(num_updates: bool) -> None:
    ema = jstep.ExponentialMovingAverage(0.75, num_updates=num_updates, start_step=3, every=2)
    _, states = run(jstep.with_moving_average(jstep.gradient_descent(0.1), ema), 8)
    want = None
    for n, state in enumerate(states, 1):
        p = np.asarray(state.params["w"], np.float64)
        if n <= 3:
            want = p
        elif (n - 3) % 2 == 0:
            decay = min(0.75, (1 + n) / (10 + n)) if num_updates else 0.75
            want = want - (1 - decay) * (want - p)
        np.testing.assert_allclose(jstep.averaged_params(state)["w"], want, rtol=1e-5, atol=1e-6)


def test_averages_equal_params_bitwise_until_the_start() -> None:
    ema = jstep.ExponentialMovingAverage(0.9, start_step=5)
    state, _ = run(jstep.with_moving_average(jstep.adam(0.3), ema), 5)
    np.testing.assert_array_equal(jstep.averaged_params(state)["w"], state.params["w"])


def test_apply_with_every_requires_num_updates() -> None:
    ema = jstep.ExponentialMovingAverage(0.5, every=2)
    averages = ema.init({"w": jnp.float32(0.0)})
    with pytest.raises(ValueError, match="num_updates=None"):
        ema.apply(averages, {"w": jnp.float32(1.0)})
    for n, want in ((1, 0.0), (2, 0.5), (3, 0.5), (4, 0.75)):
        averages = ema.apply(averages, {"w": jnp.float32(1.0)}, num_updates=n)
        assert float(averages["w"]) == want


def test_nonfinite_params_between_updates_are_ignored() -> None:
    """Between two updates the parameters do not enter the average, not even as 0 · ∞."""
    ema = jstep.ExponentialMovingAverage(0.5, every=2)
    averages = ema.apply(ema.init({"w": jnp.float32(1.0)}), {"w": jnp.float32(jnp.inf)}, num_updates=1)
    assert float(averages["w"]) == 1.0


@pytest.mark.parametrize(
    "var_list", [["w"], "w*", lambda path, leaf: path == "w", {"w": True, "deep": False, "n": False}]
)
def test_var_list_selects_the_averaged_params(var_list: Any) -> None:
    ema = jstep.ExponentialMovingAverage(0.5)
    state, _ = run(jstep.with_moving_average(jstep.gradient_descent(0.1), ema, var_list), 3)
    assert jstep.get_slot(state, ema.name, "deep/b") is None
    averaged = jstep.averaged_params(state)
    np.testing.assert_array_equal(averaged["deep"]["b"], state.params["deep"]["b"])
    assert not np.array_equal(averaged["w"], state.params["w"])


def test_averaged_params_with_invalid_arguments() -> None:
    with pytest.raises(TypeError, match="state=None: must be a TrainState"):
        jstep.averaged_params(None)  # type: ignore[arg-type]
    ema = jstep.ExponentialMovingAverage(0.5)
    state = run(jstep.scope("x", jstep.with_moving_average(jstep.gradient_descent(0.1), ema)), 1)[0]
    assert jstep.averaged_params(state)["w"] is not None
    with pytest.raises(ValueError, match=r"nearest: 'x/ExponentialMovingAverage'"):
        jstep.averaged_params(state, "x/ExponentialMovingAverages")


SGD = jstep.gradient_descent(0.1)
EVERY_SECOND = jstep.ExponentialMovingAverage(1.0, zero_debias=True, every=2)
FROM_FOUR = jstep.ExponentialMovingAverage(1.0, zero_debias=True, start_step=4)


def swa(ema: Any, wrap: Any = lambda one: one, rate: float = 1.0) -> Any:
    return wrap(jstep.with_moving_average(jstep.gradient_descent(rate), ema))


@pytest.mark.thorough(except_for=["update_every-6-start_step", "no gradient-0-every"])
@pytest.mark.parametrize("ema", [EVERY_SECOND, FROM_FOUR], ids=["every", "start_step"])
@pytest.mark.parametrize("created", [0, 6])
@pytest.mark.parametrize(
    ("wrap", "makes_update"),
    [
        (jstep.skip_nonfinite, lambda n: n % 7 not in (2, 3)),
        (lambda one: jstep.update_every(2, one), lambda n: n % 2 == 0),
        (lambda one: jstep.skip_nonfinite(jstep.update_every(2, one)), lambda n: n % 2 == 0 and n % 7 not in (2, 3)),
        (lambda one: jstep.partition({"w": one, "b": SGD}, lambda path, leaf: path), lambda n: n % 3),
    ],
    ids=["skip_nonfinite", "update_every", "both", "no gradient"],
)
def test_averages_count_the_values_that_entered(ema: Any, created: int, wrap: Any, makes_update: Any) -> None:
    """Updates that are left out, at steps at which averages move and at others, do not bias the mean."""
    optimizer = swa(ema, wrap)
    state = jstep.TrainState.create({"w": jnp.float32(10.0), "b": jnp.float32(0.0)}, optimizer, created)
    leaves_out = "partition" if "w/ExponentialMovingAverage" in state.slots else "nan"
    entered: list[float] = []
    for n in range(created + 1, created + 20):
        makes = bool(makes_update(n))
        g: Any = jnp.float32(1.0)
        if not makes and leaves_out == "partition":
            g = None
        elif n % 7 in (2, 3) and leaves_out == "nan":
            g = jnp.float32(jnp.nan) if not makes else g
        state = jstep.apply_gradients(state, {"w": g, "b": jnp.float32(1.0)}, optimizer)
        if makes and n > ema.start_step and (n - ema.start_step) % ema.every == 0:
            entered.append(float(state.params["w"]))
        if entered:
            np.testing.assert_allclose(jstep.averaged_params(state)["w"], np.mean(entered), rtol=1e-6)
    assert len(entered) > 3


@pytest.mark.parametrize("ema", [EVERY_SECOND, FROM_FOUR], ids=["every", "start_step"])
def test_several_updates_in_a_step_enter_one_by_one(ema: Any) -> None:
    optimizer = swa(ema, rate=0.5)
    state = jstep.TrainState.create({"w": jnp.float32(100.0)}, optimizer)
    entered: list[float] = []
    for n in range(1, 13):
        for _ in range(3):
            state = jstep.apply_gradients(state, {"w": jnp.float32(1.0)}, optimizer, increment_global_step=False)
            if n > ema.start_step and (n - ema.start_step) % ema.every == 0:
                entered.append(float(state.params["w"]))
        state = jstep.increment_global_step(state)
        if entered:
            np.testing.assert_allclose(jstep.averaged_params(state)["w"], np.mean(entered), rtol=1e-6)


def test_averages_that_wait_have_an_age_of_their_own_which_a_checkpoint_keeps(tmp_path: Any) -> None:
    optimizer = jstep.with_moving_average(jstep.adam(0.1), EVERY_SECOND)
    state, states = run(optimizer, 7, start=3)
    assert int(state.slots["start_step"]) == 3
    assert int(state.slots["with_moving_average/ExponentialMovingAverage/start_step"]) == 10 - 4  # steps 4, 6, 8, 10
    with jstep.Saver(tmp_path) as saver:
        saver.save(states[2])
        resumed = saver.restore(jstep.TrainState.create(PARAMS, optimizer))
    for i in range(3, 7):
        g = jnp.float32(1.0 + i)
        resumed = jstep.apply_gradients(resumed, {"w": jnp.full(2, g), "deep": {"b": g}, "n": None}, optimizer)
    np.testing.assert_allclose(jstep.averaged_params(resumed)["w"], jstep.averaged_params(state)["w"], rtol=1e-6)
    plain = jstep.with_moving_average(jstep.adam(0.1), jstep.ExponentialMovingAverage(0.9, zero_debias=True))
    assert "with_moving_average/ExponentialMovingAverage/start_step" not in jstep.TrainState.create(PARAMS, plain).slots
