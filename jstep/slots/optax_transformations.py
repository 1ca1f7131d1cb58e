"""Optax transformations as optimizers. Optax itself is not imported."""

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jstep.core import trees
from jstep.core.checks import describe_type
from jstep.core.exceptions import note
from jstep.core.jaxprs import Operation, apply, body_of, evaluate, repeated_number
from jstep.core.new_arrays import MAX_HOST_BYTES, are_on_one_device, copy_as, copy_of, place_like
from jstep.core.recorded_calls import has_init_and_update, makes_optimizer
from jstep.core.trees import (
    EMPTY_CONTEXT,
    Array,
    Context,
    Optimizer,
    Params,
    Slots,
    Step,
    Tree,
    Updates,
)
from jstep.slots.indexed_slices import IndexedSlices
from jstep.slots.matching import as_slots, match_gradients
from jstep.slots.roles import CountedSlot, Init, Roles, copies_in, infer_roles


def as_optimizer(name: str, value: object) -> Optimizer:
    """Return an `Optimizer`; convert Optax transformations, like `from_optax`; reject the rest."""
    if isinstance(value, Optimizer):
        return value
    if is_transformation(value):
        return from_optax(value)
    hint = ""
    if isinstance(value, type) or getattr(value, "__module__", "").startswith(("jstep", "optax")):
        hint = f"; call it: {getattr(value, '__name__', '…')}(...)"
    raise TypeError(
        f"{name}={value!r:.60}: must be a jstep.Optimizer, got {describe_type(value)}{hint}"
    )


def as_first_optimizer(call: str, optimizer: object, other: object) -> Optimizer:
    """Return the optimizer of a wrapper.

    The arguments of `call`, such as "scope(optimizer, name)", were swapped in 0.4.
    """
    if not _is_optimizer(optimizer) and _is_optimizer(other):
        raise TypeError(
            f"optimizer={optimizer!r:.60}: must be a jstep.Optimizer, "
            f"and is the first argument; use {call}"
        )
    return as_optimizer("optimizer", optimizer)


def _is_optimizer(value: object) -> bool:
    return isinstance(value, Optimizer) or is_transformation(value)


def is_transformation(value: object) -> bool:
    """Whether a value counts as an Optax transformation: it has `init` and `update`, no more."""
    if not has_init_and_update(value):
        return False
    # A class is not one, but its instance may be.
    if isinstance(value, type):
        return False
    # Objects with hyperparameters are an `Optimizer` or another library's.
    return not hasattr(value, "hyperparameters")


@makes_optimizer(1)
def from_optax(transformation: Any, name: str = "optax") -> Optimizer:
    """A transformation's optimizer, without hyperparameters; `jstep.from_optax` can report some."""
    takes = takes_extra(transformation.update)

    def widen_without_program(leaf: Any) -> Any:
        # As `trees.widen`, which would compile a program for each shape.
        dtype = trees.compute_dtype(leaf.dtype)
        return leaf if leaf.dtype == dtype else copy_as(leaf, dtype)

    def init(params: Params, global_step: Step = 0) -> Slots:
        with standard_promotion():
            wide = jax.tree.map(widen_without_program, _trained_only(params))
            state = _initial_state(transformation.init, wide)
        return _StateSlots(name, state, params).slots

    def skeleton(params: Params) -> _StateSlots:
        with standard_promotion():
            shapes = jax.eval_shape(lambda tree: transformation.init(seen(tree)), params)
            return _StateSlots(name, shapes, params)

    def roles(params: Params) -> Roles:
        try:
            shapes = skeleton(params)
        except Exception:
            # L-BFGS has no state for the empty tree with which wrappers compare names.
            return Roles(complete=False)

        def make(tree: Params) -> Slots:
            return _StateSlots(name, transformation.init(seen(tree)), tree).slots

        with standard_promotion():
            copies = copies_in(make, params)
        computing = {slot for slot in copies if slot.rpartition("/")[2] in _ORIGINS}
        inferred = infer_roles(shapes.slots, params, copies, lambda both: skeleton(both).slots)
        declared = Roles(computing=computing, counted=shapes.counted(), injected=shapes.injected())
        return inferred.merge(declared).with_order()

    def update_leaves(
        gradients: list[Any], slots: Slots, params: Params, shapes: _StateSlots, make_extra: Any
    ) -> tuple[Updates, Slots]:
        """Update all leaves of `params`; `make_extra(grads)` uses the step's whole loss."""
        leaves, treedef = trees.flatten(params)
        dense_gradients: list[Any] = []
        for gradient, leaf in zip(gradients, leaves, strict=True):
            if trees.is_trainable(leaf):
                dense_gradients.append(dense(gradient, leaf))
            else:
                dense_gradients.append(None)
        grads = treedef.unflatten(dense_gradients)
        with standard_promotion():
            extra = {key: value for key, value in make_extra(grads).items() if takes(key)}
            try:
                new_updates, new_state = transformation.update(
                    grads, shapes.state_from(slots), seen(params), **extra
                )
            except TypeError as error:
                missing = [key for key in EXTRA if takes(key) and key not in extra]
                if any(f"'{key}'" in str(error) for key in missing):
                    note(
                        error,
                        "jstep: pass context=jstep.Context(loss, value_and_grad), "
                        "or train with jstep.minimize",
                    )
                raise
        new = _StateSlots(name, new_state, params).slots
        if new.keys() != shapes.slots.keys():
            raise ValueError(
                f"transformation: its update returned {sorted(new)}, "
                f"its init returned {sorted(shapes.slots)}; "
                "a compiled step needs the same structure after each update"
            )
        return new_updates, new

    def update(
        updates: Updates,
        slots: Slots,
        params: Params,
        step: Step,
        context: Context = EMPTY_CONTEXT,
        /,
    ) -> tuple[Updates, Slots]:
        gradients = match_gradients(updates, params)
        shapes = skeleton(params)
        as_slots(shapes.slots, slots)
        leaves, treedef = trees.flatten(params)
        absent = [g is None for g in gradients]
        make_extra = functools.partial(_extra_arguments, context, params)
        results = None
        pairs = zip(absent, leaves, strict=True)
        if any(is_absent and trees.is_trainable(leaf) for is_absent, leaf in pairs):
            # Optax must not see a leaf without a gradient: L-BFGS compares parameters with the
            # previous ones, which are kept. But a mask that is a tree needs all leaves.
            with contextlib.suppress(Exception):
                drop = functools.partial(_drop_absent, treedef, absent)
                present_slots: Slots = {}
                for slot, parts in shapes.parts_of.items():
                    if parts is None:
                        present_slots[slot] = slots[slot]
                    else:
                        present_slots[slot] = drop(slots[slot])
                present_gradients = [g for g in gradients if g is not None]
                present = drop(params)
                results = update_leaves(
                    present_gradients, present_slots, present, skeleton(present), make_extra
                )
        if results is None:
            results = update_leaves(gradients, slots, params, shapes, make_extra)
        new_updates, new = results
        new_slots = {slot: _keep_absent(slots[slot], new[slot], treedef, absent) for slot in new}
        added = trees.flatten_like(params, new_updates, "updates")
        return _drop_absent(treedef, absent, treedef.unflatten(added)), new_slots

    return Optimizer(
        Init(init, roles, needs_all=True), update, lambda step: {}, any(map(takes, EXTRA))
    )


_ORIGINS = ("x0", "init_particles")
"""Fields of Optax's states (MADGRAD, COCOB, Mechanic) to which an update adds sums of gradients."""


def _refuse_private(state: Tree) -> None:
    """Raise for `dpsgd`, which would take the first axis of a mean gradient for the examples."""

    def is_private(node: object) -> bool:
        return type(node).__name__ == "DifferentiallyPrivateAggregateState"

    if any(map(is_private, jax.tree.leaves(state, is_leaf=is_private))):
        raise TypeError(
            "transformation: optax.contrib.differentially_private_aggregate "
            "(dpsgd) needs the gradient of each example, and a step has their mean; "
            "call its update on jax.vmap(jax.grad(loss_fn), (None, 0)) in a custom step"
        )


# The state of a transformation as slots.


@contextlib.contextmanager
def standard_promotion() -> Iterator[None]:
    """Use JAX's standard dtype promotion, on which Optax relies."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


class _StateSlots:
    """The state of a transformation as slots.

    Each node like the parameters is a slot, and so is each other leaf.

    Attributes:
        parts_of: Slot → its values at the trained leaves, or None for one that is not like the
            parameters.
        slots: The slots in the structure of all parameters, with None for anything but arrays.
    """

    def __init__(self, prefix: str, state: Tree, params: Params) -> None:
        leaves, self._params_treedef = trees.flatten(params)
        self._trained = [trees.is_trainable(leaf) for leaf in leaves]
        self._trained_treedef = trees.structure(_trained_only(params))
        nodes, treedef = jax.tree_util.tree_flatten_with_path(
            state, is_leaf=lambda x: self._parts(x) is not None
        )
        self._state_treedef: Any = treedef
        self._keys: dict[str, Any] = {}
        self.parts_of: dict[str, list[Any] | None] = {}
        self.slots: Slots = {}
        for keys, node in nodes:
            slot = f"{prefix}/{trees.path_str(keys)}" if keys else prefix
            parts = self._parts(node)
            self._keys[slot] = keys
            self.parts_of[slot] = parts
            self.slots[slot] = self._slot(node, parts)

    def _parts(self, node: object) -> list[Any] | None:
        """The values at the trained leaves if a node is like params; some may be empty nodes."""
        if self._trained_treedef.num_leaves == 0 or jax.tree_util.all_leaves([node]):
            return None
        try:
            parts: list[Any] = self._trained_treedef.flatten_up_to(node)
        except (ValueError, TypeError):
            return None
        if not any(map(_is_array, parts)):
            return None
        if not all(_is_array(part) or not jax.tree.leaves(part) for part in parts):
            return None
        return parts

    def _slot(self, node: object, parts: list[Any] | None) -> Any:
        if parts is None:
            return node
        leaves: list[Any] = [None] * len(self._trained)
        trained_indices = [i for i, is_trained in enumerate(self._trained) if is_trained]
        for i, part in zip(trained_indices, parts, strict=True):
            if _is_array(part):
                leaves[i] = part
        return self._params_treedef.unflatten(leaves)

    def counted(self) -> set[CountedSlot]:
        """Return the slots whose updates each count counts.

        These are the slots beside the count in a node, as in Optax's own states.
        """
        counted = set[CountedSlot]()
        for count, node in self.slots.items():
            if self.parts_of[count] is not None or np.shape(node) != ():
                continue
            if not jnp.issubdtype(getattr(node, "dtype", np.float32), jnp.integer):
                continue
            for slot, parts in self.parts_of.items():
                if parts is not None and self._keys[slot][:-1] == self._keys[count][:-1]:
                    counted.add(CountedSlot(count, slot))
        return counted

    def injected(self) -> set[str]:
        """Return the slots of the numbers that `optax.inject_hyperparams` was given.

        Schedules are not among them: each has a state.
        """
        injected = set[str]()
        for slot, keys in self._keys.items():
            if len(keys) < 2 or keys[-2] != jax.tree_util.GetAttrKey("hyperparams"):
                continue
            schedule_keys = (*keys[:-2], jax.tree_util.GetAttrKey("hyperparams_states"), keys[-1])
            has_schedule = any(
                other[: len(schedule_keys)] == schedule_keys for other in self._keys.values()
            )
            if not has_schedule:
                injected.add(slot)
        return injected

    def state_from(self, slots: Slots) -> Any:
        """Return the state of the transformation with the values of these slots."""
        nodes: list[Any] = []
        for slot, parts in self.parts_of.items():
            if parts is None:
                nodes.append(slots[slot])
                continue
            leaves = self._params_treedef.flatten_up_to(slots[slot])
            trained = [
                leaf for leaf, is_trained in zip(leaves, self._trained, strict=True) if is_trained
            ]
            # A part that is not an array, such as an empty node of Optax's, is not in a slot.
            values = [
                part if leaf is None else leaf for leaf, part in zip(trained, parts, strict=True)
            ]
            nodes.append(self._trained_treedef.unflatten(values))
        return self._state_treedef.unflatten(nodes)


def _is_array(x: object) -> bool:
    return trees.is_array(x) or isinstance(x, jax.ShapeDtypeStruct)


def _trained_only(params: Params) -> Params:
    return jax.tree.map(lambda leaf: leaf if trees.is_trainable(leaf) else None, params)


def seen(params: Params) -> Params:
    """The parameters as Optax sees them: trainable leaves, in at least float32."""
    return jax.tree.map(trees.widen, _trained_only(params))


def _initial_state(init: Callable[[Params], Tree], params: Params) -> Tree:
    """`init(params)` in new arrays, without compiling a program for each shape.

    The operations of `init` are executed one by one, as JAX executes them outside of a trace,
    except that arrays of one number, such as the zeros of moments, are made on the host.
    """
    leaves = jax.tree.leaves(params)
    traced = None
    if are_on_one_device(leaves):
        # An init that needs the values of the parameters raises here. Any other error is raised
        # again below.
        with contextlib.suppress(Exception):
            traced, shapes = jax.make_jaxpr(init, return_shape=True)(params)
    if traced is None:
        state = init(params)
        _refuse_private(state)
        return jax.tree.map(_separate_copy, state)
    _refuse_private(shapes)

    def execute(operation: Operation, operands: list[Any]) -> Sequence[Any]:
        array = repeated_number(operation, operands, MAX_HOST_BYTES)
        if array is None:
            return apply(operation, operands)
        return [array]

    results = evaluate(body_of(traced), leaves, execute)
    params_by_shape = {leaf.shape: leaf for leaf in leaves}
    arrays = [
        place_like(_separate_copy(result), params_by_shape.get(np.shape(result)))
        for result in results
    ]
    return jax.tree.unflatten(jax.tree.structure(shapes), arrays)


def _separate_copy(leaf: Any) -> Any:
    if trees.is_key(leaf):
        return copy_of(leaf)
    # A weak type would become strong in the first step, which would recompile it.
    return copy_as(leaf, jax.dtypes.canonicalize_dtype(jnp.result_type(leaf)))


def _drop_absent(treedef: Any, absent: list[bool], tree: Tree) -> Any:
    """Return a tree with None for the leaves without a gradient."""
    pairs = zip(treedef.flatten_up_to(tree), absent, strict=True)
    return treedef.unflatten([None if is_absent else leaf for leaf, is_absent in pairs])


def _keep_absent(old: Any, new: Any, treedef: Any, absent: list[bool]) -> Any:
    """Return the new slot in the old dtypes; leaves without a gradient keep their old value."""

    def convert(old_leaf: object, new_leaf: object) -> Any:
        if not hasattr(old_leaf, "dtype"):
            return new_leaf
        return jnp.asarray(new_leaf).astype(old_leaf.dtype)

    try:
        pairs = list(zip(treedef.flatten_up_to(old), treedef.flatten_up_to(new), strict=True))
    except (ValueError, TypeError):  # not like the parameters
        return jax.tree.map(convert, old, new)
    leaves: list[Any] = []
    for (old_leaf, new_leaf), is_absent in zip(pairs, absent, strict=True):
        if is_absent or old_leaf is None:
            leaves.append(old_leaf)
        else:
            leaves.append(jax.tree.map(convert, old_leaf, new_leaf))
    return treedef.unflatten(leaves)


# Arguments of a transformation in addition to the gradients.

EXTRA = ("value", "grad", "value_fn")
"""The extra arguments that Optax's own transformations accept."""


def takes_extra(update: Callable[..., Any]) -> Callable[[str], bool]:
    """A predicate for whether an update accepts an extra argument of a given name."""
    try:
        parameters = inspect.signature(update).parameters
    except (TypeError, ValueError):  # a callable without a signature
        return lambda name: False
    takes_any = any(
        parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values()
    )
    return lambda name: takes_any or name in parameters


def _extra_arguments(context: Context, params: Params, grads: Updates) -> dict[str, Any]:
    extra: dict[str, Any] = {}
    if context.loss is not None:
        extra |= {"value": trees.widen(jnp.asarray(context.loss)), "grad": grads}
    if context.value_and_grad is not None:
        extra["value_fn"] = _value_fn(context.value_and_grad, params)
    return extra


def _value_fn(
    value_and_grad: Callable[[Params], tuple[Array, Updates]], params: Params
) -> Callable[[Params], Array]:
    """The loss as a function of the parameters that Optax sees, with the derivative of the step."""
    leaves, treedef = trees.flatten(params)

    def evaluated(seen: Params) -> tuple[Array, Params]:
        seen_leaves = treedef.flatten_up_to(seen)
        values: list[Any] = []
        for seen_leaf, leaf in zip(seen_leaves, leaves, strict=True):
            values.append(leaf if seen_leaf is None else seen_leaf.astype(leaf.dtype))
        loss, gradients = value_and_grad(treedef.unflatten(values))
        gradient_leaves = treedef.flatten_up_to(gradients)
        grads: list[Any] = []
        for gradient, leaf, seen_leaf in zip(gradient_leaves, leaves, seen_leaves, strict=True):
            grads.append(None if seen_leaf is None else dense(gradient, leaf))
        return trees.widen(jnp.asarray(loss)), treedef.unflatten(grads)

    @jax.custom_jvp
    def value_fn(seen: Params) -> Array:
        return evaluated(seen)[0]

    @value_fn.defjvp
    def _derivative(primals: Any, tangents: Any) -> tuple[Array, Array]:
        loss, gradients = evaluated(*primals)
        products = jax.tree.map(lambda g, t: jnp.sum(g * t), gradients, *tangents)
        return loss, sum(jax.tree.leaves(products), start=jnp.zeros_like(loss)).astype(loss.dtype)

    return value_fn


def dense(gradient: Tree, leaf: Any) -> Any:
    """A gradient as Optax sees it: an array, in at least float32."""
    dtype = trees.compute_dtype(leaf.dtype)
    if gradient is None:
        return jnp.zeros_like(leaf, dtype=dtype)
    if isinstance(gradient, IndexedSlices):
        return gradient.to_dense().astype(dtype)
    return jnp.asarray(gradient).astype(dtype)
