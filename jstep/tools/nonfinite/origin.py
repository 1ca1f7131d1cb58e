"""Tracing non-finite results back to constants, when no operation made them from an argument.

The program is evaluated again and followed backwards from its non-finite results, through non-finite operands (those
with a NaN, if the result has one), to their origins.
"""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import core

from jstep.core.operations import MOVES, Operation, Subprogram, apply, read, walk
from jstep.core.scans import counts_of
from jstep.tools.nonfinite.loop_arguments import arguments_of, evaluated
from jstep.tools.nonfinite.numbers import has_nan, is_inexact, probe
from jstep.tools.nonfinite.search import Step, entered, last_uses


@dataclasses.dataclass(frozen=True)
class Reader:
    """An operation that reads a non-finite value or makes one.

    Attributes:
        path: The enclosing operations, outermost first.
        operation: The operation.
        ins: Its operands.
        outs: Its results.
    """

    path: tuple[Step, ...]
    operation: Operation
    ins: list[Any]
    outs: list[Any]


@dataclasses.dataclass(frozen=True)
class Origin:
    """The origin of non-finite numbers.

    Attributes:
        reader: The operation that reads the constant or makes the numbers; None if the constant is a result.
        constant: The constant; None if the operation makes the numbers.
    """

    reader: Reader | None
    constant: Any = None


def origin(body: Subprogram, args: list[Any], results: Sequence[Any]) -> Origin | None:
    """Return the first constant, or operation on constants, that makes a result non-finite.

    Args:
        body: The program.
        args: Its arguments, all finite.
        results: Its results.

    Returns:
        None if all results are finite or are infinite constants returned unchanged.
    """
    wanted = _bad(results)
    if not wanted:
        return None
    found = _BackwardSearch(body, args, ()).run(wanted)
    # An infinity that is only returned is a bound or a mask.
    computed = [
        one for one in found.origins if one.constant is None or has_nan(one.constant) or not _returned(body, one)
    ]
    return min(computed, key=lambda one: one.reader.operation.number if one.reader else -1, default=None)


def _returned(body: Subprogram, one: Origin) -> bool:
    """Whether the program returns a constant unchanged, except for data movement."""
    if one.reader is None:
        return True
    if one.reader.path:
        return False
    moved = {one.reader.operation.eqn.outvars[0]}
    for operation in body.operations:
        if moved.intersection(atom for atom in operation.eqn.invars if not isinstance(atom, core.Literal)):
            if operation.eqn.primitive.name not in MOVES:
                return False
            moved.update(operation.eqn.outvars)
    return one.reader.operation.eqn.primitive.name in MOVES


@dataclasses.dataclass
class _Result:
    """The result of following a program backwards: origins, and the arguments that the other numbers come from."""

    origins: list[Origin]
    readers: dict[int, Reader | None]


class _BackwardSearch:
    """An evaluated program that can be followed backwards from some of its results."""

    def __init__(self, body: Subprogram, args: list[Any], path: tuple[Step, ...]) -> None:
        self._body, self._path = body, path
        self._consts = dict(zip(body.jaxpr.constvars, body.consts, strict=True))
        # Operands and results of the operations whose results are not finite.
        self._kept: dict[int, tuple[list[Any], list[Any]]] = {}
        env = {**self._consts, **dict(zip(body.jaxpr.invars, args, strict=True))}
        last = last_uses(body)
        for at, operation in enumerate(body.operations):
            ins = [read(env, atom) for atom in operation.eqn.invars]
            outs = apply(operation, ins)
            if _bad(outs):
                self._kept[operation.number] = ins, outs
            env.update(zip(operation.eqn.outvars, outs, strict=True))
            for var in last.get(at, ()):
                env.pop(var, None)

    def run(self, wanted: Iterable[int]) -> _Result:
        """Follow the results with these indices to their origins."""
        result = _Result([], {})
        sought: dict[Any, Reader | None] = {}
        self._note([(self._body.jaxpr.outvars[i], None) for i in wanted], sought, result)
        for operation in reversed(self._body.operations):
            made = [i for i, var in enumerate(operation.eqn.outvars) if var in sought]
            if made:
                readers = self._through(operation, made, result)
                self._note([(operation.eqn.invars[i], reader) for i, reader in readers.items()], sought, result)
        indices = {var: i for i, var in enumerate(self._body.jaxpr.invars)}
        result.readers.update((indices[var], reader) for var, reader in sought.items() if var in indices)
        return result

    def _note(self, needed: list[tuple[Any, Reader | None]], sought: dict[Any, Reader | None], result: _Result) -> None:
        """Record constants as origins, and variables to be followed further."""
        for atom, reader in needed:
            if isinstance(atom, core.Literal) or atom in self._consts:
                result.origins.append(Origin(reader, read(self._consts, atom)))
            else:
                sought[atom] = reader

    def _reader(self, operation: Operation) -> Reader:
        return Reader(self._path, operation, *self._kept[operation.number])

    def _through(self, operation: Operation, made: list[int], result: _Result) -> dict[int, Reader | None]:
        """Return the operands that these results come from, each with the operation that reads it."""
        ins, outs = self._kept[operation.number]
        inner = {"call": self._call, "cond": self._cond, "scan": self._scan, "while": self._while}.get(operation.kind)
        if inner is not None:
            return inner(operation, ins, made, result)
        bad = _worst(ins, bool(_bad([outs[i] for i in made], nan=True)))
        if not bad:
            result.origins.append(self._inside(operation))
        return dict.fromkeys(bad, self._reader(operation))

    def _inside(self, operation: Operation) -> Origin:
        """Return the origin in an operation without non-finite operands: a constant inside, or the operation itself."""
        for body in operation.bodies:
            for one in walk(body):
                for atom in one.eqn.invars:
                    if isinstance(atom, core.Literal) and is_inexact(atom.val) and not np.isfinite(probe(atom.val)):
                        step = Step(operation, operation.eqn.primitive.name)
                        return Origin(Reader((*self._path, step), one, [atom.val], []), atom.val)
        return Origin(self._reader(operation))

    def _into(
        self,
        operation: Operation,
        body: Subprogram,
        args: list[Any],
        wanted: list[int],
        result: _Result,
        at: list[int] | None = None,
    ) -> dict[int, Reader | None]:
        path = (*self._path, Step(operation, entered(operation, body, at or ())))
        inner = _BackwardSearch(body, args, path).run(wanted)
        own = self._reader(operation)
        result.origins.extend(Origin(one.reader or own, one.constant) for one in inner.origins)
        return {i: reader or own for i, reader in inner.readers.items()}

    def _call(self, operation: Operation, ins: list[Any], made: list[int], result: _Result) -> dict[int, Reader | None]:
        return self._into(operation, operation.bodies[0], ins, made, result)

    def _cond(self, operation: Operation, ins: list[Any], made: list[int], result: _Result) -> dict[int, Reader | None]:
        taken = operation.bodies[min(max(int(ins[0]), 0), len(operation.bodies) - 1)]
        return {i + 1: one for i, one in self._into(operation, taken, ins[1:], made, result).items()}

    def _scan(self, operation: Operation, ins: list[Any], made: list[int], result: _Result) -> dict[int, Reader | None]:
        params, body = operation.eqn.params, operation.bodies[0]
        consts, carry = counts_of(params)
        length, reverse = params["length"], params["reverse"]

        def step(held: Any, xs: Any) -> Any:
            outs = evaluated(body, [*ins[:consts], *held, *xs])
            return outs[:carry], _states(outs)

        _, states = jax.jit(lambda held, xs: lax.scan(step, held, xs, length=length, reverse=reverse))(
            ins[consts : consts + carry], ins[consts + carry :]
        )
        order = np.asarray(states)[::-1] if reverse else np.asarray(states)

        def at(i: int) -> int:
            return length - 1 - i if reverse else i

        return self._iterations(operation, body, ins, made, order, at, consts, carry, result)

    def _while(
        self, operation: Operation, ins: list[Any], made: list[int], result: _Result
    ) -> dict[int, Reader | None]:
        params, body = operation.eqn.params, operation.bodies[-1]
        before, consts = params["cond_nconsts"], params["body_nconsts"]
        first = before + consts
        given = ins[before:first]

        def step(state: Any) -> Any:
            i, held, since = state
            outs = evaluated(body, [*given, *held])
            # For each value, the first iteration after which it was non-finite, and that after which it had a NaN.
            return i + 1, outs, jnp.where((since < 0) & _states(outs), i, since)

        def again(state: Any) -> Any:
            return evaluated(operation.bodies[0], [*ins[:before], *state[1]])[0]

        start = jnp.full((len(ins) - first, 2), -1, jnp.int32)
        count, _, since = jax.jit(lambda held: lax.while_loop(again, step, (jnp.int32(0), held, start)))(ins[first:])
        states = np.asarray(since)
        order = (np.arange(int(states.max(initial=0)) + 1)[:, None, None] == states) if int(count) else None
        if order is None:  # no iterations: the results are the operands
            return {first + i: self._reader(operation) for i in made}
        order = np.logical_or.accumulate(order)
        found = self._iterations(
            operation, body, ins[before:], made, order, lambda i: i, consts, len(ins) - first, result
        )
        return {before + i: reader for i, reader in found.items()}

    def _iterations(
        self,
        operation: Operation,
        body: Subprogram,
        ins: list[Any],
        made: list[int],
        states: Any,
        at: Any,
        consts: int,
        carry: int,
        result: _Result,
    ) -> dict[int, Reader | None]:
        """Follow results back through the iterations of a loop, from the first one with non-finite values.

        Args:
            operation: The loop.
            body: The body of the loop.
            ins: Its operands, without those of the condition.
            made: The results to follow.
            states: [iteration, result of the body, (is non-finite, has a NaN)], in execution order.
            at: Maps an iteration to its index among the results of a scan.
            consts: Number of constant operands.
            carry: Number of carried values.
            result: Collects the origins.
        """
        readers: dict[int, Reader | None] = {}
        column = int(states[:, made, 1].any())
        wanted, last = made, len(states)
        while wanted and last:
            when = [np.flatnonzero(states[:last, i, column]) for i in wanted]
            first = min((int(one[0]) for one in when if one.size), default=None)
            if first is None:
                break
            iterations = [0] * (operation.depth + 1)
            iterations[operation.depth] = at(first)
            args = arguments_of(operation, body, self._kept[operation.number][0], at(first))
            bad = [i for i, one in zip(wanted, when, strict=True) if one.size and one[0] == first]
            found = self._into(operation, body, args, bad, result, iterations)
            readers.update((i, one) for i, one in found.items() if not consts <= i < consts + carry)
            handed = [i - consts for i in found if consts <= i < consts + carry]
            if not first:
                readers.update((consts + i, found[consts + i]) for i in handed)
                break
            wanted, last = handed, first
        return readers


def _states(outs: Sequence[Any]) -> Any:
    """Return, for each value, whether it is non-finite and whether it has a NaN."""
    no = jnp.zeros((), bool)
    each = [jnp.stack([~jnp.isfinite(probe(one)), has_nan(one)] if is_inexact(one) else [no, no]) for one in outs]
    return jnp.stack(each) if each else jnp.zeros((0, 2), bool)


def _bad(values: Sequence[Any], nan: bool = False) -> list[int]:
    """Return the indices of values that are non-finite, or with `nan` those that have a NaN."""
    return [
        i
        for i, one in enumerate(values)
        if one is not None and is_inexact(one) and (bool(has_nan(one)) if nan else not np.isfinite(probe(one)))
    ]


def _worst(values: Sequence[Any], nan: bool) -> list[int]:
    """Return the values with a NaN if `nan` is set and there are any; else the non-finite values."""
    return (_bad(values, nan=True) if nan else []) or _bad(values)
