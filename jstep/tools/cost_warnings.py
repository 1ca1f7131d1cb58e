"""What a compiled step does that is probably not meant, and the line that mends it."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from jstep.core import trees
from jstep.core.sizes import size
from jstep.tools.activation_annotations import is_annotated
from jstep.tools.argument_uses import uses_of
from jstep.tools.compiled.exchanges import Exchange, exchanges_of
from jstep.tools.compiled.origins import argument_of
from jstep.tools.compiled.program import Instruction, Program, parse_program
from jstep.tools.compiled.walk import instructions_of
from jstep.tools.gathered_leaves import gathered_parameters, gathered_slots
from jstep.tools.table import listed

_PRODUCTS = {"dot", "convolution"}
_OF_THE_LOSS = "jvp("
"""JAX marks what it traces for gradients, forward and backward, with this word."""
_ALIASED = re.compile(r"\{[\d,\s]*\}:\s*\((\d+),")


def warnings_of(text: str, state: Any, args: Sequence[Any], traced: Any, result: Any = None) -> list[str]:
    """One sentence for each thing that a step does at a price, with what to do about it.

    - Activations are resharded: XLA moves them to the shards of the parameters, not the parameters to the rows, so that
      temporaries grow with the number of devices. What the loss itself asks for (`shard_map`, sharding constraints)
      is not warned about.
    - A part of the state is not donated although the step returns a new one.
    - Slots are gathered.
    - Parameters are gathered more often than the step uses them.

    Args:
        text: What `as_text()` of the compiled step returns.
        state: The state, as arrays or shapes with shardings.
        args: The batch, likewise.
        traced: The jaxpr of the step.
        result: What the step returns, as shapes; None if that is not known.
    """
    program = parse_program(text)
    leaves = _leaves(program, state)
    moved = list(exchanges_of(program))
    found = [
        _resharded(program, moved, leaves, args, traced),
        _undonated(text, leaves, state, result),
        gathered_slots(moved, leaves),
        gathered_parameters(moved, leaves, lambda: _uses(state, args, traced)),
    ]
    return [sentence for sentence in found if sentence]


def warnings_without_a_program(state: Any, args: Sequence[Any], traced: Any) -> list[str]:
    """What may be the reason why a step does not fit: there is no program then that shows it.

    Args:
        state: The state, as arrays or shapes with shardings.
        args: The batch, likewise.
        traced: The jaxpr of the step.
    """
    axis = _batch_axis(args)
    leaves = jax.tree.leaves(getattr(state, "params", None))
    if axis is None or is_annotated(traced) or not any(_is_split(leaf, axis) for leaf in leaves):
        return []
    return [
        "parameters are split over the axis of the batch, and the loss does not say where activations are. If they are "
        f"resharded, temporaries grow with the number of devices: {_mend(axis)}"
    ]


def _leaves(program: Program, state: Any) -> dict[int, tuple[str, Any]]:
    """Number of the program's argument → path and leaf of the state, by the path that JAX wrote beside it."""
    paths = {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_flatten_with_path(state)[0]}
    found: dict[int, tuple[str, Any]] = {}
    entry = program.computations.get(program.entry)
    for one in entry.instructions.values() if entry else ():
        named = re.fullmatch(r"\w+(\W.*)", one.op_name) if one.opcode == "parameter" else None
        if named and named[1] in paths and one.argument.isdigit():
            found[int(one.argument)] = (named[1].removeprefix("."), paths[named[1]])
    return found


def _uses(state: Any, args: Sequence[Any], traced: Any) -> dict[str, float]:
    """Path of a leaf → how often the step uses it; empty if the jaxpr takes other arguments."""
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
    return f"activations are resharded ({what}, {size(gathers + others)} per step): {_mend(axis)}"


def _mend(axis: Any) -> str:
    spec = f'"{axis}"' if isinstance(axis, str) else repr(axis).replace("'", '"')
    return (
        "keep their rows on their devices with, after the embedding, "
        f"x = jax.lax.with_sharding_constraint(x, jax.NamedSharding(mesh, jax.P({spec})))"
    )


def _activations(moved: Sequence[Exchange], kind: str) -> int:
    """The bytes of what the loss computed, not of parameters, that XLA gathers or reshards."""
    return sum(
        one.times * count
        for one in moved
        if one.kind == kind and _OF_THE_LOSS in one.instruction.op_name
        for name, count in one.parts()
        if argument_of(one.frame, name) is None
    )


def _in_products(program: Program, numbers: set[int]) -> bool:
    """Whether the loss multiplies with one of the program's arguments as it is, each device with its shard."""

    def wanted(one: Instruction) -> bool:
        return one.opcode in _PRODUCTS and _OF_THE_LOSS in one.op_name

    products = instructions_of(program, wanted) if numbers else iter(())
    return any(argument_of(frame, name) in numbers for frame, one in products for name in one.operands)


def _batch_axis(args: Sequence[Any]) -> Any:
    """The mesh axes that the rows of a batch are split over: the first that a spec of it names."""
    for leaf in jax.tree.leaves(args):
        for axis in _spec(leaf):
            if axis is not None:
                return axis
    return None


def _is_split(leaf: Any, axis: Any) -> bool:
    """Whether a matrix is split over one of the axes of the batch."""
    axes = set(_names(axis))
    return np.ndim(leaf) >= 2 and any(axes & set(_names(part)) for part in _spec(leaf))


def _names(axis: Any) -> tuple[str, ...]:
    return (axis,) if isinstance(axis, str) else tuple(axis or ())


def _spec(leaf: Any) -> tuple[Any, ...]:
    sharding = None if trees.is_traced(leaf) else getattr(leaf, "sharding", None)
    return tuple(sharding.spec) if isinstance(sharding, NamedSharding) else ()


def _undonated(text: str, leaves: Mapping[int, tuple[str, Any]], state: Any, result: Any) -> str:
    if not _returns(state, result):
        return ""
    aliased = {int(number) for number in _ALIASED.findall(_header(text, "input_output_alias"))}
    left = [(path, _bytes(leaf)) for number, (path, leaf) in leaves.items() if number not in aliased]
    total = sum(count for _, count in left)
    if not total or 100 * total < sum(_bytes(leaf) for _, leaf in leaves.values()):
        return ""
    return (
        f"{size(total)} of the state is not donated ({listed([path for path, _ in left])}), so that the old and "
        "the new one are both in memory: use jstep.minimize(..., donate=True) or jax.jit(step, donate_argnums=0)"
    )


def _returns(state: Any, result: Any) -> bool:
    """Whether a step returns a new state: a tree of the same structure, alone or first in a tuple."""
    structure: Any = jax.tree.structure(state)
    candidates = [result, *(result[:1] if isinstance(result, tuple) else ())]
    return any(jax.tree.structure(one) == structure for one in candidates)


def _header(text: str, key: str) -> str:
    """The value of `key={ ... }` in the first line of a program's text."""
    line = text[: text.find("\n")]
    start = line.find(f"{key}={{")
    if start < 0:
        return ""
    depth = 0
    for place in range(start, len(line)):
        depth += {"{": 1, "}": -1}.get(line[place], 0)
        if line[place] == "}" and depth == 0:
            return line[start : place + 1]
    return ""


def _bytes(leaf: Any) -> int:
    """The bytes of a leaf on each device."""
    shape, dtype = np.shape(leaf), getattr(leaf, "dtype", None)
    sharding = None if trees.is_traced(leaf) else getattr(leaf, "sharding", None)
    if sharding is not None:
        shape = sharding.shard_shape(shape)
    itemsize: int = getattr(dtype, "itemsize", 0)
    return int(np.prod(shape, dtype=np.int64)) * itemsize
