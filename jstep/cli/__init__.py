"""The command line interface, `python -m jstep`."""
