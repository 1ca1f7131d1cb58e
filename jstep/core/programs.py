"""Traced programs: their operations, including nested ones, numbered in execution order, and their evaluation."""

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend import core
from jax.sharding import Sharding

from jstep.core.meshes import dims_of

_CALLED = ("jaxpr", "call_jaxpr", "fun_jaxpr", "call")
"""Parameters in which call operations store their program."""
_OPAQUE = {"pallas_call", "custom_linear_solve", "custom_root"}
"""Operations whose inner programs work on blocks of arrays or run in special ways: treated as opaque."""
_SHARD_MAP = ("jaxpr", "mesh", "in_specs", "out_specs", "check_vma")

_REMAT = {"remat", "remat2", "checkpoint"}
"""Names of the operation of `jax.checkpoint` in different versions of JAX."""

# fmt: off
MOVES = frozenset([
    "reshape", "transpose", "broadcast_in_dim", "squeeze", "expand_dims", "slice", "dynamic_slice",
    "dynamic_update_slice", "concatenate", "pad", "rev", "copy", "copy_p", "iota", "optimization_barrier", "split",
    "stop_gradient", "all_gather", "all_gather_invariant", "all_to_all", "ppermute",
])
# fmt: on
"""Operations that move data without arithmetic."""

COPYING = frozenset(["copy", "copy_p", "convert_element_type"])
"""Operations whose result is their operand, in the same dtype or another one."""

# fmt: off
HARMLESS = MOVES.union([
    "select_n", "neg", "abs", "sign", "max", "min", "clamp", "reduce_max", "reduce_min", "sort", "floor", "ceil",
    "round", "real", "imag", "conj", "logistic", "tanh", "sin", "cos", "erf", "cummax", "cummin", "argmax", "argmin",
    "is_finite", "sharding_constraint", "device_put", "name", "pvary", "mesh_cast", "reshard",
])
# fmt: on
"""Operations whose results are finite if their operands are finite."""

_PLACING = {"sharding_constraint", "shard_map", "reshard", "mesh_cast"}
"""Operations that place an array."""

# fmt: off
ELEMENTWISE = frozenset([
    "abs", "add", "and", "cbrt", "ceil", "clamp", "convert_element_type", "copy", "copy_p", "cos", "div", "eq", "erf",
    "erf_inv", "exp", "exp2", "expm1", "floor", "ge", "gt", "integer_pow", "is_finite", "le", "log", "log1p",
    "logistic", "lt", "max", "min", "mul", "ne", "neg", "nextafter", "not", "optimization_barrier", "or", "pow",
    "reduce_precision", "rem", "round", "rsqrt", "select_n", "sign", "sin", "sqrt", "square", "stop_gradient", "sub",
    "tanh", "xor",
])
# fmt: on
"""Operations that compute each element of the result from the corresponding elements, or from scalars."""


@dataclasses.dataclass(frozen=True)
class Subprogram:
    """A program, or the inner program of an operation.

    Attributes:
        jaxpr: The open jaxpr.
        consts: Its constants.
        operations: Its operations.
        label: Its role in the operation, such as "branch 1"; empty if it is the only inner program.
    """

    jaxpr: Any
    consts: tuple[Any, ...]
    operations: tuple["Operation", ...]
    label: str = ""


@dataclasses.dataclass(frozen=True)
class Operation:
    """An operation of a program.

    Attributes:
        number: Its number in program order; nested operations have higher numbers.
        eqn: The traced equation.
        jaxpr: The program that contains it.
        kind: "operation", "call", "scan", "while", "cond" or "shard_map".
        depth: The number of enclosing loops.
        bodies: The inner programs: condition and body of a while, the branches of a cond, one for others.
    """

    number: int
    eqn: Any
    jaxpr: Any
    kind: str
    depth: int
    bodies: tuple[Subprogram, ...] = ()


def name_stack(eqn: Any) -> str:
    """Return the name stack of an equation; empty if this version of JAX does not have the attribute."""
    return str(getattr(getattr(eqn, "source_info", None), "name_stack", ""))


def is_differentiated(eqn: Any) -> bool:
    """Whether an equation was traced for a gradient, forward or backward."""
    return "jvp" in name_stack(eqn)


def counts_of(params: Mapping[str, Any]) -> tuple[int, int]:
    """Return how many arguments of a scan are constants, and how many are carried; the others are sliced."""
    if "num_consts" in params:
        return params["num_consts"], params["num_carry"]
    consts, carried, _ = params["ft_in"].unpack()  # JAX 0.12: three trees
    return len(consts), len(carried)


def programs_in(eqn: Any) -> Iterator[core.Jaxpr]:
    """Iterate over all programs among the parameters of an equation, whether or not it calls them."""
    for value in eqn.params.values():
        for one in value if isinstance(value, tuple | list) else (value,):
            jaxpr = getattr(one, "jaxpr", one)
            if isinstance(jaxpr, core.Jaxpr):
                yield jaxpr


def all_equations(program: Any, within: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Iterate over the equations of a program and of all programs in them, each after the ones that enclose it."""
    for eqn in getattr(program, "jaxpr", program).eqns:
        yield *within, eqn
        for inner in programs_in(eqn):
            yield from all_equations(inner, (*within, eqn))


def body_of(closed: Any) -> Subprogram:
    """Convert a traced program."""
    return _subprogram(closed, 0, itertools.count())


def walk(body: Subprogram) -> Iterator[Operation]:
    """Yield all operations, including nested ones."""
    for operation in body.operations:
        yield operation
        for inner in operation.bodies:
            yield from walk(inner)


def path_to(body: Subprogram, number: int) -> list[tuple[Subprogram, Operation]]:
    """Return the operations from the outermost to the one with a number, each with the program that contains it."""
    for operation in body.operations:
        if operation.number == number:
            return [(body, operation)]
        for inner in operation.bodies:
            rest = path_to(inner, number)
            if rest:
                return [(body, operation), *rest]
    return []


def _subprogram(
    jaxpr: Any, depth: int, numbers: Iterator[int], label: str = "", *, on_shards: bool = False
) -> Subprogram:
    consts = tuple(getattr(jaxpr, "consts", ()))
    jaxpr = jaxpr.jaxpr if isinstance(jaxpr, core.ClosedJaxpr) else jaxpr
    return Subprogram(
        jaxpr, consts, tuple(_as_operation(eqn, jaxpr, depth, numbers, on_shards) for eqn in jaxpr.eqns), label
    )


def _as_operation(eqn: Any, jaxpr: Any, depth: int, numbers: Iterator[int], on_shards: bool) -> Operation:
    number, name, params = next(numbers), eqn.primitive.name, eqn.params

    def made(kind: str, *inside: tuple[Any, str]) -> Operation:
        below = depth + (kind in ("scan", "while"))
        shards = on_shards or kind == "shard_map"
        bodies = tuple(_subprogram(program, below, numbers, label, on_shards=shards) for program, label in inside)
        return Operation(number, eqn, jaxpr, kind, depth, bodies)

    if name == "scan":
        return made("scan", (params["jaxpr"], ""))
    if name == "while":
        return made("while", (params["cond_jaxpr"], "condition"), (params["body_jaxpr"], ""))
    if name == "cond":
        return made("cond", *((one, f"branch {i}") for i, one in enumerate(params["branches"])))
    if name == "shard_map":
        # A nested shard_map is treated as opaque, as is one of a JAX version with other parameters.
        known = not on_shards and all(key in params for key in _SHARD_MAP) and manual_axes(params)
        return made("shard_map", (params["jaxpr"], "")) if known else made("operation")
    called = next((params[key] for key in _CALLED if _is_program(params.get(key), eqn)), None)
    return made("operation") if called is None or name in _OPAQUE else made("call", (called, ""))


def manual_axes(params: Mapping[str, Any]) -> Any:
    """Return the axes that a shard_map makes manual; JAX 0.10.0 has another name for them."""
    return params.get("newly_manual_axes") or params.get("manual_axes")


def shard_counts(operation: Operation) -> dict[str, int]:
    """Return the mesh axes over which a shard_map runs a program per shard, and their sizes."""
    mesh, manual = operation.eqn.params["mesh"], manual_axes(operation.eqn.params)
    return {name: mesh.shape[name] for name in mesh.axis_names if name in manual}


def recomputes(body: Subprogram) -> bool:
    """Whether the program recomputes operations for the gradient, as with `jax.checkpoint`."""
    return any(
        operation.eqn.primitive.name in _REMAT and operation.eqn.params.get("differentiated")
        for operation in walk(body)
    )


def _is_program(value: Any, eqn: Any) -> bool:
    """Whether an operation calls this program, unlike the scalar program of a reduction."""
    jaxpr = value.jaxpr if isinstance(value, core.ClosedJaxpr) else value
    return (
        isinstance(jaxpr, core.Jaxpr)
        and _shapes(jaxpr.invars) == _shapes(eqn.invars)
        and _shapes(jaxpr.outvars) == _shapes(eqn.outvars)
        and (isinstance(value, core.ClosedJaxpr) or not jaxpr.constvars)
    )


def _shapes(atoms: Any) -> list[Any]:
    return [getattr(atom.aval, "shape", None) for atom in atoms]


def variables(atoms: Iterable[Any]) -> list[Any]:
    """The variables among operands or results; the others are literals."""
    return [atom for atom in atoms if not isinstance(atom, core.Literal)]


def apply(operation: Operation, values: Sequence[Any]) -> list[Any]:
    """Evaluate an operation on values, traced or not."""
    eqn = operation.eqn
    needed = {atom: value for atom, value in zip(eqn.invars, values, strict=True) if not isinstance(atom, core.Literal)}
    kept = [var for var in eqn.outvars if not isinstance(var, core.DropVar)]
    # Evaluated as a program with one operation, because the API to bind primitives changes between versions of JAX.
    alone = operation.jaxpr.replace(constvars=[], invars=list(needed), outvars=kept, eqns=[eqn], effects=eqn.effects)
    results = dict(zip(kept, core.jaxpr_as_fun(core.ClosedJaxpr(alone, ()))(*needed.values()), strict=True))
    return [results.get(var) for var in eqn.outvars]


def evaluate(
    body: Subprogram,
    values: Sequence[Any],
    by: Callable[[Operation, list[Any]], Sequence[Any]] = apply,
    constant: Callable[[Any], Any] = lambda value: value,
) -> list[Any]:
    """Evaluate a program on values, traced or not, or on whatever else is known about its arguments.

    Args:
        body: The program.
        values: Its arguments.
        by: Evaluates an operation.
        constant: Maps a constant to what `by` gets for it.
    """
    consts = map(constant, body.consts)
    env = dict(zip([*body.jaxpr.constvars, *body.jaxpr.invars], [*consts, *values], strict=True))

    def read(atom: Any) -> Any:
        return constant(atom.val) if isinstance(atom, core.Literal) else env[atom]

    for operation in body.operations:
        results = by(operation, [read(atom) for atom in operation.eqn.invars])
        env.update(zip(operation.eqn.outvars, results, strict=True))
    return [read(atom) for atom in body.jaxpr.outvars]


def is_elementwise(body: Subprogram, shape: tuple[int, ...]) -> bool:
    """Whether a program computes arrays of this shape, element by element, from arrays of this shape and scalars."""
    atoms = [*body.jaxpr.constvars, *body.jaxpr.invars]
    fits = all(getattr(atom.aval, "shape", None) in ((), shape) for atom in atoms)
    return fits and all(is_elementwise_operation(operation, shape) for operation in body.operations)


def is_elementwise_operation(operation: Operation, shape: tuple[int, ...]) -> bool:
    """Whether an operation of a program computes arrays of this shape from arrays of this shape and scalars."""

    def fits(atom: Any) -> bool:
        return getattr(atom.aval, "shape", None) in ((), shape)

    if operation.kind == "call":
        return is_elementwise(operation.bodies[0], shape)
    name, atoms = operation.eqn.primitive.name, (*operation.eqn.invars, *operation.eqn.outvars)
    if name == "broadcast_in_dim":
        return fits(atoms[-1]) and atoms[0].aval.shape == ()
    return name in ELEMENTWISE and all(map(fits, atoms))


def on_slices(body: Subprogram, values: Sequence[Any], length: int) -> list[Any]:
    """Evaluate an elementwise program on slices of its arrays, of a length along the first axis."""

    def on_slice(operation: Operation, values: list[Any]) -> list[Any]:
        if operation.kind == "call":
            return on_slices(operation.bodies[0], values, length)
        return on_part(operation, values, (length, *operation.eqn.outvars[0].aval.shape[1:]))

    return evaluate(body, values, on_slice)


def on_part(operation: Operation, values: list[Any], shape: tuple[int, ...]) -> list[Any]:
    """Evaluate an elementwise operation, other than a call, on parts of its arrays, of a shape."""
    eqn = operation.eqn
    if eqn.primitive.name == "broadcast_in_dim" and eqn.params["shape"]:
        eqn = eqn.replace(params={**eqn.params, "shape": shape})
    return apply(dataclasses.replace(operation, eqn=eqn), values)


def without_calls(fn: Callable[..., Any], platform: str, *args: Any) -> tuple[Subprogram, Any]:
    """Trace a function for one platform, and return its program without calls, and the shapes of its results.

    Args:
        fn: The function, of arrays.
        platform: The platform, which decides what `jax.lax.platform_dependent` computes.
        *args: The arrays, or their shapes.
    """

    def inside(operation: Operation, values: list[Any]) -> Sequence[Any]:
        if operation.eqn.primitive.name == "platform_index":
            known = [names is None or platform in names for names in operation.eqn.params["platforms"]]
            return [np.int32(known.index(True))]
        if operation.kind == "cond" and isinstance(values[0], np.generic):
            return evaluate(operation.bodies[int(values[0])], values[1:], inside)
        if operation.kind == "call":
            return evaluate(operation.bodies[0], values, inside)
        return apply(operation, values)

    traced, shapes = jax.make_jaxpr(fn, return_shape=True)(*args)
    return body_of(jax.make_jaxpr(lambda *values: evaluate(body_of(traced), values, inside))(*args)), shapes


def is_annotated(traced: Any) -> bool:
    """Whether the loss of a step places its activations: by constraints, in `shard_map`, or on Explicit axes.

    Args:
        traced: The jaxpr of the step.
    """
    return any(
        (eqns[-1].primitive.name in _PLACING or any(map(_is_explicit, eqns[-1].outvars)))
        and any(map(is_differentiated, eqns))
        for eqns in all_equations(traced)
    )


def shards_arrays(traced: Any) -> bool:
    """Whether a step shards any array that it computes: by a constraint, in `shard_map`, or on Explicit axes.

    Args:
        traced: The jaxpr of the step.
    """
    return any(
        eqn.primitive.name == "shard_map"
        or (eqn.primitive.name in _PLACING and any(map(_splits, eqn.params.values())))
        or any(map(_is_explicit, eqn.outvars))
        for *_, eqn in all_equations(traced)
    )


def _splits(value: Any) -> bool:
    return isinstance(value, Sharding) and not value.is_fully_replicated


def _is_explicit(var: Any) -> bool:
    """Whether the type of an array has a sharding, as only types on Explicit axes do."""
    spec = getattr(getattr(var.aval, "sharding", None), "spec", None)
    return spec is not None and any(axis is not None for axis in dims_of(spec))
