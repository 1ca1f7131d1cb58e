"""Schedules against exact quotients (tests/reference.py), at every size of step and on both sides of every edge."""

import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

import jstep

LAST = 2**31 - 1
EDGES = [0, 1, 2, 9, 10, 11, 99, 100, 101, 2**24 - 1, 2**24, 2**24 + 1, 2**24 + 3, 2**30, LAST - 1, LAST]

# One of each, with decay_steps as its only argument, next to its reference.
DECAYS: dict[str, tuple[Callable[[float], jstep.Schedule], Callable[[int, float], float]]] = {
    "exponential": (
        lambda d: jstep.exponential_decay(0.1, d, 0.5),
        lambda n, d: reference.exponential_decay(n, 0.1, d, 0.5),
    ),
    "exponential-staircase": (
        lambda d: jstep.exponential_decay(0.1, d, 0.96, staircase=True),
        lambda n, d: reference.exponential_decay(n, 0.1, d, 0.96, True),
    ),
    "exponential-growing": (
        lambda d: jstep.exponential_decay(0.1, d, 1.5),
        lambda n, d: reference.exponential_decay(n, 0.1, d, 1.5),
    ),
    "natural_exp": (
        lambda d: jstep.natural_exp_decay(0.1, d, 0.3),
        lambda n, d: reference.natural_exp_decay(n, 0.1, d, 0.3),
    ),
    "natural_exp-staircase": (
        lambda d: jstep.natural_exp_decay(0.1, d, 0.3, staircase=True),
        lambda n, d: reference.natural_exp_decay(n, 0.1, d, 0.3, True),
    ),
    "inverse_time": (
        lambda d: jstep.inverse_time_decay(0.1, d, 0.5),
        lambda n, d: reference.inverse_time_decay(n, 0.1, d, 0.5),
    ),
    "inverse_time-staircase": (
        lambda d: jstep.inverse_time_decay(0.1, d, 0.5, staircase=True),
        lambda n, d: reference.inverse_time_decay(n, 0.1, d, 0.5, True),
    ),
    "polynomial": (lambda d: jstep.polynomial_decay(0.1, d), lambda n, d: reference.polynomial_decay(n, 0.1, d)),
    "polynomial-square": (
        lambda d: jstep.polynomial_decay(0.1, d, 0.01, power=2.0),
        lambda n, d: reference.polynomial_decay(n, 0.1, d, 0.01, 2.0),
    ),
    "polynomial-root": (
        lambda d: jstep.polynomial_decay(0.1, d, 0.01, power=0.5),
        lambda n, d: reference.polynomial_decay(n, 0.1, d, 0.01, 0.5),
    ),
    "polynomial-cycle": (
        lambda d: jstep.polynomial_decay(0.1, d, 0.01, cycle=True),
        lambda n, d: reference.polynomial_decay(n, 0.1, d, 0.01, 1.0, True),
    ),
    "cosine": (lambda d: jstep.cosine_decay(0.1, d), lambda n, d: reference.cosine_decay(n, 0.1, d)),
    "cosine-alpha": (
        lambda d: jstep.cosine_decay(0.1, d, alpha=0.2),
        lambda n, d: reference.cosine_decay(n, 0.1, d, 0.2),
    ),
    "cosine_restarts": (
        lambda d: jstep.cosine_decay_restarts(0.1, d),
        lambda n, d: reference.cosine_decay_restarts(n, 0.1, d),
    ),
    "cosine_restarts-equal": (
        lambda d: jstep.cosine_decay_restarts(0.1, d, t_mul=1.0, alpha=0.1),
        lambda n, d: reference.cosine_decay_restarts(n, 0.1, d, 1.0, 1.0, 0.1),
    ),
    "cosine_restarts-lower": (
        lambda d: jstep.cosine_decay_restarts(0.1, d, t_mul=1.5, m_mul=0.8, alpha=0.1),
        lambda n, d: reference.cosine_decay_restarts(n, 0.1, d, 1.5, 0.8, 0.1),
    ),
    "linear_cosine": (
        lambda d: jstep.linear_cosine_decay(0.1, d),
        lambda n, d: reference.linear_cosine_decay(n, 0.1, d),
    ),
    "linear_cosine-periods": (
        lambda d: jstep.linear_cosine_decay(0.1, d, num_periods=3, alpha=0.1, beta=0.01),
        lambda n, d: reference.linear_cosine_decay(n, 0.1, d, 3, 0.1, 0.01),
    ),
}


def close(found: Any, expected: Any, scale: float = 0.1) -> None:
    """To float32 rounding: relative where the value is a power, absolute where it is a difference."""
    np.testing.assert_allclose(
        np.asarray(found, np.float64), np.clip(expected, None, np.inf), rtol=3e-6, atol=5e-7 * scale
    )


def finite(value: Callable[[], float]) -> float:
    try:
        number = value()
    except OverflowError:
        return math.inf
    return number if number < float(np.finfo(np.float32).max) else math.inf


@pytest.mark.parametrize("decay_steps", [1, 10, 1000, 100_000, 2**24 + 1, LAST, 2.5, 1000.5, 1234.125, 3e9, 1e12])
@pytest.mark.parametrize("name", DECAYS)
def test_decays_at_the_edges(name: str, decay_steps: float) -> None:
    make, expected = DECAYS[name]
    multiples = [k * decay_steps + i for k in (1, 2, 3, 7, 1000) for i in (-1, -0.5, 0, 0.5, 1)]
    steps = sorted({*EDGES, *(int(n) for n in multiples if 0 <= n <= LAST)})
    found = make(decay_steps)(np.array(steps, np.int32))
    close(found, [finite(lambda n=n: expected(n, decay_steps)) for n in steps])


@pytest.mark.parametrize("decay_steps", [10, 1234.125])
@pytest.mark.parametrize("name", DECAYS)
def test_decays_of_python_numpy_jax_and_traced_steps_agree(name: str, decay_steps: float) -> None:
    schedule, n = DECAYS[name][0](decay_steps), 57
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


OTHERS = {
    "constant": jstep.constant(0.3),
    "piecewise_constant": jstep.piecewise_constant([10, 20], [1.0, 0.5, 0.1]),
    "piecewise_constant-one": jstep.piecewise_constant([], [1.0]),
    "linear_warmup": jstep.linear_warmup(0.5, 7),
    "linear_warmup-decay": jstep.linear_warmup(jstep.cosine_decay(0.5, 100), 7),
    "join": jstep.join([0.1, jstep.exponential_decay(1.0, 10, 0.5)], [50]),
    "shift": jstep.shift(jstep.exponential_decay(1.0, 10, 0.5), 50),
}
ALL = {name: make(100) for name, (make, _) in DECAYS.items()} | OTHERS


@pytest.mark.parametrize("name", ALL)
def test_negative_steps(name: str) -> None:
    schedule = ALL[name]
    for bad in (-1, np.int64(-5), jnp.int32(-1), np.array([3, -1])):
        with pytest.raises(ValueError, match=r"step.*-\d"):
            schedule(bad)
    np.testing.assert_array_equal(jax.jit(schedule)(-7), jax.jit(schedule)(0))


@pytest.mark.parametrize("name", ALL)
def test_steps_that_are_no_integers(name: str) -> None:
    for bad in (1.0, np.float32(1), jnp.float32(1), None, "1", True):
        with pytest.raises(TypeError, match="step"):
            ALL[name](bad)
    with pytest.raises(ValueError, match="step"):
        ALL[name](2**31)


@pytest.mark.parametrize("name", OTHERS)
def test_compositions_take_arrays_and_scalars_alike(name: str) -> None:
    schedule, steps = OTHERS[name], np.arange(100).reshape(10, 10)
    one_by_one = np.array([float(schedule(int(n))) for n in steps.ravel()[::9]])
    assert schedule(steps).shape == (10, 10)
    assert schedule(steps).dtype == jnp.float32
    np.testing.assert_allclose(np.ravel(schedule(steps))[::9], one_by_one, rtol=1e-6)
    np.testing.assert_allclose(jax.jit(schedule)(steps), schedule(steps), rtol=1e-6)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("name", [name for name in ALL if not name.startswith("cosine_restarts")])
def test_values_are_float64_under_x64(name: str) -> None:
    assert ALL[name](5).dtype == jnp.float64
    assert ALL[name](jnp.int32(5)).dtype == jnp.float64
    assert ALL[name](2**40).dtype == jnp.float64


# Exactness.


def test_the_classic_demonstration() -> None:
    schedule = jstep.exponential_decay(0.1, 10, 2)
    assert [f"{schedule(n):.6g}" for n in range(11)] == [
        "0.1",
        "0.107177",
        "0.11487",
        "0.123114",
        "0.131951",
        "0.141421",
        "0.151572",
        "0.16245",
        "0.17411",
        "0.186607",
        "0.2",
    ]


@pytest.mark.parametrize("length", [2**24 + 1, 2**24 - 1, 2**30 + 1, LAST])
def test_staircases_step_where_float32_cannot_count(length: int) -> None:
    schedule = jstep.exponential_decay(1.0, length, 0.5, staircase=True)
    assert float(schedule(length - 1)) == 1.0
    assert float(schedule(length)) == 0.5
    for make in (jstep.natural_exp_decay, jstep.inverse_time_decay):
        stairs = make(1.0, length, 1.0, staircase=True)
        assert float(stairs(length - 1)) == 1.0
        assert float(stairs(length)) < 0.6


@settings(max_examples=60)
@given(st.integers(0, LAST), st.integers(1, LAST))
@example(LAST, 1)
@example(LAST, LAST)
@example(LAST - 1, LAST)
@example(2**24 + 1, 2)
def test_staircase_counts_whole_periods_exactly(step: int, length: int) -> None:
    """The parity of the number of periods is its last bit: no rounding leaves it intact."""
    value = float(jstep.exponential_decay(1.0, length, 0.5, staircase=True)(step))
    whole = step // length
    assert value == (0.5**whole if whole < 140 else 0.0) or whole > 126  # denormals may be flushed
    nearly_one = float(jstep.exponential_decay(1.0, length, 1.0000001, staircase=True)(step))
    assert nearly_one == pytest.approx(finite(lambda: 1.0000001**whole), rel=3e-6)


@settings(max_examples=60)
@given(st.integers(0, LAST), st.integers(1, 2**20), st.sampled_from([1, 2, 4, 8, 16]), st.floats(-20, 20))
@example(LAST, 2**20 - 1, 16, 3.0)
def test_exponential_decay_with_fractional_decay_steps(step: int, num: int, den: int, exponent: float) -> None:
    length = num / den
    assume(step * den < 2**31 * num)  # no more periods than an int32 counts
    rate = math.exp(exponent / max(1.0, step / length))
    assume(0 < rate < 1e30)
    for staircase in (False, True):
        value = float(jstep.exponential_decay(1.0, length, rate, staircase)(step))
        assert value == pytest.approx(reference.exponential_decay(step, 1.0, length, rate, staircase), rel=1e-5)


@settings(max_examples=60)
@given(st.integers(0, LAST), st.floats(1.0, 1e9), st.sampled_from(["inverse_time", "polynomial", "cosine-alpha"]))
def test_smooth_decays_with_any_decay_steps(step: int, length: float, name: str) -> None:
    make, expected = DECAYS[name]
    assert float(make(length)(step)) == pytest.approx(expected(step, length), rel=5e-6, abs=1e-7)


@settings(max_examples=40)
@given(st.integers(1, LAST))
@example(LAST)
@example(2**24 + 1)
def test_the_last_step_of_a_decay_is_not_zero_and_the_end_is(length: int) -> None:
    line = jstep.polynomial_decay(1.0, length, 0.0)
    assert float(line(length - 1)) == pytest.approx(1 / length, rel=1e-6)
    assert float(line(length)) == 0.0
    assert float(line(LAST)) == (0.0 if length <= LAST else line(LAST))
    wave = jstep.cosine_decay(1.0, length)
    assert float(wave(length)) == 0.0
    # sin²(π/2n), of which (1 + cos π(1 − 1/n))/2 keeps no digit.
    assert float(wave(length - 1)) == pytest.approx(math.sin(math.pi / 2 / length) ** 2, rel=1e-5, abs=1e-37)


@settings(max_examples=40)
@given(st.integers(1, 10**6), st.integers(0, LAST))
@example(10, 2**31 - 8)
@example(1, LAST)
def test_cycles_are_stretched_to_the_next_multiple(length: int, step: int) -> None:
    value = float(jstep.polynomial_decay(1.0, length, 0.0, cycle=True)(step))
    multiple = max(1, -(-step // length))
    assert value == pytest.approx(float(1 - Fraction(step, length * multiple)), rel=1e-5, abs=1e-12)


@settings(max_examples=40)
@given(st.integers(1, 10**7), st.integers(0, 7), st.sampled_from([1.0, 2.0, 3.0]))
@example(2**24 + 1, 1, 2.0)
def test_restarts_are_at_their_exact_steps(first: int, i: int, t_mul: float) -> None:
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
def test_int64_steps_are_exact_under_x64(length: int) -> None:
    stairs = jstep.exponential_decay(1.0, length, 0.5, staircase=True)
    assert float(stairs(length - 1)) == 1.0
    assert float(stairs(length)) == 0.5
    line = jstep.polynomial_decay(1.0, length, 0.0)
    assert float(line(length - 1)) == pytest.approx(1 / length, rel=1e-12)
    assert float(jstep.piecewise_constant([length - 1], [1.0, 2.0])(length)) == 2.0
    assert float(jstep.join([1.0, 2.0], [length])(length - 1)) == 1.0
    assert float(jstep.join([1.0, 2.0], [length])(length)) == 2.0


# The compositions.


@settings(max_examples=60)
@given(
    st.lists(st.integers(0, LAST), min_size=0, max_size=5, unique=True).map(sorted),
    st.lists(st.integers(0, LAST), min_size=1, max_size=5),
)
@example([2**24, 2**24 + 1], [2**24, 2**24 + 1, 2**24 + 2])
@example([LAST], [LAST, LAST - 1])
def test_piecewise_constant_changes_after_its_boundary(boundaries: list[int], steps: list[int]) -> None:
    values = [float(i) for i in range(len(boundaries) + 1)]
    schedule = jstep.piecewise_constant(boundaries, values)
    for step in [*steps, *boundaries, *(b + 1 for b in boundaries if b < LAST)]:
        assert float(schedule(step)) == reference.piecewise_constant(step, boundaries, values)


def test_piecewise_constant_with_boundaries_between_and_beyond_steps() -> None:
    schedule = jstep.piecewise_constant([2.5, 1e12], [1, 2, 3])
    assert [float(schedule(n)) for n in (2, 3, LAST)] == [1.0, 2.0, 2.0]


@settings(max_examples=60)
@given(st.integers(0, LAST), st.integers(1, LAST))
@example(2**24, 2**24 + 2)
@example(LAST, LAST)
@example(LAST - 1, LAST)
def test_linear_warmup_is_one_from_its_last_step_on(step: int, warmup: int) -> None:
    value = float(jstep.linear_warmup(2.0, warmup)(step))
    assert value == pytest.approx(2 * min(1.0, (step + 1) / warmup), rel=1e-6)
    if step + 1 >= warmup:
        assert value == 2.0
    else:
        assert value > 0.0


def test_linear_warmup_multiplies_the_schedule_at_the_same_step() -> None:
    inner = jstep.exponential_decay(1.0, 10, 0.5)
    warm = jstep.linear_warmup(inner, 4)
    for n in range(8):
        assert float(warm(n)) == pytest.approx(float(inner(n)) * min(1, (n + 1) / 4), rel=1e-6)
    assert float(jstep.linear_warmup(0.5, 0)(0)) == 0.5
    assert float(jstep.linear_warmup(1.0, 2.5)(0)) == pytest.approx(0.4)
    assert float(jstep.linear_warmup(1.0, 2.5)(2)) == 1.0


@pytest.mark.parametrize("start", [0, 1, 1000, 2**24 + 1, LAST])
def test_shift_begins_at_its_start(start: int) -> None:
    seen = jstep.shift(lambda step: step, start)  # integers pass through, so that every bit shows
    for step in (0, 1, start - 1, start, start + 1, 2**24 + 3, LAST):
        if 0 <= step <= LAST:
            assert int(seen(step)) == max(0, step - start)


@settings(max_examples=40)
@given(st.lists(st.integers(1, LAST), min_size=1, max_size=4, unique=True).map(sorted))
@example([2**24, 2**24 + 1, LAST])
def test_join_gives_each_part_its_own_clock(boundaries: list[int]) -> None:
    """Part i reports i in the units and the last digits of its own step in the fraction."""
    parts = [lambda step, i=i: i + (step % 1000).astype(jnp.float32) / 1024 for i in range(len(boundaries) + 1)]
    schedule = jstep.join(parts, boundaries)
    for step in {0, *boundaries, *(b - 1 for b in boundaries), LAST}:
        i = sum(b <= step for b in boundaries)
        own = step - ([0, *boundaries][i])
        assert float(schedule(step)) == pytest.approx(i + own % 1000 / 1024, abs=1e-6)


def test_join_of_a_warmup_a_plateau_and_a_decay() -> None:
    schedule = jstep.join([jstep.linear_warmup(1.0, 5), 1.0, jstep.cosine_decay(1.0, 10)], [5, 8])
    values = [float(schedule(n)) for n in range(20)]
    np.testing.assert_allclose(values[:8], [0.2, 0.4, 0.6, 0.8, 1, 1, 1, 1], rtol=1e-6)
    np.testing.assert_allclose(
        values[8:], [reference.cosine_decay(n, 1.0, 10) for n in range(12)], rtol=1e-6, atol=1e-7
    )


def test_a_learning_rate_may_be_traced() -> None:
    """Sweeps over what a schedule is made of, under vmap and grad."""
    rates = jnp.array([0.1, 0.2])
    for make in (
        lambda lr: jstep.constant(lr),
        lambda lr: jstep.exponential_decay(lr, 10, 0.5),
        lambda lr: jstep.exponential_decay(0.1, 10, lr),
        lambda lr: jstep.natural_exp_decay(lr, 10, lr),
        lambda lr: jstep.inverse_time_decay(lr, 10, lr),
        lambda lr: jstep.polynomial_decay(lr, 10, end_learning_rate=lr, power=2.0),
        lambda lr: jstep.cosine_decay(lr, 10, alpha=lr),
        lambda lr: jstep.cosine_decay_restarts(lr, 10, alpha=lr),
        lambda lr: jstep.linear_cosine_decay(lr, 10, alpha=lr),
        lambda lr: jstep.linear_warmup(lr, 10),
        lambda lr: jstep.piecewise_constant([3], [lr, 0.5]),
        lambda lr: jstep.join([lr, 0.5], [7]),
        lambda lr: jstep.shift(lr, 3),
    ):
        together = jax.vmap(lambda lr, make=make: make(lr)(3))(rates)
        np.testing.assert_allclose(together, [float(make(float(lr))(3)) for lr in rates], rtol=2e-6)
        assert np.isfinite(jax.grad(lambda lr, make=make: make(lr)(3))(0.1))


@pytest.mark.parametrize("name", ALL)
def test_values_at_the_last_steps_are_finite_numbers(name: str) -> None:
    if name != "exponential-growing":
        assert np.isfinite(ALL[name](np.array([LAST - 1, LAST]))).all()
