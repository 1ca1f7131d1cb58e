"""Evaluation of the arguments of one iteration of a loop."""

from typing import Any

import jax
from jax import lax

from jstep.core.operations import Operation, Subprogram, apply, read
from jstep.core.scans import counts_of


def arguments_of(operation: Operation, inner: Subprogram, values: list[Any], iteration: int) -> list[Any]:
    """Return the arguments of the program inside a loop at an iteration, by running the loop up to it.

    Args:
        operation: The loop.
        inner: The program: that of the scan, or the condition or the body of the while.
        values: The operands of the loop.
        iteration: The index of the iteration among the results; a reversed scan starts with the last.
    """
    params, body = operation.eqn.params, operation.bodies[-1]
    if operation.kind == "scan":
        return _scanned(operation, values, iteration)
    of_condition, of_body = params["cond_nconsts"], params["body_nconsts"]
    consts = values[of_condition : of_condition + of_body]

    def step(_: Any, held: Any) -> list[Any]:
        return evaluated(body, [*consts, *held])

    held = jax.jit(lambda start: lax.fori_loop(0, iteration, step, start))(values[of_condition + of_body :])
    return [*(values[:of_condition] if inner is operation.bodies[0] else consts), *held]


def _scanned(operation: Operation, values: list[Any], iteration: int) -> list[Any]:
    params, body = operation.eqn.params, operation.bodies[0]
    (split, carry), length, reverse = counts_of(params), params["length"], params["reverse"]
    consts, start, xs = values[:split], values[split : split + carry], values[split + carry :]
    before = [x[iteration + 1 :] if reverse else x[:iteration] for x in xs]

    def step(held: Any, x: Any) -> Any:
        return evaluated(body, [*consts, *held, *x])[:carry], None

    made = length - 1 - iteration if reverse else iteration
    held, _ = jax.jit(lambda start, xs: lax.scan(step, start, xs, length=made, reverse=reverse))(start, before)
    return [*consts, *held, *(x[iteration] for x in xs)]


def evaluated(body: Subprogram, args: list[Any]) -> list[Any]:
    """Evaluate a program and return its results."""
    env = dict(zip([*body.jaxpr.constvars, *body.jaxpr.invars], [*body.consts, *args], strict=True))
    for operation in body.operations:
        outs = apply(operation, [read(env, atom) for atom in operation.eqn.invars])
        env.update(zip(operation.eqn.outvars, outs, strict=True))
    return [read(env, atom) for atom in body.jaxpr.outvars]
