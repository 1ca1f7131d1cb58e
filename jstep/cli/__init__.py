"""The command line interface, `python -m jstep`."""

from jstep.cli.main import main
from jstep.core.public import set_public_module as _set_public_module

__all__ = [
    "main",
]

_set_public_module(globals())
