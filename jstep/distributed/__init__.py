"""How do the processes of a run begin? Their later communication is in `jstep.core.processes`.

- `launcher`: initialization, from arguments and the variables of launchers.
"""

from jstep.core.public_names import set_public_module as _set_public_module
from jstep.distributed.launcher import initialize

__all__ = ["initialize"]

_set_public_module(globals())
