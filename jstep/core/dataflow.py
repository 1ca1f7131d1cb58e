"""Dataflow analysis of a program: groups of inputs and equations that share only scalars.

The inputs are given in groups. An equation belongs to the group whose inputs it depends on. An elementwise equation of
arrays of several groups merges these groups. Any other equation that combines several groups (a norm over all of them,
or matrices that are orthogonalized together) belongs to no group, and equations that depend on its result belong to a
later *stage*, which runs after the earlier stages of all groups.
"""

import dataclasses
from collections.abc import Container, Mapping
from typing import Any

import jax

from jstep.core.equations import (
    apply,
    called,
    compute,
    is_barrier,
    is_elementwise,
    is_scalar,
    value_of,
    variables,
    within,
)


class Groups:
    """Groups of inputs that can be merged (union-find).

    Args:
        of: Input (a variable) → its group.
    """

    def __init__(self, of: Mapping[Any, int]) -> None:
        self.of = dict(of)
        self._parent = {group: group for group in of.values()}

    def find(self, group: int) -> int:
        """Return the merged group that contains a group."""
        while self._parent[group] != group:
            group = self._parent[group]
        return group

    def join(self, groups: set[int]) -> None:
        """Merge some groups."""
        first, *others = sorted(map(self.find, groups))
        for other in others:
            self._parent[other] = first

    def inputs(self) -> dict[int, list[Any]]:
        """Return the inputs of each group."""
        found: dict[int, list[Any]] = {}
        for var, group in self.of.items():
            found.setdefault(self.find(group), []).append(var)
        return found


@dataclasses.dataclass(frozen=True)
class Flow:
    """Assignment of variables and equations of a program to groups.

    Attributes:
        owner: Variable → its group. Other variables depend on no group, or on a combination of several.
        stage: Variable → the number of combinations of several groups before it.
        equations: The group of each equation in order, or None.
        stages: The stage of each equation.
        mixed: The groups combined by the first equation that combines large arrays of several groups.
        mixed_at: The index of that equation.
    """

    owner: dict[Any, int]
    stage: dict[Any, int]
    equations: list[int | None]
    stages: list[int]
    mixed: set[int]
    mixed_at: int


def flow_of(closed: Any, groups: Groups) -> Flow:
    """Compute the flow of a program, and merge groups whose large arrays are combined."""
    while (flow := _pass(closed, groups)).mixed:
        groups.join(flow.mixed)
    return flow


def _pass(closed: Any, groups: Groups) -> Flow:
    owner = {var: groups.find(group) for var, group in groups.of.items()}
    stage: dict[Any, int] = {}
    equations: list[int | None] = []
    stages: list[int] = []
    mixed: set[int] = set()
    mixed_at = -1
    for i, eqn in enumerate(closed.jaxpr.eqns):
        given = variables(eqn.invars)
        large = [var for var in given if var in owner]
        found = {owner[var] for var in large}
        shared = max((stage.get(var, 0) for var in given if var not in owner), default=0)
        last = max((stage.get(var, 0) for var in large), default=0)
        combines = bool(large) and all(map(is_scalar, large)) and (len(found) > 1 or shared > 0)
        combines |= len(found) > 1 and not (_is_barrier_or_call(eqn) or is_elementwise(eqn, large[0].aval.shape))
        if len(found) > 1 and not (combines or mixed):
            mixed, mixed_at = found, i
        group = min(found) if found and not combines else None
        equations.append(group)
        stages.append(max(shared, last + combines))
        for var in eqn.outvars:
            stage[var] = stages[-1]
            if group is not None:
                owner[var] = group
    return Flow(owner, stage, equations, stages, mixed, mixed_at)


def needed(jaxpr: Any, among: list[int], made: list[Any], known: Container[Any]) -> list[Any]:
    """Return the equations, among those at some indices, that compute `made` from known variables; in order."""
    missing, found = {var for var in made if var not in known}, []
    for i in reversed(among):
        eqn = jaxpr.eqns[i]
        if not missing.isdisjoint(eqn.outvars):
            found.append(eqn)
            missing.update(var for var in variables(eqn.invars) if var not in known)
    return found[::-1]


def groups_computing(jaxpr: Any, flow: Flow) -> list[set[int | None]]:
    """Return for each equation the groups that compute it; None in the set if it is computed once for all groups.

    An equation of no group is computed in the one group that needs it if it is elementwise, which takes no memory.
    """
    needs: dict[Any, set[int | None]] = {var: {None} for var in variables(jaxpr.outvars)}
    users: list[set[int | None]] = []
    for eqn, group in zip(reversed(jaxpr.eqns), reversed(flow.equations), strict=True):
        if group is None:
            of: set[int | None] = set().union(*(needs.get(var, set()) for var in eqn.outvars))
            large = [var for var in eqn.outvars if not is_scalar(var)]
            is_light = bool(large) and is_elementwise(eqn, large[0].aval.shape)
            makes_it_large = is_light and all(map(is_scalar, variables(eqn.invars)))
            if not (makes_it_large or (is_light and len(of) == 1)):
                of = {None}
        else:
            of = {group}
        users.append(of)
        for var in variables(eqn.invars):
            needs.setdefault(var, set()).update(of)
    return users[::-1]


def split_barriers_and_calls(closed: Any, values: list[Any], of: Mapping[int, int]) -> Any:
    """Return the same program, with barriers and calls that combine groups split or inlined.

    Args:
        closed: The program.
        values: The arguments to trace it again with.
        of: Index of an argument → its group.
    """
    while True:
        groups = Groups({closed.jaxpr.invars[i]: group for i, group in of.items()})
        while (flow := _pass(closed, groups)).mixed:
            eqn = closed.jaxpr.eqns[flow.mixed_at]
            if _is_barrier_or_call(eqn):
                break
            groups.join(flow.mixed)
        if not flow.mixed:
            return closed
        closed = _without_barrier_or_call(closed, values, flow.mixed_at)


def _is_barrier_or_call(eqn: Any) -> bool:
    """Whether an equation combines variables only as a barrier or a call."""
    return is_barrier(eqn) or called(eqn) is not None


def _without_barrier_or_call(closed: Any, values: list[Any], at: int) -> Any:
    knot = closed.jaxpr.eqns[at]

    def by(jaxpr: Any, eqn: Any, given: list[Any]) -> list[Any]:
        if eqn is not knot:
            return apply(jaxpr, eqn, given)
        if is_barrier(eqn):
            return [jax.lax.optimization_barrier(value) for value in given]
        return within(called(eqn), given, apply)

    def run(*values: Any) -> list[Any]:
        env = dict(zip(closed.jaxpr.constvars, closed.consts, strict=True))
        env.update(zip(closed.jaxpr.invars, values, strict=True))
        compute(closed.jaxpr, closed.jaxpr.eqns, env, by)
        return [value_of(env, atom) for atom in closed.jaxpr.outvars]

    return jax.make_jaxpr(run)(*values)
