"""Each row of a measured table on the pages "From …": jstep computes what the original's code
computes."""

import importlib.util
import re

import measured_rows
import numpy as np
import pytest

ROWS = measured_rows.rows()
DAY = re.compile(r"[Mm]easured on \d{1,2} [A-Z][a-z]+ 20\d\d with [A-Za-z]+ \d")
QUICK = "optax.adam(lr)"
"""A row whose library the quick tests have; the others are thorough tests."""


def id_of(row):
    return f"{row.page}: {row.theirs.encode('ascii', 'replace').decode()}"


def skip_without(row):
    for modules in measured_rows.modules_of(row.theirs).values():
        for module in modules:
            if importlib.util.find_spec(module.partition(".")[0]) is None:
                pytest.skip(f"{module} is not installed")


def test_each_page_with_measured_rows_names_the_day_and_the_versions():
    pages = {row.page for row in ROWS}
    assert pages >= {"pytorch", "keras", "optax", "hf-trainer", "tf-train"}
    for page in pages - {"nanogpt"}:  # its function is in the test
        text = (measured_rows.PAGES / f"{page}.md").read_text("utf-8")
        assert DAY.search(text), page


@pytest.mark.thorough(except_for=[id_of(row) for row in ROWS if row.theirs == QUICK])
@pytest.mark.parametrize("row", ROWS, ids=id_of)
def test_rows(row, monkeypatch):
    monkeypatch.setenv("KERAS_BACKEND", "jax")
    skip_without(row)
    theirs = measured_rows.computed(row.theirs)
    found = measured_rows.difference(measured_rows.in_jstep(row, theirs.shape), theirs)
    if not row.off_by:
        assert found <= measured_rows.BOUND, f"{row.ours}: off by {found:.1e}"
    else:  # the page tells the truth: neither more nor much less
        assert row.off_by / 2 < found <= 1.05 * row.off_by, f"{row.ours}: off by {found:.2%}"


def test_a_wrong_row_is_found():
    (row,) = [row for row in ROWS if row.theirs == QUICK]
    theirs = measured_rows.computed(row.theirs)
    wrong = measured_rows.in_jstep(row._replace(ours="adam(lr, epsilon=1e-4)"), theirs.shape)
    assert measured_rows.difference(wrong, theirs) > 0.01
    np.testing.assert_array_less(0.0, np.abs(theirs).max())
