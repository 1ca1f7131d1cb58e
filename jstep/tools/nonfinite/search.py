"""Search for the first operation with a non-finite result, evaluating one operation at a time."""

import contextlib
import dataclasses
import itertools
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.extend import core

from jstep.core.operations import HARMLESS, Operation, Subprogram, apply, path_to
from jstep.tools.nonfinite.first_nonfinite import NONE, FirstNonFinite
from jstep.tools.nonfinite.loop_arguments import arguments_of
from jstep.tools.nonfinite.numbers import has_nan, is_inexact, on_mesh_of, probe
from jstep.tools.nonfinite.shards import first_shard, name_of, numbers_of

_FIRST, _MOST, _BYTES = 16, 256, 2**30
"""Results are checked in groups of so many operations or bytes, to avoid waiting for the device after each.

Groups are small at first and double each time, since compiling an operation takes longer than waiting for it.
"""

_probe = jax.jit(probe)


@dataclasses.dataclass(frozen=True)
class Step:
    """An enclosing operation, with the iteration, branch or condition that is entered, in words."""

    operation: Operation
    words: str


class Found(Exception):  # noqa: N818  it ends the search
    """Raised with the operation that was searched for.

    Attributes:
        path: The enclosing operations, outermost first.
        operation: The operation.
        ins: Its operands.
        outs: Its results.
    """

    def __init__(self, path: tuple[Step, ...], operation: Operation, ins: list[Any], outs: list[Any]) -> None:
        super().__init__(operation.eqn.primitive.name)
        self.path, self.operation, self.ins, self.outs = path, operation, ins, outs


class _Made(NamedTuple):
    path: tuple[Step, ...]
    operation: Operation
    ins: list[Any]
    outs: list[Any]
    depends: bool
    sums: list[Any]


class Search:
    """Search for the first operation that makes a non-finite number from finite ones."""

    def __init__(self) -> None:
        self._made: list[_Made] = []
        self._bytes, self._together = 0, _FIRST

    def run(self, body: Subprogram, args: list[Any], depends: list[bool], path: tuple[Step, ...] = ()) -> list[Any]:
        """Run a program; return its results, each with whether it depends on an argument of the outermost program.

        Raises:
            Found: The operation was found.
        """
        env: dict[Any, Any] = dict(zip(body.jaxpr.constvars, ((const, False) for const in body.consts), strict=True))
        env.update(zip(body.jaxpr.invars, zip(args, depends, strict=True), strict=True))

        def value(atom: Any) -> Any:
            return (atom.val, False) if isinstance(atom, core.Literal) else env[atom]

        last = last_uses(body)
        for at, operation in enumerate(body.operations):
            pairs = [value(atom) for atom in operation.eqn.invars]
            ins, on = [one for one, _ in pairs], [which for _, which in pairs]
            with on_mesh_of(operation.eqn.outvars[0].aval) if operation.eqn.outvars else contextlib.nullcontext():
                outs = getattr(self, f"_{operation.kind}")(operation, ins, on, path)
            env.update(zip(operation.eqn.outvars, ((out, any(on)) for out in outs), strict=True))
            for var in last.get(at, ()):
                env.pop(var, None)
        return [value(atom) for atom in body.jaxpr.outvars]

    def finish(self) -> None:
        """Check the results that have not been checked yet.

        Raises:
            Found: The operation is among them.
        """
        made, self._made, self._bytes = self._made, [], 0
        if not made:
            return
        self._together = min(2 * self._together, _MOST)
        sums = np.asarray([sum(some) for some in jax.device_get([one.sums for one in made])])
        for at in np.flatnonzero(~np.isfinite(sums)):
            one = made[at]
            ins = [value for value in one.ins if is_inexact(value)]
            outs = [value for value in one.outs if value is not None and is_inexact(value)]
            of_finite = all(np.isfinite(probe(value)) for value in ins)
            new_nan = any(map(has_nan, outs)) and not any(map(has_nan, ins))
            # Infinities that do not depend on an argument are constants of the user; NaNs are always reported.
            if new_nan or (of_finite and one.depends):
                raise Found(one.path, one.operation, one.ins, one.outs)

    def _operation(self, operation: Operation, ins: list[Any], on: list[bool], path: tuple[Step, ...]) -> list[Any]:
        outs = apply(operation, ins)
        inexact = [out for out in outs if out is not None and is_inexact(out)]
        if inexact and operation.eqn.primitive.name not in HARMLESS:
            self._made.append(_Made(path, operation, ins, outs, any(on), [_probe(out) for out in inexact]))
            self._bytes += sum(out.nbytes for out in inexact)
            if len(self._made) >= self._together or self._bytes >= _BYTES:
                self.finish()
        return outs

    def _call(self, operation: Operation, ins: list[Any], on: list[bool], path: tuple[Step, ...]) -> list[Any]:
        return _values(
            self.run(operation.bodies[0], ins, on, (*path, Step(operation, entered(operation, operation.bodies[0]))))
        )

    def _cond(self, operation: Operation, ins: list[Any], on: list[bool], path: tuple[Step, ...]) -> list[Any]:
        taken = operation.bodies[min(max(int(ins[0]), 0), len(operation.bodies) - 1)]
        return _values(self.run(taken, ins[1:], on[1:], (*path, Step(operation, entered(operation, taken)))))

    def _shard_map(self, operation: Operation, ins: list[Any], on: list[bool], path: tuple[Step, ...]) -> list[Any]:
        """Run a shard_map as a whole, since its shards communicate; the operation found inside is run again."""
        self.finish()
        depends = (any(on),) * len(on)
        outs: list[Any] = []
        for operands in (False, True):
            outs, firsts = jax.jit(FirstNonFinite(operation, operands=operands).of_shards, static_argnums=1)(
                ins, depends
            )
            numbers, at = (np.asarray(one).tolist() for one in firsts)
            if all(number == NONE for number in numbers):
                return outs
        shard = first_shard(operation, numbers, at, NONE)
        chain = path_to(operation.bodies[0], numbers[shard])
        made_of, made = numbers_of(operation, ins, shard, chain, at[shard])
        inside = [Step(operation, f"shard_map ({name_of(operation, shard)})")]
        for (_, one), (body, _) in itertools.pairwise(chain):
            inside.append(Step(one, entered(one, body, at[shard])))
        raise Found((*path, *inside), chain[-1][1], made_of, made)

    def _scan(self, operation: Operation, ins: list[Any], on: list[bool], path: tuple[Step, ...]) -> list[Any]:
        return self._loop(operation, ins, on, path)

    def _while(self, operation: Operation, ins: list[Any], on: list[bool], path: tuple[Step, ...]) -> list[Any]:
        return self._loop(operation, ins, on, path)

    def _loop(self, operation: Operation, ins: list[Any], on: list[bool], path: tuple[Step, ...]) -> list[Any]:
        """Run a loop as a whole; enter only the first iteration that makes a non-finite number."""
        self.finish()
        # The carry is passed on, so every value depends on all others.
        depends = (any(on),) * len(on)
        outs: list[Any] = []
        for operands in (False, True):
            outs, (number, at) = jax.jit(FirstNonFinite(operation, operands=operands), static_argnums=1)(ins, depends)
            if int(number) == NONE:
                return outs
            self._enter(operation, ins, depends[0], path, int(number), np.asarray(at).tolist())
        return outs

    def _enter(
        self, operation: Operation, ins: list[Any], depends: bool, path: tuple[Step, ...], number: int, at: list[int]
    ) -> None:
        inner = next(body for body in operation.bodies if path_to(body, number))
        args = arguments_of(operation, inner, ins, at[operation.depth])
        self.run(inner, args, [depends] * len(args), (*path, Step(operation, entered(operation, inner, at))))
        self.finish()


def entered(operation: Operation, inner: Subprogram, at: list[int] | tuple[()] = ()) -> str:
    """Return the words for an enclosing operation, such as "scan iteration 3"."""
    eqn = operation.eqn
    if operation.kind == "cond":
        return f"cond {inner.label}"
    if operation.kind in ("scan", "while"):
        words = " ".join(
            [operation.kind, *([inner.label] if inner.label else []), "iteration", str(at[operation.depth])]
        )
        return words + (", backwards" if eqn.params.get("reverse") else "")
    kind = {"remat2": "remat", "checkpoint": "remat", "pjit": "jit"}.get(eqn.primitive.name, eqn.primitive.name)
    called = eqn.params.get("name")
    return kind.removesuffix("_call") + (f"({called})" if called else "")


def _values(pairs: list[Any]) -> list[Any]:
    return [value for value, _ in pairs]


def last_uses(body: Subprogram) -> dict[int, list[Any]]:
    """Return index of an operation → variables whose last use it is, which can be freed after it."""
    last: dict[Any, int] = {}
    for at, operation in enumerate(body.operations):
        for atom in (*operation.eqn.invars, *operation.eqn.outvars):
            if not isinstance(atom, core.Literal):
                last[atom] = at
    for atom in body.jaxpr.outvars:
        if not isinstance(atom, core.Literal):
            last.pop(atom, None)
    uses: dict[int, list[Any]] = {}
    for var, at in last.items():
        uses.setdefault(at, []).append(var)
    return uses
