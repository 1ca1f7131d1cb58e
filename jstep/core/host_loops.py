"""Loops that load arrays from host memory, compute with them, and write the results back."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jstep.core import trees
from jstep.core.equations import Env, apply, compute, is_elementwise, on_slices, value_of, variables
from jstep.core.placement import is_on_host, on_devices, shardings_of, to_host

ROWS = {1: 4096, 2: 32}
"""Number of dimensions → the row multiple of a slice: whole tiles of a TPU's memory, for every dtype."""


def is_worth_a_sequence(state: Any) -> bool:
    """Whether a traced state has arrays in host memory, and its compiler is known to support loops of transfers.

    On a CPU, device memory is host memory. The GPU compiler is untested.
    """
    leaves = jax.tree.leaves(state)
    if not (any(map(trees.is_traced, leaves)) and any(map(is_on_host, leaves))):
        return False
    known = shardings_of(state)
    platform = jax.default_backend() if known is None else next(iter(known[0].device_set)).platform
    return bool(platform == "tpu")


def whole_on_first_axis(state: Any) -> frozenset[int]:
    """Return the indices of leaves that are known not to be split along their first axis."""
    leaves = jax.tree.leaves(state)
    pairs = enumerate(zip(leaves, shardings_of(state) or [None] * len(leaves), strict=True))
    return frozenset(
        i
        for i, (leaf, sharding) in pairs
        if sharding is not None and leaf.ndim and sharding.shard_shape(leaf.shape)[0] == leaf.shape[0]
    )


@dataclasses.dataclass(frozen=True)
class Placed:
    """Arrays, some of them in host memory.

    Attributes:
        leaves: The traced arrays.
        groups: Index of an array in host memory → its group.
        whole: The indices of arrays that are known not to be split along their first axis.
        once: The integer 1, hidden from XLA.
    """

    leaves: list[Any]
    groups: Mapping[int, int]
    whole: frozenset[int]
    once: Any


@dataclasses.dataclass(frozen=True)
class Loop:
    """Equations to evaluate in a loop.

    Attributes:
        jaxpr: The program that contains the equations.
        eqns: The equations, in order.
        due: The variables to compute, and the indices of the arrays that they replace, or None.
        parts: The minimum number of slices of the arrays; 0 for no loop.
    """

    jaxpr: Any
    eqns: list[Any]
    due: list[tuple[Any, int | None]]
    parts: int


def run_loop(loop: Loop, env: Env, placed: Placed) -> list[Any]:
    """Return the values of `due`; values that replace arrays in host memory are in host memory."""
    given = {var: env[var] for var in _free(loop)}
    start = [_start(var, place, placed) for var, place in loop.due]
    invars = {loop.jaxpr.invars[place]: k for k, (_, place) in enumerate(loop.due) if place is not None}

    def send(values: list[Any]) -> list[Any]:
        return [
            to_host(value) if place in placed.groups else value
            for value, (_, place) in zip(values, loop.due, strict=True)
        ]

    def computed(values: Env, by: Callable[[Any, Any, list[Any]], list[Any]] = apply) -> list[Any]:
        inside = {var: on_devices(value) for var, value in values.items()}
        compute(loop.jaxpr, loop.eqns, inside, by)
        return send([value_of(inside, var) for var, _ in loop.due])

    def carried(carry: list[Any]) -> Env:
        return {var: carry[invars[var]] if var in invars else value for var, value in given.items()}

    if loop.parts == 0:
        return computed(given)
    count = _slices(loop, placed)
    if count == 1:
        # XLA inlines loops of one iteration, so the number of iterations is hidden from it.
        return jax.lax.fori_loop(0, placed.once, lambda _, carry: computed(carried(carry)), start)
    length = loop.due[0][0].aval.shape[0] // count

    def one_slice(i: Any, carry: list[Any]) -> list[Any]:
        def of(x: Any) -> Any:
            return x if jnp.ndim(x) == 0 else jax.lax.dynamic_slice_in_dim(x, i * length, length, 0)

        new = computed(
            {var: of(value) for var, value in carried(carry).items()},
            lambda jaxpr, eqn, values: on_slices(jaxpr, eqn, values, length),
        )
        return [jax.lax.dynamic_update_slice_in_dim(x, part, i * length, 0) for x, part in zip(carry, new, strict=True)]

    return jax.lax.fori_loop(0, count, one_slice, start)


def has_same_type(var: Any, leaf: Any) -> bool:
    """Whether an array has the shape and dtype of a variable."""
    return bool(var.aval.shape == leaf.shape and var.aval.dtype == leaf.dtype)


def _start(var: Any, place: int | None, placed: Placed) -> Any:
    return jnp.zeros(var.aval.shape, var.aval.dtype) if place is None else placed.leaves[place]


def _free(loop: Loop) -> list[Any]:
    """Return the free variables of the equations."""
    made = {var for eqn in loop.eqns for var in eqn.outvars}
    used = [*(var for eqn in loop.eqns for var in variables(eqn.invars)), *(var for var, _ in loop.due)]
    return [var for var in dict.fromkeys(used) if var not in made]


def _slices(loop: Loop, placed: Placed) -> int:
    """Return the number of slices; 1 if the equations cannot be evaluated slice by slice."""
    shape = loop.due[0][0].aval.shape
    atoms = [*_free(loop), *(var for var, _ in loop.due)]
    indices = {var: i for i, var in enumerate(loop.jaxpr.invars)}
    fits = (
        len(shape) > 0
        and all(var.aval.shape == shape for var, _ in loop.due)
        and all(var.aval.shape in ((), shape) for var in atoms)
        and all(indices[var] in placed.whole for var in atoms if var in indices and var.aval.shape == shape)
        and all(is_elementwise(eqn, shape) for eqn in loop.eqns)
    )
    if not fits:
        return 1
    rows = ROWS.get(len(shape), 1)
    counts = [n for n in range(2, shape[0] + 1) if shape[0] % n == 0 and shape[0] // n % rows == 0]
    return min((n for n in counts if n >= loop.parts), default=max(counts, default=1))
