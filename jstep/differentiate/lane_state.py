"""Merging the leaves of model_state that the lanes of a batch return.

Floating leaves become the mean over the lanes. Integers, such as step numbers, and keys must be equal in all lanes.
"""

import contextlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jstep.core import trees
from jstep.core.jaxprs import part_for, program_hash
from jstep.core.trees import Array
from jstep.differentiate import microbatches
from jstep.differentiate.lanes import Lanes, trace_lane, trace_on_lanes

NewState = Callable[[Array, list[Array], list[Array], list[Array]], list[Array]]
"""`new_state(i, old, others, rows)`: the leaves of model_state after lane i."""


def check_integers(
    lanes: Lanes, new_state: NewState, old: object, others: list[Array], batch: list[Array], size: int
) -> None:
    leaves = [jnp.asarray(leaf) for leaf in jax.tree.leaves(old)]
    integers = [i for i, leaf in enumerate(leaves) if not (microbatches.is_inexact(leaf) or trees.is_key(leaf))]
    if not integers:
        return
    whole = np.int32(0), leaves, others
    rows = [jax.ShapeDtypeStruct((size, *x.shape[1:]), x.dtype) for x in batch]
    of_whole = of_lane = trace_lane(lanes, new_state, rows, (*whole, batch))[0]
    with contextlib.suppress(Exception):  # the loss may only work for the rows of a lane
        of_whole = trace_on_lanes(lanes, new_state, *whole, batch)[0]
    for i in integers:
        results = [n == i for n in range(len(leaves))]
        program, (is_numbered, *used) = part_for(of_lane, results, keeps_arguments=False)
        is_of_rows = any(used[len(leaves) + len(others) :])
        whole_program, _ = part_for(of_whole, results, keeps_arguments=False)
        # A number of rows is a constant of the program.
        path = trees.quote_path(trees.leaf_paths(old)[i])
        if is_numbered or is_of_rows or program_hash(program) != program_hash(whole_program):
            raise TypeError(
                f"lanes={lanes.number}: the leaf {path} of model_state must not depend on the rows or key of a lane, "
                f"because it is {leaves[i].dtype}; return it in aux"
            )


def state_summand(i: Array, new: Any) -> Array:
    new = trees.key_data(jnp.asarray(new))
    return trees.widen(new) if microbatches.is_inexact(new) else jnp.where(i == 0, new, jnp.zeros_like(new))


def merge_leaf(number: int, total: Array, old: Any) -> Array:
    if trees.is_key(old):
        return jax.random.wrap_key_data(total, impl=jax.random.key_impl(old))
    old = jnp.asarray(old)
    return (total / number if microbatches.is_inexact(old) else total).astype(old.dtype)
