"""Scans that unroll if the compiled loop would be slow."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jstep.core.checks import as_int, kind, shown
from jstep.core.meshes import dims_of
from jstep.core.programs import all_equations

Unroll = int | bool | None

SLOW_IN_LOOPS = frozenset({"conv_general_dilated"})
"""Operations with a slow path inside loops in XLA's CPU backend: convolutions, 10 to 30 times slower."""


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


def is_slow_in_loops(jaxpr: Any) -> bool:
    """Whether XLA runs a program much slower in a loop than by itself, on the default backend."""
    is_cpu = jax.default_backend() == "cpu"
    return is_cpu and any(eqn.primitive.name in SLOW_IN_LOOPS for *_, eqn in all_equations(jaxpr))


def first_row(x: Any) -> jax.ShapeDtypeStruct:
    """Return the shape of an element, with the sharding of the stacked array."""
    if not isinstance(x, jax.Array):
        return jax.ShapeDtypeStruct(np.shape(x)[1:], jax.dtypes.canonicalize_dtype(jax.numpy.result_type(x)))
    whole: Any = jax.typeof(x).sharding
    sharding = None if whole.mesh.empty else NamedSharding(whole.mesh, PartitionSpec(*dims_of(whole.spec)[1:]))
    return jax.ShapeDtypeStruct(x.shape[1:], x.dtype, sharding=sharding)
