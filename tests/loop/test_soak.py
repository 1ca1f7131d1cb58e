"""A run with all features does not leak memory: a short version of dev/soak.py, which runs nightly."""

import importlib.util
import pathlib

import pytest

import jstep


@pytest.mark.thorough
def test_memory_does_not_grow(tmp_path):
    spec = importlib.util.spec_from_file_location("soak", pathlib.Path(__file__).parents[2] / "dev" / "soak.py")
    soak = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(soak)
    state, found = soak.soak(1000, str(tmp_path))
    assert jstep.global_step(state) == 1000
    assert len(found) == soak.PARTS
    grown = soak.growth(found)
    grown.pop("objects", None)  # caches of the first compilations of a test process
    assert grown == {}
