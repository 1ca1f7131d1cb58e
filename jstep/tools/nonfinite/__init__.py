"""The parts of `find_nonfinite`: the operations of a program, which of them was first, and what went into it."""

__all__: list[str] = []
