"""What a command of `python -m jstep` is."""

import argparse
from collections.abc import Callable
from typing import NamedTuple

OK = 0
DIFFERENT = 1
"""`diff` found a difference."""
TROUBLE = 2
"""A missing path, damage, nothing in common, wrong usage."""


class Command(NamedTuple):
    """A command.

    Attributes:
        add_arguments: Adds its arguments to its parser.
        run: Does it, and returns the exit code. An error that it raises is told on stderr, and the code is `TROUBLE`.
    """

    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]
