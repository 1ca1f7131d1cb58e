"""Shardings of states, from specs, rules or FSDP."""

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from jstep.core import meshes, placement, selection, trees
from jstep.core.checks import as_int
from jstep.core.new_arrays import copy_of
from jstep.core.trees import Params, Slots, Tree
from jstep.slots.roles import NO_ROLES, Role, Roles

# Partition specs for fully sharded data parallelism (FSDP).


def fsdp_specs(params: Params, mesh: object, axis: object = "data", min_size: int = 2**16) -> Any:
    """Return specs that split each large parameter over a mesh axis.

    It is split along its largest divisible dimension.

    Args:
        params: Arrays, or shapes from `jax.eval_shape`.
        mesh: A `jax.sharding.Mesh`.
        axis: The mesh axis, or a tuple of axes.
        min_size: The minimum number of elements of a split leaf.

    Returns:
        A tree of `PartitionSpec`.

    Raises:
        ValueError: The mesh has no such axis.

    Example:
        >>> import jax, jstep
        >>> mesh = jax.make_mesh((1,), ("data",))
        >>> params = {"w": jax.ShapeDtypeStruct((256, 512), "float32"), "b": jax.numpy.ones(4)}
        >>> specs = jstep.fsdp_specs(params, mesh)
        >>> tuple(specs["w"]), tuple(specs["b"])
        ((None, 'data'), ())

    Source: Zhao et al., "PyTorch FSDP" (2023); Rajbhandari et al., "ZeRO" (2019), stage 3.
    """
    min_size = as_int(min_size, "min_size", 0, "a number of elements")
    size = meshes.axis_size(meshes.as_mesh(mesh), axis, f"axis={axis!r}")

    def spec(leaf: Any) -> PartitionSpec:
        shape = np.shape(leaf)
        if math.prod(shape) < min_size:
            return PartitionSpec()
        dim = meshes.largest_divisible(shape, size)
        if dim is None:
            return PartitionSpec()
        return PartitionSpec(*[None] * dim, axis)

    return jax.tree.map(spec, params)


# Shardings of the leaves of a state, from the user's specs and rules.

MODEL_STATE = "model_state"


def is_model_state(name: str) -> bool:
    """Whether a slot is the model state or one of its averages, `…/model_state`."""
    return name == MODEL_STATE or name.endswith(f"/{MODEL_STATE}")


AnyMesh = Mesh | AbstractMesh
Specs = Any
"""None (replicated), a PartitionSpec, a tree of them, rules or a function.

Rules are `[(glob, spec), …]`, a function is `(path, leaf) -> spec`.
"""
_IS_SPEC = (type(None), PartitionSpec)


def tree_shardings(mesh: AnyMesh, tree: Tree, specs: Specs, argument: str) -> Any:
    """Return a tree of the shardings of the leaves of a tree.

    `argument` is the name of the argument that the specs were passed for.
    """
    shardings: list[NamedSharding] = []
    leaf_specs = _leaf_specs(tree, specs, argument)
    for spec, (path, leaf) in zip(leaf_specs, trees.leaves_with_paths(tree), strict=True):
        subject = f"{argument}: {spec} at {trees.quote_path(path)}"
        shardings.append(_check_sharding(mesh, spec, np.shape(leaf), subject))
    return trees.structure(tree).unflatten(shardings)


def _leaf_specs(tree: Tree, specs: Specs, argument: str) -> list[PartitionSpec]:
    named = trees.leaves_with_paths(tree)
    if isinstance(specs, _IS_SPEC):
        return [specs or PartitionSpec()] * len(named)
    if isinstance(specs, list | tuple) and all(map(_is_rule, specs)):
        return _apply_rules(tree, specs, argument)
    if trees.is_function(specs):
        return [_as_spec(specs(path, leaf), path, argument) for path, leaf in named]
    try:
        whole = jax.tree.broadcast(specs, tree, is_leaf=lambda x: isinstance(x, _IS_SPEC))
    except ValueError as error:
        raise ValueError(
            f"{argument}: a tree of specs must have the structure of {_DESCRIBED[argument]} or a "
            f"prefix of it, whose paths are {[path for path, _ in named][:20]}"
        ) from error
    leaves = trees.structure(tree).flatten_up_to(whole)
    return [_as_spec(spec, path, argument) for spec, (path, _) in zip(leaves, named, strict=True)]


PARAM_SPECS = "param_specs"
MODEL_STATE_SPECS = "model_state_specs"
_DESCRIBED = {PARAM_SPECS: "params", MODEL_STATE_SPECS: "model_state"}
_LEAVES = {PARAM_SPECS: "parameter", MODEL_STATE_SPECS: "leaf of model_state"}


def _is_rule(rule: object) -> bool:
    return isinstance(rule, tuple | list) and len(rule) == 2 and isinstance(rule[0], str)


def _apply_rules(
    tree: Tree, rules: Sequence[tuple[str, Any]], argument: str
) -> list[PartitionSpec]:
    paths = [path for path, _ in trees.leaves_with_paths(tree)]
    names = selection.leaf_names(tree)
    for glob, _ in rules:
        if not any(selection.is_named(aliases, glob) for aliases in names):
            hint = trees.suggest_names(glob, paths)
            raise ValueError(f"{argument}: the rule {glob!r} matches no {_LEAVES[argument]}{hint}")
    specs: list[PartitionSpec] = []
    for aliases, path in zip(names, paths, strict=True):
        # The first rule that matches applies.
        matching = (spec for glob, spec in rules if selection.is_named(aliases, glob))
        specs.append(_as_spec(next(matching, None), path, argument))
    return specs


def _as_spec(spec: object, path: str, argument: str) -> PartitionSpec:
    if spec is None:
        return PartitionSpec()
    if not isinstance(spec, PartitionSpec):
        raise TypeError(
            f"{argument}: at {trees.quote_path(path)}: "
            f"must be a jax.sharding.PartitionSpec, got {spec!r}"
        )
    return spec


def _check_sharding(
    mesh: AnyMesh, spec: PartitionSpec, shape: tuple[int, ...], subject: str
) -> NamedSharding:
    if len(spec) > len(shape):
        raise ValueError(f"{subject} has {len(spec)} dimensions, but the leaf has shape {shape}")
    try:
        sharding = NamedSharding(mesh, spec)
        sharding.shard_shape(shape)
    except Exception as error:  # of JAX, which names no leaf
        raise ValueError(f"{subject} does not fit shape {shape}: {error}") from None
    return sharding


def check_model_state(model_state: Tree, specs: Specs) -> None:
    if model_state is None and specs is not None:
        raise ValueError(f"{MODEL_STATE_SPECS}: must be None for a state without model_state")


def model_state_shardings(slots: Slots, mesh: AnyMesh, specs: Specs) -> Slots:
    """Return the shardings of the model state and of its averages, which are sharded like it."""
    model_state = slots.get(MODEL_STATE)
    check_model_state(model_state, specs)
    if model_state is None:
        return {}
    treedef = trees.structure(model_state)
    result: Slots = {MODEL_STATE: tree_shardings(mesh, model_state, specs, MODEL_STATE_SPECS)}
    shardings = jax.tree.leaves(result[MODEL_STATE])
    for name, averages in slots.items():
        if name == MODEL_STATE or not is_model_state(name):
            continue
        # A leaf is None if it is not averaged, such as an integer.
        leaves = treedef.flatten_up_to(averages)
        pairs = zip(leaves, shardings, strict=True)
        result[name] = treedef.unflatten(
            [None if leaf is None else sharding for leaf, sharding in pairs]
        )
    return result


def state_shardings(
    params: Params,
    slots: Slots,
    mesh: AnyMesh,
    param_specs: Specs,
    slot_axis: object,
    roles: Roles = NO_ROLES,
) -> tuple[Any, Slots]:
    """Return the shardings of the parameters and of their slots; the model state is replicated."""
    leaves, treedef = trees.flatten(params)
    param_shardings = jax.tree.leaves(tree_shardings(mesh, params, param_specs, PARAM_SPECS))
    if slot_axis is not None:
        meshes.axis_size(mesh, slot_axis, f"slot_axis={slot_axis!r}")

    def is_per_parameter(name: str, tree: Tree) -> bool:
        # Non-trained variables may have the structure of the parameters by accident.
        if is_model_state(name) or (name in roles and roles.has_one_value(name)):
            return False
        return trees.is_like(params, tree)

    def shard(name: str, tree: Tree) -> Any:
        if not is_per_parameter(name, tree):
            return jax.tree.map(lambda _: everywhere(mesh), tree)
        role = roles.get(name)
        values = treedef.flatten_up_to(tree)
        shardings: list[NamedSharding | None] = []
        for value, sharding, parameter in zip(values, param_shardings, leaves, strict=True):
            if value is None:
                shardings.append(None)
                continue
            shape = np.shape(parameter)
            shardings.append(slot_sharding(sharding, shape, np.shape(value), slot_axis, role))
        return treedef.unflatten(shardings)

    slot_shardings = {name: shard(name, tree) for name, tree in slots.items()}
    return treedef.unflatten(param_shardings), slot_shardings


def change_memory(shardings: Slots, slots: Slots, kind: str | None) -> Slots:
    """Change the memory kind of slots with one dimension or more; model_state is unchanged."""
    if kind is None:
        return shardings

    def moved(sharding: NamedSharding, leaf: Any) -> NamedSharding:
        if np.ndim(leaf) == 0:
            return sharding
        return sharding.with_memory_kind(kind)

    changed = dict(shardings)
    for name, tree in shardings.items():
        if not is_model_state(name):
            changed[name] = jax.tree.map(moved, tree, slots[name])
    return changed


def everywhere(mesh: AnyMesh) -> NamedSharding:
    return NamedSharding(mesh, PartitionSpec())


def shard_slot(sharding: NamedSharding, shape: tuple[int, ...], axis: object) -> NamedSharding:
    """Return the parameter's sharding, or if it is replicated, one split over `axis` (ZeRO-1)."""
    if axis is None or any(dim is not None for dim in sharding.spec):
        return sharding
    dim = meshes.largest_divisible(shape, meshes.parts_along(sharding.mesh, axis))
    if dim is None:
        return sharding
    return NamedSharding(sharding.mesh, PartitionSpec(*[None] * dim, axis))


def slot_sharding(
    sharding: NamedSharding,
    shape: tuple[int, ...],
    slot_shape: tuple[int, ...],
    slot_axis: object,
    role: Role | None,
) -> NamedSharding:
    """Return the parameter's sharding without the dimensions that the slot lacks (removed or 1).

    For square parameters, the shapes do not show whether the slot has one number for each row or
    for each column, but its role does.
    """
    mesh = sharding.mesh
    sharding = shard_slot(sharding, shape, slot_axis)
    if role is Role.SCALES:
        # Scales are sharded like their codes, except along an axis whose blocks would be split.
        return NamedSharding(mesh, meshes.fitting_spec(mesh, sharding.spec, slot_shape))
    if slot_shape == shape:
        return sharding
    spec = (*sharding.spec, *[None] * (len(shape) - len(sharding.spec)))
    if _has_reduced_axes(slot_shape, shape):
        axes = []
        for axis, size, whole in zip(spec, slot_shape, shape, strict=True):
            axes.append(axis if size == whole else None)
        return shard_slot(NamedSharding(mesh, PartitionSpec(*axes)), slot_shape, slot_axis)
    # The slot may lack some dimensions of the parameter, such as those that a sum has reduced.
    candidates = []
    for kept in itertools.combinations(range(len(shape)), len(slot_shape)):
        if tuple(shape[dim] for dim in kept) == slot_shape:
            candidates.append(PartitionSpec(*(spec[dim] for dim in kept)))
    if not candidates or not slot_shape:
        return everywhere(mesh)
    if len(candidates) > 1 and role in (Role.ROWS, Role.COLUMNS):
        chosen = candidates[0] if role is Role.ROWS else candidates[1]
    else:  # either dimension may be the reduced one: prefer more shards, to save memory
        chosen = max(candidates, key=_count_of_split_dims)
    return shard_slot(NamedSharding(mesh, chosen), slot_shape, slot_axis)


def _has_reduced_axes(slot_shape: tuple[int, ...], shape: tuple[int, ...]) -> bool:
    """Whether a slot has the dimensions of its parameter, some of them reduced to size 1."""
    if len(slot_shape) != len(shape):
        return False
    return all(size in (1, whole) for size, whole in zip(slot_shape, shape, strict=True))


def _count_of_split_dims(spec: PartitionSpec) -> int:
    return sum(axis is not None for axis in spec)


def put_leaf(leaf: Any, sharding: NamedSharding) -> Any:
    """Place a copy of a leaf; shapes, or leaves on compile-only devices, become sharded shapes."""
    leaf = trees.native(leaf, "", "state")
    is_abstract = placement.is_shape(leaf)
    if not is_abstract:
        is_abstract = placement.compiles_only(sharding.mesh) and not trees.is_traced(leaf)
    if is_abstract:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
    if _can_transfer(leaf, sharding):
        return jax.device_put(_unaliased_copy(leaf), sharding)
    if trees.is_key(leaf):
        return jax.random.wrap_key_data(
            put_leaf(jax.random.key_data(leaf), sharding), impl=jax.random.key_impl(leaf)
        )
    # Every process has the whole leaf and keeps its own shards.
    host = np.asarray(leaf)
    return jax.make_array_from_callback(host.shape, sharding, lambda index: np.array(host[index]))


def put_leaves(tree: Tree, shardings: Tree) -> Tree:
    """Place a copy of each leaf as `put_leaf` does, with one transfer for all that allow it."""
    leaves, structure = trees.flatten(tree)
    shardings_of_leaves = structure.flatten_up_to(shardings)
    placed: list[Any] = []
    transferred_indices: list[int] = []
    for leaf, sharding in zip(leaves, shardings_of_leaves, strict=True):
        is_array = (
            isinstance(leaf, jax.Array)
            and not trees.is_traced(leaf)
            and not placement.compiles_only(sharding.mesh)
        )
        if is_array and _can_transfer(leaf, sharding):
            transferred_indices.append(len(placed))
            placed.append(_unaliased_copy(leaf))
        else:
            placed.append(put_leaf(leaf, sharding))
    copies = [placed[i] for i in transferred_indices]
    targets = [shardings_of_leaves[i] for i in transferred_indices]
    for i, leaf in zip(transferred_indices, jax.device_put(copies, targets), strict=True):
        placed[i] = leaf
    return jax.tree.unflatten(structure, placed)


def _can_transfer(leaf: Any, sharding: NamedSharding) -> bool:
    """Whether `jax.device_put` can place the leaf.

    It can on devices of this process, or between the devices of all processes.
    """
    if sharding.is_fully_addressable:
        return True
    return isinstance(leaf, jax.Array) and not leaf.is_fully_addressable


def _unaliased_copy(leaf: Any) -> Any:
    # Without a copy the shard on the leaf's own device could alias the leaf, and be donated with
    # the state. On a CPU may_alias=False is not honored: the state could alias NumPy's memory.
    if isinstance(leaf, jax.Array):
        return copy_of(leaf)
    return np.array(leaf)


def place_with_params(state: Tree) -> Tree:
    """With several processes, replicate the leaves on no mesh over the mesh of the parameters.

    JAX accepts such a leaf, often the step, in the first call, and returns it on the mesh. So
    without this the step is compiled twice, and a run that takes no step cannot save: each process
    has a leaf of its own.
    """
    if jax.process_count() == 1:
        return state
    mesh = meshes.mesh_of(state.params)
    if mesh is None or everywhere(mesh).is_fully_addressable:
        return state
    return jax.tree.map(lambda leaf: _place_whole(mesh, leaf), state)


def _place_whole(mesh: Mesh, leaf: Any) -> Any:
    if not trees.is_array(leaf) and not placement.is_shape(leaf):
        return leaf
    if isinstance(leaf, jax.Array) and (leaf.is_deleted() or not leaf.is_fully_addressable):
        return leaf
    if placement.is_shape(leaf) and leaf.sharding is not None:
        return leaf
    return put_leaf(leaf, everywhere(mesh))


def build(
    make: Callable[..., Any], shardings_of: Callable[[Any], Any], *args: object, abstract: bool
) -> Any:
    """Compute `make(*args)` with the shardings `shardings_of(shapes)`.

    No device ever holds more than its shards.
    """
    shapes = jax.eval_shape(make, *args)
    shardings = shardings_of(shapes)
    if abstract:
        return jax.tree.map(put_leaf, shapes, shardings)
    return jax.jit(make, out_shardings=shardings)(*args)


def describe_devices(state: Tree) -> dict[str, Any]:
    """Return the devices of a run and the mesh of its state, which may be shapes, or donated."""
    leaves = [
        leaf
        for leaf in jax.tree.leaves(state)
        if isinstance(leaf, jax.Array | jax.ShapeDtypeStruct)
    ]
    state_devices = next(
        (leaf.sharding.device_set for leaf in leaves if leaf.sharding is not None), set()
    )
    first = min(state_devices or jax.devices(), key=lambda device: device.id)
    mesh = meshes.mesh_of(state)
    return {
        "platform": first.platform,
        "kind": first.device_kind,
        "count": jax.device_count(first.platform),
        "of_state": max(len(state_devices), 1),
        "processes": jax.process_count(),
        "mesh": None if mesh is None else meshes.mesh_text(mesh),
    }
