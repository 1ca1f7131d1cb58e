"""Fixtures of the tests of pages."""

import jax
import pytest
from pages import LEFT_OUT, run_page


@pytest.fixture(scope="module")
def page(request):
    """The names that the page `PAGE` of the test's file defines."""
    return run_page(request.module.PAGE)


@pytest.fixture
def standard():
    """JAX's own settings, as those in which pages run."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


@pytest.fixture(autouse=True)
def report_left_out_blocks(record_property):
    """Say of a test that passed without some blocks of its page which packages they need.

    `dev/peers.sh` runs it again, as if it had been skipped (`dev/nightly_tests.py`). A page of a
    module runs before this fixture, and is reported with the module's first test.
    """
    yield
    for package in LEFT_OUT:
        record_property("left_out", f"needs {package}")
    LEFT_OUT.clear()
