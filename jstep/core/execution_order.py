"""Execution order of a step on CPUs, so that XLA overwrites slots without copying them.

XLA's CPU backend computes each array in a separate kernel. On TPUs and GPUs one kernel computes all arrays of a leaf,
and reads each operand once; an enforced order would split it and read operands twice.
"""

from typing import Any

import jax
import jax.numpy as jnp

from jstep.core.types import Array


def compute_first(*arrays: Any) -> tuple[Any, ...]:
    """Materialize arrays (or trees) on a CPU before their uses, so that they are not recomputed."""
    if not _is_traced(arrays):
        return arrays
    same: tuple[Any, ...] = jax.lax.platform_dependent(
        *arrays, cpu=lambda *arrays: jax.lax.optimization_barrier(arrays), default=lambda *arrays: arrays
    )
    return same


def ordered_after(x: Array, first: Array) -> Array:
    """Return x, on a CPU computed by a kernel that XLA must run after the kernel of `first`.

    If two kernels read a slot that one of them overwrites, XLA copies the slot unless the other must run earlier, which
    only a data dependency ensures. The condition is never true; LLVM detects this and XLA does not, so the dependency
    adds no memory traffic.
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
    """Order arrays after the computation of the new parameter, which needs the old values of slots.

    The sum p + u is the same as in `apply_updates`; XLA computes it once.

    Args:
        p: The parameter, in the rule's dtype.
        u: Its update.
        dtype: The dtype in which the parameter is stored.
        *reads: Arrays that are read again after it.
    """
    return compute_first((p + u).astype(dtype), *reads)


def _is_traced(tree: Any) -> bool:
    """Whether a program is being traced: outside of one the order is fixed, and `platform_dependent` would compile."""
    return any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(tree))
