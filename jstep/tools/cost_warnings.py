"""Warnings about likely mistakes in a compiled step, each with its remedy."""

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from jstep.core import trees
from jstep.core.block_codes import blocks_between
from jstep.core.checks import listed, size
from jstep.core.meshes import dims_of, mesh_axes_of, parts_along
from jstep.core.placement import sharding_of
from jstep.core.programs import is_annotated
from jstep.core.slot_roles import roles_in
from jstep.state.sharding import mesh_without_batch
from jstep.tools.argument_uses import uses_of
from jstep.tools.collectives import Exchange, exchanges_of
from jstep.tools.compiled.program import Array, Instruction, Program
from jstep.tools.compiled.values import argument_of, instructions_of
from jstep.tools.device_memory import bytes_of

_BY_HAND = re.compile(r"\bshard_map\b")
"""The mark in the names of operations of a `shard_map`, and of those that place its arguments as its specs request."""
_PRODUCTS = {"dot", "convolution"}
_OF_THE_LOSS = "jvp("
"""The mark in the names of operations traced for gradients, forward and backward."""
_ALIASED = re.compile(r"\{[\d,\s]*\}:\s*\((\d+),")
"""An entry of `input_output_alias` in the header of a program, with the number of the argument."""


def warnings_of(program: Program, state: Any, args: Sequence[Any], traced: Any, result: Any = None) -> list[str]:
    """Return a warning for each costly problem of a compiled step, with its remedy.

    - Activations are resharded: XLA moves them to the shards of the parameters instead of gathering the parameters, so
      that temporaries grow with the number of devices. A loss that requests this (`shard_map`, sharding constraints)
      gives no warning.
    - A part of the state is not donated although the step returns a new one.
    - Slots are gathered.
    - Blocks of slots that `compact` stores are split between devices.
    - Parameters are gathered more often than the step uses them. Gathers that a `shard_map` requests, of slots or
      parameters, give no warning.

    Args:
        program: The compiled step.
        state: The state, as arrays or shapes with shardings.
        args: The batch, as arrays or shapes with shardings.
        traced: The jaxpr of the step.
        result: The shapes of the results of the step; None if unknown.
    """
    leaves = _leaves(program, state)
    moved = exchanges_of(program)
    found = [
        _resharded(program, moved, leaves, args, traced),
        _undonated(program, leaves, state, result),
        _gathered_slots(moved, leaves),
        _gathered_parameters(moved, leaves, lambda: _uses(state, args, traced)),
        _split_blocks(state),
    ]
    return [sentence for sentence in found if sentence]


def warnings_without_a_program(state: Any, args: Sequence[Any], traced: Any) -> list[str]:
    """Return likely reasons why a step does not fit, in which case there is no compiled program.

    Args:
        state: The state, as arrays or shapes with shardings.
        args: The batch, as arrays or shapes with shardings.
        traced: The jaxpr of the step.
    """
    axis = _batch_axis(args)
    leaves = jax.tree.leaves(getattr(state, "params", None))
    if axis is None or is_annotated(traced) or not any(_is_split(leaf, axis) for leaf in leaves):
        return []
    return [
        "parameters are split over the axis of the batch, and the loss does not place its activations. If they are "
        f"resharded, temporaries grow with the number of devices: {_remedy(axis)}"
    ]


def unplaced_batch(state: Any, args: Sequence[Any]) -> list[str]:
    """Return a warning if the state is on a mesh of several devices and no array of the batch is on it."""
    mesh = mesh_without_batch(state, args)
    if mesh is None:
        return []
    return [
        f"the batch is not on the mesh of the state, so each of its {mesh.size} devices gets all of it, as in train "
        "without batch_sharding. With batch_sharding, train runs another program; to measure that one, place the "
        "batch in the same way, such as jstep.cost(train_step, state, jstep.shard_batch(batch, mesh))"
    ]


def _leaves(program: Program, state: Any) -> dict[int, tuple[str, Any]]:
    """Return argument number → path and leaf of the state, from the paths in the metadata of the parameters."""
    paths = {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_flatten_with_path(state)[0]}
    found: dict[int, tuple[str, Any]] = {}
    entry = program.computations.get(program.entry)
    for one in entry.instructions.values() if entry else ():
        named = re.fullmatch(r"\w+(\W.*)", one.op_name) if one.opcode == "parameter" else None
        if named and named[1] in paths and one.argument.isdigit():
            found[int(one.argument)] = (named[1].removeprefix("."), paths[named[1]])
    return found


def _uses(state: Any, args: Sequence[Any], traced: Any) -> dict[str, float]:
    """Return path of a leaf → how often the step uses it; empty if the jaxpr has other arguments."""
    paths = [path for path, _ in jax.tree_util.tree_flatten_with_path(state)[0]]
    counted = uses_of(traced)
    if len(counted) != len(paths) + len(jax.tree.leaves(args)):
        return {}
    return {jax.tree_util.keystr(path).removeprefix("."): count for path, count in zip(paths, counted, strict=False)}


def _resharded(
    program: Program, moved: Sequence[Exchange], leaves: Mapping[int, tuple[str, Any]], args: Sequence[Any], traced: Any
) -> str:
    axis = _batch_axis(args)
    if axis is None or is_annotated(traced):
        return ""
    gathers, others = (_activations(moved, kind) for kind in ("all-gather", "all-to-all"))
    split = {number for number, (path, leaf) in leaves.items() if path.startswith("params") and _is_split(leaf, axis)}
    if not others and not (gathers and _in_products(program, split)):
        return ""
    what = " and ".join(kind for kind, found in (("all-gather", gathers), ("all-to-all", others)) if found)
    return f"activations are resharded ({what}, {size(gathers + others)} per step): {_remedy(axis)}"


def _remedy(axis: Any) -> str:
    spec = f'"{axis}"' if isinstance(axis, str) else repr(axis).replace("'", '"')
    return (
        "keep their rows on their devices with, after the embedding, "
        f"x = jax.lax.with_sharding_constraint(x, jax.NamedSharding(mesh, jax.P({spec})))"
    )


def _activations(moved: Sequence[Exchange], kind: str) -> int:
    """Return the bytes of activations, not parameters, that XLA gathers or reshards."""
    return sum(
        one.times * count
        for one in moved
        if one.kind == kind and _OF_THE_LOSS in one.instruction.op_name
        for name, count in one.parts()
        if argument_of(one.frame, name) is None
    )


def _in_products(program: Program, numbers: set[int]) -> bool:
    """Whether a matrix product of the loss has one of these arguments as an operand, each device its shard."""

    def wanted(one: Instruction) -> bool:
        return one.opcode in _PRODUCTS and _OF_THE_LOSS in one.op_name

    products = instructions_of(program, wanted) if numbers else iter(())
    return any(argument_of(frame, name) in numbers for frame, one in products for name in one.operands)


def _batch_axis(args: Sequence[Any]) -> Any:
    """Return the mesh axes that the rows of a batch are split over: the first in the specs of its leaves."""
    for leaf in jax.tree.leaves(args):
        for axis in _spec(leaf):
            if axis is not None:
                return axis
    return None


def _is_split(leaf: Any, axis: Any) -> bool:
    """Whether a matrix is split over one of the batch axes."""
    axes = set(mesh_axes_of(axis))
    return np.ndim(leaf) >= 2 and any(axes & set(mesh_axes_of(part)) for part in _spec(leaf))


def _spec(leaf: Any) -> tuple[Any, ...]:
    sharding = sharding_of(leaf)
    return dims_of(sharding.spec) if isinstance(sharding, NamedSharding) else ()


def _undonated(program: Program, leaves: Mapping[int, tuple[str, Any]], state: Any, result: Any) -> str:
    if not _returns(state, result):
        return ""
    aliased = {int(number) for number in _ALIASED.findall(program.header)}
    left = [(path, bytes_of(leaf)) for number, (path, leaf) in leaves.items() if number not in aliased]
    total = sum(count for _, count in left)
    if not total or 100 * total < sum(bytes_of(leaf) for _, leaf in leaves.values()):
        return ""
    return (
        f"{size(total)} of the state is not donated ({listed([path for path, _ in left])}), so that the old and "
        "the new state are both in memory: use jstep.minimize(..., donate=True) or jax.jit(step, donate_argnums=0)"
    )


def _returns(state: Any, result: Any) -> bool:
    """Whether a step returns a new state: a tree of the same structure, alone or as the first element of a tuple."""
    structure: Any = jax.tree.structure(state)
    candidates = [result, *(result[:1] if isinstance(result, tuple) else ())]
    return any(jax.tree.structure(one) == structure for one in candidates)


def _gathered_slots(moved: Sequence[Exchange], leaves: Mapping[int, tuple[str, Any]]) -> str:
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


def _gathered_parameters(
    moved: Sequence[Exchange], leaves: Mapping[int, tuple[str, Any]], uses: Callable[[], Mapping[str, float]]
) -> str:
    """Return a warning about parameters that are gathered more often than they are used, or the empty string.

    This happens on TPUs if a loop runs over a split axis, such as the axis of stacked layers: each iteration gathers
    all layers to use one.
    """
    often: dict[str, float] = {}
    for one, path, name, leaf in _gathers(moved, leaves):
        shape = one.frame.computation.instructions[name].shape
        if path.startswith("params") and isinstance(shape, Array):
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


def _split_blocks(state: Any) -> str:
    """Return a warning about blocks of codes that several devices share, or the empty string."""
    found = []
    for name, half in roles_in(state).halves.items():
        both = (trees.flatten_like(state.params, state.slots[one], one) for one in (name, half))
        for path, codes, scales in zip(trees.paths_of(state.params), *both, strict=True):
            axis = None if scales is None else blocks_between(codes.shape, scales.shape).axis
            split = _spec(codes)[axis : axis + 1] if axis is not None else ()
            if any(scales.shape[axis] % parts_along(codes.sharding.mesh, part) for part in split):
                found.append(f"slots/{name}/{path}")
    text = (
        "blocks of slots are split between devices ({}), which exchange codes for common scales in each update: split "
        "these parameters along another axis, or give compact a smaller block, such as 32"
    )
    return text.format(listed(found)) if found else ""


def _gathers(
    moved: Sequence[Exchange], leaves: Mapping[int, tuple[str, Any]]
) -> Iterator[tuple[Exchange, str, str, Any]]:
    """Iterate over the all-gathers of leaves: the exchange, the path of the leaf, the operand, and the leaf.

    Those that a `shard_map` requests are left out.
    """
    for one in moved:
        is_found = one.kind == "all-gather" and not _BY_HAND.search(one.instruction.op_name)
        for name, _ in one.parts() if is_found else ():
            found = leaves.get(number) if (number := argument_of(one.frame, name)) is not None else None
            if found is not None and getattr(found[1], "sharding", None) is not None:
                yield one, found[0], name, found[1]
