"""Scans that unroll where a loop would be slow."""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jstep.core.checks import as_int, kind, shown

Unroll = int | bool | None

SLOW_IN_LOOPS = frozenset({"conv_general_dilated"})
"""What XLA's CPU backend runs by a slow path inside a loop: convolutions, 10 to 30 times slower."""


def as_unroll(value: Any) -> Unroll:
    """How many iterations of a scan make one of the compiled loop, as in `jax.lax.scan`; None chooses.

    Raises:
        TypeError: It is no integer, no bool and not None.
        ValueError: It is below 1.
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
    """`jax.lax.scan`, whose unroll=None chooses.

    Args:
        body: `body(carry, x) -> (carry, y)`; traced once.
        carry: What passes from one iteration to the next.
        xs: What is gone through, stacked on a leading axis.
        length: The number of iterations.
        unroll: As in `jax.lax.scan`. None: 1, but whole where something in the body is slow inside a loop.
    """
    if unroll is None and jax.default_backend() == "cpu" and length > 1:
        first = jax.tree.map(_first_of, xs)
        traced, shapes = jax.make_jaxpr(body, return_shape=True)(carry, first)
        out = jax.tree.structure(shapes)

        def body(carry: Any, x: Any) -> Any:  # what was traced, not traced again
            values = jax.core.eval_jaxpr(traced.jaxpr, traced.consts, *jax.tree.leaves((carry, x)))
            return jax.tree.unflatten(out, values)

        unroll = not SLOW_IN_LOOPS.isdisjoint(_primitives(traced.jaxpr)) or 1
    return jax.lax.scan(body, carry, xs, length=length, unroll=1 if unroll is None else unroll)


def _first_of(x: Any) -> jax.ShapeDtypeStruct:
    """The shape of an element, sharded as the whole is."""
    if not isinstance(x, jax.Array):
        return jax.ShapeDtypeStruct(np.shape(x)[1:], jax.dtypes.canonicalize_dtype(jax.numpy.result_type(x)))
    whole: Any = jax.typeof(x).sharding
    sharding = None if whole.mesh.empty else NamedSharding(whole.mesh, PartitionSpec(*whole.spec.partitions[1:]))
    return jax.ShapeDtypeStruct(x.shape[1:], x.dtype, sharding=sharding)


def _primitives(jaxpr: Any) -> Iterator[str]:
    """The names of all operations of a program, those of inner programs too."""
    for equation in jaxpr.eqns:
        yield equation.primitive.name
        for inner in jax.tree.leaves(list(equation.params.values()), is_leaf=_is_program):
            if _is_program(inner):
                yield from _primitives(getattr(inner, "jaxpr", inner))


def _is_program(x: Any) -> bool:
    return hasattr(x, "eqns") or hasattr(getattr(x, "jaxpr", None), "eqns")
