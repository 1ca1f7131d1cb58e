"""The number of examples of a batch."""

from typing import Any

import numpy as np

from jstep.core import trees


def num_examples(args: Any) -> int | str:
    """Return the size of the leading axis of all arrays among the arguments, or a string that explains its absence."""
    sizes: dict[int, str] = {}
    for path, leaf in trees.leaves_with_paths(args):
        if np.ndim(leaf):
            sizes.setdefault(np.shape(leaf)[0], path)
    if not sizes:
        return "no argument has a leading axis of examples; return a pair (sum, count)"
    if len(sizes) > 1:
        each = ", ".join(f"{size} at {trees.quoted(path)}" for size, path in sizes.items())
        return (
            f"the arguments have leading axes of different sizes ({each}); close over arrays without an axis of "
            "examples, or return a pair (sum, count)"
        )
    return next(iter(sizes))
