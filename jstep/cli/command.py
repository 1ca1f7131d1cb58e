"""The interface of a command of `python -m jstep`, and the exit codes."""

import argparse
from collections.abc import Callable
from typing import NamedTuple

OK = 0
DIFFERENT = 1
"""`diff` found a difference."""
TROUBLE = 2
"""A missing path, corrupted data, nothing in common, or wrong usage."""


class Command(NamedTuple):
    """A command.

    Attributes:
        add_arguments: Adds its arguments to its parser.
        run: Runs the command and returns the exit code. An error is reported on stderr, with exit code `TROUBLE`.
    """

    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]
