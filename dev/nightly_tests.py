"""A plugin of pytest for dev/nightly.sh: which tests of a folder a step runs.

    PYTHONPATH=dev .venv/bin/python -m pytest -p nightly_tests -m "" --quick-only=tests/data

`--quick-only=FOLDER` leaves out the thorough tests of a folder, and `--thorough-only=FOLDER` the
quick ones; both can be repeated.
"""

from typing import Any


def pytest_addoption(parser: Any) -> None:
    parser.addoption("--quick-only", action="append", default=[], metavar="FOLDER")
    parser.addoption("--thorough-only", action="append", default=[], metavar="FOLDER")


# After tests/conftest.py, which removes the marker `thorough` from some cases and is called first.
def pytest_collection_modifyitems(config: Any, items: list[Any]) -> None:
    root = config.rootpath
    quick_only = [root / folder for folder in config.getoption("--quick-only")]
    thorough_only = [root / folder for folder in config.getoption("--thorough-only")]

    def is_selected(item: Any) -> bool:
        is_thorough = item.get_closest_marker("thorough") is not None
        left_out_folders = quick_only if is_thorough else thorough_only
        return not any(item.path.is_relative_to(folder) for folder in left_out_folders)

    selected = []
    others = []
    for item in items:
        if is_selected(item):
            selected.append(item)
        else:
            others.append(item)
    config.hook.pytest_deselected(items=others)
    items[:] = selected
