"""Instrumented loops and shard_maps, which return the first operation with a non-finite result and its iteration."""

import contextlib
import functools
from collections.abc import Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import core

from jstep.core.operations import HARMLESS, Operation, Subprogram, apply, walk
from jstep.core.scans import counts_of
from jstep.tools.nonfinite.numbers import has_nan, is_inexact, on_current_mesh, on_mesh_of, probe
from jstep.tools.nonfinite.shards import manual_axes, mapped

NONE = 2**31 - 1


class First(NamedTuple):
    """The first operation found so far, traced: its number (or `NONE`) and the iterations of the enclosing loops."""

    number: Any
    at: Any


class _Var(NamedTuple):
    """A value and whether it depends on an argument."""

    value: Any
    depends: bool


class FirstNonFinite:
    """Instrumented operation with loops, which finds the first operation inside that makes a non-finite number.

    Args:
        operation: The operation.
        operands: Whether to check operands as well. If all constants are finite, checking results is enough: the first
            non-finite result is the one to find.
    """

    def __init__(self, operation: Operation, *, operands: bool) -> None:
        self.operation, self._operands = operation, operands
        # Zero; inside shard_map it varies over the shards, and so do the numbers it is added to.
        self._own: Any = 0
        self._loops = max(
            one.depth + 1 for one in [operation, *(one for body in operation.bodies for one in walk(body))]
        )

    def __call__(self, values: list[Any], depends: tuple[bool, ...]) -> tuple[list[Any], First]:
        """Return the results and the first operation; must be traced."""
        ins = _vars(values, depends)
        return getattr(self, f"_{self.operation.kind}")(self.operation, ins)

    def _none(self) -> First:
        return First(jnp.int32(NONE) + self._own, jnp.zeros(self._loops, jnp.int32) + self._own)

    def _run(self, body: Subprogram, args: list[_Var]) -> tuple[list[_Var], First]:
        env: dict[Any, _Var] = {}
        env.update(zip(body.jaxpr.constvars, (_Var(const, False) for const in body.consts), strict=True))
        env.update(zip(body.jaxpr.invars, args, strict=True))
        flags = _Flags(self._operands)
        found: list[First] = []

        def value(atom: Any) -> _Var:
            return _Var(atom.val, False) if isinstance(atom, core.Literal) else env[atom]

        for operation in body.operations:
            ins = [value(atom) for atom in operation.eqn.invars]
            depends = any(one.depends for one in ins)
            with on_mesh_of(operation.eqn.outvars[0].aval) if operation.eqn.outvars else contextlib.nullcontext():
                if operation.kind == "operation":
                    results, first = apply(operation, [one.value for one in ins]), None
                else:
                    results, first = getattr(self, f"_{operation.kind}")(operation, ins)
            if first is None:
                flags.record(operation, [one.value for one in ins], results, depends)
            else:
                found.append(First(*map(on_current_mesh, first)))
            env.update(zip(operation.eqn.outvars, (_Var(result, depends) for result in results), strict=True))
        found.append(self._none()._replace(number=flags.first() + self._own))
        return [value(atom) for atom in body.jaxpr.outvars], self._least(found)

    def _least(self, found: list[First]) -> First:
        """Return the one with the lowest number, which ran first."""
        if len(found) == 1:
            return found[0]
        numbers = jnp.stack([one.number for one in found])
        which = jnp.argmin(numbers)
        return First(numbers[which], jnp.stack([one.at for one in found])[which])

    def of_shards(self, values: list[Any], depends: tuple[bool, ...]) -> tuple[list[Any], First]:
        """Return the results of a shard_map and, stacked, the first operation of each shard; must be traced."""
        return self._on_shards(self.operation, _vars(values, depends))

    def _on_shards(self, operation: Operation, ins: list[_Var]) -> tuple[list[Any], First]:
        depends = any(one.depends for one in ins)

        def on_shard(values: Any) -> Any:
            self._own = lax.pcast(jnp.int32(0), manual_axes(operation), to="varying")
            try:
                outs, first = self._run(operation.bodies[0], [_Var(one, depends) for one in values])
            finally:
                self._own = 0
            return [out.value for out in outs], first

        return mapped(operation, on_shard)([one.value for one in ins])

    def _shard_map(self, operation: Operation, ins: list[_Var]) -> tuple[list[Any], First]:
        outs, firsts = self._on_shards(operation, ins)
        which = jnp.argmin(firsts.number)
        return outs, First(firsts.number[which], firsts.at[which])

    def _call(self, operation: Operation, ins: list[_Var]) -> tuple[list[Any], First]:
        outs, first = self._run(operation.bodies[0], ins)
        return [out.value for out in outs], first

    def _cond(self, operation: Operation, ins: list[_Var]) -> tuple[list[Any], First]:
        def branch(body: Subprogram) -> Any:
            def run(*values: Any) -> Any:
                outs, first = self._run(body, _with(values, ins[1:]))
                return [out.value for out in outs], first

            return run

        index = jnp.asarray(ins[0].value).astype(jnp.int32)
        outs, first = lax.switch(index, [branch(body) for body in operation.bodies], *[one.value for one in ins[1:]])
        return outs, first

    def _scan(self, operation: Operation, ins: list[_Var]) -> tuple[list[Any], First]:
        params, body = operation.eqn.params, operation.bodies[0]
        consts, carry = counts_of(params)
        depends = any(one.depends for one in ins)
        length, reverse = params["length"], params["reverse"]

        def step(state: Any, xs: Any) -> Any:
            held, first, i = state
            values = [*(one.value for one in ins[:consts]), *held, *xs]
            # The carry is passed on, so every value depends on all others.
            outs, new = self._run(body, [_Var(one, depends) for one in values])
            results = [out.value for out in outs]
            position = length - 1 - i if reverse else i
            return (results[:carry], _earlier(first, new, operation.depth, position), i + 1), results[carry:]

        start = [one.value for one in ins[consts : consts + carry]]
        xs = [one.value for one in ins[consts + carry :]]
        (held, first, _), ys = lax.scan(
            step, (start, self._none(), jnp.int32(0)), xs, length=length, reverse=reverse, unroll=params["unroll"]
        )
        return [*held, *ys], first

    def _while(self, operation: Operation, ins: list[_Var]) -> tuple[list[Any], First]:
        params, (condition, body) = operation.eqn.params, operation.bodies
        of_condition, of_body = params["cond_nconsts"], params["body_nconsts"]
        values = [one.value for one in ins]
        depends = any(one.depends for one in ins)

        def condition_at(held: Any, first: First, i: Any) -> Any:
            given = [_Var(one, depends) for one in [*values[:of_condition], *held]]
            (again,), new = self._run(condition, given)
            return again.value, _earlier(first, new, operation.depth, i)

        def step(state: Any) -> Any:
            _, held, first, i = state
            given = [_Var(one, depends) for one in [*values[of_condition : of_condition + of_body], *held]]
            outs, new = self._run(body, given)
            held = [out.value for out in outs]
            again, first = condition_at(held, _earlier(first, new, operation.depth, i), i + 1)
            return again, held, first, i + 1

        start = values[of_condition + of_body :]
        again, first = condition_at(start, self._none(), jnp.int32(0))
        _, held, first, _ = lax.while_loop(lambda state: state[0], step, (again, start, first, jnp.int32(0)))
        return held, first


class _Flags:
    """Flags of the operations with non-finite results: one scalar each, stacked at the end."""

    def __init__(self, operands: bool) -> None:
        self._operands = operands
        self._sums: dict[int, tuple[Any, Any]] = {}
        self._numbers: list[int] = []
        self._bad: list[Any] = []

    def _sum(self, value: Any) -> Any:
        if id(value) not in self._sums:
            self._sums[id(value)] = (value, probe(value))  # keeping a reference to the value keeps its id unique
        return self._sums[id(value)][1]

    def record(self, operation: Operation, ins: list[Any], outs: list[Any], depends: bool) -> None:
        """Record an operation with its operands and results."""
        outs = [out for out in outs if out is not None and is_inexact(out)]
        if not outs or operation.eqn.primitive.name in HARMLESS:
            return
        self._numbers.append(operation.number)
        if not self._operands:
            self._bad.append(sum(map(self._sum, outs[1:]), self._sum(outs[0])))
            return
        ins = [value for value in ins if is_inexact(value)]
        after, before = (_any(~jnp.isfinite(self._sum(one)) for one in some) for some in (outs, ins))
        nan_after, nan_before = (_any(has_nan(one) for one in some) for some in (outs, ins))
        # Infinities that do not depend on an argument are constants of the user; NaNs are always reported.
        bad = (nan_after & ~nan_before) | (after & ~before if depends else False)
        self._bad.append(jnp.where(bad, jnp.float32(np.nan), jnp.float32(0)))

    def first(self) -> Any:
        """Return the number of the first flagged operation."""
        if not self._bad:
            return jnp.int32(NONE)
        bad = ~jnp.isfinite(jnp.stack(self._bad))
        return jnp.min(jnp.where(bad, jnp.array(self._numbers, jnp.int32), jnp.int32(NONE)))


def _vars(values: list[Any], depends: tuple[bool, ...]) -> list[_Var]:
    return [_Var(value, on) for value, on in zip(values, depends, strict=True)]


def _with(values: Any, like: list[_Var]) -> list[_Var]:
    return [_Var(value, one.depends) for value, one in zip(values, like, strict=True)]


def _any(flags: Iterable[Any]) -> Any:
    return functools.reduce(jnp.logical_or, flags, jnp.zeros((), bool))


def _earlier(first: First, new: First, depth: int, iteration: Any) -> First:
    """Return `first` if it is set, else `new` at this iteration of the loop."""
    new = First(new.number, new.at.at[depth].set(jnp.asarray(iteration, jnp.int32)))
    return jax.tree.map(lambda a, b: jnp.where(first.number != NONE, a, b), first, new)
