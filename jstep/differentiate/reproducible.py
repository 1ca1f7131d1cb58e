"""Bitwise reproducible evaluation of a function on any number of devices, for lanes.

Elementwise operations stay sharded, except on CPUs; sums over whole arrays are computed over L
blocks in the tree of the lanes; every device computes all other operations on whole arrays.
"""

import collections
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core
from jax.sharding import PartitionSpec

from jstep.core import jaxprs, meshes, trees
from jstep.core.jaxprs import ELEMENTWISE, Operation, Subprogram
from jstep.core.placement import move_to_devices
from jstep.core.trees import Array
from jstep.differentiate.lanes import Lanes, is_in_lanes, isolate, sum_over_lanes, trace_on_lanes

_MOVES = "bitcast_convert_type broadcast_in_dim expand_dims reshape rev slice squeeze transpose"
_EXACT = "add_any argmax argmin atan2 complex conj erfc imag lgamma real reduce_max reduce_min"
SHARDED = ELEMENTWISE.union(_MOVES.split(), _EXACT.split())
"""Operations that XLA rounds in the same way on the shards of an array, except on CPUs."""

SHARDS = "shards"
"""The operation is computed on the shards of its arrays, except on CPUs."""
SUM = "sum"
"""The sum of a whole array is computed over blocks, in the tree of the lanes."""
WHOLE = "whole"
APART = "apart"
"""The operation contains operations of the other kinds, or is in lanes already."""


def evaluate_reproducibly(lanes: Lanes | None, fn: Callable[..., Any], *args: Any) -> Any:
    """Return `fn(*args)`; with lanes, bitwise reproducible on any number of devices."""
    if lanes is None:
        return fn(*args)
    arrays, filled = trees.partition_arrays(args)
    rebuilds: list[Any] = []

    def call(arrays: list[Array]) -> list[Array]:
        results, rebuild = trees.partition_arrays(fn(*filled(arrays)))
        rebuilds.append(rebuild)
        return results

    arrays = move_to_devices(arrays)
    program, _ = trace_on_lanes(lanes, call, arrays)
    # Data that XLA does not know: constants are not traced.
    data = [x for x in arrays if x.size and not trees.is_key(x)]
    witness = min(data, key=lambda x: (not trees.is_traced(x), x.size))
    return rebuilds[-1](_evaluated(lanes, jaxprs.body_of(program), arrays, witness))


def _evaluated(
    lanes: Lanes, body: Subprogram, values: Sequence[Array], witness: Array
) -> list[Array]:
    program, _ = trace_on_lanes(
        lanes, lambda values: jaxprs.evaluate(body, values, _inlined), list(values)
    )
    jaxpr = program.jaxpr
    # Variable → the numbers of the operations that use it; -1 for the caller of the program.
    users = {atom: {-1} for atom in jaxprs.variables(jaxpr.outvars)}
    operations: list[Operation] = []
    for op in reversed(jaxprs.body_of(program).operations):
        if op.eqn.effects or any(atom in users for atom in op.eqn.outvars):  # its results are used
            operations.insert(0, op)
            for atom in jaxprs.variables(op.eqn.invars):
                users.setdefault(atom, set()).add(op.number)
    # Operations without operands, such as zeros, are computed where they are used.
    free: dict[Any, Any] = {}
    for op in operations:
        if not jaxprs.variables(op.eqn.invars):
            free.update(dict.fromkeys(op.eqn.outvars, op.eqn))
    env: dict[Any, Any] = dict(
        zip([*jaxpr.constvars, *jaxpr.invars], [*program.consts, *values], strict=True)
    )

    def read(atom: object) -> Any:
        if isinstance(atom, core.Literal):
            return atom.val
        if atom in env:
            return env[atom]
        (value,) = jax.core.eval_jaxpr(jaxprs.subprogram(jaxpr, [], [atom], [free[atom]]), ())
        return value

    def compute_together(call: Callable[..., list[Array]], group: Sequence[Operation]) -> None:
        """Make one program of some operations.

        `call(program, inputs)` computes what others use of its results.
        """
        # Dicts are ordered sets here.
        outputs: dict[Any, None] = {}
        used: dict[Any, None] = {}
        for op in group:
            outputs.update(dict.fromkeys(op.eqn.outvars))
            used.update(dict.fromkeys(jaxprs.variables(op.eqn.invars)))
        inputs = [atom for atom in used if atom not in outputs and atom not in free]
        numbers = {op.number for op in group}
        results = [atom for atom in outputs if users.get(atom, numbers) - numbers]
        first = {id(free[atom]): free[atom] for atom in used if atom in free}
        eqns = [*first.values(), *(op.eqn for op in group)]
        program = core.ClosedJaxpr(jaxprs.subprogram(jaxpr, inputs, results, eqns), ())
        env.update(zip(results, call(program, [env[atom] for atom in inputs]), strict=True))

    def compute_on_shards(program: Any, args: list[Array]) -> list[Array]:
        def sharded(args: list[Array]) -> list[Array]:
            return isolate(program, list(map(lanes.placed, args)), witness)

        # Not on the shards of CPUs: since JAX 0.12, roundings of XLA's CPU compiler depend on the
        # shape of a loop over elements.
        def whole(args: list[Array]) -> list[Array]:
            results = isolate(program, list(map(lanes.everywhere, args)), witness)
            return list(map(lanes.everywhere, results))

        return list(map(lanes.placed, jax.lax.platform_dependent(args, cpu=whole, default=sharded)))

    def sum_blocks(program: Any, args: list[Array]) -> list[Array]:
        dims: Any = [meshes.largest_divisible(x.shape, lanes.number) for x in args]
        fn = core.jaxpr_as_fun(program)

        def sum_block(i: Array, _: list[Array], blocks: list[Array]) -> list[Array]:
            return fn(*blocks)

        return list(sum_over_lanes(lanes, sum_block, [], args, dims, witness))

    def compute_whole(program: Any, args: list[Array]) -> list[Array]:
        everywhere = PartitionSpec()
        spread = lanes.spread(functools.partial(isolate, program), everywhere, everywhere)
        return list(spread(args, witness))

    with_operands = [op for op in operations if jaxprs.variables(op.eqn.invars)]
    for level in _levels(lanes.number, with_operands):
        if level[SHARDS]:
            compute_together(compute_on_shards, level[SHARDS])
        if level[SUM]:
            compute_together(sum_blocks, level[SUM])
        for group in _connected(level[WHOLE]):
            compute_together(compute_whole, group)
        for op in level[APART]:
            results = _apart(lanes, op, list(map(read, op.eqn.invars)), witness)
            env.update(zip(op.eqn.outvars, results, strict=True))
    return list(map(read, jaxpr.outvars))


def _inlined(operation: Operation, values: list[Any]) -> Sequence[Any]:
    """Apply an operation; inline a call that cannot run on parts."""
    if operation.kind == "call" and not is_in_lanes(operation) and _way(1, operation) != SHARDS:
        return jaxprs.evaluate(operation.bodies[0], values, _inlined)
    return jaxprs.apply(operation, values)


def _levels(number: int, operations: Sequence[Operation]) -> Iterator[dict[str, list[Operation]]]:
    """Group operations by way: in a level, operations on shards come first, then sums."""
    levels: dict[int, dict[str, list[Operation]]] = collections.defaultdict(
        lambda: collections.defaultdict(list)
    )
    ready: dict[Any, int] = collections.defaultdict(int)  # the level in which a value is known
    whole: dict[Any, int] = {}  # the level in which every device has computed it, as a whole
    for operation in operations:
        operands = jaxprs.variables(operation.eqn.invars)
        arrays = [atom for atom in operands if atom.aval.shape]
        way = _way(number, operation)
        # Every device has the operands already.
        if way in (SHARDS, SUM) and arrays and all(atom in whole for atom in arrays):
            way = WHOLE
        number_of_level = 0
        for atom in operands:
            known_at = ready[atom]
            if way == WHOLE:
                known_at = whole.get(atom, known_at)
            number_of_level = max(number_of_level, known_at)
        levels[number_of_level][way].append(operation)
        for atom in operation.eqn.outvars:
            # Operations on shards come first in a level, so that others of the same level may use
            # their results.
            ready[atom] = number_of_level if way == SHARDS else number_of_level + 1
            if way == WHOLE:
                whole[atom] = number_of_level
    return (levels[level] for level in sorted(levels))


def _way(number: int, operation: Operation) -> str:
    eqn = operation.eqn
    if is_in_lanes(operation):
        return APART
    if operation.kind in ("call", "cond"):
        ways: set[str] = set()
        for body in operation.bodies:
            ways.update(_way(number, inner) for inner in body.operations)
        if ways <= {SHARDS}:
            return SHARDS
        # XLA must see only one branch of a condition that selects by platform.
        return WHOLE if operation.is_of_platforms else APART
    if operation.bodies:
        if any(map(is_in_lanes, jaxprs.nested_operations(operation))):
            return APART
        return WHOLE
    if operation.name in SHARDED or not any(map(_is_inexact, [*eqn.invars, *eqn.outvars])):
        return SHARDS
    is_sum = operation.name == "reduce_sum" and not eqn.outvars[0].aval.shape
    if is_sum and meshes.largest_divisible(eqn.invars[0].aval.shape, number) is not None:
        return SUM
    return WHOLE


def _is_inexact(atom: Any) -> bool:
    dtype = getattr(atom.aval, "dtype", None)
    return dtype is not None and bool(jnp.issubdtype(dtype, jnp.inexact))


def _connected(operations: Sequence[Operation]) -> list[list[Operation]]:
    """Group operations that use each other's results, so that not all arrays are whole together."""
    group_of: dict[Any, list[Operation]] = {}
    for operation in operations:
        operands = jaxprs.variables(operation.eqn.invars)
        used = [group_of[atom] for atom in operands if atom in group_of]
        # The operation joins all groups whose results it uses, each of them once; or begins one.
        first, *others = {id(group): group for group in used}.values() or [[]]
        added = [operation]
        for group in others:
            added += group
        first.extend(added)
        for member in added:
            group_of.update(dict.fromkeys(member.eqn.outvars, first))
    groups = {id(group): group for group in group_of.values()}.values()
    return [sorted(group, key=lambda member: member.number) for group in groups]


def _apart(
    lanes: Lanes, operation: Operation, values: Sequence[Any], witness: Array
) -> Sequence[Any]:
    def run_body(i: int, *values: object) -> list[Array]:
        return _evaluated(lanes, operation.bodies[i], list(map(jnp.asarray, values)), witness)

    if operation.kind == "cond":
        branches = [functools.partial(run_body, i) for i in range(len(operation.bodies))]
        return list(jax.lax.switch(values[0], branches, *values[1:]))
    if operation.kind == "while":
        test_count, body_count = operation.counts
        test_consts = values[:test_count]
        body_consts = values[test_count : test_count + body_count]
        carry = list(values[test_count + body_count :])

        def test(carry: list[Any]) -> Array:
            return run_body(0, *test_consts, *carry)[0]

        def step(carry: list[Any]) -> list[Array]:
            return run_body(1, *body_consts, *carry)

        return jax.lax.while_loop(test, step, carry)
    return jaxprs.apply(operation, values)
