"""A batch in L lanes, each computed on one device by the same program, and summed in a binary tree.

Sums are bitwise identical on any number n of devices that divides L: each device adds its L/n lanes
in its branch of the tree; these sums are exchanged and added in the rest of the tree.
"""

import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from jstep.core import jaxprs, meshes, trees
from jstep.core.checks import as_int
from jstep.core.exceptions import note, setting
from jstep.core.meshes import (
    call_on_auto_axes,
    dims_of,
    mesh_axes_of,
    mesh_of,
    parts_along,
    using_mesh,
)
from jstep.core.placement import SHARDINGS, traced_shardings
from jstep.core.trees import Array, Tree, shape_of
from jstep.differentiate import microbatches
from jstep.differentiate.merging import merge_equal

SMALL = 2**14
"""Arrays with fewer elements are exchanged together."""
MIN_ELEMENTS_PER_DEVICE = 64
"""The minimum number of elements per device of an array that is split."""


class Lanes(NamedTuple):
    """L lanes and the mesh that they are spread over.

    Attributes:
        axes: The mesh axes of the rows of the batch.
        other_axes: The other mesh axes (tensor parallelism), which are left to XLA.
        specs: Shape → the finer spec of the parameters and slots of this shape.
    """

    number: int
    mesh: Any = None
    axes: tuple[str, ...] = ()
    other_axes: tuple[str, ...] = ()
    specs: Mapping[tuple[int, ...], PartitionSpec] | None = None

    @property
    def devices(self) -> int:
        return parts_along(self.mesh, self.axes)

    @property
    def manual(self) -> frozenset[str]:
        """The mesh axes that a lane does not have."""
        if self.mesh is None:
            return frozenset()
        return frozenset(self.mesh.axis_names).difference(self.other_axes)

    def alone(self) -> AbstractMesh:
        """The mesh that a lane is traced on, without the rows' axes."""
        if not self.other_axes:
            return AbstractMesh((), ())
        return self.mesh.update_axis_types(dict.fromkeys(self.manual, AxisType.Manual))

    def spread(self, fn: Any, in_specs: Any, out_specs: Any) -> Any:
        """Return `fn` as a program that every device runs on its parts of the arguments."""
        if not self.manual:
            return fn
        return jax.shard_map(
            fn,
            mesh=self.mesh,
            axis_names=self.manual,
            in_specs=in_specs,
            out_specs=out_specs,
            check_vma=False,
        )

    def split(self, dim: int | None) -> PartitionSpec:
        """The spec of an array that is split over the devices along `dim`."""
        if dim is None or not self.axes:
            return PartitionSpec()
        return PartitionSpec(*[None] * dim, self.axes)

    def placed(self, x: Array) -> Array:
        """Return an array of an elementwise operation, split like the parameters of its shape."""
        if x.size < MIN_ELEMENTS_PER_DEVICE * self.number:
            # XLA simplifies a program on one element as one on scalars, with other roundings.
            return self._constrained(x, PartitionSpec())
        spec = (self.specs or {}).get(x.shape)
        if spec is None:
            return x
        return self._constrained(x, spec)

    def everywhere(self, x: Array) -> Array:
        """Return an array that is replicated over the axes of the rows."""
        if self.other_axes:
            return x
        return self._constrained(x, PartitionSpec())

    def _constrained(self, x: Array, spec: PartitionSpec) -> Array:
        if self.mesh is None or not x.ndim or trees.is_key(x):
            return x
        return jax.lax.with_sharding_constraint(x, NamedSharding(self.mesh, spec))

    def scattered(self, shape: tuple[int, ...]) -> int | None:
        """The dimension along which to split a sum of this shape over the devices."""
        spec = dims_of((self.specs or {}).get(shape, PartitionSpec()))
        for dim, axis in enumerate(spec):
            if not set(mesh_axes_of(axis)).isdisjoint(self.axes):
                return None if shape[dim] % self.devices else dim
        return None


def as_lanes(lanes: object) -> int | None:
    if lanes is None:
        return None
    number = as_int(lanes, "lanes", 1)
    if number & (number - 1):
        power = 1 << number.bit_length() - 1
        raise ValueError(
            f"lanes={number}: must be a power of two, for a binary tree; use {power} or {2 * power}"
        )
    return number


def call_on_lanes(
    number: int | None,
    fn: Callable[..., Any],
    whole: object,
    args: tuple[Any, ...],
    batch_specs: Tree = None,
    specs: Mapping[tuple[int, ...], PartitionSpec] | None = None,
    specs_of: Callable[[Any], Any] | None = None,
) -> Any:
    """Return `fn(lanes, whole, args)`, compiled and on Auto axes.

    Without lanes, return `fn(None, whole, args)`.
    """
    if number is None:
        return fn(None, whole, args)
    row_specs = microbatches.specs_of_rows(args, batch_specs)
    batch_dims = [dims_of(spec) for spec in row_specs if spec is not None]
    shardings = traced_shardings(whole)
    if not shardings:
        shardings = list(map(meshes.sharding_on_mesh, jax.tree.leaves(whole)))

    def call(whole: object, args: Any) -> Any:
        lanes = _lanes_on_mesh(number, batch_dims, shardings)
        if lanes.mesh is not None:
            lanes = lanes._replace(specs=specs)
        return fn(lanes, whole, args)

    def computed(whole: object, args: Any) -> Any:
        return call_on_auto_axes(call, whole, args, specs_of=specs_of)

    if trees.has_tracers((whole, args)):
        return computed(whole, args)
    with using_mesh(mesh_of((whole, args))):
        return jax.jit(computed)(whole, args)


def _lanes_on_mesh(
    number: int, batch_dims: Sequence[tuple[Any, ...]], shardings: Sequence[Any]
) -> Lanes:
    """Return lanes on the current mesh.

    `batch_dims` are the specs of the batch, `shardings` are of the other arrays.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or set(mesh.axis_types) != {AxisType.Auto}:
        return Lanes(number)
    axes = _axes_of_rows(number, mesh, batch_dims)
    devices = parts_along(mesh, axes)
    if number % devices:
        raise ValueError(
            f"lanes={number}: must be a multiple of {devices}, "
            "the number of devices that the rows of the batch are on"
        )
    used: set[str] = set()
    other_dims = (dims_of(s.spec) for s in shardings if isinstance(s, NamedSharding))
    for dims in [*batch_dims, *other_dims]:
        used.update(*map(mesh_axes_of, dims))
    others = [
        name
        for name in mesh.axis_names
        if name in used and name not in axes and mesh.shape[name] > 1
    ]
    return Lanes(number, mesh, axes, tuple(others))


def _axes_of_rows(number: int, mesh: Any, batch_dims: Sequence[tuple[Any, ...]]) -> tuple[str, ...]:
    for dims in batch_dims:
        if dims and dims[0] is not None:
            return mesh_axes_of(dims[0])
    # Rows of unknown sharding are spread over all devices.
    if not batch_dims and number % mesh.size == 0:
        return tuple(mesh.axis_names)
    return ()


def trace_on_lanes(lanes: Lanes, fn: Callable[..., Any], *args: Any) -> tuple[Any, Any]:
    """Trace a function without any mesh or layout; return its jaxpr and the result shapes."""
    with jax.sharding.use_abstract_mesh(lanes.alone()), setting(SHARDINGS, None):
        return jax.make_jaxpr(fn, return_shape=True)(*jax.tree.map(_shape, args))


_shape = functools.partial(shape_of, weak=True)


def isolate(program: Any, args: Any, witness: Array) -> list[Array]:
    """Return the results of a program whose operations XLA neither fuses nor moves with others.

    `witness` is a nonempty array whose values XLA does not know.
    """
    fn = core.jaxpr_as_fun(merge_equal(program))
    shapes = program.out_avals

    # Otherwise the fusion of a product and a sum, which rounds once instead of twice, could depend
    # on the layout. XLA's CPU compiler drops optimization barriers before it fuses. On CPUs, `fn`
    # is therefore a branch of a condition that is always true, which XLA cannot see: the first
    # element of the witness has at most 32 bits. The CPU compiler also makes one function of a
    # small loop, in which sums have another order, unless the loop calls a library. The other
    # branch does so, and never runs.
    def isolate_by_condition(witness: Array, args: Any) -> list[Array]:
        first = jax.lax.stop_gradient(jnp.real(witness[(0,) * witness.ndim]).astype(jnp.float32))
        bits = jax.lax.population_count(jax.lax.bitcast_convert_type(first, jnp.uint32))

        def never() -> list[Array]:
            value = jax.lax.linalg.cholesky(first.reshape(1, 1), symmetrize_input=False)[0, 0]
            return [jnp.full(x.shape, value, x.dtype) for x in shapes]

        return list(jax.lax.cond(bits <= 32, lambda: fn(*args), never))

    def isolate_by_barriers(witness: Array, args: Any) -> list[Array]:
        return jax.lax.optimization_barrier(fn(*jax.lax.optimization_barrier(args)))

    results = jax.lax.platform_dependent(
        witness, args, cpu=isolate_by_condition, default=isolate_by_barriers
    )
    return list(results)


def sum_over_lanes(
    lanes: Lanes,
    lane_fn: Callable[..., Any],
    whole: Sequence[Array],
    blocked: Sequence[Array],
    dims: Sequence[int],
    witness: Array | None = None,
) -> Any:
    """Return Σ lane_fn(i, whole, blocks) over the lanes i, in the tree.

    For bools, return whether any is true. `blocks` are the i-th of L blocks of each of `blocked`,
    along its dimension in `dims`.
    """
    sizes = [x.shape[dim] // lanes.number for x, dim in zip(blocked, dims, strict=True)]

    def blocks_at(i: Any, blocked: Sequence[Array]) -> list[Array]:
        blocks: list[Array] = []
        for x, size, dim in zip(blocked, sizes, dims, strict=True):
            blocks.append(jax.lax.dynamic_slice_in_dim(x, i * size, size, dim))
        return blocks

    blocks = jax.eval_shape(functools.partial(blocks_at, np.int32(0)), list(blocked))
    closed, shapes = trace_lane(lanes, lane_fn, blocks, (np.int32(0), list(whole), list(blocked)))
    outs, treedef = trees.flatten(shapes)
    program = core.ClosedJaxpr(jaxprs.consts_to_arguments(closed), ())
    split = [lanes.scattered(x.shape) for x in outs]

    def sum_on_device(
        witness: Array | None, consts: list[Array], whole: list[Array], blocked: list[Array]
    ) -> list[Array]:
        candidates = (x for x in (*blocked, *whole) if x.size and not trees.is_key(x))
        data = witness
        if data is None:
            data = next(candidates, jnp.ones(()))
        count = lanes.number // lanes.devices
        if lanes.devices > 1:
            first = jax.lax.axis_index(lanes.axes) * count
        else:
            first = jnp.int32(0)

        def lane(i: Any) -> list[Array]:
            return isolate(program, (*consts, first + i, *whole, *blocks_at(i, blocked)), data)

        return _sum_over_devices(lanes, _sum_in_loop(lane, count, outs), split)

    def sum_on_all_devices(*args: Any) -> list[Array]:
        everywhere = PartitionSpec()
        in_specs = (everywhere, everywhere, everywhere, list(map(lanes.split, dims)))
        out_specs = list(map(lanes.split, split))
        return list(lanes.spread(sum_on_device, in_specs, out_specs)(*args))

    # `is_in_lanes` recognizes the call in a traced program by this name.
    sum_on_all_devices.__name__ = sum_over_lanes.__qualname__
    lane_mesh: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
    if lanes.mesh is not None:
        lane_mesh = jax.sharding.use_abstract_mesh(lanes.mesh)
    with lane_mesh:
        sums = jax.jit(sum_on_all_devices)(witness, list(closed.consts), list(whole), list(blocked))
    return treedef.unflatten(sums)


def is_in_lanes(operation: jaxprs.Operation) -> bool:
    return operation.called == sum_over_lanes.__qualname__


def stack_over_lanes(lanes: Lanes, i: Array, tree: Tree) -> Any:
    """Stack arrays on a leading axis: zeros except at i, to be summed over the lanes."""

    def leaf(x: Any) -> Array:
        here = jnp.arange(lanes.number).reshape(-1, *[1] * np.ndim(x)) == i
        return jnp.where(here, jnp.asarray(x)[None], jnp.zeros((), jnp.result_type(x)))

    return jax.tree.map(leaf, tree)


def _sum_in_loop(
    lane: Callable[[Any], list[Array]], count: int, shapes: Sequence[Any]
) -> list[Array]:
    """Return Σ lane(i) for i < count, a power of two, in a binary tree; `lane` is traced once."""

    def subtree(size: int, first: Any) -> list[Array]:
        if size == 1:
            return lane(first)

        def add(i: Any, total: list[Array]) -> list[Array]:
            new = subtree(size // 2, first + i * (size // 2))
            return [jnp.where(i == 0, b, a + b) for a, b in zip(total, new, strict=True)]

        zeros = [jnp.zeros(x.shape, x.dtype) for x in shapes]
        return list(jax.lax.fori_loop(np.int32(0), np.int32(2), add, zeros))

    return subtree(count, np.int32(0))


def _sum_over_devices(
    lanes: Lanes, arrays: Sequence[Array], dims: Sequence[int | None]
) -> list[Array]:
    """Sum over the devices, in the same tree.

    Each sum is whole if its entry in `dims` is None, else a device has its part of this dimension.
    The exchange has the bytes of a reduce-scatter, or of an all-reduce for whole sums.
    """
    n = lanes.devices
    axes = lanes.axes
    sums = list(arrays)
    if n == 1:
        return sums
    # Whole sums that are exchanged together: small arrays of one dtype, or a large one by itself.
    groups: dict[Any, list[int]] = {}
    for i, (x, dim) in enumerate(zip(arrays, dims, strict=True)):
        if dim is None:
            group = x.dtype if x.size < SMALL else i
            groups.setdefault(group, []).append(i)
        else:
            shards = x.reshape(*x.shape[:dim], n, x.shape[dim] // n, *x.shape[dim + 1 :])
            sums[i] = _sum(jax.lax.all_to_all(shards, axes, dim, 0))
    for indices in groups.values():
        flat = jnp.concatenate([arrays[i].reshape(-1) for i in indices])
        shards = jnp.pad(flat, (0, -flat.size % n)).reshape(n, -1)
        total = _gathered(_sum(jax.lax.all_to_all(shards, axes, 0, 0)), axes).reshape(-1)
        ends = np.cumsum([arrays[i].size for i in indices])
        for i, summed in zip(indices, jnp.split(total, ends), strict=False):
            sums[i] = summed.reshape(arrays[i].shape)
    return sums


def _sum(stacked: Array) -> Array:
    """Sum over the leading axis, a power of two, in the same tree."""
    while len(stacked) > 1:
        stacked = stacked[0::2] + stacked[1::2]
    return stacked[0]


def _gathered(x: Array, axes: tuple[str, ...]) -> Array:
    """Stack the arrays of all devices."""
    if not trees.is_floating(x.dtype):
        return jax.lax.all_gather(x, axes)
    # As integers: XLA may gather by adding zeros, which changes -0.0.
    bits = jax.lax.bitcast_convert_type(x, f"uint{8 * x.dtype.itemsize}")
    return jax.lax.bitcast_convert_type(jax.lax.all_gather(bits, axes), x.dtype)


def trace_lane(
    lanes: Lanes, lane_fn: Callable[..., Any], blocks: object, args: tuple[Any, ...]
) -> tuple[Any, Any]:
    try:
        trace = trace_on_lanes(lanes, lane_fn, *args[:-1], blocks)
    except Exception as error:
        if lanes.manual:
            axes = ", ".join(map(repr, sorted(lanes.manual)))
            note(error, f"lanes={lanes.number}: {_ONE_DEVICE} {axes}")
        raise
    named = jaxprs.named_axes(trace[0]) & lanes.manual
    if named:
        axes = ", ".join(map(repr, sorted(named)))
        raise ValueError(f"lanes={lanes.number}: {_ONE_DEVICE} {axes}")
    return trace


_ONE_DEVICE = (
    "one device computes a lane: "
    "leave out of the loss all constraints and collectives over the mesh axes"
)


# The model_state that lanes return: floating leaves become the mean over the lanes. Integers, such
# as step numbers, and keys must be equal in all lanes.

NewState = Callable[[Array, list[Array], list[Array], list[Array]], list[Array]]
"""`new_state(i, old, others, rows)`: the leaves of model_state after lane i."""


def check_integers(
    lanes: Lanes,
    new_state: NewState,
    old: object,
    others: list[Array],
    batch: list[Array],
    size: int,
) -> None:
    """Reject integers of model_state that depend on the number of a lane, or on its rows."""
    leaves = [jnp.asarray(leaf) for leaf in jax.tree.leaves(old)]
    integers = [
        i
        for i, leaf in enumerate(leaves)
        if not (microbatches.is_inexact(leaf) or trees.is_key(leaf))
    ]
    if not integers:
        return
    args = (np.int32(0), leaves, others)
    rows = [jax.ShapeDtypeStruct((size, *x.shape[1:]), x.dtype) for x in batch]
    lane_trace, _ = trace_lane(lanes, new_state, rows, (*args, batch))
    whole_trace = lane_trace
    with contextlib.suppress(Exception):  # the loss may only work for the rows of a lane
        whole_trace, _ = trace_on_lanes(lanes, new_state, *args, batch)
    for i in integers:
        results = [n == i for n in range(len(leaves))]
        program, (uses_number, *used) = jaxprs.part_for(lane_trace, results, keeps_arguments=False)
        uses_rows = any(used[len(leaves) + len(others) :])
        whole_program, _ = jaxprs.part_for(whole_trace, results, keeps_arguments=False)
        # The number of rows is a constant of the program, which differs for the rows of all lanes.
        uses_size = jaxprs.program_hash(program) != jaxprs.program_hash(whole_program)
        if uses_number or uses_rows or uses_size:
            path = trees.quote_path(trees.leaf_paths(old)[i])
            raise TypeError(
                f"lanes={lanes.number}: the leaf {path} of model_state must not depend on the rows "
                f"or key of a lane, because it is {leaves[i].dtype}; return it in aux"
            )


def state_summand(i: Array, new: Any) -> Array:
    new = trees.key_data(jnp.asarray(new))
    if microbatches.is_inexact(new):
        return trees.widen(new)
    # It is equal in all lanes, so the sum over the lanes must be the value of the first one.
    return jnp.where(i == 0, new, jnp.zeros_like(new))


def merge_leaf(number: int, total: Array, old: Any) -> Array:
    if trees.is_key(old):
        return jax.random.wrap_key_data(total, impl=jax.random.key_impl(old))
    old = jnp.asarray(old)
    if microbatches.is_inexact(old):
        total = total / number
    return total.astype(old.dtype)
