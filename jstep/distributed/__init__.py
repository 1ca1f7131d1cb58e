"""How do the processes of a run begin? Their agreement on values is `jstep.core.processes`."""

from jstep.core.processes import initialize
from jstep.core.public_names import set_public_module as _set_public_module

__all__ = ["initialize"]

_set_public_module(globals())
