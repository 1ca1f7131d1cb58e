"""examples/time_travel.py, shortened, finds the bugs that it plants."""

import pytest
from programs import ROOT, run


@pytest.mark.thorough
def test_time_travel_finds_the_line_and_the_step(tmp_path):
    pytest.importorskip("sklearn")
    out = run("time_travel.py", "--directory", tmp_path)
    source = (ROOT / "examples" / "time_travel.py").read_text().splitlines()
    line = 1 + next(i for i, text in enumerate(source) if "images / length" in text)
    assert "the loss is nan at step 138 (the update 137 → 138)" in out
    assert f"the first non-finite number is produced by div at time_travel.py:{line} (scale)" in out
    assert "blank images in its rows [5]" in out
    assert "find_nonfinite of that step with that batch: None" in out
    assert "the runs diverge at step 64" in out
    assert "the runs diverge at step 80" in out
    assert "The update 60 → 61 is the first that differs" in out
