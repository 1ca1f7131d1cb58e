"""The operations of a traced program, numbered in the order in which they run, with those inside of them."""

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any

from jax.extend import core

_CALLED = ("jaxpr", "call_jaxpr", "fun_jaxpr")
"""Where operations that merely call something keep it."""
_OPAQUE = {"shard_map", "pallas_call", "custom_linear_solve", "custom_root"}
"""They hold programs, too, but of pieces of arrays, or to be run in ways of their own: seen from outside."""

MOVES = frozenset(
    [
        "reshape",
        "transpose",
        "broadcast_in_dim",
        "squeeze",
        "expand_dims",
        "slice",
        "dynamic_slice",
        "dynamic_update_slice",
        "concatenate",
        "pad",
        "rev",
        "copy",
        "copy_p",
        "iota",
        "optimization_barrier",
        "split",
        "stop_gradient",
    ]
)
"""They move numbers and compute none; what is computed with is as it was."""

HARMLESS = MOVES | frozenset(
    [
        "select_n",
        "neg",
        "abs",
        "sign",
        "max",
        "min",
        "clamp",
        "reduce_max",
        "reduce_min",
        "sort",
        "floor",
        "ceil",
        "round",
        "real",
        "imag",
        "conj",
        "logistic",
        "tanh",
        "sin",
        "cos",
        "erf",
        "cummax",
        "cummin",
        "argmax",
        "argmin",
        "is_finite",
        "sharding_constraint",
        "device_put",
        "name",
        "pvary",
        "mesh_cast",
        "reshard",
    ]
)
"""Operations whose results are finite where their operands are."""


@dataclasses.dataclass(frozen=True)
class Body:
    """A program, or one inside an operation.

    Attributes:
        jaxpr: What JAX has traced, open.
        consts: Its constants.
        sites: Its operations.
        label: What it is in its operation, such as "branch 1"; empty where there is one alone.
    """

    jaxpr: Any
    consts: tuple[Any, ...]
    sites: tuple["Site", ...]
    label: str = ""


@dataclasses.dataclass(frozen=True)
class Site:
    """An operation at its place.

    Attributes:
        number: Its own, in the order of the program; those inside it have higher ones.
        eqn: What JAX has traced.
        jaxpr: The program it is in.
        kind: "operation", "call", "scan", "while" or "cond".
        depth: How many loops it is in.
        bodies: What is inside: of a call and a scan one, of a while its condition and its body, of a cond its branches.
    """

    number: int
    eqn: Any
    jaxpr: Any
    kind: str
    depth: int
    bodies: tuple[Body, ...] = ()


def body_of(closed: Any) -> Body:
    """The whole of a traced program."""
    return _body(closed, 0, itertools.count())


def walk(body: Body) -> Iterator[Site]:
    """All operations, also those inside others."""
    for site in body.sites:
        yield site
        for inner in site.bodies:
            yield from walk(inner)


def path_to(body: Body, number: int) -> list[tuple[Body, Site]]:
    """The operations from the outermost in, to one; each with the program it is in."""
    for site in body.sites:
        if site.number == number:
            return [(body, site)]
        for inner in site.bodies:
            rest = path_to(inner, number)
            if rest:
                return [(body, site), *rest]
    return []


def _body(jaxpr: Any, depth: int, numbers: Iterator[int], label: str = "") -> Body:
    consts = tuple(getattr(jaxpr, "consts", ()))
    jaxpr = jaxpr.jaxpr if isinstance(jaxpr, core.ClosedJaxpr) else jaxpr
    return Body(jaxpr, consts, tuple(_site(eqn, jaxpr, depth, numbers) for eqn in jaxpr.eqns), label)


def _site(eqn: Any, jaxpr: Any, depth: int, numbers: Iterator[int]) -> Site:
    number, name, params = next(numbers), eqn.primitive.name, eqn.params
    if name == "scan":
        return Site(number, eqn, jaxpr, "scan", depth, (_body(params["jaxpr"], depth + 1, numbers),))
    if name == "while":
        inner = [
            _body(params[key], depth + 1, numbers, label)
            for key, label in (("cond_jaxpr", "condition"), ("body_jaxpr", ""))
        ]
        return Site(number, eqn, jaxpr, "while", depth, tuple(inner))
    if name == "cond":
        branches = [_body(one, depth, numbers, f"branch {i}") for i, one in enumerate(params["branches"])]
        return Site(number, eqn, jaxpr, "cond", depth, tuple(branches))
    called = next((params[key] for key in _CALLED if _is_program(params.get(key), eqn)), None)
    if called is None or name in _OPAQUE:
        return Site(number, eqn, jaxpr, "operation", depth)
    return Site(number, eqn, jaxpr, "call", depth, (_body(called, depth, numbers),))


def _is_program(value: Any, eqn: Any) -> bool:
    jaxpr = value.jaxpr if isinstance(value, core.ClosedJaxpr) else value
    return (
        isinstance(jaxpr, core.Jaxpr)
        and len(jaxpr.invars) == len(eqn.invars)
        and len(jaxpr.outvars) == len(eqn.outvars)
        and (isinstance(value, core.ClosedJaxpr) or not jaxpr.constvars)
    )


def apply(site: Site, values: list[Any]) -> list[Any]:
    """Makes an operation as it stands, on values, traced or not."""
    eqn = site.eqn
    needed = {atom: value for atom, value in zip(eqn.invars, values, strict=True) if not isinstance(atom, core.Literal)}
    kept = [var for var in eqn.outvars if not isinstance(var, core.DropVar)]
    # A program of this operation alone: how operations are bound changes from version to version of JAX.
    alone = site.jaxpr.replace(constvars=[], invars=list(needed), outvars=kept, eqns=[eqn], effects=eqn.effects)
    results = dict(zip(kept, core.jaxpr_as_fun(core.ClosedJaxpr(alone, ()))(*needed.values()), strict=True))
    return [results.get(var) for var in eqn.outvars]


def read(env: dict[Any, Any], atom: Any) -> Any:
    """The value of a variable or a literal."""
    return atom.val if isinstance(atom, core.Literal) else env[atom]
