"""Paths of the tests of benchmarks: the helpers of the tests."""

import pathlib
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "docs")]
# Doctests of modules of the same name are not collected together.
collect_ignore_glob = ["*conftest.py"]
