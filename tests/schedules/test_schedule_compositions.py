"""Schedules composed of other schedules."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from decay_table import LAST
from hypothesis import example, given
from hypothesis import strategies as st
from thorough import examples

import jstep


@examples(60)
@given(
    st.lists(st.integers(0, LAST), min_size=0, max_size=5, unique=True).map(sorted),
    st.lists(st.integers(0, LAST), min_size=1, max_size=5),
)
@example([2**24, 2**24 + 1], [2**24, 2**24 + 1, 2**24 + 2])
@example([LAST], [LAST, LAST - 1])
def test_piecewise_constant_changes_after_a_boundary(boundaries, steps):
    values = [float(i) for i in range(len(boundaries) + 1)]
    schedule = jstep.piecewise_constant(boundaries, values)
    for step in [*steps, *boundaries, *(b + 1 for b in boundaries if b < LAST)]:
        assert float(schedule(step)) == reference.piecewise_constant(step, boundaries, values)


@examples(60)
@given(st.integers(0, LAST), st.integers(1, LAST))
@example(2**24, 2**24 + 2)
@example(LAST, LAST)
@example(LAST - 1, LAST)
def test_linear_warmup_ends_exactly_at_its_last_step(step, warmup):
    value = float(jstep.linear_warmup(2.0, warmup)(step))
    assert value == pytest.approx(2 * min(1.0, (step + 1) / warmup), rel=1e-6)
    if step + 1 >= warmup:
        assert value == 2.0
    else:
        assert value > 0.0


def test_linear_warmup_multiplies_the_schedule_at_the_same_step():
    inner = jstep.exponential_decay(1.0, 10, 0.5)
    warm = jstep.linear_warmup(inner, 4)
    for n in range(8):
        assert float(warm(n)) == pytest.approx(float(inner(n)) * min(1, (n + 1) / 4), rel=1e-6)
    assert float(jstep.linear_warmup(0.5, 0)(0)) == 0.5
    for steps in (np.int64(4), jnp.int32(4)):
        assert float(jstep.linear_warmup(1.0, steps)(0)) == 0.25


@pytest.mark.parametrize("start", [0, 1, 1000, 2**24 + 1, LAST])
def test_shift_starts_at_its_start_step(start):
    # Integers are passed through, so that the comparison is bitwise.
    shifted = jstep.shift(lambda step: step, start)
    for step in (0, 1, start - 1, start, start + 1, 2**24 + 3, LAST):
        if 0 <= step <= LAST:
            assert int(shifted(step)) == max(0, step - start)


@examples(40)
@given(st.lists(st.integers(1, LAST), min_size=1, max_size=4, unique=True).map(sorted))
@example([2**24, 2**24 + 1, LAST])
def test_join_gives_each_part_a_step_counter_of_its_own(boundaries):
    """Part i returns i plus a fraction that encodes the last digits of its local step."""
    parts = [
        lambda step, i=i: i + (step % 1000).astype(jnp.float32) / 1024
        for i in range(len(boundaries) + 1)
    ]
    schedule = jstep.join(parts, boundaries)
    for step in {0, *boundaries, *(b - 1 for b in boundaries), LAST}:
        i = sum(b <= step for b in boundaries)
        local_step = step - ([0, *boundaries][i])
        assert float(schedule(step)) == pytest.approx(i + local_step % 1000 / 1024, abs=1e-6)


@pytest.mark.thorough
def test_arguments_of_schedules_may_be_traced():
    """Arguments of schedules are swept with vmap and differentiated with grad."""
    rates = jnp.array([0.1, 0.2])
    for make in (
        lambda lr: jstep.constant(lr),
        lambda lr: jstep.exponential_decay(lr, 10, 0.5),
        lambda lr: jstep.exponential_decay(0.1, 10, lr),
        lambda lr: jstep.natural_exp_decay(lr, 10, lr),
        lambda lr: jstep.inverse_time_decay(lr, 10, lr),
        lambda lr: jstep.polynomial_decay(lr, 10, end_learning_rate=lr, power=2.0),
        lambda lr: jstep.polynomial_decay(1.0, 10, power=lr),
        lambda lr: jstep.cosine_decay(lr, 10, alpha=lr),
        lambda lr: jstep.cosine_decay_restarts(lr, 10, alpha=lr),
        lambda lr: jstep.linear_cosine_decay(lr, 10, alpha=lr),
        lambda lr: jstep.linear_warmup(lr, 10),
        lambda lr: jstep.piecewise_constant([3], [lr, 0.5]),
        lambda lr: jstep.join([lr, 0.5], [7]),
        lambda lr: jstep.shift(lr, 3),
        lambda lr: jstep.linear(lr, 0.5, 10),
        lambda lr: jstep.linear(0.5, lr, 10),
        lambda lr: jstep.warmup_cosine_decay(lr, 2, 10, lr, lr),
        lambda lr: jstep.warmup_stable_decay(lr, 2, 0, 10, lr),
        lambda lr: jstep.one_cycle(lr, 10, div_factor=lr, final_div_factor=lr),
        lambda lr: jstep.inverse_sqrt_decay(lr, 2),
        lambda lr: jstep.cyclical(lr, 0.5, 7),
        lambda lr: jstep.times(lr, lr),
        lambda lr: jstep.ademamix_alpha(lr, 10),
        lambda lr: jstep.ademamix_beta3(lr, 1 - lr / 2, 10),
    ):
        together = jax.vmap(lambda lr, make=make: make(lr)(3))(rates)
        np.testing.assert_allclose(together, [float(make(float(lr))(3)) for lr in rates], rtol=2e-6)
        assert np.isfinite(jax.grad(lambda lr, make=make: make(lr)(3))(0.1))


def test_values_of_pieces_may_be_traced():
    found = jax.jit(lambda rate: jstep.piecewise_constant([3], [rate, 0.5])(np.array([3, 4])))(0.25)
    assert (found.tolist(), found.dtype) == ([0.25, 0.5], jnp.float32)
    rates = jax.jit(lambda rate: jstep.piecewise_constant([], [rate])(np.array([3, 4])))(0.25)
    assert rates.tolist() == [0.25, 0.25]


def test_traced_steps_of_other_dtypes_do_not_wrap_around():
    compiled = jax.jit(jstep.piecewise_constant([5], [1.0, 2.0]))
    steps = [np.uint32(2**32 - 1), np.uint32(5), np.uint8(255), np.int8(-1), np.int16(6)]
    assert [float(compiled(step)) for step in steps] == [2.0, 1.0, 2.0, 1.0, 2.0]


def test_plain_numbers_are_one_table():
    def inputs(count):
        schedule = jstep.piecewise_constant([*range(count)], [0.5] * (count + 1))
        return max(
            len(operation.invars) for operation in jax.make_jaxpr(schedule)(jnp.int32(3)).eqns
        )

    assert inputs(300) == inputs(3)
