"""What compiled programs need on CPUs: scans that unroll if the loop would be slow, and an order of execution.

XLA's CPU backend computes each array in a separate kernel, and overwrites slots without copying them if it must run the
kernels in the right order. On TPUs and GPUs one kernel computes all arrays of a leaf, and reads each operand once; an
enforced order would split it and read operands twice.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jstep.core import trees
from jstep.core.checks import as_int, kind, shown
from jstep.core.jaxprs import is_slow_in_loops
from jstep.core.meshes import dims_of
from jstep.core.trees import Array

Unroll = int | bool | None


def as_unroll(value: Any) -> Unroll:
    """Validate `unroll`, the number of scan iterations per loop iteration, as in `jax.lax.scan`; None is automatic.

    Raises:
        TypeError: The value is not an integer, a bool or None.
        ValueError: The value is below 1.
    """
    if value is None or isinstance(value, bool | np.bool_):
        return None if value is None else bool(value)
    try:
        return as_int(value, "unroll", 1, "a number of iterations")
    except TypeError:
        raise TypeError(f"unroll={shown(value)}: must be an integer, a bool or None, got {kind(value)}") from None


def scan(
    body: Callable[[Any, Any], tuple[Any, Any]], carry: Any, xs: Any, length: int, unroll: Unroll = None
) -> tuple[Any, Any]:
    """`jax.lax.scan` with automatic unrolling for unroll=None.

    Args:
        body: `body(carry, x) -> (carry, y)`; traced once.
        carry: The loop carry.
        xs: The inputs of the iterations, stacked on a leading axis.
        length: The number of iterations.
        unroll: As in `jax.lax.scan`. None: fully unrolled if the body has operations that are slow in a loop, else 1.
    """
    if unroll is None and jax.default_backend() == "cpu" and length > 1:
        first = jax.tree.map(first_row, xs)
        traced, shapes = jax.make_jaxpr(body, return_shape=True)(carry, first)
        out = jax.tree.structure(shapes)

        def body(carry: Any, x: Any) -> Any:  # reuse the trace
            values = jax.core.eval_jaxpr(traced.jaxpr, traced.consts, *jax.tree.leaves((carry, x)))
            return jax.tree.unflatten(out, values)

        unroll = is_slow_in_loops(traced.jaxpr) or 1
    return jax.lax.scan(body, carry, xs, length=length, unroll=1 if unroll is None else unroll)


def first_row(x: Any) -> jax.ShapeDtypeStruct:
    """Return the shape of an element, with the sharding of the stacked array."""
    if not isinstance(x, jax.Array):
        return jax.ShapeDtypeStruct(np.shape(x)[1:], jnp.result_type(x))
    whole: Any = jax.typeof(x).sharding
    sharding = None if whole.mesh.empty else NamedSharding(whole.mesh, PartitionSpec(*dims_of(whole.spec)[1:]))
    return jax.ShapeDtypeStruct(x.shape[1:], x.dtype, sharding=sharding)


def compute_first(*arrays: Any) -> tuple[Any, ...]:
    """Materialize arrays (or trees) on a CPU before their uses, so that they are not recomputed."""
    if not trees.has_tracers(arrays):  # outside of a program the order is fixed, and platform_dependent would compile
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

    An order that nothing needs is not free: a kernel that other kernels wait for becomes two, and with 1000 leaves the
    two slots of Adam take half as long to compile again.
    """

    def ordered(first: Array, *later: Array) -> list[Array]:
        found = []
        for x in later:
            first = jax.lax.optimization_barrier(first)
            first = jax.lax.select((first > 0) & (first < 0), first.astype(x.dtype), x)
            found.append(first)
        return found

    if not later or not trees.has_tracers((first, later)):  # as in `compute_first`
        return list(later)
    return list(jax.lax.platform_dependent(first, *later, cpu=ordered, default=lambda first, *later: [*later]))
