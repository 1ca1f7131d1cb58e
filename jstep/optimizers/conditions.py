"""Conditions of updates: guards and `update_every` report them; averages, projections and `compact` follow them."""

import contextlib
import contextvars
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jstep.core.exceptions import setting
from jstep.core.trees import Array, Params


class Condition(NamedTuple):
    """A condition of the updates of some parameters.

    Attributes:
        params: The parameters: a tree with None in place of the others.
        holds: Whether they were updated: if not, their updates are zero.
        is_guard: Whether the update is otherwise skipped, by a guard; not if it was not due.
    """

    params: Params
    holds: Array
    is_guard: bool


Conditions = list[Condition]

CONDITIONS: contextvars.ContextVar[tuple[Conditions, ...]] = contextvars.ContextVar("jstep_conditions", default=())
"""Where the conditions of the updates that are made are collected: by each wrapper around them that asks for them."""


def observing_conditions(into: Conditions) -> contextlib.AbstractContextManager[Any]:
    """Collect the conditions of the updates made in a context, for those outside as well."""
    return setting(CONDITIONS, (*CONDITIONS.get(), into))


def report_condition(condition: Condition) -> None:
    """Report that some parameters are updated only if a condition holds."""
    for collected in CONDITIONS.get():
        collected.append(condition)


def conditions_of(params: Params, collected: Conditions) -> list[Array | None]:
    """The condition under which each leaf was updated, in order; None if it was in any case.

    Args:
        params: The parameters.
        collected: Conditions of some of them.
    """
    found: dict[Any, Array] = {}
    for part, condition, _ in collected:
        for keys, _ in jax.tree_util.tree_leaves_with_path(part):
            found[keys] = found[keys] & condition if keys in found else condition
    return [found.get(keys) for keys, _ in jax.tree_util.tree_leaves_with_path(params)]


def unless_skipped_by_guards(collected: Conditions, gradients: list[Any], params: Params) -> Array | bool:
    """Whether guards let an update through, for one leaf with a gradient at least.

    Args:
        collected: The conditions of the update.
        gradients: The gradients, in order; None for a leaf without one.
        params: The parameters.
    """
    conditions = conditions_of(params, [one for one in collected if one.is_guard])
    mine = [one for one, gradient in zip(conditions, gradients, strict=True) if gradient is not None]
    known = [one for one in mine if one is not None]
    return functools.reduce(jnp.logical_or, known) if known and len(known) == len(mine) else True


ADVANCES: contextvars.ContextVar[bool] = contextvars.ContextVar("jstep_advances", default=True)
"""Whether the update that is being computed advances the global step."""
