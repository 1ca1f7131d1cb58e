"""Entry point of the command line: `python -m jstep runs DIR`, `python -m jstep report RUN`."""

import os
import sys

# `python -m` puts the current directory before all other directories of modules, so that a numpy.py
# beside the runs of somebody else would be run. The script `jstep` has no such entry, and neither
# has `python -P -m jstep`.
if not sys.flags.safe_path and sys.path[0] in ("", os.getcwd()):
    del sys.path[0]

from jstep.look.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
