"""Implementation of `find_nonfinite`."""

__all__: list[str] = []
