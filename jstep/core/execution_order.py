"""What a step must compute before it overwrites slots: for CPUs, where XLA would copy them otherwise.

XLA's CPU backend makes each array in a kernel of its own. TPUs and GPUs make all arrays of a leaf in one kernel, which
reads each of its operands once; kept apart, they would read them twice.
"""

from typing import Any

import jax
import jax.numpy as jnp

from jstep.core.types import Array


def compute_first(*arrays: Any) -> tuple[Any, ...]:
    """Arrays (or trees) that a CPU makes before it makes anything of them, and does not make a second time."""
    if not _is_traced(arrays):
        return arrays
    same: tuple[Any, ...] = jax.lax.platform_dependent(
        *arrays, cpu=lambda *arrays: jax.lax.optimization_barrier(arrays), default=lambda *arrays: arrays
    )
    return same


def ordered_after(x: Array, first: Array) -> Array:
    """X itself, on a CPU from a kernel that XLA has to run after the one that makes `first`.

    Where two kernels read a slot that one of them overwrites, XLA copies the slot unless the other is known to
    run earlier; only data says so. The condition is never true, which LLVM sees and XLA does not: nothing more
    is read from memory.
    """
    if not _is_traced((x, first)):
        return x
    same: Array = jax.lax.platform_dependent(
        x,
        first,
        cpu=lambda x, first: jnp.where((first > 0) & (first < 0), first.astype(x.dtype), x),
        default=lambda x, first: x,
    )
    return same


def after_parameter(p: Array, u: Array, dtype: Any, *reads: Array) -> tuple[Array, ...]:
    """The new parameter, and what may be read once it is there: for slots that it needs as they were.

    The sum is the one that `apply_updates` makes, which XLA sees and makes once.

    Args:
        p: The parameter, as the rule has it.
        u: Its update.
        dtype: The dtype that the parameter is kept in.
        *reads: Arrays that are read again after it.
    """
    return compute_first((p + u).astype(dtype), *reads)


def _is_traced(tree: Any) -> bool:
    """Whether there is an order to choose: outside of a program there is none, and the choice would be compiled."""
    return any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(tree))
