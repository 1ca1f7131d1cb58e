"""Evaluation inside a shard_map, shard by shard."""

import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from jstep.core.operations import Operation, Subprogram, apply, path_to, read, shard_counts
from jstep.tools.nonfinite.loop_arguments import arguments_of


def manual_axes(operation: Operation) -> tuple[str, ...]:
    """Return the names of the manual axes of a shard_map."""
    return tuple(shard_counts(operation))


def mapped(operation: Operation, fn: Callable[[Any], Any], *, results: bool = True) -> Callable[[Any], Any]:
    """Return a function of the operands of a shard_map that calls `fn` on each shard.

    Args:
        operation: The shard_map.
        fn: Returns the results of the shard_map's program, and a pytree that is stacked over the shards on a leading
            axis.
        results: Whether `fn` returns these results; if not, it returns an empty list.
    """
    params = operation.eqn.params
    stacked = PartitionSpec(manual_axes(operation))

    def on_shard(values: Any) -> Any:
        outs, more = fn(values)
        return list(outs), jax.tree.map(lambda leaf: leaf[None], more)

    return jax.shard_map(
        on_shard,
        mesh=params["mesh"],
        in_specs=(list(params["in_specs"]),),
        out_specs=(list(params["out_specs"]) if results else [], stacked),
        axis_names=set(manual_axes(operation)),
        check_vma=params["check_vma"],
    )


def first_shard(operation: Operation, numbers: list[int], at: list[list[int]], none: int) -> int:
    """Return the shard whose operation ran first, by operation number and iterations.

    Args:
        operation: The shard_map.
        numbers: The number of the operation found by each shard.
        at: The iterations of the enclosing loops.
        none: The number that means no operation.
    """

    def when(shard: int) -> list[int]:
        order = []
        for _, inner in path_to(operation.bodies[0], numbers[shard]):
            order.append(inner.number)
            if inner.kind in ("scan", "while"):
                iteration = at[shard][inner.depth]
                order.append(-iteration if inner.eqn.params.get("reverse") else iteration)
        return order

    return min((shard for shard, number in enumerate(numbers) if number != none), key=when)


def name_of(operation: Operation, shard: int) -> str:
    """Return the name of a shard: its index along each axis."""
    counts = shard_counts(operation)
    place = np.unravel_index(shard, tuple(counts.values()))
    return ", ".join(f"{name} {i}" for name, i in zip(counts, place, strict=True))


def numbers_of(
    operation: Operation, values: list[Any], shard: int, chain: list[tuple[Subprogram, Operation]], at: list[int]
) -> tuple[list[Any], list[Any]]:
    """Return the operands and results that an operation inside a shard_map has on one shard.

    Args:
        operation: The shard_map.
        values: Its operands.
        shard: The index of the shard.
        chain: The operations inside, outermost first; the last one is evaluated.
        at: The iterations of the enclosing loops.
    """
    last = chain[-1][1]

    def run(values: Any) -> Any:
        ins = _operands(chain, values, at)
        made = [out for out in apply(last, ins) if out is not None]
        return [], [jnp.asarray(one) for one in (*ins, *made)]

    _, found = jax.jit(mapped(operation, run, results=False))(values)
    count = len(last.eqn.invars)
    own = [_of_shard(one, shard) for one in found]
    return own[:count], own[count:]


def _operands(chain: list[tuple[Subprogram, Operation]], args: list[Any], at: list[int]) -> list[Any]:
    """Return the operands of the last operation, running each program up to the next one."""
    for i, (body, operation) in enumerate(chain):
        env = dict(zip([*body.jaxpr.constvars, *body.jaxpr.invars], [*body.consts, *args], strict=True))
        for before in itertools.takewhile(lambda one: one.number < operation.number, body.operations):  # noqa: B023
            outs = apply(before, [read(env, atom) for atom in before.eqn.invars])
            env.update(zip(before.eqn.outvars, outs, strict=True))
        values = [read(env, atom) for atom in operation.eqn.invars]
        if i == len(chain) - 1:
            return values
        inner = chain[i + 1][0]
        if operation.kind in ("scan", "while"):
            args = arguments_of(operation, inner, values, at[operation.depth])
        else:
            args = values[1:] if operation.kind == "cond" else values
    return []


def _of_shard(stacked: Any, shard: int) -> Any:
    if jnp.issubdtype(stacked.dtype, jax.dtypes.extended):  # PRNG keys have no numbers
        return jax.ShapeDtypeStruct(stacked.shape[1:], stacked.dtype)
    return np.asarray(stacked)[shard]
