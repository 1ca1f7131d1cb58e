"""Computation with arrays in host memory, a few of them on the devices at a time.

A function of many arrays in host memory, such as the update of a state from its slots, is split into groups that share
only scalars, usually one for each parameter. Each group becomes a loop that loads its inputs and writes back its
results. Otherwise XLA would load all arrays at once: it moves transfers across barriers, but not out of loops. The loop
of an elementwise group runs over slices of its arrays.
"""

from collections.abc import Callable
from typing import Any, TypeAlias

import jax

from jstep.core.dataflow import Flow, Groups, flow_of, groups_computing, needed, split_barriers_and_calls
from jstep.core.equations import Env, compute, is_variable, size_of, traced, value_of, variables
from jstep.core.host_loops import Loop, Placed, has_same_type, run_loop
from jstep.core.placement import on_devices, to_host

Wanted: TypeAlias = dict[int, dict[tuple[Any, int | None], int]]
"""Group → (variable to compute, index of the array that it replaces) → the stage at which it is computed."""

PARTS = 16
"""At most 1/PARTS of the offloaded bytes should be on the devices at once, loaded or to be written back."""


def compute_offloaded(
    fn: Callable[[list[Any]], Any], placed: Placed, replaced: Callable[[Any], list[int | None]]
) -> Any:
    """Compute `fn(placed.leaves)`; results that replace arrays in host memory are in host memory.

    Args:
        fn: A function of arrays on devices.
        placed: The arguments and their placement.
        replaced: Maps the result to the index of the array that each of its leaves replaces, or None.
    """
    here = jax.eval_shape(on_devices, placed.leaves)
    program = traced(lambda *arrays: fn(list(arrays)), *here)
    of = replaced(program.whole(list(program.indices)))
    closed = split_barriers_and_calls(program.closed, here, placed.groups)
    return program.whole(_computed(closed, placed, [of[i] for i in program.indices]))


def _computed(closed: Any, placed: Placed, of: list[int | None]) -> list[Any]:
    jaxpr, groups, at_once = closed.jaxpr, *_packed_groups(closed, placed)
    flow = flow_of(closed, groups)
    bytes_of = _bytes_of(groups)
    env: Env = dict(zip(jaxpr.constvars, closed.consts, strict=True))
    env.update(zip(jaxpr.invars, placed.leaves, strict=True))
    sent: Env = {}
    wanted = _wanted(jaxpr, flow, of, placed)
    users = groups_computing(jaxpr, flow)
    members = _members(users, wanted)
    for stage in range(max([0, *flow.stages]) + 1):
        shared = [i for i, of_eqn in enumerate(users) if None in of_eqn and flow.stages[i] == stage]
        compute(jaxpr, [jaxpr.eqns[i] for i in shared], env)
        for group, found in wanted.items():
            due = [one for one, when in found.items() if when == stage]
            if not due:
                continue
            eqns = needed(jaxpr, members[group], [var for var, _ in due], env)
            parts = 0 if group in at_once else -(-bytes_of[group] * PARTS // sum(bytes_of.values()))
            results = run_loop(Loop(jaxpr, eqns, due, parts), env, placed)
            for (var, place), value in zip(due, results, strict=True):
                (sent if place in placed.groups else env)[var] = value
    return [_result(env, sent, *one, placed) for one in zip(jaxpr.outvars, of, strict=True)]


def _packed_groups(closed: Any, placed: Placed) -> tuple[Groups, set[int]]:
    """Return the groups of a program, with small groups merged, and the groups too small for a loop."""
    groups = Groups({closed.jaxpr.invars[i]: group for i, group in placed.groups.items()})
    flow_of(closed, groups)
    bytes_of = _bytes_of(groups)
    limit = sum(bytes_of.values()) / PARTS
    at_once: set[int] = set()
    for group in sorted(bytes_of, key=lambda group: bytes_of[group]):
        if sum(bytes_of[one] for one in at_once) + bytes_of[group] > limit:
            break
        at_once.add(group)
    bundle: set[int] = set()
    for group, size in bytes_of.items():
        if group in at_once or size > limit:
            continue
        if bundle and sum(bytes_of[one] for one in bundle) + size > limit:
            bundle = set()
        bundle.add(group)
        groups.join(bundle)
    return groups, at_once


def _bytes_of(groups: Groups) -> dict[int, int]:
    return {group: sum(map(size_of, found)) for group, found in groups.inputs().items()}


def _wanted(jaxpr: Any, flow: Flow, of: list[int | None], placed: Placed) -> Wanted:
    """Return the variables that each group must compute, and their stages: shared ones first, the others at the end."""
    found: Wanted = {}
    for eqn, group in zip(jaxpr.eqns, flow.equations, strict=True):
        for var in variables(eqn.invars) if group is None else ():
            if var in flow.owner:
                found.setdefault(flow.owner[var], {})[var, None] = flow.stage.get(var, 0)
    results: dict[int, list[tuple[Any, int | None]]] = {}
    for atom, place in zip(jaxpr.outvars, of, strict=True):
        stays = atom in jaxpr.invars and place in placed.groups
        if is_variable(atom) and atom in flow.owner and not stays:
            takes_place = place is not None and has_same_type(atom, placed.leaves[place])
            results.setdefault(flow.owner[atom], []).append((atom, place if takes_place else None))
    for group, ones in results.items():
        own = found.setdefault(group, {})
        last = max([*own.values(), *(flow.stage.get(var, 0) for var, _ in ones)])
        for one in ones:
            own.setdefault(one, last)
    return found


def _members(users: list[set[int | None]], wanted: Wanted) -> dict[int, list[int]]:
    members: dict[int, list[int]] = {group: [] for group in wanted}
    for i, of_eqn in enumerate(users):
        for group in of_eqn:
            if group in members:
                members[group].append(i)
    return members


def _result(env: Env, sent: Env, atom: Any, place: int | None, placed: Placed) -> Any:
    value = value_of(env, atom) if atom not in sent else sent[atom]
    return to_host(value) if place in placed.groups else on_devices(value)
