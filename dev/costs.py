"""The cost of each test: `pytest -p costs --costs=FILE` writes it, `python dev/costs.py FILE` shows
it by directory.

The cost of a test is the CPU time of its phases and of the processes that it starts and waits for.
The script also lists the tests that break the rule of dev/README.md, and exits with 1 if a quick
test is too expensive.

    PYTHONPATH=dev .venv/bin/python -m pytest -p costs -n 2 -m "" --costs=costs.json
    .venv/bin/python dev/costs.py costs.json
"""

import collections
import json
import os
import pathlib
import sys
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

QUICK = 3.0
"""CPU seconds that a quick test may take. The first test of a module may compile for all others."""
CHEAP = 0.1
"""CPU seconds below which a test need not be thorough for its cost."""


class Cost(NamedTuple):
    """CPU and wall seconds of a test, and whether it is marked as thorough."""

    cpu: float
    wall: float
    is_thorough: bool


def cpu_seconds() -> float:
    """Return the CPU time of this process, of its children, and of the programs of `forked` that
    have ended."""
    times, forked = os.times(), sys.modules.get("forked")
    return (
        time.process_time()
        + times.children_user
        + times.children_system
        + getattr(forked, "cpu_seconds", 0.0)
    )


class Recorder:
    """A plugin of pytest that records the costs of all tests, and writes them when the session
    ends."""

    def __init__(self, path: pathlib.Path) -> None:
        self.path = path
        self.costs: dict[str, Cost] = {}
        self.begin = 0.0, 0.0

    def pytest_runtest_logstart(self) -> None:
        self.begin = cpu_seconds(), time.perf_counter()

    def pytest_runtest_makereport(self, item: Any, call: Any) -> None:
        if call.when == "teardown":
            cpu, wall = cpu_seconds() - self.begin[0], time.perf_counter() - self.begin[1]
            is_thorough = item.get_closest_marker("thorough") is not None
            # pytest-xdist sends it on.
            item.user_properties.append(("cost", (cpu, wall, is_thorough)))

    def pytest_runtest_logreport(self, report: Any) -> None:
        for value in (value for name, value in report.user_properties if name == "cost"):
            self.costs[report.nodeid] = Cost(*value)

    def pytest_sessionfinish(self, session: Any) -> None:
        if not hasattr(session.config, "workerinput"):
            # Under pytest-xdist, the controller has all reports.
            self.path.write_text(json.dumps(self.costs, indent=0), encoding="utf-8")


def pytest_addoption(parser: Any) -> None:
    parser.addoption(
        "--costs", type=pathlib.Path, help="write the CPU time of each test to this file"
    )


def pytest_configure(config: Any) -> None:
    if path := config.getoption("--costs"):
        config.pluginmanager.register(Recorder(path))


def table(costs: dict[str, Cost]) -> Iterator[str]:
    """Yield the lines of a table of the costs by directory."""
    groups = collections.defaultdict(list)
    for name, cost in costs.items():
        folder = "/".join(pathlib.PurePath(name.split("::")[0]).parts[:2])
        for group in (folder.removesuffix(".py"), "~ all"):
            groups[group, cost.is_thorough].append(cost)
    titles = ("tests", "CPU s", "wall s")
    yield f"{'':32}" + "".join(
        f"{title:>10}" for title in ("quick", *titles[1:], "thorough", *titles[1:])
    )
    for group in sorted({group for group, _ in groups}):
        row = [groups[group, is_thorough] for is_thorough in (False, True)]
        cells = [(len(c), sum(one.cpu for one in c), sum(one.wall for one in c)) for c in row]
        yield f"{group.lstrip('~ '):32}" + "".join(
            f"{n:10d}{cpu:10.1f}{wall:10.1f}" for n, cpu, wall in cells
        )


def main(path: str) -> int:
    """Print the table and the tests that break the rule; return the exit code."""
    costs = {
        name: Cost(*cost)
        for name, cost in json.loads(pathlib.Path(path).read_text(encoding="utf-8")).items()
    }
    print(*table(costs), sep="\n")
    expensive = {
        name: cost.cpu for name, cost in costs.items() if not cost.is_thorough and cost.cpu > QUICK
    }
    print(f"\n{len(expensive)} quick tests take more than {QUICK} s of CPU time:")
    for name in sorted(expensive, key=expensive.__getitem__, reverse=True):
        print(f"{expensive[name]:8.2f}  {name}")
    cheap = sum(cost.is_thorough and cost.cpu < CHEAP for cost in costs.values())
    print(
        f"\n{cheap} thorough tests take less than {CHEAP} s: "
        "repetitions over more inputs, or they wait"
    )
    return bool(expensive)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
