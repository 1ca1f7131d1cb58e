"""Schedules, compared with exact quotients (tests/reference.py), for steps of all sizes and around
every edge."""

import math
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from decay_table import DECAYS, EDGES, LAST, close, finite
from hypothesis import assume, example, given
from hypothesis import strategies as st
from thorough import examples

import jstep
from jstep.schedules import arithmetic


@pytest.mark.thorough(
    except_for=[
        "exponential-staircase-10",
        "cosine_restarts-equal-1",
        "linear_cosine-periods-1",
    ]
)
@pytest.mark.parametrize(
    "decay_steps", [1, 10, 1000, 100_000, 2**24 + 1, LAST, 2.5, 1000.5, 1234.125, 3e9, 1e12]
)
@pytest.mark.parametrize("name", DECAYS)
def test_decays_at_the_edges(name, decay_steps):
    make, expected = DECAYS[name]
    multiples = [k * decay_steps + i for k in (1, 2, 3, 7, 1000) for i in (-1, -0.5, 0, 0.5, 1)]
    steps = sorted({*EDGES, *(int(n) for n in multiples if 0 <= n <= LAST)})
    found = jax.jit(make(decay_steps))(np.array(steps, np.int32))
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


@pytest.mark.thorough(except_for=["piecewise_constant", "linear_warmup-decay"])
@pytest.mark.parametrize("name", ALL)
def test_calls_by_hand_pass_a_transfer_guard(name):
    for step in 5, np.int32(5), jnp.int32(5):
        with jax.transfer_guard("disallow_explicit"):
            found = ALL[name](step)
        assert found == ALL[name](step)


@pytest.mark.thorough(except_for=["linear"])
@pytest.mark.parametrize("name", ALL)
def test_schedules_agree_for_python_numpy_jax_and_traced_steps(name):
    schedule, n = ALL[name], 57
    value = schedule(n)
    assert value.shape == ()
    assert value.dtype == jnp.float32
    for step in (
        np.int32(n),
        np.int64(n),
        np.uint8(n),
        np.array(n),
        jnp.int32(n),
        jnp.uint32(n),
        jnp.int16(n),
    ):
        again = schedule(step)
        assert again.dtype == jnp.float32
        assert float(again) == float(value)
    np.testing.assert_allclose(jax.jit(schedule)(n), value, rtol=1e-6)
    for shape in ((3,), (2, 3), (0,)):
        many = schedule(np.full(shape, n))
        assert many.shape == shape
        np.testing.assert_allclose(many, np.full(shape, value), rtol=1e-6)
    np.testing.assert_allclose(jax.vmap(schedule)(jnp.array([n, n])), np.full(2, value), rtol=1e-6)


@pytest.mark.thorough(except_for=["linear"])
@pytest.mark.parametrize("name", ALL)
def test_negative_steps(name):
    schedule = ALL[name]
    for bad in (-1, np.int64(-5), jnp.int32(-1), np.array([3, -1])):
        with pytest.raises(ValueError, match=r"step.*-\d"):
            schedule(bad)
    compiled = jax.jit(schedule)
    np.testing.assert_array_equal(compiled(-7), compiled(0))


@pytest.mark.thorough(except_for=["polynomial-cycle"])
@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("name", [name for name in ALL if not name.startswith("cosine_restarts")])
def test_values_are_float64_under_x64(name):
    for step in (5, jnp.int32(5), 2**40):
        assert jax.eval_shape(lambda step=step: ALL[name](step)).dtype == jnp.float64


# Schedules at steps beyond the precision of float32: exact staircases, ends, cycles and restarts.


@examples(60)
@given(st.integers(0, LAST), st.integers(1, LAST))
@example(LAST, 1)
@example(LAST, LAST)
@example(LAST - 1, LAST)
@example(2**24 + 1, 2)
def test_staircase_counts_whole_periods_exactly(step, length):
    value = float(jstep.exponential_decay(1.0, length, 0.5, staircase=True)(step))
    periods = step // length
    expected = 0.5**periods if periods < 140 else 0.0
    assert value == pytest.approx(expected, rel=1e-5, abs=1e-37)  # denormals may be flushed
    nearly_one = float(jstep.exponential_decay(1.0, length, 1.0000001, staircase=True)(step))
    assert nearly_one == pytest.approx(finite(lambda: 1.0000001**periods), rel=3e-5)


@examples(40)
@given(st.integers(1, LAST))
@example(LAST)
@example(2**24 + 1)
def test_decays_reach_zero_exactly_at_their_end(length):
    line = jstep.polynomial_decay(1.0, length, 0.0)
    assert float(line(length - 1)) == pytest.approx(1 / length, rel=1e-6)
    assert float(line(length)) == 0.0
    assert float(line(LAST)) == (0.0 if length <= LAST else line(LAST))
    wave = jstep.cosine_decay(1.0, length)
    assert float(wave(length)) == 0.0
    # sin²(π/2n); all digits are lost in (1 + cos π(1 − 1/n))/2.
    assert float(wave(length - 1)) == pytest.approx(
        math.sin(math.pi / 2 / length) ** 2, rel=1e-5, abs=1e-37
    )


@examples(40)
@given(st.integers(1, 10**6), st.integers(0, LAST))
@example(10, 2**31 - 8)
@example(1, LAST)
def test_cycles_are_stretched_to_the_next_multiple(length, step):
    value = float(jstep.polynomial_decay(1.0, length, 0.0, cycle=True)(step))
    multiple = max(1, -(-step // length))
    assert value == pytest.approx(float(1 - Fraction(step, length * multiple)), rel=1e-5, abs=1e-12)


@examples(40)
@given(st.integers(1, 10**7), st.integers(0, 7), st.sampled_from([1.0, 2.0, 3.0]))
@example(2**24 + 1, 1, 2.0)
def test_restarts_are_at_their_exact_steps(first, i, t_mul):
    start = sum(first * int(t_mul) ** k for k in range(i))
    assume(start <= LAST)
    schedule = jstep.cosine_decay_restarts(1.0, first, t_mul=t_mul, m_mul=0.5)
    assert float(schedule(start)) == pytest.approx(0.5**i, rel=1e-6)
    if i:
        last = first * int(t_mul) ** (i - 1)
        expected = 0.5 ** (i - 1) * math.sin(math.pi / 2 / last) ** 2
        assert float(schedule(start - 1)) == pytest.approx(expected, rel=1e-4, abs=1e-37)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("length", [2**53 + 1, 2**62 + 1, 2**63 - 1])
def test_int64_steps_are_exact_under_x64(length):
    stairs = jstep.exponential_decay(1.0, length, 0.5, staircase=True)
    assert float(stairs(length - 1)) == 1.0
    assert float(stairs(length)) == 0.5
    line = jstep.polynomial_decay(1.0, length, 0.0)
    assert float(line(length - 1)) == pytest.approx(1 / length, rel=1e-12)
    assert float(jstep.piecewise_constant([length - 1], [1.0, 2.0])(length)) == 2.0
    assert float(jstep.join([1.0, 2.0], [length])(length - 1)) == 1.0
    assert float(jstep.join([1.0, 2.0], [length])(length)) == 2.0


@pytest.mark.parametrize("step", [1_100_000_000, 1_500_000_000, 2**31 - 1])
def test_more_periods_than_fit_into_int32(step):
    """decay_steps may be any positive number, even below 1."""
    value = float(jstep.inverse_time_decay(1.0, 0.5, 1e-9)(step))
    assert value == pytest.approx(reference.inverse_time_decay(step, 1.0, 0.5, 1e-9), rel=1e-5)
    value = float(jstep.exponential_decay(1.0, 0.5, 1 - 1e-9)(step))
    assert value == pytest.approx(math.exp(2 * step * math.log(1 - 1e-9)), rel=1e-5)


def test_a_period_below_a_step_with_many_digits():
    length, steps = Fraction("0.7182818284"), [1, 7, 1000, 100_000]
    periods = arithmetic.divide_steps(jnp.array(steps), length)
    assert periods.whole.tolist() == [math.floor(step / length) for step in steps]
    expected = [float(step / length % 1) for step in steps]
    np.testing.assert_allclose(periods.fraction, expected, atol=1e-3)
    np.testing.assert_allclose(periods.remaining, 1 - np.array(expected), atol=1e-3)
    whole = arithmetic.divide_steps(jnp.int32(1), Fraction(1, 10**12)).whole
    assert float(whole) == pytest.approx(2**31)


def test_a_rate_of_decay_may_be_traced_or_zero():
    for staircase, exponents in ((False, [0.0, 0.5, 1.0, 2.5]), (True, [0.0, 0.0, 1.0, 2.0])):
        found = jax.jit(
            lambda rate, s=staircase: jstep.exponential_decay(3.0, 10, rate, s)(
                np.array([0, 5, 10, 25])
            )
        )
        np.testing.assert_allclose(found(0.25), 3 * 0.25 ** np.array(exponents), rtol=1e-6)
        assert jstep.exponential_decay(3.0, 10, 0.0, staircase)(np.array([0, 5, 10])).tolist() == [
            3,
            3 * staircase,
            0,
        ]
