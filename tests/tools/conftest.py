"""The command line, as tests of its commands run it."""

from collections.abc import Callable
from typing import Any

import pytest
from chromium import browser as browser

from jstep.tools.cli import main


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> Callable[..., Any]:
    """`cli(*arguments, code=0)` runs a command, which must exit with this code, and returns its `out` and `err`."""

    def run(*arguments: Any, code: int = 0) -> Any:
        assert main(list(map(str, arguments))) == code
        return capsys.readouterr()

    return run
