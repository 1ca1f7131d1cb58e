"""The training state: parameters, slots and the global step.

`global_step`, the number of updates applied, is the only counter in jstep: schedules, bias corrections, averages,
checkpoints, logs and the stop condition all read it.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jstep.core import trees
from jstep.core.checks import as_bool, html_table, kind, size
from jstep.core.meshes import explicit_mesh, internal_transfers, require_mesh, spec_of, without_explicit_axes
from jstep.core.placement import checked_memory, collecting_checks, run_checks
from jstep.core.slot_roles import NO_ROLES, Roles, roles_in, roles_of
from jstep.core.trees import Array, Optimizer, Params, Slots, Step, require_optimizer
from jstep.sharding import layout
from jstep.state.create import is_abstract, made_on, refuse_untrained
from jstep.state.global_step import NO_STEP, create_global_step

MODEL_STATE = layout.MODEL_STATE
START_STEP = "start_step"


@dataclasses.dataclass(frozen=True, repr=False, eq=False)
@functools.partial(
    jax.tree_util.register_dataclass, data_fields=("params", "slots", "global_step"), meta_fields=("roles",)
)
class TrainState:
    """Training state: parameters, optimizer state, called *slots* as in TensorFlow, and the global step.

    An immutable pytree of arrays.

    Attributes:
        params: The trained variables, any pytree of arrays.
        slots: Slot name → tree with the structure of `params` (None for a leaf without a slot), or a scalar.
            Non-trained variables are stored in `slots["model_state"]`.
        global_step: The number of updates applied so far, an int32 scalar (int64 under x64).
        roles: What each slot is to the optimizer that made it, such as an age; static, not a leaf, not saved, and
            empty in a state made by hand.

    Example:
        >>> import jstep
        >>> state = jstep.TrainState.create({"w": [1.0, 2.0]}, jstep.momentum(0.1, 0.9))
        >>> state
        TrainState(global_step=0, params: 2 numbers in 2 leaves (8 B), slots: momentum (8 B))
        >>> state.replace(params={"w": [0.0, 0.0]}).params
        {'w': [0.0, 0.0]}

    `state == other` returns a bool: whether both have the same structure and bitwise identical arrays.
    """

    params: Params
    slots: Slots
    global_step: Array | None
    roles: dataclasses.InitVar[Roles] = NO_ROLES

    def __post_init__(self, roles: Roles) -> None:
        """Keep the roles: an attribute, but no field."""
        object.__setattr__(self, "roles", roles)

    @classmethod
    def create(
        cls,
        params: Params,
        optimizer: Optimizer,
        global_step: Step = 0,
        model_state: Any = None,
        *,
        copy: bool = True,
        mesh: Any = None,
        param_specs: Any = None,
        slot_axis: Any = None,
        slots_memory: str | None = None,
    ) -> "TrainState":
        """Create a state with new slots at `global_step`.

        Args:
            params: Any pytree of arrays and numbers; None and integer leaves are kept. Or a function without arguments
                that returns one: with a mesh it is compiled, so that no device ever holds the whole tree. Shapes
                (`jax.ShapeDtypeStruct`), or a mesh from `jstep.topology`, give a state of shapes.
            optimizer: The optimizer that creates the slots.
            global_step: The number of updates applied so far, ≥ 0.
            model_state: Non-trained variables such as BatchNorm statistics, any pytree of arrays.
            copy: Whether to copy params and model_state, so that the caller's arrays survive when the state is donated
                to a compiled step. False saves the memory of the copy; the caller's arrays are then deleted by the
                first step.
            mesh: A `jax.sharding.Mesh` to shard the state over; see `shard_state` for this and the next arguments.
            param_specs: Sharding of the parameters.
            slot_axis: The mesh axis over which slots of replicated parameters are split.
            slots_memory: The memory kind of the slots, such as `"pinned_host"`.

        Raises:
            TypeError: A leaf is neither an array nor a number (names its path), or `global_step` is not an integer.
            ValueError: `global_step` is negative, or with `copy=False` two leaves share one buffer.
        """
        require_optimizer("optimizer", optimizer)
        copy = as_bool(copy, "copy")
        if mesh is None and (param_specs is not None or slot_axis is not None or slots_memory is not None):
            raise ValueError(
                "param_specs, slot_axis and slots_memory describe the sharding over a mesh: give mesh as well"
            )
        is_function = trees.is_function(params)

        def make(params: Any, model_state: Any) -> TrainState:
            params = params() if is_function else params
            with internal_transfers():
                step = create_global_step(global_step)
                return _fresh(cls, params, optimizer, step, model_state, copy=copy)

        if mesh is None:
            if is_abstract(None, params, model_state):
                return jax.eval_shape(make, params, model_state)
            with collecting_checks() as waiting:
                state = make(params, model_state)
            run_checks(waiting, state.params)
            return state
        jax.eval_shape(lambda: create_global_step(global_step))  # fail before large arrays are placed
        mesh = require_mesh(mesh)
        memory = checked_memory(slots_memory, mesh, "slots_memory")

        def of_params(params: Any) -> Any:
            return layout.state_shardings(params, {}, mesh, param_specs, slot_axis)[0]

        def shardings(shapes: TrainState) -> Any:
            placed, slots, step = layout.state_shardings(
                shapes.params, shapes.slots, mesh, param_specs, slot_axis, roles_in(shapes)
            )
            slots = layout.in_memory(slots, shapes.slots, memory)
            return shapes.replace(params=placed, slots=slots, global_step=step)

        with collecting_checks() as waiting:
            state = made_on(mesh, make, params, model_state, shardings, of_params)
        run_checks(waiting, state.params)
        return state

    @property
    def model_state(self) -> Any:
        """The non-trained variables, `slots["model_state"]`; None if there are none."""
        return self.slots.get(MODEL_STATE)

    def replace(self, **changes: Any) -> "TrainState":
        """Return a new state with some of `params`, `slots`, `global_step` and `model_state` replaced.

        Args:
            **changes: The new values. `model_state=None` removes it; numbers in it become arrays.

        Raises:
            TypeError: There is no such field.

        Example:
            >>> import jstep
            >>> state = jstep.TrainState.create({"w": 1.0}, jstep.gradient_descent(0.1), model_state={"seen": 0})
            >>> print(state.replace(model_state={"seen": 1}).model_state["seen"])
            1
        """
        replaceable = (*_FIELDS, MODEL_STATE)
        for name in changes:
            if name not in replaceable:
                raise TypeError(
                    f"replace({name}=…): a TrainState has the fields {', '.join(_FIELDS)}"
                    f"{trees.nearest(name, replaceable)}; optimizer state is in slots, and model_state=… replaces "
                    "the non-trained variables"
                )
        if MODEL_STATE in changes:
            slots, made = dict(changes.get("slots", self.slots)), changes.pop(MODEL_STATE)
            slots.pop(MODEL_STATE, None)
            changes["slots"] = slots if made is None else {**slots, MODEL_STATE: _numbers_as_arrays(made)}
        return dataclasses.replace(self, **changes)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, TrainState):
            return NotImplemented
        return self is other or _is_equal(_fields(self), _fields(other))

    def __repr__(self) -> str:
        leaves = jax.tree.leaves(self.params)
        numbers = sum(int(np.size(leaf)) for leaf in leaves)
        slots = ", ".join(f"{name} ({_bytes_text(tree)})" for name, tree in sorted(self.slots.items()))
        return (
            f"TrainState(global_step={_step_text(self.global_step)}, "
            f"params: {_counted(numbers, 'number', 'numbers')} in {_counted(len(leaves), 'leaf', 'leaves')} "
            f"({_bytes_text(self.params)}), "
            f"slots: {slots or 'none'})"
        )

    def _repr_html_(self) -> str:
        numbers = sum(int(np.size(leaf)) for leaf in jax.tree.leaves(self.params))
        named = {"params": self.params, **dict(sorted(self.slots.items()))}
        rows = [(name, f"{len(jax.tree.leaves(tree)):,}", _bytes_text(tree)) for name, tree in named.items()]
        title = f"TrainState at step {_step_text(self.global_step)}: {_counted(numbers, 'parameter', 'parameters')}"
        return html_table(title, rows, ("", "leaves", "size"))


_FIELDS = tuple(field.name for field in dataclasses.fields(TrainState))


def keep_roles(old: Any, new: Any) -> Any:
    """Return the new state that a step made, with the roles of the old one where the step made it by hand."""
    if not (isinstance(new, TrainState) and isinstance(old, TrainState)) or roles_in(new) or not roles_in(old):
        return new
    same = isinstance(new.slots, dict) and new.slots.keys() == old.slots.keys()
    return TrainState(new.params, new.slots, new.global_step, roles=roles_in(old)) if same else new


def _fields(state: TrainState) -> tuple[Any, ...]:
    return state.params, state.slots, state.global_step


def _fresh(
    cls: type[TrainState], params: Any, optimizer: Optimizer, step: Array, model_state: Any, *, copy: bool
) -> TrainState:
    refuse_untrained(params)
    params = _as_arrays(params, copy=copy)
    roles = roles_of(optimizer, params).of_state()
    slots = _unshared(params, dict(_slots_of(params, optimizer, step, roles)))
    if model_state is not None:
        if MODEL_STATE in slots:
            raise ValueError(
                f"the optimizer has a slot named {MODEL_STATE!r}, a name reserved for non-trained variables"
            )
        slots[MODEL_STATE] = _as_arrays(model_state, copy=copy, argument=MODEL_STATE)
    if not copy:
        _refuse_shared_buffers(params, slots)
    return cls(params, slots, jnp.array(step, copy=True), roles=roles)


def _slots_of(params: Params, optimizer: Optimizer, step: Array, roles: Roles) -> Slots:
    mesh = explicit_mesh(params)
    if mesh is None:
        return optimizer.init(params, step)
    everywhere = layout.everywhere(mesh)
    specs = jax.tree.map(lambda leaf: spec_of(leaf) if explicit_mesh(leaf) else everywhere.spec, params)

    def place(slots: Slots) -> Any:
        return jax.tree.map(lambda one: one.spec, layout.state_shardings(params, slots, mesh, specs, None, roles)[1])

    return without_explicit_axes(lambda params, step: dict(optimizer.init(params, step)), params, step, place=place)


def _is_equal(a: Any, b: Any) -> bool:
    """Whether two trees are bitwise identical; leaves without accessible values are compared by identity."""
    (leaves, structure), (others, other) = trees.flatten(a), trees.flatten(b)
    try:
        with internal_transfers():
            return bool(structure == other) and all(map(_has_same_bits, leaves, others))
    except Exception:  # static parts of a user's class that cannot be compared
        return False


def _has_same_bits(a: Any, b: Any) -> bool:
    if a is b:
        return True
    if not (trees.is_array(a) and trees.is_array(b)):
        return bool(a == b)
    if trees.is_traced(a) or trees.is_traced(b) or (a.dtype, a.shape) != (b.dtype, b.shape):
        return False
    if any(isinstance(one, jax.Array) and (one.is_deleted() or not one.is_fully_addressable) for one in (a, b)):
        return False
    return np.asarray(trees.key_data(a)).tobytes() == np.asarray(trees.key_data(b)).tobytes()


def _unshared(params: Params, slots: Slots) -> Slots:
    """Return the slots with copies of all arrays that they share with params: a shared buffer cannot be donated."""
    seen = {id(leaf) for leaf in jax.tree.leaves(params)}

    def own(leaf: Any) -> Any:
        if isinstance(leaf, jax.Array) and not trees.is_traced(leaf) and id(leaf) in seen:
            leaf = leaf.copy()
        seen.add(id(leaf))
        return leaf

    return {name: jax.tree.map(own, tree) for name, tree in slots.items()}


def _as_arrays(tree: Any, *, copy: bool, argument: str = "params") -> Any:
    return jax.tree_util.tree_map_with_path(
        lambda keys, leaf: trees.as_leaf(leaf, trees.path_str(keys), copy=copy, argument=argument), tree
    )


def _numbers_as_arrays(model_state: Any) -> Any:
    """Convert its numbers; its other leaves may be arrays, their shapes or their shardings."""

    def converted(keys: Any, leaf: Any) -> Any:
        if not isinstance(leaf, bool | int | float | complex | np.generic):
            return leaf
        return trees.as_leaf(leaf, trees.path_str(keys), copy=False, argument=MODEL_STATE)

    with internal_transfers():
        return jax.tree_util.tree_map_with_path(converted, model_state)


def _refuse_shared_buffers(params: Params, slots: Slots) -> None:
    # Donating one buffer twice fails inside XLA with a message that names no leaf.
    seen: dict[int, str] = {}
    for path, leaf in trees.leaves_with_paths({"params": params, "slots": slots}):
        if seen.setdefault(id(leaf), path) != path:
            raise ValueError(
                f"copy=False: {seen[id(leaf)]!r} and {path!r} are the same array, which cannot be donated twice "
                "to a compiled step. Use copy=True, or store a shared array only once in the tree."
            )


def _counted(count: int, one: str, several: str) -> str:
    return f"{count:,} {one if count == 1 else several}"


def _bytes_text(tree: Any) -> str:
    return size(sum(_bytes(leaf) for leaf in jax.tree.leaves(tree)))


def _bytes(leaf: Any) -> int:
    # A ShapeDtypeStruct has no nbytes.
    return int(getattr(leaf, "nbytes", 0) or np.size(leaf) * getattr(getattr(leaf, "dtype", None), "itemsize", 0))


def _step_text(step: Any) -> str:
    if step is None:
        return "None"
    if trees.is_traced(step) or isinstance(step, jax.ShapeDtypeStruct):
        return "traced" if trees.is_traced(step) else "abstract"
    if isinstance(step, jax.Array) and step.is_deleted():
        return "donated"
    return str(np.asarray(step))


def require_state(value: Any, argument: str = "state") -> TrainState:
    """Return the value, which must be a `TrainState`.

    Raises:
        TypeError: It is not a `TrainState`.
    """
    if not isinstance(value, TrainState):
        raise TypeError(f"{argument}: must be a TrainState, got {kind(value)}; make one with TrainState.create")
    return value


def step_of(state: TrainState) -> Array:
    """Return the global step of a state, which must have one.

    Raises:
        ValueError: Its global step is None.
    """
    if state.global_step is None:
        raise ValueError(NO_STEP)
    return state.global_step


def require_alive(state: Any, cause: BaseException | None = None) -> None:
    """Reject a state that was donated to a compiled step.

    Args:
        state: Any tree of arrays.
        cause: JAX's own exception, if there is one.

    Raises:
        RuntimeError: A leaf was donated; names its path.
    """
    path = trees.donated_leaf(state)
    if path is not None:
        raise RuntimeError(
            f"the state's {path!r} was donated to an earlier step and deleted. Use the state that the step returned, "
            "`state, metrics = train_step(state, ...)`, or keep old states alive with minimize(..., donate=False)."
        ) from cause
