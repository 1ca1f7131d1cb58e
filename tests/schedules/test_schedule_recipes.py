"""Schedules of modern recipes, compared with their references and with exact quotients, also beyond
2^24."""

import copy
import math
from fractions import Fraction

import jax
import numpy as np
import optax
import pytest
import torch_rates
from decay_table import LAST

import jstep

STEPS = np.arange(140)
BIG = [2**24 + 1, 2**30 + 1, LAST - 5]


def close(found: object, expected: object) -> None:
    np.testing.assert_allclose(
        np.asarray(found, np.float64), np.asarray(expected, np.float64), rtol=3e-6, atol=1e-7
    )


@pytest.mark.thorough
@jax.numpy_dtype_promotion("standard")
def test_linear_and_warmup_cosine_match_optax() -> None:
    expected_schedule = optax.linear_schedule(0.1, 0.9, 33)
    close(jstep.linear(0.1, 0.9, 33)(STEPS), jax.vmap(expected_schedule)(STEPS))
    for warm in (0, 10):
        expected_schedule = optax.warmup_cosine_decay_schedule(0.01, 0.3, warm, 110, 0.002)
        close(
            jstep.warmup_cosine_decay(0.3, warm, 110, 0.01, 0.002)(STEPS),
            jax.vmap(expected_schedule)(STEPS),
        )


@pytest.mark.thorough(except_for=["0.005-linear", "0.3-cos", "1.0-cos"])
@pytest.mark.parametrize(("share", "anneal"), torch_rates.ONE_CYCLE)
def test_one_cycle_matches_torch(share: float, anneal: str) -> None:
    rates = torch_rates.stored(f"one_cycle {share} {anneal}")
    schedule = jax.jit(
        jstep.one_cycle(0.7, torch_rates.COUNT, share, final_div_factor=100, anneal=anneal)
    )
    close(schedule(np.array([*range(torch_rates.COUNT), LAST])), [*rates, rates[-1]])


@pytest.mark.parametrize("sizes", torch_rates.CYCLICAL)
def test_cyclical_matches_torch(sizes: tuple[int, int | None]) -> None:
    rates = torch_rates.stored(f"cyclical {sizes[0]} {sizes[1]}")
    close(jax.jit(jstep.cyclical(0.1, 0.7, *sizes))(np.arange(torch_rates.COUNT)), rates)


@pytest.mark.thorough
@pytest.mark.parametrize("name", torch_rates.CASES)
def test_torch_computes_the_stored_rates(name: str) -> None:
    pytest.importorskip("torch")
    np.testing.assert_allclose(torch_rates.computed(name), torch_rates.stored(name), rtol=1e-7)


SHAPES = {
    "linear": lambda x: 1 - x,
    "cosine": lambda x: math.cos(math.pi * x / 2) ** 2,
    "sqrt": lambda x: 1 - math.sqrt(x),
}


@pytest.mark.thorough(except_for=["lengths4-linear"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    "lengths", [(10, 20, 50), (0, 0, 50), (3, 4, 7), (1, 0, 1), (7, 2**24 + 1, 2**25 + 3)]
)
def test_warmup_stable_decay(shape: str, lengths: tuple[float, float, float]) -> None:
    warm, stable, down = map(Fraction, lengths)
    steps = [*STEPS, 2**24 - 1, 2**24 + 7, 2**24 + 8, 2**24 + 9, 2**25 + 2**24 + 10, LAST]

    def expected(n: int) -> float:
        ramp = min(1.0, float((n + 1) / warm)) if warm else 1.0
        x = float(min(1, max(Fraction(0), (n - warm - stable) / down)))
        return ramp * (0.1 + 0.6 * SHAPES[shape](x))

    schedule = jax.jit(jstep.warmup_stable_decay(0.7, *lengths, 0.1, shape))
    close(schedule(np.array(steps)), [expected(int(n)) for n in steps])


@pytest.mark.parametrize("length", BIG)
def test_late_steps_are_exact(length: int) -> None:
    """A decay to 0 is not 0 one step before its end, and 0 at its end."""
    plateau = jstep.warmup_stable_decay(1.0, 3, length - 13, 10)
    close(
        [plateau(length - 10), plateau(length - 9), plateau(length - 1), plateau(length)],
        [1.0, 0.9, 0.1, 0.0],
    )
    line = jstep.linear(1.0, 0.0, length)
    assert float(line(length - 1)) == pytest.approx(1 / length, rel=1e-6)
    assert float(line(length)) == 0.0
    wave = jstep.warmup_cosine_decay(1.0, length - 10, length)
    assert float(wave(length - 10)) == 1.0
    assert float(wave(length - 1)) == pytest.approx(math.sin(math.pi / 20) ** 2, rel=1e-5)
    once = jstep.one_cycle(1.0, length + 1, final_div_factor=1e30)
    assert float(once(length)) == pytest.approx(4e-32, rel=1e-5)
    assert float(once(length - 1)) > 0.0
    assert float(jstep.ademamix_alpha(5.0, length)(length - 1)) == 5.0
    assert float(jstep.ademamix_alpha(5.0, length)(length - 100)) < 5.0


@pytest.mark.parametrize("half", [3, 1000, 2**20 + 1])
def test_triangles_do_not_drift(half: float) -> None:
    schedule = jstep.cyclical(0.0, 1.0, half)
    for n in (2**24 + 1, 2**24 + 3, 2**30 + 1, LAST - 1, LAST):
        x = (Fraction(n) / (2 * Fraction(half))) % 1 * 2
        assert float(schedule(n)) == pytest.approx(float(min(x, 2 - x)), abs=3e-7)


def test_inverse_sqrt_decay() -> None:
    schedule, w = jax.jit(jstep.inverse_sqrt_decay(0.7, 10)), 10
    steps = [*range(40), 2**24 + 1, LAST]
    close(
        schedule(np.array(steps)),
        [0.7 * min(1, (n + 1) / w) * math.sqrt(w / max(n, w)) for n in steps],
    )


def test_ademamix_schedules_count_updates_from_one() -> None:
    first, last, length = 0.9, 0.9999, 100
    steps = [0, 5, 49, 98, 99, 100, 200, LAST]

    def beta3(n: int) -> float:
        x, a, b = (n + 1) / length, math.log(first), math.log(last)
        return last if x >= 1 else min(math.exp(a * b / ((1 - x) * b + x * a)), last)

    close(
        jax.jit(jstep.ademamix_beta3(first, last, length))(np.array(steps)),
        [beta3(n) for n in steps],
    )
    close(
        jax.jit(jstep.ademamix_alpha(5.0, length))(np.array(steps)),
        [min((n + 1) * 5 / length, 5) for n in steps],
    )


STEP = jstep.create_global_step(3)


def test_steps_where_rates_belong_and_what_is_none() -> None:
    for make in (
        lambda: jstep.cosine_decay(0.1, STEP),
        lambda: jstep.cosine_decay_restarts(0.1, 100, m_mul=2),
        lambda: jstep.linear_cosine_decay(0.1, 100, beta=1000),
        lambda: jstep.exponential_decay(0.1, 1000, STEP),
        lambda: jstep.exponential_decay(STEP, 1000, 0.5),
        lambda: jstep.natural_exp_decay(0.1, 1, 1000),
        lambda: jstep.cosine_decay(0.1, 1000, np.array(0)),
        lambda: jstep.polynomial_decay(0.1, 1000, STEP),
    ):
        with pytest.raises(TypeError, match="leave out TF's global_step"):
            make()
    with pytest.raises(TypeError, match=r"end_learning_rate=20: must be a rate, at most 1"):
        jstep.polynomial_decay(0.1, 5, 20)
    with pytest.raises(TypeError, match="missing 1 required") as error:  # another mistake
        jstep.exponential_decay(0.1, 5)
    assert "TF" not in str(error.value)
    for good in (
        jstep.inverse_time_decay(0.1, np.int64(100), 50.0),
        jstep.polynomial_decay(0.1, 1000, 20.0),
        jstep.cosine_decay_restarts(0.1, 100, 3, 1),
    ):
        assert np.isfinite(float(good(10)))
    assert jax.jit(lambda rate: jstep.cosine_decay(rate, 10, alpha=rate)(3))(0.1) > 0


def test_the_repr_of_a_schedule_is_its_call() -> None:
    warm = jstep.linear_warmup(jstep.cosine_decay(0.5, 100), 7)
    assert repr(warm) == (
        "linear_warmup(cosine_decay(learning_rate=0.5, decay_steps=100), warmup_steps=7)"
    )
    unchanged = jstep.cosine_decay(0.5, decay_steps=100)
    assert jstep.linear_warmup(unchanged, 0) is unchanged
    assert repr(jstep.times(0.5, jstep.constant(2.0))) == "times(0.5, constant(2.0))"
    joined = jstep.join([0.1, jstep.shift(lambda step: 1.0, 3)], [50])
    assert repr(joined) == "join([0.1, shift(<lambda>, start_step=3)], boundaries=[50])"
    names = vars(jstep).copy() | {n: getattr(jstep, n) for n in jstep.__all__}
    assert eval(repr(warm), names)(3) == warm(3)
    assert copy.deepcopy(warm) is warm
