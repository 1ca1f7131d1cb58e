"""Entry point of the command line: `python -m jstep plot LOGDIR -o loss.png`, `python -m jstep events FILE`."""

from jstep.tools.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
