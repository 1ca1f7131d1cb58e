"""The state of a training run, `TrainState`, and its creation, optionally sharded."""

import contextlib
import dataclasses
import operator
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Generic, Self, overload

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from jstep.core import device_values, meshes, placement, trees
from jstep.core.checks import as_bool, describe_type, format_bytes
from jstep.core.logs import logger
from jstep.core.new_arrays import copy_as, copy_of
from jstep.core.placement import as_memory, compiles_only, is_shape
from jstep.core.public_names import explains_attributes, find_hint
from jstep.core.tables import html_table
from jstep.core.tracebacks import shortens_tracebacks
from jstep.core.trees import Array, Optimizer, OptimizerLike, P, Params, Slots, Step, T, Tree
from jstep.slots.optax_transformations import as_optimizer
from jstep.slots.roles import NO_ROLES, Init, Role, Roles, roles_in, state_roles
from jstep.state import copies
from jstep.state import sharding as layout
from jstep.state.global_step import check_alive, create_global_step
from jstep.state.packed_slots import Packing, pack

# Creation of a state: validation of parameters, and sharding without any device holding more than
# its shards.


def is_abstract(mesh: Mesh | None, *arguments: object) -> bool:
    """Whether to create an abstract state: from shapes, or for compile-only devices."""
    if any(map(is_shape, jax.tree.leaves(arguments))):
        return True
    return compiles_only(mesh) and meshes.current_mesh() is not None


def make_on(
    mesh: Mesh,
    make: Callable[[Any, Any], Any],
    params: Tree,
    model_state: Tree,
    shardings: Callable[[Any], Any],
    model_state_specs: layout.Specs,
) -> Any:
    """Return the state `make(params, model_state)`, sharded over a mesh, or its shapes."""
    abstract = is_abstract(mesh, params, model_state)

    def place(tree: Tree, argument: str, shardings: Callable[[Any], Any]) -> Any:
        def as_leaf(keys: Any, leaf: object) -> Any:
            if is_shape(leaf):
                return leaf
            return device_values.host_leaf(leaf, trees.path_str(keys), argument)

        tree = jax.tree_util.tree_map_with_path(as_leaf, tree)
        return layout.put_leaves(tree, shardings(tree))

    def param_shardings(tree: Tree) -> Any:
        no_step: Any = None
        return shardings(TrainState(tree, {}, no_step)).params

    def model_state_shardings(tree: Tree) -> Any:
        return layout.tree_shardings(mesh, tree, model_state_specs, layout.MODEL_STATE_SPECS)

    with meshes.internal_transfers():
        placed_params = None
        if not trees.is_function(params):
            placed_params = place(params, "params", param_shardings)
        variables = place(model_state, MODEL_STATE, model_state_shardings)

    def split(placed_params: object, variables: object) -> Any:
        def specs(state: Tree) -> Any:
            return jax.tree.map(lambda sharding: sharding.spec, shardings(state))

        return meshes.call_on_auto_axes(
            make, placed_params, variables, specs_of=specs, mesh=mesh.abstract_mesh
        )

    with meshes.using_mesh(mesh):
        if AxisType.Explicit in mesh.axis_types:
            # Auto axes come first, because with them each device generates its own shard of random
            # numbers; with Explicit axes each generates the whole array, unless the function
            # annotates shardings. JAX rejects such a function with Auto axes.
            with contextlib.suppress(Exception):
                return layout.build(split, shardings, placed_params, variables, abstract=abstract)
        return layout.build(make, shardings, placed_params, variables, abstract=abstract)


NOT_TRAINED = frozenset({"BatchStat", "Cache", "Intermediate", "Perturbation", "RngState"})
"""Variable types of Flax NNX that no gradient trains, by name."""


COLLECTIONS = frozenset({"batch_stats", "cache", "intermediates", "perturbations"})
"""Collections of Flax Linen, beside "params", that no gradient trains."""


def check_trained(params: Tree) -> None:
    """Reject a whole `nnx.Module`, or all variables of a Linen module.

    Running statistics would not be updated.
    """
    if isinstance(params, Mapping) and "params" in params and not COLLECTIONS.isdisjoint(params):
        untrained = sorted(COLLECTIONS.intersection(params))
        raise TypeError(
            f"params: has Flax's collections {['params', *untrained]}; {untrained[0]!r} is "
            "not trained, but an optimizer would decay it: pass variables['params'] as params, "
            "and the others as model_state (the page 'From Flax' shows the loss)"
        )

    def is_variable(node: object) -> bool:
        return "Variable" in _nnx_kinds(node)

    for path, node in trees.leaves_with_paths(params, is_leaf=is_variable):
        if _nnx_kinds(node) & NOT_TRAINED:
            raise TypeError(
                f"params: the variable at {trees.quote_path(path)} is "
                f"an nnx.{type(node).__name__}, which is not trained; "
                "split the model, `graphdef, params, rest = nnx.split(model, nnx.Param, ...)`, "
                "and pass model_state=rest (the page 'From Flax' shows the loss)"
            )


def _nnx_kinds(node: object) -> set[str]:
    return {kind.__name__ for kind in type(node).__mro__ if kind.__module__.startswith("flax.nnx")}


# The training state: parameters, slots and the global step.
#
# `global_step`, the number of updates applied, is the only counter in jstep: schedules, bias
# corrections, averages, checkpoints, logs and the stop condition all read it.

MODEL_STATE = layout.MODEL_STATE
START_STEP = "start_step"


@explains_attributes
@dataclasses.dataclass(frozen=True, init=False, repr=False, eq=False)
class TrainState(Generic[P]):
    """Training state, an immutable pytree: parameters, optimizer state and the step.

    Optimizer state is called *slots*, as in TensorFlow.

    Attributes:
        params: The trained variables, any pytree of arrays.
        slots: Slot name → tree with the structure of `params` (None for a leaf without a slot), or
            a scalar. Non-trained variables are stored in `slots["model_state"]`. Each access
            returns a new dict.
        global_step: The number of training steps completed, an int32 scalar (int64 under x64).
        roles: The role of each slot in its optimizer, such as an age; static and not saved. It is
            empty in a state made by hand.

    Example:
        >>> import jstep
        >>> state = jstep.TrainState.create({"w": [1.0, 2.0]}, jstep.momentum(0.1, 0.9))
        >>> state
        TrainState(global_step=0, params: 2 numbers in 2 leaves (8 B), slots: momentum (8 B))
        >>> state.replace(params={"w": [0.0, 0.0]}).params
        {'w': [0.0, 0.0]}

    `state == other` is a bool: whether both have the same structure and bitwise identical arrays.
    """

    # A train step sets it on the states that it returns. Without a default, looking for it at each
    # step would call `__getattr__`.
    _layout: ClassVar[Any] = None
    _children: ClassVar[tuple[Any, ...]]
    _static: ClassVar[tuple[Roles, Packing | None]]
    params: P
    slots: Slots
    global_step: Array
    roles: dataclasses.InitVar[Roles] = NO_ROLES

    @shortens_tracebacks
    def __init__(
        self, params: P, slots: Slots, global_step: Array, roles: Roles = NO_ROLES
    ) -> None:
        stored: Any = slots
        packing = None
        # JAX and users may put anything there, such as one sharding for all slots.
        if type(slots) is dict:
            stored, packing = pack(params, slots)
        self.__dict__.update(vars(_unflatten((roles, packing), (params, stored, global_step))))

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.params, self.slots, self.global_step, self._static[0])

    @overload
    @classmethod
    def create(
        cls, params: Callable[[], T], optimizer: OptimizerLike | None, *args: Any, **kwargs: Any
    ) -> "TrainState[T]": ...

    @overload
    @classmethod
    def create(
        cls,
        params: T,
        optimizer: OptimizerLike | None,
        global_step: Step = 0,
        model_state: Tree = None,
        *,
        copy: bool = True,
        mesh: object = None,
        param_specs: object = None,
        slot_axis: object = None,
        slots_memory: str | None = None,
        model_state_specs: object = None,
    ) -> "TrainState[T]": ...

    @classmethod
    @shortens_tracebacks
    def create(
        cls,
        params: Any,
        optimizer: OptimizerLike | None,
        global_step: Step = 0,
        model_state: Tree = None,
        *,
        copy: bool = True,
        mesh: object = None,
        param_specs: object = None,
        slot_axis: object = None,
        slots_memory: str | None = None,
        model_state_specs: object = None,
    ) -> "TrainState[Any]":
        """Create a state with new slots at `global_step`.

        Args:
            params: Any pytree of arrays and numbers; None and integer leaves are kept. Or a
                function without arguments that returns one: with a mesh no device ever holds the
                whole tree. Shapes, or a mesh from `jstep.topology`, give a state of shapes.
            optimizer: The optimizer that creates the slots; None for a state without slots, whose
                step changes the parameters itself.
            global_step: The number of training steps completed, ≥ 0.
            model_state: Non-trained variables such as BatchNorm statistics, any pytree of arrays.
            copy: Whether to copy params and model_state. If False, the first compiled step deletes
                the caller's arrays.
            mesh: A `jax.sharding.Mesh` to shard the state over.
            param_specs: As in `shard_state`.
            slot_axis: As in `shard_state`.
            slots_memory: As in `shard_state`.
            model_state_specs: As in `shard_state`.

        Raises:
            TypeError: A leaf is neither an array nor a number (names its path), or `global_step` is
                not an integer.
            ValueError: `global_step` is negative.
            OverflowError: A leaf has an integer that 32 bits cannot hold, and 64-bit types are off
                (names its path).
        """
        if isinstance(params, Optimizer):
            raise TypeError(
                "params: must be a tree of arrays, got an optimizer; "
                "the arguments are TrainState.create(params, optimizer)"
            )
        if optimizer is None:
            optimizer = _NO_OPTIMIZER
        else:
            optimizer = as_optimizer("optimizer", optimizer)
        copy = as_bool(copy, "copy")
        mesh_arguments = {
            "param_specs": param_specs,
            "slot_axis": slot_axis,
            "slots_memory": slots_memory,
            "model_state_specs": model_state_specs,
        }
        given = [name for name, value in mesh_arguments.items() if value is not None]
        if mesh is None and given:
            raise ValueError(
                f"{', '.join(given)}: must be None without a mesh, over which it shards; "
                "give mesh as well"
            )
        make_params: Any = params if trees.is_function(params) else None
        shared = [] if make_params is not None else _shared_leaves(params)

        def make(arrays: object, model_state: Tree) -> TrainState:
            if make_params is None:
                tree = arrays
            else:
                tree = make_params()
                shared[:] = _shared_leaves(tree)
            with meshes.internal_transfers():
                return _fresh(
                    cls, tree, optimizer, create_global_step(global_step), model_state, copy=copy
                )

        if mesh is None:
            if is_abstract(None, params, model_state):
                return jax.eval_shape(make, params, model_state)
            state = device_values.make_and_check(make, params, model_state)
        else:
            # This fails before large arrays are placed.
            jax.eval_shape(lambda: create_global_step(global_step))
            mesh = meshes.as_mesh(mesh)
            memory = as_memory(slots_memory, mesh)

            def shardings(shapes: TrainState) -> TrainState:
                # `make_on` also passes a state of the parameters alone, to place them first.
                specs = model_state_specs if MODEL_STATE in shapes.slots else None
                return _shardings_of(shapes, mesh, param_specs, slot_axis, memory, specs)

            layout.check_model_state(model_state, model_state_specs)
            state = device_values.make_and_check(
                make_on, mesh, make, params, model_state, shardings, model_state_specs
            )
        for paths in shared:
            logger.warning(
                "params: %s are the same array. The state stores a separate copy under each path, "
                "and the copies are trained independently. To tie them, "
                "keep the array under one path and read it there in the model.",
                " and ".join(map(repr, paths)),
            )
        return state

    @property
    def model_state(self) -> Any:
        """The non-trained variables, `slots["model_state"]`; None if there are none."""
        return self.slots.get(MODEL_STATE)

    def replace(self, **changes: Any) -> Self:
        """Return a new state with other `params`, `slots`, `global_step` or `model_state`.

        Args:
            **changes: The new values; NumPy arrays among them are copied. `model_state=None`
                removes it; numbers in it become arrays.

        Raises:
            TypeError: There is no such field.

        Example:
            >>> import jstep
            >>> optimizer = jstep.gradient_descent(0.1)
            >>> state = jstep.TrainState.create({"w": 1.0}, optimizer, model_state={"seen": 0})
            >>> print(state.replace(model_state={"seen": 1}).model_state["seen"])
            1
        """
        for name in changes:
            if name not in _REPLACEABLE:
                hint = find_hint(f"TrainState.{name}")
                raise TypeError(
                    f"replace({name}=…): must be one of {', '.join(_REPLACEABLE)}{hint}"
                )
        if "params" in changes and "slots" not in changes:
            keep = "; or state.replace(params=…, slots=state.slots) to keep them"
            copies.warn_of_copies(
                self, changes["params"], self.slots, "state.replace(params=…)", keep
            )
        if _is_count(changes.get("global_step")):
            changes["global_step"] = placement.place_like_old(
                create_global_step(changes["global_step"]), self.global_step
            )
        if MODEL_STATE in changes:
            slots = dict(changes.get("slots", self.slots))
            variables = changes.pop(MODEL_STATE)
            slots.pop(MODEL_STATE, None)
            if variables is not None:
                slots = {**slots, MODEL_STATE: _numbers_as_arrays(variables)}
            changes["slots"] = slots
        copied = {name: trees.copy_numpy(value, name) for name, value in changes.items()}
        return self._pack_prefix(dataclasses.replace(self, **copied))

    def _pack_prefix(self, new: Self) -> Self:
        """Store the slots of a new state as this state stores its own.

        The new state may be a tree prefix of this one, such as its shardings.
        """
        roles, packing = self._static
        if packing is None or new._static[1] is not None:
            return new
        stored = packing.pack_prefix(new.slots)
        if stored is None:
            return new
        return _unflatten((roles, packing), (new.params, stored, new.global_step))  # type: ignore[return-value]

    @shortens_tracebacks
    def with_params(self, params: P) -> Self:
        """Return a new state with other parameters, and slots that are copies of them set to these.

        Copies are averages, masters, slow weights and others, which would undo
        `state.replace(params=…)`. Everything else stays.

        Args:
            params: The new parameters, with the structure, shapes and dtypes of the old ones; each
                leaf is copied, and placed like the old one. A leaf that is the state's own array
                stays, and so do its slots. A low-precision leaf may be given in float32 if it has a
                master or a remainder.

        Raises:
            TypeError: A leaf is not an array or a number (names its path).
            ValueError: The structure, a shape or a dtype differs (names the leaf), the state was
                made by hand, or the rule computes the parameters from its slots, as FTRL and
                MADGRAD do.

        Example:
            >>> import jstep
            >>> ema = jstep.ExponentialMovingAverage(0.999)
            >>> optimizer = jstep.with_moving_average(jstep.sgd(0.1), ema)
            >>> state = jstep.TrainState.create({"w": 1.0}, optimizer).with_params({"w": 5.0})
            >>> print(state.params["w"], jstep.averaged_params(state)["w"])
            5.0 5.0
        """
        params, slots = copies.replace_params(self, params)
        return dataclasses.replace(self, params=params, slots=slots)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, TrainState):
            return NotImplemented
        if trees.has_tracers((self, other)):
            raise TypeError(
                "state == other: must not be traced, as its result is a Python bool; "
                "compare states outside of jit, vmap and steps, or their leaves by jnp.array_equal"
            )
        for state in (self, other):
            check_alive(state)
        return self is other or _is_equal(self._children, other._children)

    def __repr__(self) -> str:
        leaves = jax.tree.leaves(self.params)
        numbers = sum(int(np.size(leaf)) for leaf in leaves)
        slots = ", ".join(
            f"{name} ({_bytes_text(tree)})" for name, tree in sorted(self.slots.items())
        )
        return (
            f"TrainState(global_step={_step_text(self.global_step)}, "
            f"params: {_counted(numbers, 'number', 'numbers')} in "
            f"{_counted(len(leaves), 'leaf', 'leaves')} ({_bytes_text(self.params)}), "
            f"slots: {slots or 'none'})"
        )

    def _repr_html_(self) -> str:
        numbers = sum(int(np.size(leaf)) for leaf in jax.tree.leaves(self.params))
        named = {"params": self.params, **dict(sorted(self.slots.items()))}
        rows = [
            (name, f"{len(jax.tree.leaves(tree)):,}", _bytes_text(tree))
            for name, tree in named.items()
        ]
        title = (
            f"TrainState at step {_step_text(self.global_step)}: "
            f"{_counted(numbers, 'parameter', 'parameters')}"
        )
        return html_table(title, rows, ("", "leaves", "size"))


def _no_slots(params: Params, step: Step) -> Slots:
    return {}


def _no_roles(params: Params) -> Roles:
    return NO_ROLES


def _keep_updates(updates: Tree, slots: Slots, params: Params, step: Step) -> tuple[Tree, Slots]:
    return updates, slots


def _no_hyperparameters(step: Step, /) -> dict[str, Any]:
    return {}


_NO_OPTIMIZER = Optimizer(Init(_no_slots, _no_roles), _keep_updates, _no_hyperparameters)
"""The optimizer of a state without one, whose step changes the parameters itself."""
_FIELDS = tuple(field.name for field in dataclasses.fields(TrainState))
_REPLACEABLE = (*_FIELDS, MODEL_STATE)
_flatten = operator.attrgetter("_children", "_static")


def _flatten_with_keys(state: TrainState) -> tuple[list[tuple[Any, Any]], Any]:
    children = zip(map(jax.tree_util.GetAttrKey, _FIELDS), state._children, strict=True)
    return list(children), state._static


def _unflatten(static: tuple[Roles, Packing | None], children: Any) -> TrainState:
    # JAX calls it at each step: setting the attributes of a frozen dataclass takes twice as long.
    state = object.__new__(TrainState)
    fields = state.__dict__
    fields["_static"] = static  # a tuple, which Python compares by identity first
    fields["_children"] = children
    fields["params"] = children[0]
    fields["global_step"] = children[2]
    fields["roles"] = static[0]
    return state


def _copied_slots(state: TrainState) -> Any:
    stored = state._children[1]
    packing = state._static[1]
    if type(stored) is not dict:
        return stored
    if packing is None:
        return dict(stored)
    fields = state.__dict__
    if "_unpacked" not in fields:
        fields["_unpacked"] = packing.unpack(stored)
    return dict(fields["_unpacked"])


# A copy, so that `state.slots[name] = x` changes neither this state nor those that share its dict.
TrainState.slots = property(_copied_slots)  # type: ignore[assignment]
_frozen_setattr = TrainState.__setattr__


def _refuse_assignment(self: TrainState, name: str, value: object) -> None:
    try:
        _frozen_setattr(self, name, value)
    except dataclasses.FrozenInstanceError as error:
        remedy = ""
        if name in _REPLACEABLE:
            remedy = f"; a state is immutable: use state = state.replace({name}=…)"
        raise dataclasses.FrozenInstanceError(f"{error}{remedy}") from None


# Set here, because a frozen dataclass may not define `__setattr__`.
TrainState.__setattr__ = _refuse_assignment  # type: ignore[assignment]
# Not by `register_dataclass`, so that JAX reads the slots without copying them.
jax.tree_util.register_pytree_with_keys(TrainState, _flatten_with_keys, _unflatten, _flatten)


def keep_roles(old: object, new: object) -> Any:
    """Return the new state, with the old roles if a step created it by hand."""
    if not (isinstance(new, TrainState) and isinstance(old, TrainState)):
        return new
    if roles_in(new) or not roles_in(old):
        return new
    if not isinstance(new.slots, dict) or new.slots.keys() != old.slots.keys():
        return new
    return TrainState(new.params, new.slots, new.global_step, roles=roles_in(old))


def _fresh(
    cls: type[TrainState],
    params: Tree,
    optimizer: Optimizer,
    step: Array,
    model_state: Tree,
    *,
    copy: bool,
) -> TrainState:
    check_trained(params)
    params = _as_arrays(params, copy=copy)
    roles = state_roles(optimizer, params)
    slots = _unshared(params, dict(_slots_of(params, optimizer, step, roles)))
    if model_state is not None:
        if MODEL_STATE in slots:
            raise ValueError(
                f"the optimizer has a slot named {MODEL_STATE!r}, "
                "a name reserved for non-trained variables"
            )
        slots[MODEL_STATE] = _as_arrays(model_state, copy=copy, argument=MODEL_STATE)
        for name in roles.names_with(Role.LAST_WEIGHT):
            scope, _, _ = name.rpartition("/")
            slots[f"{scope}/{MODEL_STATE}"] = jax.tree.map(_init_average, slots[MODEL_STATE])
    return cls(params, slots, copy_of(step), roles=roles)


def _init_average(leaf: Any) -> Any:
    if not trees.is_trainable(leaf):
        return None
    return copy_as(leaf, trees.compute_dtype(leaf.dtype))


def _slots_of(params: Params, optimizer: Optimizer, step: Array, roles: Roles) -> Slots:
    mesh = meshes.explicit_mesh(params)
    if mesh is None:
        return optimizer.init(params, step)
    everywhere = layout.everywhere(mesh)

    def spec(leaf: Any) -> Any:
        return meshes.spec_of(leaf) if meshes.explicit_mesh(leaf) else everywhere.spec

    specs = jax.tree.map(spec, params)

    def specs_of(slots: Slots) -> Any:
        _, shardings = layout.state_shardings(params, slots, mesh, specs, None, roles)
        return jax.tree.map(lambda sharding: sharding.spec, shardings)

    def init(params: Params, step: Array) -> Slots:
        return dict(optimizer.init(params, step))

    return meshes.call_on_auto_axes(init, params, step, specs_of=specs_of)


def _is_equal(a: object, b: object) -> bool:
    """Whether two trees are bitwise identical, as far as this host sees."""
    leaves_a, structure_a = trees.flatten(a)
    leaves_b, structure_b = trees.flatten(b)
    try:
        with meshes.internal_transfers():
            is_alike = bool(structure_a == structure_b)
            return is_alike and all(map(trees.has_same_bits, leaves_a, leaves_b))
    except Exception:  # static parts of a user's class that cannot be compared
        return False


def _unshared(params: Params, slots: Slots) -> Slots:
    """Copy slots that share an array with params: a shared buffer cannot be donated."""
    seen = {id(leaf) for leaf in jax.tree.leaves(params)}

    def copy_if_seen(leaf: object) -> Any:
        if isinstance(leaf, jax.Array) and not trees.is_traced(leaf) and id(leaf) in seen:
            leaf = copy_of(leaf)
        seen.add(id(leaf))
        return leaf

    return {name: jax.tree.map(copy_if_seen, tree) for name, tree in slots.items()}


def _as_arrays(tree: Tree, *, copy: bool, argument: str = "params") -> Any:
    def convert(keys: Any, leaf: object) -> Any:
        return device_values.as_leaf(leaf, trees.path_str(keys), copy=copy, argument=argument)

    return jax.tree_util.tree_map_with_path(convert, tree)


def _is_count(step: Any) -> bool:
    """Whether a step is an integer of Python or NumPy."""
    if isinstance(step, np.ndarray):
        return step.ndim == 0 and step.dtype.kind in "iu"
    return isinstance(step, int | np.integer) and not isinstance(step, bool)


def _numbers_as_arrays(model_state: Tree) -> Any:
    """Convert numbers; other leaves may be shapes or shardings."""

    def convert(keys: Any, leaf: Any) -> Any:
        if not isinstance(leaf, bool | int | float | complex | np.generic):
            return leaf
        return device_values.as_leaf(leaf, trees.path_str(keys), copy=False, argument=MODEL_STATE)

    with meshes.internal_transfers():
        return jax.tree_util.tree_map_with_path(convert, model_state)


def _shared_leaves(params: Params) -> list[list[str]]:
    paths_of: dict[int, list[str]] = {}
    named = trees.leaves_with_paths(params)  # kept, so that the ids stay unique
    for path, leaf in named:
        if isinstance(leaf, jax.Array | np.ndarray):
            paths_of.setdefault(id(leaf), []).append(path)
    return [paths for paths in paths_of.values() if len(paths) > 1]


def _counted(count: int, singular: str, plural: str) -> str:
    return f"{count:,} {singular if count == 1 else plural}"


def _bytes_text(tree: Tree) -> str:
    arrays = (leaf for leaf in jax.tree.leaves(tree) if hasattr(leaf, "dtype"))
    return format_bytes(sum(int(np.size(leaf)) * leaf.dtype.itemsize for leaf in arrays))


def _step_text(step: object) -> str:
    if trees.is_traced(step) or is_shape(step):
        return "abstract"
    if trees.is_donated(step):
        return "donated"
    return str(np.asarray(step))


def as_state(value: object) -> TrainState:
    if not isinstance(value, TrainState):
        library = type(value).__module__.partition(".")[0]
        got = f"{library}'s TrainState"
        if type(value).__name__ != "TrainState":
            got = describe_type(value)
        remedy = ""
        if not isinstance(value, tuple):
            remedy = "; make one with jstep.TrainState.create(params, optimizer)"
        raise TypeError(f"state: must be a jstep.TrainState, got {got}{remedy}")
    return value


# Sharding of a training state over a mesh.


@shortens_tracebacks
def shard_state(
    state: TrainState,
    mesh: object,
    param_specs: layout.Specs = None,
    slot_axis: object = None,
    *,
    slots_memory: str | None = None,
    model_state_specs: layout.Specs = None,
) -> TrainState:
    """Shard a state over a mesh. Compiled steps preserve the sharding of every leaf.

    Args:
        state: Any state. For one too large for a device, pass the mesh to `TrainState.create`. A
            state of shapes gives shapes with shardings: a target for `Saver.restore`.
        mesh: A `jax.sharding.Mesh`. The state keeps its axis types, Explicit or Auto.
        param_specs: Sharding of the parameters: one `PartitionSpec` for all, a tree of them (or a
            prefix of one), rules `[(glob, spec), …]` of which the first match applies, or a
            function `(path, leaf) -> spec`; otherwise replicated.
        slot_axis: A mesh axis over which the slots of replicated parameters are split (ZeRO-1).
            Other slots are sharded like their parameters; scalars are replicated.
        slots_memory: The memory kind of slots with one dimension or more: `"pinned_host"` for host
            memory, None or `"device"` for device memory.
        model_state_specs: Sharding of model_state, in the same forms; otherwise replicated.
            `PartitionSpec("data")` splits the leading axis of each leaf, as of stacked workers.
            Averages of model_state are sharded like it.

    Raises:
        ValueError: A spec names an axis that is not in the mesh, or does not divide its leaf (names
            the path); or the devices do not have that memory kind.

    Example:
        >>> import jax, jstep
        >>> from jax.sharding import PartitionSpec as P
        >>> state = jstep.TrainState.create({"w": jax.numpy.ones((8, 4))}, jstep.adam())
        >>> mesh = jax.make_mesh((1,), ("data",))
        >>> tuple(jstep.shard_state(state, mesh, [("w", P("data"))]).slots["m"]["w"].sharding.spec)
        ('data',)

    Source: Rajbhandari et al., "ZeRO" (2019), stage 1, for `slot_axis`.
    """
    as_state(state)
    mesh = meshes.as_mesh(mesh)
    shardings = _shardings_of(
        state, mesh, param_specs, slot_axis, as_memory(slots_memory, mesh), model_state_specs
    )
    with meshes.internal_transfers():
        return layout.put_leaves(state, shardings)


def _shardings_of(
    state: TrainState,
    mesh: Any,
    param_specs: Any,
    slot_axis: Any,
    memory: str | None,
    model_state_specs: Any,
) -> TrainState:
    roles = roles_in(state)
    params, slots = layout.state_shardings(
        state.params, state.slots, mesh, param_specs, slot_axis, roles
    )
    slots = layout.change_memory(slots, state.slots, memory)
    slots |= layout.model_state_shardings(state.slots, mesh, model_state_specs)
    step: Any = None
    if state.global_step is not None:
        step = layout.everywhere(mesh)
    return state.replace(params=params, slots=slots, global_step=step)
