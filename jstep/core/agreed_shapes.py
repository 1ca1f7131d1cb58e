"""A check that the batches of all processes are alike, before they wait for each other."""

from collections.abc import Hashable
from typing import Any

import jax
import numpy as np

from jstep.core import processes, trees
from jstep.core.checks import array_type
from jstep.core.threads import AGREEING_ON_SHAPES, doing


class AgreedShapes:
    """The batch shapes that all processes agreed on: others would make them wait forever."""

    def __init__(self) -> None:
        self._known: set[Any] = set()

    def check(self, state: trees.Tree, args: tuple[Any, ...], shapes: Hashable = None) -> None:
        """Compare new shapes of a batch with the other processes, if its arrays span them.

        All processes must call it before each call of a step.

        Args:
            state: The state of the step.
            args: The other arguments of the step.
            shapes: What differs if the shapes of `args` do; None if it is not known yet.
        """
        if shapes is None:
            leaves, treedef = trees.flatten(args)
            types = [
                (leaf.shape, leaf.dtype) if hasattr(leaf, "dtype") else type(leaf)
                for leaf in leaves
            ]
            shapes = (treedef, *types)
        if shapes in self._known:
            return
        step = getattr(state, "global_step", None)
        if not any(map(_spans_processes, (*jax.tree.leaves(args), step))):
            return  # not recorded either: one process may run steps by itself
        with doing(AGREEING_ON_SHAPES):
            batches = processes.gather_texts(_described(args))
        for process, batch in enumerate(batches):
            if batch != batches[0]:
                raise ValueError(
                    f"batch: must be alike on all processes, got {batches[0]} on process 0, "
                    f"{batch} on {process}"
                )
        self._known.add(shapes)


def _spans_processes(leaf: object) -> bool:
    if not isinstance(leaf, jax.Array) or trees.is_traced(leaf):
        return False
    return not leaf.is_fully_addressable


def _described(args: tuple[Any, ...]) -> str:
    """Name the type of each array over all processes, and its path."""
    texts: list[str] = []
    for path, leaf in trees.leaves_with_paths(trees.args_to_batch(args)):
        kind = array_type(np.shape(leaf), np.dtype(jax.dtypes.result_type(leaf)).name)
        texts.append(f"{kind} at {path!r}" if path else kind)
    return ", ".join(texts)
