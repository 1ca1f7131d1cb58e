"""Each row of a measured table on the pages "From …": jstep computes what the original's code computes."""

import importlib.util

import measured_rows
import numpy as np
import pytest

ROWS = measured_rows.rows()
QUICK = {"RMSprop", "Adagrad", "NAdam", "MultiStepLR", "AveragedModel", "ModelEmaV3", "get_lr"}
"""The rows that were wrong; the others are thorough tests."""


def id_of(row):
    return f"{row.page}: {row.theirs.encode('ascii', 'replace').decode()}"


def test_every_page_with_optimizers_is_measured():
    pages = {row.page for row in ROWS}
    assert pages >= {"pytorch", "keras", "optax", "hf-trainer", "tf-train"}
    assert set(measured_rows.stored()) == {row.theirs for row in ROWS}, "run python tests/docs/measured_rows.py"


@pytest.mark.thorough(except_for=[id_of(row) for row in ROWS if any(name in row.theirs for name in QUICK)])
@pytest.mark.parametrize("row", ROWS, ids=id_of)
def test_rows(row):
    theirs = measured_rows.stored()[row.theirs]
    found = measured_rows.difference(measured_rows.in_jstep(row, theirs.shape), theirs)
    if not row.off_by:
        assert found <= measured_rows.BOUND, f"{row.ours}: off by {found:.1e}"
    else:  # the page tells the truth: neither more nor much less
        assert row.off_by / 2 < found <= 1.05 * row.off_by, f"{row.ours}: off by {found:.2%}"


@pytest.mark.thorough
@pytest.mark.parametrize("row", ROWS, ids=id_of)
def test_the_originals_compute_the_stored_numbers(row, monkeypatch):
    monkeypatch.setenv("KERAS_BACKEND", "jax")
    for modules in measured_rows.modules_of(row.theirs).values():
        for module in modules:
            if importlib.util.find_spec(module.partition(".")[0]) is None:
                pytest.skip(f"{module} is not installed")
    theirs, stored = measured_rows.computed(row.theirs), measured_rows.stored()[row.theirs]
    assert measured_rows.difference(theirs, stored) <= measured_rows.BOUND / 10


def test_a_wrong_row_is_found():
    (row,) = [row for row in ROWS if row.theirs == "torch.optim.RMSprop(p, lr)"]
    theirs = measured_rows.stored()[row.theirs]
    wrong = measured_rows.in_jstep(row._replace(ours="rmsprop(lr, 0.99, epsilon=1e-8)"), theirs.shape)
    assert measured_rows.difference(wrong, theirs) > 0.1
    np.testing.assert_array_less(0.0, np.abs(theirs).max())
