"""examples/recipes.py, shortened."""

import re

import pytest
from programs import run


@pytest.mark.thorough
def test_recipes_are_compared(tmp_path):
    picture = tmp_path / "curves.png"
    out = run("recipes.py", "--steps", 10, "--only", "muon", "free", "bfloat16", "NorMuonH", "--plot", picture)
    cells = re.findall(r"^(\S.{17}) +([\d.]+) +([\d.]+) MB +([\d.]+) MB", out, re.MULTILINE)
    rows = {name.strip(): numbers for name, *numbers in cells}
    assert rows.keys() == {"Muon + AdamW", "NorMuonH", "schedule-free", "AdamW, bfloat16"}
    for loss, params, slots in rows.values():
        assert 2.0 < float(loss) < 4.8  # a uniform guess is ln 128
        assert float(slots) > float(params)
    assert picture.stat().st_size > 1000
