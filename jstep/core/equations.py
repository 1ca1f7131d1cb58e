"""Evaluation of traced functions, equation by equation."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import jax
from jax.extend import core

# fmt: off
ELEMENTWISE = frozenset([
    "abs", "add", "and", "cbrt", "ceil", "clamp", "convert_element_type", "copy", "copy_p", "cos", "div", "eq", "erf",
    "erf_inv", "exp", "exp2", "expm1", "floor", "ge", "gt", "integer_pow", "is_finite", "le", "log", "log1p",
    "logistic", "lt", "max", "min", "mul", "ne", "neg", "nextafter", "not", "or", "pow", "reduce_precision", "rem",
    "round", "rsqrt", "select_n", "sign", "sin", "sqrt", "square", "stop_gradient", "sub", "tanh", "xor",
])
# fmt: on
"""JAX primitives that compute each element of the result from the corresponding elements, or from scalars."""

Env = dict[Any, Any]


def value_of(env: Mapping[Any, Any], atom: Any) -> Any:
    """Return the value of a variable or a literal."""
    return atom.val if isinstance(atom, core.Literal) else env[atom]


def is_variable(atom: Any) -> bool:
    """Whether an operand is a variable and not a literal."""
    return not isinstance(atom, core.Literal)


def variables(atoms: Iterable[Any]) -> list[Any]:
    """Return the operands that are not literals."""
    return [atom for atom in atoms if not isinstance(atom, core.Literal)]


def called(eqn: Any) -> Any:
    """Return the program that a call equation, such as `jax.jit`'s, calls; None for any other equation."""
    inner = eqn.params.get("jaxpr")
    is_call = eqn.primitive.name in ("jit", "pjit") and hasattr(inner, "consts")
    return inner if is_call else None


def apply(jaxpr: Any, eqn: Any, values: list[Any]) -> list[Any]:
    """Evaluate an equation of a program for some values of its operands."""
    needed = {atom: value for atom, value in zip(eqn.invars, values, strict=True) if not isinstance(atom, core.Literal)}
    kept = [var for var in eqn.outvars if not isinstance(var, core.DropVar)]
    # Evaluated as a program with one equation, because the API to bind primitives changes between versions of JAX.
    alone = jaxpr.replace(constvars=[], invars=list(needed), outvars=kept, eqns=[eqn], effects=eqn.effects)
    results = dict(zip(kept, core.jaxpr_as_fun(core.ClosedJaxpr(alone, ()))(*needed.values()), strict=True))
    return [results.get(var) for var in eqn.outvars]


def compute(jaxpr: Any, eqns: Iterable[Any], env: Env, by: Callable[[Any, Any, list[Any]], list[Any]] = apply) -> None:
    """Evaluate equations of a program in order, and add their results to `env`.

    Args:
        jaxpr: The program.
        eqns: Some of its equations.
        env: The values of the variables that they need.
        by: Evaluates one equation: `by(jaxpr, eqn, values)`.
    """
    for eqn in eqns:
        results = by(jaxpr, eqn, [value_of(env, atom) for atom in eqn.invars])
        env.update(zip(eqn.outvars, results, strict=True))


def is_barrier(eqn: Any) -> bool:
    """Whether an equation is only an optimization barrier."""
    return bool(eqn.primitive.name == "optimization_barrier")


def within(closed: Any, values: list[Any], by: Callable[[Any, Any, list[Any]], list[Any]]) -> list[Any]:
    """Evaluate a whole program, each equation with `by`."""
    env = dict(zip(closed.jaxpr.constvars, closed.consts, strict=True))
    env.update(zip(closed.jaxpr.invars, values, strict=True))
    compute(closed.jaxpr, closed.jaxpr.eqns, env, by)
    return [value_of(env, atom) for atom in closed.jaxpr.outvars]


def is_elementwise(eqn: Any, shape: tuple[int, ...]) -> bool:
    """Whether an equation is elementwise, from arrays of this shape and scalars to arrays of this shape."""
    inner = called(eqn)
    if inner is not None:
        return all(map(_is_scalar, inner.consts)) and all(is_elementwise(one, shape) for one in inner.jaxpr.eqns)
    atoms = [atom.aval for atom in (*eqn.invars, *eqn.outvars)]
    if not all(_is_scalar(aval) or aval.shape == shape for aval in atoms):
        return False
    name = eqn.primitive.name
    if name == "broadcast_in_dim":
        return bool(_is_scalar(atoms[0]))
    return name in ELEMENTWISE or is_barrier(eqn)


def on_slices(jaxpr: Any, eqn: Any, values: list[Any], length: int) -> list[Any]:
    """Evaluate an elementwise equation for slices of `length` along the first axis of its arrays."""
    inner = called(eqn)
    if inner is not None:
        return within(inner, values, lambda jaxpr, eqn, values: on_slices(jaxpr, eqn, values, length))
    if eqn.primitive.name == "broadcast_in_dim" and eqn.params["shape"]:
        eqn = eqn.replace(params={**eqn.params, "shape": (length, *eqn.params["shape"][1:])})
    return apply(jaxpr, eqn, values)


def _is_scalar(x: Any) -> bool:
    return getattr(x, "shape", None) == ()


def is_scalar(atom: Any) -> bool:
    """Whether a variable has one element."""
    return getattr(atom.aval, "size", 0) == 1


def size_of(atom: Any) -> int:
    """Return the size of a variable in bytes, over all devices."""
    dtype = atom.aval.dtype
    return int(atom.aval.size) * (dtype.itemsize if hasattr(dtype, "itemsize") else 8)


class Traced(NamedTuple):
    """A traced function.

    Attributes:
        closed: The program; its results are the arrays among the leaves of the function's result.
        indices: The indices of these arrays among all leaves.
        whole: Maps the values of the program's results to the function's result.
    """

    closed: Any
    indices: list[int]
    whole: Callable[[list[Any]], Any]


def traced(fn: Callable[..., Any], *args: Any) -> Traced:
    """Trace a function. Closed-over arrays are constants of the program."""
    found: list[Any] = []

    def arrays_of(*args: Any) -> list[Any]:
        leaves, treedef = jax.tree.flatten(fn(*args))
        indices = [i for i, leaf in enumerate(leaves) if isinstance(leaf, jax.Array)]
        # No tracer outlives its trace.
        others = [None if isinstance(leaf, jax.Array) else leaf for leaf in leaves]
        found.append((treedef, indices, others))
        return [leaves[i] for i in indices]

    closed = jax.make_jaxpr(arrays_of)(*args)
    treedef, indices, others = found[-1]

    def whole(values: list[Any]) -> Any:
        leaves = list(others)
        for i, value in zip(indices, values, strict=True):
            leaves[i] = value
        return treedef.unflatten(leaves)

    return Traced(closed, indices, whole)
