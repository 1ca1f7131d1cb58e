"""Fixtures of the tests of pages."""

import jax
import pytest
from pages import run_page


@pytest.fixture(scope="module")
def page(request):
    """The names that the page `PAGE` of the test's file defines."""
    return run_page(request.module.PAGE)


@pytest.fixture
def standard():
    """JAX's own settings, as those in which pages run."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield
