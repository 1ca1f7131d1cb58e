"""Execution order of a step on CPUs, so that XLA overwrites slots without copying them.

XLA's CPU backend computes each array in a separate kernel. On TPUs and GPUs one kernel computes all arrays of a leaf,
and reads each operand once; an enforced order would split it and read operands twice.
"""

from typing import Any

import jax

from jstep.core.types import Array


def compute_first(*arrays: Any) -> tuple[Any, ...]:
    """Materialize arrays (or trees) on a CPU before their uses, so that they are not recomputed."""
    if not _is_traced(arrays):
        return arrays
    same: tuple[Any, ...] = jax.lax.platform_dependent(
        *arrays, cpu=lambda *arrays: jax.lax.optimization_barrier(arrays), default=lambda *arrays: arrays
    )
    return same


def in_order(first: Array, *later: Array) -> list[Array]:
    """Return the later arrays, on a CPU each computed by a kernel that XLA must run after that of the one before it.

    If two kernels read a slot that one of them overwrites, XLA copies the slot unless the other must run earlier, which
    only a data dependency ensures. The condition is never true; LLVM detects this and XLA does not, so the dependency
    adds no memory traffic. The barrier keeps XLA from computing `first` again in the kernel that is to wait for it.
    """

    def ordered(first: Array, *later: Array) -> list[Array]:
        found = []
        for x in later:
            first = jax.lax.optimization_barrier(first)
            first = jax.lax.select((first > 0) & (first < 0), first.astype(x.dtype), x)
            found.append(first)
        return found

    if not later or not _is_traced((first, later)):
        return list(later)
    same: list[Array] = jax.lax.platform_dependent(first, *later, cpu=ordered, default=lambda first, *later: [*later])
    return same


def _is_traced(tree: Any) -> bool:
    """Whether a program is being traced: outside of one the order is fixed, and `platform_dependent` would compile."""
    return any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(tree))
