"""examples/sweep.py, shortened."""

import re

import pytest
from programs import run


@pytest.mark.thorough
def test_the_best_of_sixteen_rates_is_trained_further():
    out = run("sweep.py", "--steps", 100, "--more", 200)
    losses = {float(rate): float(loss) for rate, loss in re.findall(r"^  (\S+) +(\d\.\d{4})$", out, re.MULTILINE)}
    assert len(losses) == 16
    best = float(re.search(r"best: (\S+); continuing from step 100", out)[1])
    assert best == min(losses, key=losses.get)
    assert 1e-3 < best < 0.5
    after = float(re.search(r"after 300 steps: validation loss ([\d.]+)", out)[1])
    assert after < 0.8 * losses[best]
