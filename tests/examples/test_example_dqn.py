"""examples/dqn.py: its carts and its buffer against their definitions, the return it reaches, and killed runs."""

import re

import numpy as np
import pytest
from killed import kill_after, newest_step
from programs import ROOT, fingerprint, run, start
from source_files import import_file


@pytest.fixture
def dqn():
    return import_file(ROOT / "examples" / "dqn.py")


def test_a_push_is_that_of_gym(dqn):
    """The first observations of Gymnasium's CartPole-v1 after reset(seed=42), as its documentation prints them."""
    carts = dqn.CartPoles(1, seed=0)
    carts.seen = np.float32([[0.0273956, -0.00611216, 0.03585979, 0.0197368]])
    after, fell = carts.push(np.array([1]))
    np.testing.assert_allclose(after, np.float32([[0.02727336, 0.18847767, 0.03625453, -0.26141977]]), atol=2e-8)
    assert not fell.any()


def test_an_episode_ends_when_the_pole_falls_or_after_500_pushes(dqn):
    carts = dqn.CartPoles(4, seed=0)
    carts.seen[:] = [[0.0, 0.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0], [0.0, 0.0, 0.3, 0.0], [2.5, 0.0, 0.0, 0.0]]
    carts.pushes[:] = [3, 499, 20, 30]
    after, fell = carts.push(np.ones(4, int))
    assert fell.tolist() == [False, False, True, True]
    assert carts.pushes.tolist() == [4, 0, 0, 0]
    assert carts.last_return.tolist() == [0, 500, 21, 31]
    np.testing.assert_array_equal(carts.seen[0], after[0])
    assert np.abs(carts.seen[1:]).max() <= 0.05


def test_a_full_buffer_has_the_newest_rows(dqn):
    buffer = dqn.Buffer(6, at=np.int32(0), seen=np.zeros(2, np.float32))
    for first in (0, 4, 8):
        at = np.arange(first, first + 4)
        buffer.add(at=at, seen=np.stack([at, -at], axis=1))
    assert sorted(buffer.rows["at"]) == [6, 7, 8, 9, 10, 11]
    rows = buffer.sample(np.random.default_rng(0), 50)
    assert set(rows["at"]) == set(range(6, 12))
    np.testing.assert_array_equal(rows["seen"], np.stack([rows["at"], -rows["at"]], axis=1))
    assert (rows["at"].dtype, rows["seen"].dtype) == (np.int32, np.float32)


@pytest.mark.thorough
@pytest.mark.parametrize("script", ["dqn.py", "dqn_on_device.py"])
def test_it_reaches_the_known_return(script):
    assert float(re.search(r"mean return .*: ([\d.]+) of 500", run(script))[1]) >= 150


@pytest.mark.thorough
def test_a_run_killed_anywhere_ends_with_the_same_bits(tmp_path):
    expected = fingerprint(run("dqn.py"))
    directory = tmp_path / "killed"
    for step in (1, 2000):
        kill_after(start("dqn.py", "--dir", directory), directory, step)
    assert newest_step(directory) < 8000
    assert fingerprint(run("dqn.py", "--dir", directory)) == expected
