"""Entry point of the command line: `python -m jstep runs DIR`, `python -m jstep report RUN`."""

from jstep.look.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
