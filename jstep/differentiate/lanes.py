"""Lanes: a batch in L parts, sums in one binary tree, and functions with the same bits on any number of devices."""

import collections
import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from jstep.core import jaxprs, meshes, trees
from jstep.core.checks import as_int
from jstep.core.exceptions import explain_jax, setting
from jstep.core.jaxprs import ELEMENTWISE, Operation, Subprogram
from jstep.core.meshes import dims_of, mesh_axes_of, mesh_of, parts_along, using_mesh, without_explicit_axes
from jstep.core.placement import SHARDINGS, on_devices, shardings_of
from jstep.core.trees import Array, shape_of
from jstep.differentiate.microbatches import specs_of_rows

# Lanes: a batch in L parts, each computed by one device with the same program, and sums in one binary tree.
#
# The bits of a sum depend on L alone, not on the number n of devices, which divides L: each device computes L/n lanes
# one after the other and adds them in its part of the tree; these sums are exchanged and added in the rest of the tree.

SMALL = 2**14
"""Arrays with fewer elements are exchanged together."""
LEAST = 64
"""The least number of elements of an array that a device has for itself."""


class Lanes(NamedTuple):
    """A number of lanes and the mesh that they are spread over.

    Attributes:
        number: L.
        mesh: The mesh, with Auto axes; None without one.
        axes: The mesh axes of the rows of the batch.
        others: The mesh axes that split other arrays and not the rows (tensor parallelism), which are left to XLA.
        places: Shape → spec of the parameters or slots of that shape, whichever is finer. It affects traffic, not bits.
    """

    number: int
    mesh: Any = None
    axes: tuple[str, ...] = ()
    others: tuple[str, ...] = ()
    places: Mapping[tuple[int, ...], PartitionSpec] | None = None

    @property
    def devices(self) -> int:
        """The number of devices that the lanes are spread over."""
        return parts_along(self.mesh, self.axes)

    @property
    def manual(self) -> frozenset[str]:
        """The mesh axes that a lane does not have."""
        return frozenset(() if self.mesh is None else self.mesh.axis_names).difference(self.others)

    def alone(self) -> AbstractMesh:
        """The mesh that a lane is traced on: without the rows' axes, so that its program is the same on any mesh."""
        if not self.others:
            return AbstractMesh((), ())
        return self.mesh.update_axis_types(dict.fromkeys(self.manual, AxisType.Manual))

    def spread(self, fn: Any, given: Any, made: Any) -> Any:
        """Return `fn` as a program that every device runs on its parts of the arguments, with these specs of both."""
        if not self.manual:
            return fn
        return jax.shard_map(
            fn, mesh=self.mesh, axis_names=self.manual, in_specs=given, out_specs=made, check_vma=False
        )

    def split(self, dim: int | None) -> PartitionSpec:
        """The spec of an array that is split over the devices of the lanes along a dimension; None for no dimension."""
        return PartitionSpec() if dim is None or not self.axes else PartitionSpec(*[None] * dim, self.axes)

    def placed(self, x: Array) -> Array:
        """Return an array sharded like the parameters and slots of its shape, or whole on every device if it is small.

        XLA simplifies a program on one element as one on scalars, with other roundings.
        """
        spec = PartitionSpec() if x.size < LEAST * self.number else (self.places or {}).get(x.shape)
        if spec is None or self.mesh is None or not x.ndim or trees.is_key(x):
            return x
        return jax.lax.with_sharding_constraint(x, NamedSharding(self.mesh, spec))

    def scattered(self, shape: tuple[int, ...]) -> int | None:
        """The dimension along which a sum of this shape is to be split over the devices; None if it is not split."""
        spec = dims_of((self.places or {}).get(shape, PartitionSpec()))
        split = (dim for dim, axis in enumerate(spec) if set(mesh_axes_of(axis)) & set(self.axes))
        dim = next(split, None)
        return None if dim is None or shape[dim] % self.devices else dim


def as_lanes(lanes: Any) -> int | None:
    """Validate a number of lanes: a power of two, or None.

    Raises:
        TypeError: It is not an integer.
        ValueError: It is below 1 or not a power of two. The message contains the two nearest.
    """
    number = None if lanes is None else as_int(lanes, "lanes", 1)
    if number is not None and number & (number - 1):
        below = 1 << number.bit_length() - 1
        raise ValueError(f"lanes={number}: must be a power of two, for a binary tree; use {below} or {2 * below}")
    return number


def on_lanes(
    number: int | None,
    run: Callable[..., Any],
    held: Any,
    args: tuple[Any, ...],
    batch_specs: Any = None,
    places: Mapping[tuple[int, ...], PartitionSpec] | None = None,
    place: Callable[[Any], Any] | None = None,
) -> Any:
    """Return `run(lanes, held, args)`, compiled and on Auto axes; or `run(None, held, args)` without lanes.

    Args:
        number: L, or None.
        run: The function.
        held: A tree of arrays that are not split by rows: parameters, or a state.
        args: The batch.
        batch_specs: The shardings of its leaves; None if unknown.
        places: As in `Lanes`.
        place: As in `without_explicit_axes`.

    Raises:
        ValueError: The number of devices does not divide L.
    """
    if number is None:
        return run(None, held, args)
    rows = [dims_of(spec) for spec in specs_of_rows(args, batch_specs) if spec is not None]
    shardings = shardings_of(held) or list(map(meshes.sharding_on_mesh, jax.tree.leaves(held)))

    def on_auto_axes(held: Any, args: Any) -> Any:
        lanes = _found(number, rows, shardings)
        return run(lanes if lanes.mesh is None else lanes._replace(places=places), held, args)

    def computed(held: Any, args: Any) -> Any:
        return without_explicit_axes(on_auto_axes, held, args, place=place)

    is_traced = any(map(trees.is_traced, jax.tree.leaves((held, args))))
    with using_mesh(None if is_traced else mesh_of((held, args))):
        return (computed if is_traced else jax.jit(computed))(held, args)


def _found(number: int, rows: Sequence[tuple[Any, ...]], shardings: Sequence[Any]) -> Lanes:
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or set(mesh.axis_types) != {AxisType.Auto}:
        return Lanes(number)
    # Rows of unknown sharding are spread over all devices.
    everywhere = mesh.axis_names if not rows and number % mesh.size == 0 else ()
    axes = next((mesh_axes_of(dims[0]) for dims in rows if dims and dims[0] is not None), everywhere)
    devices = parts_along(mesh, axes)
    if number % devices:
        raise ValueError(
            f"lanes={number}: the rows of the batch are on {devices} devices, and {devices} does not divide {number}; "
            "use a larger power of two, or a number of devices that divides it"
        )
    dims = [*rows, *(dims_of(one.spec) for one in shardings if isinstance(one, NamedSharding))]
    used = {name for spec in dims for axis in spec for name in mesh_axes_of(axis) if mesh.shape[name] > 1}
    return Lanes(number, mesh, tuple(axes), tuple(name for name in mesh.axis_names if name in used.difference(axes)))


def traced(lanes: Lanes, fn: Callable[..., Any], *args: Any) -> tuple[Any, Any]:
    """Trace a function for arrays or shapes, without any mesh or layout: its program is the same on all of them.

    Returns:
        Its closed jaxpr, and the tree of its results as shapes.
    """
    with jax.sharding.use_abstract_mesh(lanes.alone()), setting(SHARDINGS, None):
        return jax.make_jaxpr(fn, return_shape=True)(*jax.tree.map(_shape, args))


_shape = functools.partial(shape_of, weak=True)


def isolated(fn: Callable[..., list[Array]], args: Any, shapes: Sequence[Any], witness: Array) -> list[Array]:
    """Return `fn(*args)`, compiled by itself: XLA neither fuses nor moves its operations with others.

    Otherwise the fusion of a product and a sum, which rounds once instead of twice, could depend on the layout. XLA's
    CPU compiler drops optimization barriers before it fuses, so `fn` is the branch of a condition there.

    Args:
        fn: A function of trees of arrays.
        args: Its arguments.
        shapes: The shapes of its results.
        witness: Data: an array that is not empty and that XLA cannot know. The condition is that its first element has
            at most 32 bits.
    """

    def in_condition(witness: Array, args: Any) -> list[Array]:
        first = jnp.real(witness[(0,) * witness.ndim]).astype(jnp.float32)
        bits = jax.lax.population_count(jax.lax.bitcast_convert_type(first, jnp.uint32))
        nothing = [jnp.zeros(x.shape, x.dtype) for x in shapes]
        return list(jax.lax.cond(bits <= 32, lambda: fn(*args), lambda: nothing))

    def behind_barriers(witness: Array, args: Any) -> list[Array]:
        return jax.lax.optimization_barrier(fn(*jax.lax.optimization_barrier(args)))

    return list(jax.lax.platform_dependent(witness, args, cpu=in_condition, default=behind_barriers))


def sum_over_lanes(
    lanes: Lanes,
    part: Callable[..., Any],
    whole: Sequence[Array],
    blocked: Sequence[Array],
    dims: Sequence[int],
    witness: Array | None = None,
) -> Any:
    """Return Σ part(i, whole, blocks) over the lanes i, in the tree; of bools, whether one of them is true.

    Args:
        lanes: The lanes.
        part: Maps the number of a lane, arrays, and the i-th of L blocks of other arrays to a tree of arrays.
        whole: Arrays that each lane gets as a whole.
        blocked: Arrays that are cut into L contiguous blocks.
        dims: The dimension along which each of these is cut.
        witness: As in `isolated`; by default one of the other arguments.
    """
    sizes = [x.shape[dim] // lanes.number for x, dim in zip(blocked, dims, strict=True)]

    def blocks_at(i: Any, blocked: Sequence[Array]) -> list[Array]:
        each = zip(blocked, sizes, dims, strict=True)
        return [jax.lax.dynamic_slice_in_dim(x, i * size, size, dim) for x, size, dim in each]

    blocks = jax.eval_shape(functools.partial(blocks_at, np.int32(0)), list(blocked))
    closed, shapes = traced_lane(lanes, part, blocks, (np.int32(0), list(whole), list(blocked)))
    outs, treedef = trees.flatten(shapes)
    split = [lanes.scattered(x.shape) for x in outs]

    def on_device(witness: Array | None, consts: list[Array], whole: list[Array], blocked: list[Array]) -> list[Array]:
        data = (x for x in (*blocked, *whole) if x.size and not trees.is_key(x))
        known = next(data, jnp.ones(())) if witness is None else witness
        each = lanes.number // lanes.devices
        first = jax.lax.axis_index(lanes.axes) * each if lanes.devices > 1 else jnp.int32(0)

        def lane(i: Any) -> list[Array]:
            args = (consts, first + i, *whole, *blocks_at(i, blocked))
            return isolated(functools.partial(jax.core.eval_jaxpr, closed.jaxpr), args, outs, known)

        return _exchanged(lanes, _sum_in_loop(lane, each, outs), split)

    def run(*args: Any) -> list[Array]:
        given = (*[PartitionSpec()] * 3, list(map(lanes.split, dims)))
        return list(lanes.spread(on_device, given, list(map(lanes.split, split)))(*args))

    run.__name__ = sum_over_lanes.__qualname__
    with contextlib.nullcontext() if lanes.mesh is None else jax.sharding.use_abstract_mesh(lanes.mesh):
        return treedef.unflatten(jax.jit(run)(witness, list(closed.consts), list(whole), list(blocked)))


def is_in_lanes(operation: Operation) -> bool:
    """Whether an operation is a sum over lanes, whose bits do not depend on the layout."""
    return operation.called == sum_over_lanes.__qualname__


def of_each_lane(lanes: Lanes, i: Array, tree: Any) -> Any:
    """Return arrays of lane i such that their sums are those of all lanes, stacked on a leading axis."""

    def leaf(x: Any) -> Array:
        here = jnp.arange(lanes.number).reshape(-1, *[1] * np.ndim(x)) == i
        return jnp.where(here, jnp.asarray(x)[None], jnp.zeros((), jnp.result_type(x)))

    return jax.tree.map(leaf, tree)


def _sum_in_loop(part: Callable[[Any], list[Array]], count: int, shapes: Sequence[Any]) -> list[Array]:
    """Σ part(i) for i < count, a power of two, in a binary tree; `part` is traced once."""

    def subtree(size: int, first: Any) -> list[Array]:
        if size == 1:
            return part(first)

        def add(i: Any, total: list[Array]) -> list[Array]:
            new = subtree(size // 2, first + i * (size // 2))
            return [jnp.where(i == 0, b, a + b) for a, b in zip(total, new, strict=True)]

        return list(jax.lax.fori_loop(np.int32(0), np.int32(2), add, [jnp.zeros(x.shape, x.dtype) for x in shapes]))

    return subtree(count, np.int32(0))


def _exchanged(lanes: Lanes, arrays: Sequence[Array], dims: Sequence[int | None]) -> list[Array]:
    """The sums over the devices, in the same tree: whole, or the device's part along a dimension.

    The exchange has the bytes of a reduce-scatter, or for whole sums those of an all-reduce.
    """
    n, axes, found = lanes.devices, lanes.axes, list(arrays)
    if n == 1:
        return found
    together: dict[Any, list[int]] = {}
    for i, (x, dim) in enumerate(zip(arrays, dims, strict=True)):
        if dim is None:
            together.setdefault(x.dtype if x.size < SMALL else i, []).append(i)
        else:
            parts = x.reshape(*x.shape[:dim], n, x.shape[dim] // n, *x.shape[dim + 1 :])
            found[i] = _sum(jax.lax.all_to_all(parts, axes, dim, 0))
    for indices in together.values():
        flat = jnp.concatenate([arrays[i].reshape(-1) for i in indices])
        parts = jnp.pad(flat, (0, -flat.size % n)).reshape(n, -1)
        total = _gathered(_sum(jax.lax.all_to_all(parts, axes, 0, 0)), axes).reshape(-1)
        ends = np.cumsum([arrays[i].size for i in indices])
        for i, part in zip(indices, jnp.split(total, ends), strict=False):
            found[i] = part.reshape(arrays[i].shape)
    return found


def _sum(stacked: Array) -> Array:
    """The sum over the leading axis, whose size is a power of two, in the same tree."""
    while len(stacked) > 1:
        stacked = stacked[0::2] + stacked[1::2]
    return stacked[0]


def _gathered(x: Array, axes: tuple[str, ...]) -> Array:
    """The arrays of all devices, stacked. XLA may gather by adding zeros, which changes -0.0 but no integer."""
    if not trees.is_floating(x.dtype):
        return jax.lax.all_gather(x, axes)
    bits = jax.lax.bitcast_convert_type(x, f"uint{8 * x.dtype.itemsize}")
    return jax.lax.bitcast_convert_type(jax.lax.all_gather(bits, axes), x.dtype)


def traced_lane(lanes: Lanes, part: Callable[..., Any], blocks: Any, args: tuple[Any, ...]) -> tuple[Any, Any]:
    """Trace a lane, which must not name mesh axes that it does not have; `args` are those of the whole batch."""
    error, found = None, None
    try:
        found = traced(lanes, part, *args[:-1], blocks)
        named = jaxprs.named_axes(found[0])
    except Exception as reason:
        error, named = reason, set[str]()
        for kind in (AxisType.Auto, AxisType.Explicit):  # does it work on the mesh, without lanes?
            with contextlib.suppress(Exception):
                sizes = [(name, lanes.mesh.shape[name]) for name in lanes.manual]
                with jax.sharding.use_abstract_mesh(lanes.mesh.update_axis_types({name: kind for name, _ in sizes})):
                    named |= jaxprs.named_axes(jax.make_jaxpr(part, axis_env=sizes)(*jax.tree.map(_shape, args)))
    try:
        if named & lanes.manual:
            raise ValueError(
                f"lanes={lanes.number}: the loss names the mesh axes {', '.join(map(repr, sorted(named)))}, over which "
                "the lanes are spread; one device computes a lane: leave these constraints and collectives out of the "
                "loss"
            ) from error
        if error is not None:
            explain_jax(error)
            raise error
    finally:
        del error  # breaks the reference cycle with this frame, which its traceback holds
    assert found is not None
    return found


# Evaluation of a function with the same bits on any number of devices, for lanes.
#
# The function is traced. Elementwise operations stay sharded, sums over whole arrays are made over L blocks in the tree
# of the lanes, and whatever else combines the elements of an array is computed by every device on whole arrays. What is
# computed together is compiled apart from the rest, so that the roundings do not depend on what else is in the program.

_MOVES = "bitcast_convert_type broadcast_in_dim expand_dims reshape rev slice squeeze transpose"
_EXACT = "add_any argmax argmin atan2 complex conj erfc imag lgamma real reduce_max reduce_min"
ON_PARTS = ELEMENTWISE.union(_MOVES.split(), _EXACT.split())
"""Operations on floats whose results XLA does not round differently if it splits their arrays."""

PARTS, SUM, WHOLE, APART = "parts", "sum", "whole", "apart"
"""The ways to compute an operation: on the parts of its arrays; a sum of a whole array, over blocks; by every device on
whole arrays; and one that contains such operations, or is in lanes already."""


def alike(lanes: Lanes | None, fn: Callable[..., Any], *args: Any) -> Any:
    """Return `fn(*args)`; with lanes, its bits are the same on any number of devices.

    Args:
        lanes: The lanes; None to just call the function.
        fn: A function of trees.
        *args: Its arguments, in any memory; its results are in device memory.
    """
    if lanes is None:
        return fn(*args)
    arrays, filled = trees.arrays_of(args)
    made: list[Any] = []

    def of_arrays(arrays: list[Array]) -> list[Array]:
        found, rebuilt = trees.arrays_of(fn(*filled(arrays)))
        made.append(rebuilt)
        return found

    arrays = on_devices(arrays)
    program, _ = traced(lanes, of_arrays, arrays)
    # Data that XLA cannot know: constants are not traced.
    known = [x for x in arrays if x.size and not trees.is_key(x)]
    witness = min(known, key=lambda x: (not trees.is_traced(x), x.size))
    return made[-1](_evaluated(lanes, jaxprs.body_of(program), arrays, witness))


def _evaluated(lanes: Lanes, body: Subprogram, values: Sequence[Array], witness: Array) -> list[Array]:
    program, _ = traced(lanes, lambda values: jaxprs.evaluate(body, values, _inlined), list(values))
    jaxpr = program.jaxpr
    users = {atom: {-1} for atom in jaxprs.variables(jaxpr.outvars)}
    operations: list[Operation] = []
    for one in reversed(jaxprs.body_of(program).operations):
        if one.eqn.effects or any(atom in users for atom in one.eqn.outvars):  # it is needed
            operations.insert(0, one)
            for atom in jaxprs.variables(one.eqn.invars):
                users.setdefault(atom, set()).add(one.number)
    # Operations without operands, such as zeros, are computed where they are used.
    free = {atom: one.eqn for one in operations if not jaxprs.variables(one.eqn.invars) for atom in one.eqn.outvars}
    env: dict[Any, Any] = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*program.consts, *values], strict=True))

    def read(atom: Any) -> Any:
        if isinstance(atom, core.Literal):
            return atom.val
        return env[atom] if atom in env else jax.core.eval_jaxpr(jaxprs.part_of(jaxpr, [], [atom], [free[atom]]), ())[0]

    def together(call: Callable[..., list[Array]], some: Sequence[Operation]) -> None:
        """Compute operations as one program, of which the others see only what they use."""
        made = dict.fromkeys(atom for one in some for atom in one.eqn.outvars)
        used = dict.fromkeys(atom for one in some for atom in jaxprs.variables(one.eqn.invars))
        given = [atom for atom in used if atom not in made and atom not in free]
        numbers = {one.number for one in some}
        kept = [atom for atom in made if users.get(atom, numbers) - numbers]
        first = {id(free[atom]): free[atom] for atom in used if atom in free}
        eqns = [*first.values(), *(one.eqn for one in some)]
        compute = functools.partial(jax.core.eval_jaxpr, jaxprs.part_of(jaxpr, given, kept, eqns), ())
        env.update(zip(kept, call(compute, [env[atom] for atom in given], [atom.aval for atom in kept]), strict=True))

    def on_parts(fn: Any, args: list[Array], shapes: Any) -> list[Array]:
        return list(map(lanes.placed, isolated(fn, list(map(lanes.placed, args)), shapes, witness)))

    def on_blocks(fn: Any, args: list[Array], shapes: Any) -> list[Array]:
        dims: Any = [_dim_of_blocks(lanes.number, x.shape) for x in args]
        return list(sum_over_lanes(lanes, lambda i, _, blocks: fn(*blocks), [], args, dims, witness))

    def on_whole_arrays(fn: Any, args: list[Array], shapes: Any) -> list[Array]:
        everywhere = PartitionSpec()
        run = lanes.spread(lambda args, witness: isolated(fn, args, shapes, witness), everywhere, everywhere)
        return list(run(args, witness))

    for level in _levels(lanes.number, [one for one in operations if jaxprs.variables(one.eqn.invars)]):
        if level[PARTS]:
            together(on_parts, level[PARTS])
        if level[SUM]:
            together(on_blocks, level[SUM])
        for some in _connected(level[WHOLE]):
            together(on_whole_arrays, some)
        for one in level[APART]:
            results = _apart(lanes, one, list(map(read, one.eqn.invars)), witness)
            env.update(zip(one.eqn.outvars, results, strict=True))
    return list(map(read, jaxpr.outvars))


def _inlined(operation: Operation, values: list[Any]) -> Sequence[Any]:
    """Apply an operation; a call that is not all on parts, operation by operation."""
    if operation.kind == "call" and not is_in_lanes(operation) and _way(1, operation) != PARTS:
        return jaxprs.evaluate(operation.bodies[0], values, _inlined)
    return jaxprs.apply(operation, values)


def _levels(number: int, operations: Sequence[Operation]) -> Iterator[dict[str, list[Operation]]]:
    """Group operations by way: within a level, those on parts come first, then sums, then the others.

    What every device has computed on whole arrays stays there, as long as the next operation needs nothing else.
    """
    levels: dict[int, dict[str, list[Operation]]] = collections.defaultdict(lambda: collections.defaultdict(list))
    ready: dict[Any, int] = collections.defaultdict(int)  # the level in which a value is known
    inside: dict[Any, int] = {}  # the level in which every device has computed it, as a whole
    for operation in operations:
        given = jaxprs.variables(operation.eqn.invars)
        arrays = [atom for atom in given if atom.aval.shape]
        way = _way(number, operation)
        if way in (PARTS, SUM) and arrays and all(atom in inside for atom in arrays):
            way = WHOLE
        at = max(inside.get(atom, ready[atom]) if way == WHOLE else ready[atom] for atom in given)
        levels[at][way].append(operation)
        for atom in operation.eqn.outvars:
            ready[atom] = at + (way != PARTS)
            if way == WHOLE:
                inside[atom] = at
    return (levels[at] for at in sorted(levels))


def _way(number: int, operation: Operation) -> str:
    """The way to compute an operation with this number of lanes."""
    eqn = operation.eqn
    if is_in_lanes(operation):
        return APART
    if operation.kind in ("call", "cond"):
        ways = {_way(number, one) for body in operation.bodies for one in body.operations}
        return PARTS if ways <= {PARTS} else WHOLE if operation.is_of_platforms else APART  # XLA must see one branch
    if operation.bodies:
        return APART if any(map(is_in_lanes, jaxprs.inside(operation))) else WHOLE
    if operation.name in ON_PARTS or not any(map(_is_inexact, [*eqn.invars, *eqn.outvars])):
        return PARTS
    is_sum = operation.name == "reduce_sum" and not eqn.outvars[0].aval.shape
    return SUM if is_sum and _dim_of_blocks(number, eqn.invars[0].aval.shape) is not None else WHOLE


def _is_inexact(atom: Any) -> bool:
    dtype = getattr(atom.aval, "dtype", None)
    return dtype is not None and bool(jnp.issubdtype(dtype, jnp.inexact))


def _dim_of_blocks(number: int, shape: Sequence[int]) -> int | None:
    """The dimension along which an array is cut into blocks for its sum; None if their number divides none."""
    fitting = [dim for dim, size in enumerate(shape) if size and size % number == 0]
    return max(fitting, key=lambda dim: (shape[dim], -dim), default=None)


def _connected(operations: Sequence[Operation]) -> list[list[Operation]]:
    """Group operations that use each other's results, so that not all arrays have to be whole at the same time."""
    group_of: dict[Any, list[Operation]] = {}
    for operation in operations:
        used = [group_of[atom] for atom in jaxprs.variables(operation.eqn.invars) if atom in group_of]
        first, *others = {id(group): group for group in used}.values() or [[]]
        added = [operation, *(one for group in others for one in group)]
        first.extend(added)
        group_of.update((atom, first) for one in added for atom in one.eqn.outvars)
    groups = {id(group): group for group in group_of.values()}.values()
    return [sorted(group, key=lambda one: one.number) for group in groups]


def _apart(lanes: Lanes, operation: Operation, values: Sequence[Any], witness: Array) -> Sequence[Any]:
    """Evaluate the programs of a condition or a loop in the same way; apply what is in lanes already."""

    def run(i: int, *values: Any) -> list[Array]:
        return _evaluated(lanes, operation.bodies[i], list(map(jnp.asarray, values)), witness)

    if operation.kind == "cond":
        branches = [functools.partial(run, i) for i in range(len(operation.bodies))]
        return list(jax.lax.switch(values[0], branches, *values[1:]))
    if operation.kind == "while":
        of_test, of_body = operation.counts
        test, body, start = values[:of_test], values[of_test : of_test + of_body], values[of_test + of_body :]
        return jax.lax.while_loop(lambda now: run(0, *test, *now)[0], lambda now: run(1, *body, *now), list(start))
    return jaxprs.apply(operation, values)
