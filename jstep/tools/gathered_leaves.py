"""Warnings about all-gathers of slots and of parameters."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from jstep.core.text import size
from jstep.tools.compiled.exchanges import Exchange
from jstep.tools.compiled.shapes import Array
from jstep.tools.compiled.values import argument_of
from jstep.tools.table import listed

_BY_HAND = "shard_map"


def gathered_slots(moved: Sequence[Exchange], leaves: Mapping[int, tuple[str, Any]]) -> str:
    """Return a warning about gathered slots, or the empty string.

    Only slots themselves count: optimizers such as Muon and SOAP must gather values computed from slots.
    """
    sizes: dict[str, int] = {}
    for one, path, name, _ in _gathers(moved, leaves):
        if path.startswith("slots"):
            sizes[path] = sizes.get(path, 0) + one.times * dict(one.parts())[name]
    if not sizes:
        return ""
    return (
        f"slots are gathered ({listed(list(sizes))}; {size(sum(sizes.values()))} per step): if memory allows, "
        "replicate them with jstep.shard_state(state, mesh, param_specs, slot_axis=None) and specs that leave their "
        "parameters whole"
    )


def gathered_parameters(
    moved: Sequence[Exchange], leaves: Mapping[int, tuple[str, Any]], uses: Callable[[], Mapping[str, float]]
) -> str:
    """Return a warning about parameters that are gathered more often than they are used, or the empty string.

    This happens on TPUs if a loop runs over a split axis, such as the axis of stacked layers: each iteration gathers
    all layers to use one.
    """
    often: dict[str, float] = {}
    for one, path, name, leaf in _gathers(moved, leaves):
        shape = one.frame.computation.instructions[name].shape
        if path.startswith("params") and isinstance(shape, Array) and _BY_HAND not in one.instruction.op_name:
            share = math.prod(shape.dims) / max(1, math.prod(leaf.sharding.shard_shape(np.shape(leaf))))
            often[path] = often.get(path, 0.0) + one.times * share
    used = uses() if max(often.values(), default=0) > 1 else {}
    too_often = [path for path, count in often.items() if count > used.get(path, math.inf) + 0.5]
    worst = sorted(too_often, key=lambda path: -often[path])
    if not worst:
        return ""
    return (
        f"parameters are gathered more often than they are used ({listed(worst)}; {often[worst[0]]:.0f} times per "
        'step): split an axis that no loop runs over, such as jax.P(None, "data") for stacked layers'
    )


def _gathers(
    moved: Sequence[Exchange], leaves: Mapping[int, tuple[str, Any]]
) -> Iterator[tuple[Exchange, str, str, Any]]:
    """Iterate over the all-gathers of leaves: the exchange, the path of the leaf, the operand, and the leaf."""
    for one in moved:
        for name, _ in one.parts() if one.kind == "all-gather" else ():
            found = leaves.get(number) if (number := argument_of(one.frame, name)) is not None else None
            if found is not None and getattr(found[1], "sharding", None) is not None:
                yield one, found[0], name, found[1]
