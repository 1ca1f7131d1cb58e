"""The command line, as tests of its commands run it."""

import pytest
from chromium import browser as browser

from jstep.tools.cli import main


@pytest.fixture
def cli(capsys):
    """`cli(*arguments, code=0)` runs a command, which must exit with this code, and returns its `out` and `err`."""

    def run(*arguments, code=0):
        assert main(list(map(str, arguments))) == code
        return capsys.readouterr()

    return run
