"""Random programs with random faults, each compared with an undisturbed run: a small part of
`dev/random_runs.py`."""

import pytest
from source_files import ROOT, import_file

random_runs = import_file(ROOT / "dev" / "random_runs.py")


def needs_process(seed):
    """Whether a fault kills the process, or replaces a function of it."""
    faults = random_runs.draw(seed, 1)[1]
    return any(fault.kind == "SIGKILL" or fault.place == "fsync" for fault in faults)


SEEDS = [seed for seed in range(100, 160) if not needs_process(seed)]


@pytest.mark.thorough(except_for=[str(seed) for seed in SEEDS[:3]])
@pytest.mark.parametrize("seed", SEEDS)
def test_a_restart_after_each_fault_ends_as_an_undisturbed_run(seed):
    """A full disk and SIGKILL, which need a process of their own, are left to the command."""
    problems, _ = random_runs.problems_of(seed, 1, None)
    assert problems == []
