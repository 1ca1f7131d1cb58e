"""A plugin of pytest: tests that need more devices than there are count as skipped."""

import re
from collections.abc import Iterator
from typing import Any

import jax
import pytest

NEEDS_DEVICES = re.compile(
    r"Number of devices \d+ must be|cannot reshape array of size \d+ into shape"
)


def needs_more(excinfo: Any) -> bool:
    """Return whether a mesh could not be made, or one of `jax.devices()` is not there."""
    is_index = isinstance(excinfo.value, IndexError)
    if is_index:
        is_index = "devices()" in str(excinfo.traceback[-1].statement)
    return is_index or NEEDS_DEVICES.search(str(excinfo.value)) is not None


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: Any) -> Iterator[None]:
    report: Any = yield
    if jax.device_count() < 8 and report.failed and call.excinfo and needs_more(call.excinfo):
        report.outcome = "skipped"
        report.longrepr = (
            str(item.path),
            item.location[1] or 0,
            f"needs more than {jax.device_count()} devices",
        )
    return report
