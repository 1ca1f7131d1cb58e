"""The page "A table as a schedule": what it says of steps."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from pages import DOCS, blocks_of, run_page

PAGE = DOCS / "recipes" / "table-schedule.md"


@pytest.fixture(scope="module")
def page():
    """The names of the page without its run, which test_pages.py trains."""
    run = blocks_of(PAGE)[-1].code
    return run_page(PAGE, lambda code: "" if code == run else code)


def test_steps_beyond_the_table_have_its_last_value(page):
    schedule = page["look_up"]([0.5, 0.25])
    for one in (schedule, jax.jit(schedule)):
        assert [float(one(step)) for step in (0, 1, 2, 2**31 - 1)] == [0.5, 0.25, 0.25, 0.25]


def test_lines_between_points_are_exact_at_large_steps(page):
    first = 2**24
    values = [float(page["through"]({0: 0.0, first: 0.0, first + 4: 1.0})(first + i)) for i in range(5)]
    assert values == [0.0, 0.25, 0.5, 0.75, 1.0]
    steps, rates = jnp.array([0.0, first, first + 4]), jnp.array([0.0, 0.0, 1.0])
    assert [float(jnp.interp(jnp.float32(first + i), steps, rates)) for i in range(5)] != values


@pytest.mark.thorough
def test_one_value_for_each_epoch(page):
    steps = [0, 99, 100, 499, 500, 10**6]
    assert [float(page["by_epoch"](step)) for step in steps] == [
        float(np.float32(rate)) for rate in (0.0, 0.0, 0.05, 0.02, 0.01, 0.01)
    ]
