"""Merging of equal operations in traced programs, for lanes.

XLA replaces some divisions by a broadcast with products, which round differently. Which divisions
depends on the number of devices, so here all of them become products.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core
from jax.sharding import AbstractMesh

from jstep.core.jaxprs import Operation, Subprogram, body_of
from jstep.core.trees import is_floating

INLINED = {"jit", "pjit", "closed_call"}
"""Names of calls that XLA inlines."""
NEVER_MERGED = {"optimization_barrier", "rng_uniform"}
"""Names of operations that differ even if their operands are equal."""


def merge_equal(closed: Any) -> Any:
    """Return the same program without equal operations.

    Calls are inlined, divisions by broadcasts are products.
    """
    body = body_of(closed)
    constants: dict[int, tuple[Any, Any]] = {}  # id → variable and constant
    known: dict[Any, list[Any]] = {}  # what an operation computes → its results
    broadcasts: dict[Any, Any] = {}  # result → equation
    eqns: list[Any] = []

    def add(name: str, eqn: Any) -> list[Any]:
        """Return the results of an equal operation; or add this one, with new variables."""
        key = (eqn.primitive, *sorted(eqn.params.items()), eqn.ctx, *map(_identity, eqn.invars))
        is_mergeable = not eqn.effects and name not in NEVER_MERGED
        results = None
        if is_mergeable:
            try:
                results = known.get(key)
            except TypeError:  # parameters without a hash
                is_mergeable = False
        if results is not None:
            return results
        results = [core.Var(var.aval) for var in eqn.outvars]
        eqns.append(eqn.replace(outvars=results))
        if is_mergeable:
            known[key] = results
        if name == "broadcast_in_dim":
            broadcasts[results[0]] = eqns[-1]
        return results

    def divide(eqn: Any) -> list[Any]:
        """Add x · (1 / y) for a division by a broadcast; add another division as it is."""
        x, y = eqn.invars
        widening = broadcasts.get(y) if isinstance(y, core.Var) else None
        divisor = y if widening is None else widening.invars[0]
        if divisor.aval.shape == eqn.outvars[0].aval.shape or not _has_inverses(divisor.aval.dtype):
            return add("div", eqn)
        unit, product = _one_and_product(divisor.aval.dtype)
        inversion = eqn.replace(invars=[unit, divisor], outvars=[core.Var(divisor.aval)])
        (inverse,) = add("div", inversion)
        if widening is not None:
            (inverse,) = add("broadcast_in_dim", widening.replace(invars=[inverse]))
        product = product.replace(
            invars=[x, inverse], outvars=eqn.outvars, ctx=eqn.ctx, source_info=eqn.source_info
        )
        return add("mul", product)

    def merge_body(body: Subprogram, atoms: Sequence[Any], scopes: Any = None) -> list[Any]:
        """Add the operations of a program or of an inlined call; return its results.

        `atoms` are the arguments.
        """
        consts = list(zip(body.jaxpr.constvars, body.consts, strict=True))
        for var, const in consts:
            constants.setdefault(id(const), (core.Var(var.aval), const))
        env = dict(zip(body.jaxpr.invars, atoms, strict=True))
        env.update((var, constants[id(const)][0]) for var, const in consts)

        def read(atom: Any) -> Any:
            return atom if isinstance(atom, core.Literal) else env[atom]

        for operation in body.operations:
            eqn = operation.eqn
            source = operation.eqn.source_info
            if scopes is not None:  # of the calls around it, which profiles and tools show
                source = source.replace(name_stack=scopes + source.name_stack)
            eqn = eqn.replace(invars=list(map(read, eqn.invars)), source_info=source)
            if operation.kind == "call" and operation.name in INLINED:
                results = merge_body(operation.bodies[0], eqn.invars, source.name_stack)
            else:
                eqn = eqn.replace(params=_merged_params(operation))
                if operation.name == "div":
                    results = divide(eqn)
                else:
                    results = add(operation.name, eqn)
            env.update(zip(operation.eqn.outvars, results, strict=True))
        return list(map(read, body.jaxpr.outvars))

    outvars = merge_body(body, body.jaxpr.invars)
    constvars = [var for var, _ in constants.values()]
    consts = [const for _, const in constants.values()]
    return core.ClosedJaxpr(
        body.jaxpr.replace(constvars=constvars, eqns=eqns, outvars=outvars), consts
    )


def _identity(atom: Any) -> Any:
    if not isinstance(atom, core.Literal):
        return atom
    value = np.asarray(atom.val)
    return atom.aval, value.dtype, value.tobytes()  # 0.0 and -0.0 are equal values


def _merged_params(operation: Operation) -> dict[str, Any]:
    """Return the parameters of an operation, with merged operations in the programs among them."""

    def merged(value: Any) -> Any:
        if isinstance(value, tuple):
            if any(isinstance(item, core.ClosedJaxpr) for item in value):
                return tuple(map(merged, value))
            return value
        if isinstance(value, core.ClosedJaxpr):  # in JAX 0.12, of any program
            return merge_equal(value)
        if not isinstance(value, core.Jaxpr) or value.constvars:
            return value
        program = merge_equal(value)
        if program.consts:
            return value  # a `Jaxpr` has no place for constants
        return program.jaxpr

    params: dict[str, Any] = operation.eqn.params
    if not operation.bodies:
        return params
    return {name: merged(value) for name, value in params.items()}


def _has_inverses(dtype: Any) -> bool:
    """Whether a dtype has the range of float32: the inverse of a float16 may be infinite."""
    return is_floating(dtype) and bool(jnp.finfo(dtype).maxexp >= 128)  # type: ignore[no-untyped-call]


@functools.cache
def _one_and_product(dtype: Any) -> tuple[Any, Any]:
    with jax.sharding.use_abstract_mesh(AbstractMesh((), ())):
        traced = jax.make_jaxpr(lambda x: (1 / x) * x)(jax.ShapeDtypeStruct((), dtype))
    division, product = traced.jaxpr.eqns
    return division.invars[0], product
