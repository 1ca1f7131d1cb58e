"""Multi-process training: initialization, and agreement between processes."""

from jstep.core.public_names import set_public_module as _set_public_module
from jstep.distributed.processes import initialize

__all__ = ["initialize"]

_set_public_module(globals())
