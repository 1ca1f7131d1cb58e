"""Counting how often a traced program uses each of its arguments."""

import math
from collections.abc import Sequence
from typing import Any

from jstep.core.programs import MOVES, Operation, Subprogram, body_of, counts_of, evaluate, programs_in

_PARTS = MOVES | {"convert_element_type", "bitcast_convert_type", "sharding_constraint", "reshard", "mesh_cast", "name"}
"""Operations that return a copy or a part of an operand; uses of the result are uses of the operand."""
_LOOPS = {"scan", "while"}
_Sources = frozenset[int]


def uses_of(traced: Any) -> list[float]:
    """Return an upper bound on how often each argument is used as a whole.

    Each operation that computes with an argument is a use, as often as it runs; an operation on half of the argument is
    half a use. A loop of unknown length counts once. If uses cannot be counted, the number is infinite.

    Args:
        traced: The jaxpr of a program.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from jstep.tools.argument_uses import uses_of
        >>> def f(stacked, x):
        ...     return jax.lax.scan(lambda x, w: (x @ w, None), x, stacked)[0]
        >>> uses_of(jax.make_jaxpr(f)(jnp.ones((5, 4, 4)), jnp.ones((2, 4))))[0]
        1.0
    """
    body = body_of(traced)
    sizes = [_size(var) for var in body.jaxpr.invars]
    counter = _Counter(sizes)
    counter.run(body, [frozenset([number]) for number in range(len(sizes))], 1)
    return counter.uses


class _Counter:
    def __init__(self, sizes: Sequence[int]) -> None:
        self.sizes = sizes
        self.uses = [0.0] * len(sizes)

    def run(self, body: Subprogram, given: Sequence[_Sources], times: float) -> list[_Sources]:
        """Count uses in a program, given the sources of its arguments; return the sources of its results."""
        return evaluate(
            body, given, lambda operation, taken: self._site(operation, taken, times), lambda constant: frozenset()
        )

    def _site(self, operation: Operation, taken: list[_Sources], times: float) -> list[_Sources]:
        nothing: list[_Sources] = [frozenset()] * len(operation.eqn.outvars)
        if not any(taken):
            return nothing
        if operation.kind in _LOOPS:
            return self._loop(operation, taken, times)
        if operation.kind == "cond":
            branches = [self.run(body, taken[1:], times) for body in operation.bodies]
            return [frozenset().union(*results) for results in zip(*branches, strict=True)]
        if operation.kind in ("call", "shard_map"):
            return self.run(operation.bodies[0], taken, times)
        if operation.eqn.primitive.name in _PARTS:
            return [frozenset().union(*taken)] * len(operation.eqn.outvars)
        opaque = any(True for _ in programs_in(operation.eqn))
        for atom, found in zip(operation.eqn.invars, taken, strict=True):
            for source in found:
                share = min(1.0, _size(atom) / max(1, self.sizes[source]))
                self.uses[source] += math.inf if opaque else times * share
        return nothing

    def _loop(self, operation: Operation, taken: list[_Sources], times: float) -> list[_Sources]:
        """Iterate until the sources of the carried values, which an iteration passes to the next, no longer change."""
        params, body = operation.eqn.params, operation.bodies[-1]
        if operation.kind == "scan":
            before, carried = counts_of(params)
            often = times * params["length"]
        else:
            skipped = params["cond_nconsts"]
            before, carried, often = params["body_nconsts"], len(operation.eqn.outvars), times
            taken = taken[skipped:]
        kept = list(self.uses)
        while True:
            self.uses = list(kept)
            results = self.run(body, taken, often)
            wider = [old | new for old, new in zip(taken[before : before + carried], results[:carried], strict=True)]
            if wider == taken[before : before + carried]:
                return results
            taken = [*taken[:before], *wider, *taken[before + carried :]]


def _size(atom: Any) -> int:
    return math.prod(getattr(atom.aval, "shape", ()))
