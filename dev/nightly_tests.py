"""A plugin of pytest for dev/nightly.sh and dev/peers.sh: which tests a step runs, and a list of
those that it skipped.

    PYTHONPATH=dev .venv/bin/python -m pytest -p nightly_tests -m "" --quick-only=tests/data
    PYTHONPATH=dev .venv/bin/python -m pytest -p nightly_tests -m "" --write-skipped=FILE

`--quick-only=FOLDER` leaves out the thorough tests of a folder, and `--thorough-only=FOLDER` the
quick ones; both can be repeated. `--write-skipped=FILE` writes a line for each skipped test: the
reason, a tab and the id. A test that passed without a part of it, such as a page with a block that
needs another package, says so in a property `left_out`, and is listed, too. `--only-ids=FILE` runs
only the tests whose ids are the lines of a file, and fails if one of them does not exist.
"""

import pathlib
from typing import Any

import pytest


class SkippedTests:
    """Collects the skipped tests of a session, and writes them when it ends."""

    def __init__(self, path: pathlib.Path) -> None:
        self.path = path
        self.lines: set[str] = set()

    def add(self, nodeid: str, reason: str) -> None:
        self.lines.add(f"{' '.join(reason.split())}\t{nodeid}\n")

    def pytest_collectreport(self, report: Any) -> None:
        # A module that is skipped as a whole; its id is its file.
        if report.skipped:
            self.add(report.nodeid, _reason(report))

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.skipped and not hasattr(report, "wasxfail"):
            self.add(report.nodeid, _reason(report))
        if report.when == "teardown":
            for name, value in report.user_properties:
                if name == "left_out":
                    self.add(report.nodeid, value)

    def pytest_sessionfinish(self, session: Any, exitstatus: int) -> None:
        # Of pytest-xdist's processes, only the controller has all reports.
        is_worker = hasattr(session.config, "workerinput")
        is_complete = exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED)
        is_cut = session.shouldstop or session.shouldfail
        if not is_worker and is_complete and not is_cut:
            self.path.write_text("".join(sorted(self.lines)), encoding="utf-8")


def _reason(report: Any) -> str:
    if isinstance(report.longrepr, tuple | list):
        return str(report.longrepr[-1]).removeprefix("Skipped: ")
    return str(report.longrepr)


def pytest_addoption(parser: Any) -> None:
    parser.addoption("--quick-only", action="append", default=[], metavar="FOLDER")
    parser.addoption("--thorough-only", action="append", default=[], metavar="FOLDER")
    parser.addoption("--write-skipped", type=pathlib.Path, metavar="FILE")
    parser.addoption("--only-ids", type=pathlib.Path, metavar="FILE")


def pytest_configure(config: Any) -> None:
    if path := config.getoption("--write-skipped"):
        config.pluginmanager.register(SkippedTests(path.absolute()))


# After tests/conftest.py, which removes the marker `thorough` from some cases and is called first.
def pytest_collection_modifyitems(config: Any, items: list[Any]) -> None:
    root = config.rootpath
    quick_only = [root / folder for folder in config.getoption("--quick-only")]
    thorough_only = [root / folder for folder in config.getoption("--thorough-only")]
    ids = config.getoption("--only-ids")
    listed = None if ids is None else set(ids.read_text(encoding="utf-8").splitlines())

    def is_selected(item: Any) -> bool:
        is_thorough = item.get_closest_marker("thorough") is not None
        left_out_folders = quick_only if is_thorough else thorough_only
        if any(item.path.is_relative_to(folder) for folder in left_out_folders):
            return False
        return listed is None or item.nodeid in listed or _file(item) in listed

    if listed is not None:
        found = {item.nodeid for item in items} | {_file(item) for item in items}
        if missing := sorted(listed - found):
            # Not a UsageError, whose text a worker of xdist would not show.
            raise ValueError(
                f"{ids}: no such tests here, or their modules are skipped: {', '.join(missing)}"
            )
    selected = []
    others = []
    for item in items:
        if is_selected(item):
            selected.append(item)
        else:
            others.append(item)
    config.hook.pytest_deselected(items=others)
    items[:] = selected


def _file(item: Any) -> str:
    return item.nodeid.partition("::")[0]
