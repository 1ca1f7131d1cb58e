"""Schedules, compared with exact quotients (tests/reference.py), for steps of all sizes and around every edge."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from decay_table import DECAYS, EDGES, LAST, close, finite

import jstep


@pytest.mark.thorough(
    except_for=[
        "exponential-staircase-10",
        "cosine_restarts-equal-1",
        "linear_cosine-periods-1",
    ]
)
@pytest.mark.parametrize("decay_steps", [1, 10, 1000, 100_000, 2**24 + 1, LAST, 2.5, 1000.5, 1234.125, 3e9, 1e12])
@pytest.mark.parametrize("name", DECAYS)
def test_decays_at_the_edges(name: str, decay_steps: float) -> None:
    make, expected = DECAYS[name]
    multiples = [k * decay_steps + i for k in (1, 2, 3, 7, 1000) for i in (-1, -0.5, 0, 0.5, 1)]
    steps = sorted({*EDGES, *(int(n) for n in multiples if 0 <= n <= LAST)})
    steps += [LAST] * (len(EDGES) + len(multiples) - len(steps))  # arrays of one size share compiled operations
    found = make(decay_steps)(np.array(steps, np.int32))
    close(found, [finite(lambda n=n: expected(n, decay_steps)) for n in steps], rtol=3e-5)


OTHERS = {
    "constant": jstep.constant(0.3),
    "piecewise_constant": jstep.piecewise_constant([10, 20], [1.0, 0.5, 0.1]),
    "piecewise_constant-one": jstep.piecewise_constant([], [1.0]),
    "linear_warmup": jstep.linear_warmup(0.5, 7),
    "linear_warmup-decay": jstep.linear_warmup(jstep.cosine_decay(0.5, 100), 7),
    "join": jstep.join([0.1, jstep.exponential_decay(1.0, 10, 0.5)], [50]),
    "shift": jstep.shift(jstep.exponential_decay(1.0, 10, 0.5), 50),
    "times": jstep.times(0.5, jstep.linear_warmup(1.0, 7), jstep.cosine_decay(0.5, 100)),
    "linear": jstep.linear(0.1, 0.9, 33),
    "warmup_cosine_decay": jstep.warmup_cosine_decay(0.5, 10, 60, 0.1, 0.05),
    "warmup_stable_decay": jstep.warmup_stable_decay(0.5, 10, 20, 30, 0.1, "sqrt"),
    "one_cycle": jstep.one_cycle(0.5, 80),
    "inverse_sqrt_decay": jstep.inverse_sqrt_decay(0.5, 10),
    "cyclical": jstep.cyclical(0.1, 0.5, 7, 11),
    "ademamix_alpha": jstep.ademamix_alpha(5.0, 50),
    "ademamix_beta3": jstep.ademamix_beta3(0.9, 0.9999, 50),
}
ALL = {name: make(100) for name, (make, _) in DECAYS.items()} | OTHERS


@pytest.mark.thorough(except_for=["cyclical"])
@pytest.mark.parametrize("name", ALL)
def test_schedules_agree_for_python_numpy_jax_and_traced_steps(name: str) -> None:
    schedule, n = ALL[name], 57
    value = schedule(n)
    assert value.shape == ()
    assert value.dtype == jnp.float32
    for step in (np.int32(n), np.int64(n), np.uint8(n), np.array(n), jnp.int32(n), jnp.uint32(n), jnp.int16(n)):
        again = schedule(step)
        assert again.dtype == jnp.float32
        assert float(again) == float(value)
    np.testing.assert_allclose(jax.jit(schedule)(n), value, rtol=1e-6)
    for shape in ((3,), (2, 3), (0,)):
        many = schedule(np.full(shape, n))
        assert many.shape == shape
        np.testing.assert_allclose(many, np.full(shape, value), rtol=1e-6)
    np.testing.assert_allclose(jax.vmap(schedule)(jnp.array([n, n])), np.full(2, value), rtol=1e-6)


@pytest.mark.thorough(except_for=["cosine", "linear_warmup-decay"])
@pytest.mark.parametrize("name", ALL)
def test_negative_steps(name: str) -> None:
    schedule = ALL[name]
    for bad in (-1, np.int64(-5), jnp.int32(-1), np.array([3, -1])):
        with pytest.raises(ValueError, match=r"step.*-\d"):
            schedule(bad)
    compiled = jax.jit(schedule)
    np.testing.assert_array_equal(compiled(-7), compiled(0))


@pytest.mark.thorough(except_for=["cosine", "linear_warmup-decay"])
@pytest.mark.parametrize("name", ALL)
def test_steps_that_are_not_integers(name: str) -> None:
    for bad in (1.0, np.float32(1), jnp.float32(1), None, "1", True):
        with pytest.raises(TypeError, match="step"):
            ALL[name](bad)
    with pytest.raises(ValueError, match="step"):
        ALL[name](2**31)


@pytest.mark.thorough(except_for=["polynomial-cycle", "join"])
@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("name", [name for name in ALL if not name.startswith("cosine_restarts")])
def test_values_are_float64_under_x64(name: str) -> None:
    assert ALL[name](5).dtype == jnp.float64
    assert ALL[name](jnp.int32(5)).dtype == jnp.float64
    assert ALL[name](2**40).dtype == jnp.float64
