"""Updates of slots in host memory: a loop for each leaf transfers its slots.

Without loops XLA would load all slots at the same time. Small leaves are loaded together before the
update, large ones slice by slice if their rule is elementwise. Only updates marked with
`loads_slots` read slots in host memory.
"""

import contextvars
import dataclasses
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from jstep.core import trees
from jstep.core.exceptions import setting
from jstep.core.jaxprs import Subprogram, body_of, evaluate, evaluate_on_slices, is_elementwise
from jstep.core.meshes import parts_along
from jstep.core.placement import (
    is_on_host,
    layout_of,
    move_to_devices,
    move_to_host,
    traced_shardings,
)
from jstep.core.trees import Array, Params, Slots, Tree
from jstep.state.train_state import TrainState

PARTS = 16
"""At most 1/PARTS of the offloaded bytes should be on the devices at a time."""

ROWS = {1: 4096, 2: 32}
"""Number of dimensions → the row multiple of a slice: whole tiles of a TPU's memory."""

_Update = TypeVar("_Update", bound=Callable[..., Any])


@dataclasses.dataclass(frozen=True)
class Transfers:
    """The transfers of an update.

    Attributes:
        limit: The bytes that should be on the devices at a time.
        turns: 1, or 0 in a skipped update, unknown to XLA.
    """

    limit: int
    turns: Array
    is_certain: bool = True


TRANSFERS: contextvars.ContextVar[Transfers | None] = contextvars.ContextVar(
    "jstep_transfers", default=None
)
"""How slots in host memory are loaded; None if all are loaded together."""


def only_if(condition: Array) -> AbstractContextManager[Transfers | None]:
    """A context in which slots in host memory are updated only if a condition holds."""
    transfers = TRANSFERS.get()
    if transfers is not None:
        transfers = Transfers(
            transfers.limit, jnp.where(condition, transfers.turns, 0), is_certain=False
        )
    return setting(TRANSFERS, transfers)


def is_worth_loops(state: Tree) -> bool:
    """Whether a traced state is partly in host memory, and its compiler supports transfer loops."""
    # On a CPU, device memory is host memory. The GPU compiler is untested.
    leaves = jax.tree.leaves(state)
    if not (any(map(trees.is_traced, leaves)) and any(map(is_on_host, leaves))):
        return False
    shardings = traced_shardings(state)
    if shardings is None:
        return jax.default_backend() == "tpu"
    device = next(iter(shardings[0].device_set))
    return bool(device.platform == "tpu")


def load_small_slots(state: TrainState) -> tuple[Slots, int | None]:
    """Load the slots that need no loop; return all slots, and the limit for the others."""
    params = state.params
    slots = state.slots
    if not is_worth_loops(state):
        return move_to_devices(slots), None
    treedef = trees.structure(params)
    leaves = {
        name: treedef.flatten_up_to(tree)
        for name, tree in slots.items()
        if trees.is_like(params, tree)
    }
    # For each parameter, the bytes of its slots.
    sizes = [
        sum(map(_host_bytes, slots_of_leaf)) for slots_of_leaf in zip(*leaves.values(), strict=True)
    ]
    limit = sum(sizes) // PARTS
    # As many of the smallest as fit together.
    small: set[int] = set()
    total = 0
    for i in sorted(range(len(sizes)), key=sizes.__getitem__):
        total += sizes[i]
        if total > limit:
            break
        small.add(i)

    def load(name: str, tree: Tree) -> Any:
        if name not in leaves:
            return move_to_devices(tree)
        loaded = list(leaves[name])
        for i in sorted(small):
            loaded[i] = move_to_devices(loaded[i])
        return treedef.unflatten(loaded)

    return {name: load(name, tree) for name, tree in slots.items()}, limit


def loads_slots(update: _Update) -> _Update:
    """Decorator: mark an update that reads slots in host memory itself."""
    update.loads_slots = True  # type: ignore[attr-defined]
    return update


def call_with_loaded(
    update: Callable[[Slots, Any], tuple[Any, Slots]], slots: Slots, params: Tree
) -> Any:
    """Call `update(slots, params) -> (result, new slots)` on the devices; send new slots back."""
    if not any(map(is_on_host, jax.tree.leaves((slots, params)))):
        return update(slots, params)
    loaded = move_to_devices(slots)
    result, new = update(loaded, move_to_devices(params))
    transfers = TRANSFERS.get()

    def send_back(stored: object, old: Any, updated: Any) -> Any:
        """Return a new value in the memory of the one that is stored, which was loaded as `old`."""
        if not is_on_host(stored):
            return updated
        if transfers is not None and not transfers.is_certain:
            updated = jnp.where(transfers.turns > 0, updated, old)
        return move_to_host(updated)

    new_slots = dict(new)
    for name, tree in new.items():
        if name in slots and trees.structure(tree) == trees.structure(slots[name]):
            new_slots[name] = jax.tree.map(send_back, slots[name], loaded[name], tree)
    return result, new_slots


def update_leaf(
    rule: Callable[..., tuple[Any, Slots]], path: str, slots: Slots, *args: Any
) -> tuple[Any, Slots]:
    """Compute `rule(slots, *args) -> (result, new slots)` for one leaf.

    This is a loop if some arrays are in host memory. In a skipped update, the slots keep their
    values, and the result is unspecified.
    """
    transfers = TRANSFERS.get()
    if transfers is None or not any(map(is_on_host, jax.tree.leaves((slots, args)))):
        return call_with_loaded(lambda slots, args: rule(slots, *args), slots, args)
    closed, shapes = jax.make_jaxpr(rule, return_shape=True)(
        *jax.eval_shape(move_to_devices, (slots, *args))
    )
    body = body_of(closed)
    inputs = jax.tree.leaves((slots, *args))
    # The loop carries the outputs, each in place of the input that it replaces.
    replaced = _replaced(shapes, slots, args)
    start: list[Any] = []
    for output, i in zip(closed.out_avals, replaced, strict=True):
        start.append(jnp.zeros(output.shape, output.dtype) if i is None else inputs[i])
    fewest = -(-sum(map(_host_bytes, inputs)) // max(transfers.limit, 1))
    count = _number_of_slices(body, path, fewest)
    # The number of rows of a slice; 0 if the leaf is updated as a whole.
    rows = start[0].shape[0] // count if count > 1 else 0

    def turn(i: Array, carry: list[Any]) -> list[Any]:
        # The barriers hide from XLA that values are the same in all iterations: otherwise it would
        # load a parameter in host memory, which the loop only reads, before the loop.
        if rows and any(is_on_host(x) for k, x in enumerate(inputs) if k not in replaced):
            first, i = jax.lax.optimization_barrier((carry[0], i))
            carry = [first, *carry[1:]]
        current = dict(zip(replaced, carry, strict=True))
        values = [current.get(k, x) for k, x in enumerate(inputs)]
        if rows:
            parts = [
                jax.lax.dynamic_slice_in_dim(x, i * rows, rows, 0) if jnp.ndim(x) else x
                for x in values
            ]
            new = evaluate_on_slices(body, move_to_devices(parts), (rows, *start[0].shape[1:]))
        else:
            values, _ = jax.lax.optimization_barrier((values, i))
            new = evaluate(body, move_to_devices(values))
        new = [move_to_host(x) if is_on_host(old) else x for old, x in zip(start, new, strict=True)]
        if rows:
            pairs = zip(carry, new, strict=True)
            new = [jax.lax.dynamic_update_slice_in_dim(x, part, i * rows, 0) for x, part in pairs]
        return new

    if not rows:
        turns: Any = transfers.turns
    elif transfers.is_certain:
        turns = count
    else:
        turns = count * transfers.turns
    values = jax.lax.fori_loop(0, turns, turn, start)
    outputs: tuple[Any, Slots] = jax.tree.unflatten(jax.tree.structure(shapes), values)
    return outputs


def update_leaves(
    params: Params, slots: Mapping[str, list[Any]], calls: Iterable[tuple[Any, ...] | None]
) -> list[Any]:
    """Call `update_leaf` with each `(rule, *args)` and put new slots into the lists.

    A None has the result None.
    """
    results: list[Any] = [None] * len(jax.tree.leaves(params))
    for i, (path, call) in enumerate(zip(trees.leaf_paths(params), calls, strict=True)):
        if call is None:
            continue
        rule, *args = call
        slots_of_leaf = {name: leaves[i] for name, leaves in slots.items()}
        results[i], new = update_leaf(rule, path, slots_of_leaf, *args)
        for name, leaf in new.items():
            slots[name][i] = leaf
    return results


def _replaced(shapes: tuple[Any, Slots], slots: Slots, args: Any) -> list[int | None]:
    """The index, among the arrays of slots and args, of what each output replaces, or None."""
    leaves, treedef = trees.flatten((slots, args))
    slot_indices, arg_indices = treedef.unflatten(range(len(leaves)))
    free = dict(zip(jax.tree.leaves(arg_indices), jax.tree.leaves(args), strict=True))
    results, new_slots = shapes
    replaced: list[int | None] = []
    # A result replaces an argument, such as the gradient, whose memory the loop reuses.
    for result in jax.tree.leaves(results):
        kind = (result.shape, result.dtype)
        index = next(
            (i for i, x in free.items() if not is_on_host(x) and (x.shape, x.dtype) == kind), None
        )
        replaced.append(index)
        free.pop(index, None)
    # A slot replaces the old one.
    old_slots = {name: slot_indices[name] for name, leaf in new_slots.items() if leaf is not None}
    return [*replaced, *jax.tree.leaves(old_slots)]


def _number_of_slices(body: Subprogram, path: str, minimum: int) -> int:
    """The number of slices along the first axis, if possible at least the minimum.

    It is 1 if the program has no slices.
    """
    shapes = {atom.aval.shape for atom in body.jaxpr.outvars}
    layout = layout_of(path)
    if len(shapes) != 1 or shapes == {()} or layout is None:
        return 1
    shape: tuple[int, ...] = shapes.pop()
    is_split = len(layout.spec) > 0 and parts_along(layout.mesh, layout.spec[0]) > 1
    if is_split or not is_elementwise(body, shape):
        return 1
    multiple = ROWS.get(len(shape), 1)
    counts = [
        n for n in range(1, shape[0] + 1) if shape[0] % n == 0 and shape[0] // n % multiple == 0
    ]
    large_counts = [n for n in counts if n >= minimum]
    return min(large_counts) if large_counts else max(counts, default=1)


def _host_bytes(leaf: Any) -> int:
    return int(leaf.size) * int(leaf.dtype.itemsize) if is_on_host(leaf) else 0
