"""Implementation of `find_nonfinite`."""
