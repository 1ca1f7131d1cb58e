"""Chain elements without a rule, and the leaves of custom optimizers."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jstep.core import trees
from jstep.core.checks import as_function
from jstep.core.placement import on_devices
from jstep.core.slot_roles import Init, Role, Roles
from jstep.core.trees import Optimizer, Params, Slots, Step, Updates, is_slices
from jstep.optimizers.held import held_names, held_slots
from jstep.optimizers.hyper import Hyper, report, values_at
from jstep.optimizers.match_gradients import missing_slot
from jstep.optimizers.offloading import loads_slots


def element(
    fn: Callable[[Updates, Params, Step, Hyper], Updates], hyper: Mapping[str, Any], *, finished: bool = False
) -> Optimizer:
    """A chain element from `fn(updates, params, step, h) -> updates` and its hyperparameters.

    Args:
        fn: The transformation; it must handle None leaves and `IndexedSlices` itself. The leaves are float32 at least.
        hyper: Name → the value returned by `checked`.
        finished: Whether the updates include −learning_rate.
    """
    held = held_names(hyper)

    @loads_slots
    def update(updates: Updates, slots: Slots, params: Params, step: Step, /) -> tuple[Updates, Slots]:
        for name in held:
            if name not in slots:
                raise missing_slot(name, slots)
        return fn(wide_updates(updates), on_devices(params), step, values_at(hyper, step, slots)), {
            name: slots[name] for name in held
        }

    def init(params: Params, step: Step) -> Slots:
        return held_slots(hyper)

    roles = Roles(dict.fromkeys(held, Role.HELD))
    return Optimizer(Init(init, lambda params: roles, finished), update, report(hyper))


def wide_updates(updates: Updates) -> Updates:
    """The updates in float32 at least: what is rounded to the dtype of low-precision gradients is lost to slots."""

    def wide(u: Any) -> Any:
        if is_slices(u):
            return dataclasses.replace(u, values=wide(jnp.asarray(u.values)))
        if not (trees.is_array(u) and trees.is_floating(u.dtype)):
            return u
        return u.astype(trees.compute_dtype(u.dtype))

    return jax.tree.map(wide, updates, is_leaf=is_slices)


def stateless(fn: Callable[[Updates, Params, Step], Updates]) -> Optimizer:
    """A chain element from a pure function, without slots or hyperparameters.

    Args:
        fn: A pure function `fn(updates, params, step) -> updates`. Leaves of updates are arrays (in float32 at least),
            `IndexedSlices` or None, which stays None; the step is the number of updates applied so far.

    Example:
        >>> import jax, jax.numpy as jnp, jstep
        >>> signs = jstep.stateless(lambda updates, params, step: jax.tree.map(jnp.sign, updates))
        >>> optimizer = jstep.chain(signs, jstep.gradient_descent(0.5))
        >>> state = jstep.TrainState.create({"w": 1.0}, optimizer)
        >>> print(jstep.apply_gradients(state, {"w": jnp.float32(3.0)}, optimizer).params["w"])
        0.5

    Source: `optax.stateless`.
    """
    as_function(fn, "fn", "(updates, params, step) -> updates")
    return element(lambda updates, params, step, h: fn(updates, params, step), {})


def map_leaves(fn: Callable[..., Any], params: Params, *others: Any) -> Any:
    """Map `fn(path, leaf, …)` over the trainable leaves for which no other tree has None.

    It handles None and integer leaves, None gradients, `IndexedSlices` (converted to dense) and low-precision leaves
    (converted to float32).

    Args:
        fn: `fn(path, leaf, *others)`, with arrays of one floating dtype.
        params: The parameters.
        *others: Trees like params, such as gradients and slots; leaves may be None.

    Returns:
        A tree like params, with None where `fn` was not called: the form in which an `Optimizer` returns updates.

    Raises:
        ValueError: A tree does not have the structure of params.

    Example:
        >>> import jax.numpy as jnp, jstep
        >>> params = {"w": jnp.bfloat16(2.0), "n": jnp.array(3), "b": jnp.float32(1.0)}
        >>> grads = {"w": jnp.bfloat16(-4.0), "n": None, "b": None}
        >>> jstep.map_leaves(lambda path, p, g: -0.5 * jnp.sign(g), params, grads)
        {'b': None, 'n': None, 'w': Array(0.5, dtype=float32)}
    """
    as_function(fn, "fn", "(path, leaf, …)")
    found = [trees.flatten_like(params, tree, f"others[{i}]", is_leaf=is_slices) for i, tree in enumerate(others)]
    results: list[Any] = []
    for (path, leaf), *rest in zip(trees.leaves_with_paths(params), *found, strict=True):
        if not trees.is_trainable(leaf) or any(trees.is_none(one) for one in rest):
            results.append(None)
            continue
        dtype = trees.compute_dtype(jnp.result_type(leaf))
        results.append(fn(path, *(_wide(one, dtype) for one in (leaf, *rest))))
    return trees.structure(params).unflatten(results)


def map_updates(
    fn: Callable[..., Any], params: Params, updates: Updates, *others: Iterable[Any], what: str = "gradients"
) -> Updates:
    """Map `fn(update, …)` over the leaves that have an update, which may be an `IndexedSlices`; the others stay None.

    Args:
        fn: `fn(update, *others)`.
        params: The parameters.
        updates: A tree like params.
        *others: Values to pass with each update: one for each leaf of params, in order.
        what: The name of `updates`, for errors.
    """
    found = trees.flatten_like(params, updates, what, is_leaf=is_slices)
    rows = zip(found, *others, strict=True)
    return trees.structure(params).unflatten([None if trees.is_none(u) else fn(u, *rest) for u, *rest in rows])


def _wide(x: Any, dtype: Any) -> Any:
    x = x.to_dense() if is_slices(x) else jnp.asarray(x)
    return x.astype(dtype) if trees.is_floating(x.dtype) else x
