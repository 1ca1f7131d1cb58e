"""Gradients: of any function, and of a loss with all that training asks of them."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jstep.core import trees
from jstep.core.meshes import auto_axes, on_auto_axes
from jstep.core.types import Array, Params
from jstep.core.var_list import VarList, selected
from jstep.differentiate.microbatches import AggregationMethod, Part, accumulate, split

GATE_NONE = 0
"""No gating: XLA may start an update before its gradient is whole."""
GATE_OP = 1
"""Each gradient is whole before its update begins."""
GATE_GRAPH = 2
"""All gradients are whole before any update begins."""


def gradients(fn: Callable[[Any], Any], xs: Any, grad_ys: Any = None) -> Any:
    """The sum of d ys/d x for each x of the tree xs, where ys = fn(xs).

    Args:
        fn: A function of one tree that returns a tree of arrays.
        xs: The tree of arrays to differentiate by. Leaves that are not floating point get None.
        grad_ys: Weights of the ys, a tree like fn(xs); ones unless told.

    Returns:
        A tree like xs.

    Raises:
        TypeError: No leaf of xs, or none of fn(xs), is floating point.
        ValueError: `grad_ys` has not the structure and shapes of fn(xs).

    Example:
        >>> import jax.numpy as jnp, jstep
        >>> print(jstep.gradients(lambda x: x**2, jnp.array([1.0, 2.0])))
        [2. 4.]

    Source: `tf.gradients`.
    """
    leaves, treedef = trees.flatten(xs)
    places = [i for i, leaf in enumerate(leaves) if jnp.issubdtype(jnp.result_type(leaf), jnp.inexact)]
    if not places:
        raise TypeError(f"xs: no leaf is floating point, got dtypes {[str(jnp.result_type(leaf)) for leaf in leaves]}")

    def of_some(some: list[Any]) -> Any:
        return fn(treedef.unflatten(_placed(leaves, places, some)))

    ys, pull_back = jax.vjp(of_some, [jnp.asarray(leaves[i]) for i in places])
    (found,) = pull_back(_cotangents(ys, grad_ys))
    return treedef.unflatten(_placed([None] * len(leaves), places, found))


def _cotangents(ys: Any, grad_ys: Any) -> Any:
    named = trees.leaves_with_paths(ys)
    if not any(jnp.issubdtype(y.dtype, jnp.inexact) for _, y in named):
        raise TypeError(f"fn returned no floating-point array, but dtypes {[str(y.dtype) for _, y in named]}")
    try:
        given = [None] * len(named) if grad_ys is None else trees.structure(ys).flatten_up_to(grad_ys)
    except (ValueError, TypeError) as error:
        raise ValueError(
            f"grad_ys has the structure {trees.structure(grad_ys)}, fn(xs) has {trees.structure(ys)}"
        ) from error

    def cotangent(path: str, y: Array, weight: Any) -> Any:
        if not jnp.issubdtype(y.dtype, jnp.inexact):
            return np.zeros(y.shape, jax.dtypes.float0)
        if weight is None:
            return jnp.ones_like(y)
        if np.shape(weight) != y.shape:
            raise ValueError(f"grad_ys: at {trees.quoted(path)} shape {np.shape(weight)}, but fn(xs) has {y.shape}")
        return jnp.asarray(weight).astype(y.dtype)

    cotangents = [cotangent(path, y, weight) for (path, y), weight in zip(named, given, strict=True)]
    return trees.structure(ys).unflatten(cotangents)


def _placed(leaves: list[Any], places: list[int], values: list[Any]) -> list[Any]:
    leaves = list(leaves)
    for place, value in zip(places, values, strict=True):
        leaves[place] = value
    return leaves


def stop_gradient(x: Any) -> Any:
    """The identity, which blocks differentiation; x is any tree.

    Example:
        >>> import jax, jstep
        >>> print(jax.grad(lambda x: x * jstep.stop_gradient(x))(3.0))
        3.0

    Source: `tf.stop_gradient`.
    """
    return jax.lax.stop_gradient(x)


def compute_gradients(
    loss_fn: Callable[..., Any],
    *,
    var_list: VarList = None,
    has_aux: bool = False,
    num_microbatches: int = 1,
    weight_fn: Callable[..., Any] | None = None,
    gate_gradients: int = GATE_OP,
    aggregation_method: AggregationMethod = AggregationMethod.DEFAULT,
) -> Callable[..., Any]:
    """A function that computes a loss and its gradients.

    Args:
        loss_fn: `loss_fn(params, *args) -> loss`, a floating-point scalar; with has_aux `-> (loss, aux)`.
        var_list: What to differentiate: None (all), a predicate `(path, leaf) -> bool`, a list of paths or globs
            (`"decoder/*"`), or a tree of bools. What is left out is not differentiated at all and gets None.
        has_aux: Whether loss_fn returns auxiliary values with the loss.
        num_microbatches: In how many parts the leading axis of every arg is split. The parts, contiguous blocks
            of rows, are gone through in one scan; gradients, loss and floating leaves of aux are their means
            in float32 at least, integer leaves of aux their sums.
        weight_fn: `weight_fn(*microbatch)`, the weight of a microbatch in the means, such as its number of tokens.
        gate_gradients: GATE_NONE, GATE_OP or GATE_GRAPH: where XLA may not overlap gradients and updates. Changes
            memory and time, never values.
        aggregation_method: Whether microbatches keep a running sum of gradients (DEFAULT) or every part (ADD_N).

    Returns:
        `f(params, *args, **kwargs) -> (loss, grads)`, or `((loss, aux), grads)`. Keyword arguments reach loss_fn
        as they are, in every microbatch.

    Raises:
        TypeError: An argument is of the wrong type, or the loss is not floating point.
        ValueError: An argument is out of range, the loss is no scalar, a var_list entry matches nothing, or
            num_microbatches does not divide the batch.

    Example:
        >>> import jax.numpy as jnp, jstep
        >>> f = jstep.compute_gradients(lambda p, x: jnp.mean(p["w"] * x + p["b"]), var_list=["w"])
        >>> loss, grads = f({"w": jnp.float32(2.0), "b": jnp.float32(1.0)}, jnp.array([1.0, 3.0]))
        >>> print(loss, grads)
        5.0 {'b': None, 'w': Array(2., dtype=float32)}

    Source: `tf.train.Optimizer.compute_gradients`.
    """
    compute = gradient_function(
        loss_fn,
        var_list=var_list,
        has_aux=has_aux,
        num_microbatches=num_microbatches,
        weight_fn=weight_fn,
        gate_gradients=gate_gradients,
        aggregation_method=aggregation_method,
    )

    def loss_and_gradients(params: Params, *args: Any, **kwargs: Any) -> Any:
        with auto_axes():
            given = on_auto_axes((params, args, kwargs))
            loss, _, aux, grads = compute(given[0], None, given[1], given[2], None)
        return ((loss, aux), grads) if has_aux else (loss, grads)

    return loss_and_gradients


def gradient_function(
    loss_fn: Callable[..., Any],
    *,
    var_list: VarList = None,
    has_aux: bool = False,
    has_model_state: bool = False,
    num_microbatches: int = 1,
    weight_fn: Callable[..., Any] | None = None,
    gate_gradients: int = GATE_OP,
    aggregation_method: AggregationMethod = AggregationMethod.DEFAULT,
) -> Callable[..., tuple[Array, Any, Any, Any]]:
    """`compute(params, model_state, args, kwargs, key, rows) -> (loss, model_state, aux, grads)`: the engine of both
    `compute_gradients` and `minimize`, checked before anything is traced. `rows` are the shardings of args, if known.
    """  # noqa: D205
    _check_arguments(loss_fn, num_microbatches, weight_fn, gate_gradients, aggregation_method)

    def one(params: Params, places: list[int], model_state: Any, args: Any, kwargs: Any) -> Part:
        leaves, treedef = trees.flatten(params)

        def of_some(some: list[Array]) -> tuple[Array, tuple[Any, Any]]:
            whole = treedef.unflatten(_placed(leaves, places, some))
            out = loss_fn(whole, *((model_state,) if has_model_state else ()), *args, **kwargs)
            loss, new_model_state, aux = _taken_apart(out, has_aux, has_model_state)
            return _checked_loss(loss), (_same_kind(model_state, new_model_state), _checked_aux(aux))

        some = [jnp.asarray(leaves[i]) for i in places]
        (loss, (new_model_state, aux)), grads = jax.value_and_grad(of_some, has_aux=True)(some)
        return Part(loss, new_model_state, aux, grads)

    def compute(
        params: Params, model_state: Any, args: Any, kwargs: Any, key: Any, rows: Any = None
    ) -> tuple[Array, Any, Any, Any]:
        for path, leaf in trees.leaves_with_paths(params):
            if not (trees.is_array(leaf) or isinstance(leaf, bool | int | float)):
                raise TypeError(
                    f"params: the leaf at {trees.quoted(path)} is {type(leaf).__name__}, which is no array or number; "
                    "keep it out of params, for instance with equinox.partition(model, equinox.is_array)"
                )
        places = selected(params, var_list)
        leaves, treedef = trees.flatten(params)
        if num_microbatches == 1:
            kwargs = kwargs if key is None else {**kwargs, "rng": key}
            part = one(params, places, model_state, args, kwargs)
        else:

            def part_fn(model_state: Any, batch: Any, i: Array) -> Part:
                keyed = kwargs if key is None else {**kwargs, "rng": jax.random.fold_in(key, i)}
                return one(params, places, model_state, batch, keyed)

            like = [jnp.asarray(leaves[i]) for i in places]
            parts = split(args, num_microbatches, rows)
            part = accumulate(part_fn, parts, model_state, like, num_microbatches, weight_fn, aggregation_method)
        grads = _gated(part.gradients, gate_gradients)
        return (
            part.loss,
            part.model_state,
            part.aux,
            treedef.unflatten(_placed([None] * len(leaves), places, grads)),
        )

    return compute


def _gated(grads: list[Array], gate: int) -> list[Array]:
    if gate == GATE_OP:
        return [jax.lax.optimization_barrier(g) for g in grads]
    return jax.lax.optimization_barrier(grads) if gate == GATE_GRAPH else grads


def _check_arguments(loss_fn: Any, n: Any, weight_fn: Any, gate: Any, method: Any) -> None:
    if not callable(loss_fn):
        raise TypeError(f"loss_fn={loss_fn!r}: must be a function (params, *args) -> loss")
    if isinstance(n, bool) or not isinstance(n, int | np.integer):
        raise TypeError(f"num_microbatches={n!r}: must be an integer, got {type(n).__name__}")
    if n < 1:
        raise ValueError(f"num_microbatches={n}: must be ≥ 1")
    if weight_fn is not None and not callable(weight_fn):
        raise TypeError(f"weight_fn={weight_fn!r}: must be a function of a microbatch")
    if gate not in (GATE_NONE, GATE_OP, GATE_GRAPH):
        raise ValueError(f"gate_gradients={gate!r}: must be GATE_NONE, GATE_OP or GATE_GRAPH")
    if not isinstance(method, AggregationMethod):
        raise TypeError(f"aggregation_method={method!r}: must be AggregationMethod.DEFAULT or .ADD_N")


def _taken_apart(out: Any, has_aux: bool, has_model_state: bool) -> tuple[Any, Any, Any]:
    """Loss, model_state and aux from what loss_fn returned."""
    if not (has_aux or has_model_state):
        if isinstance(out, tuple | list):
            raise TypeError(
                f"loss_fn returned a {type(out).__name__} of {len(out)}; it must return a scalar loss. Say "
                "has_aux=True where it returns (loss, aux), has_model_state=True where (loss, model_state)."
            )
        return out, None, None
    want = "(loss, aux)" if not has_model_state else "(loss, (model_state, aux))" if has_aux else "(loss, model_state)"
    said = f"has_aux={has_aux}" + (", has_model_state=True" if has_model_state else "")
    if not (isinstance(out, tuple | list) and len(out) == 2):
        raise TypeError(f"loss_fn returned {_kind(out)}; with {said} it must return {want}")
    loss, rest = out
    if not has_model_state:
        return loss, None, rest
    if not has_aux:
        return loss, rest, None
    if not (isinstance(rest, tuple | list) and len(rest) == 2):
        raise TypeError(f"loss_fn returned (loss, {_kind(rest)}); with {said} it must return {want}")
    return loss, rest[0], rest[1]


def _kind(x: Any) -> str:
    return f"an array of shape {np.shape(x)}" if trees.is_array(x) else f"a {type(x).__name__}"


def _checked_loss(loss: Any) -> Array:
    if not (trees.is_array(loss) or isinstance(loss, int | float)):
        raise TypeError(f"loss_fn returned a {type(loss).__name__} as loss; it must be a floating-point scalar")
    loss = jnp.asarray(loss)
    if not jnp.issubdtype(loss.dtype, jnp.floating):
        raise TypeError(f"the loss has dtype {loss.dtype}; it must be floating point")
    if loss.ndim:
        raise ValueError(f"the loss has shape {loss.shape}; it must be a scalar: reduce it, for instance with jnp.mean")
    return loss


def _checked_aux(aux: Any) -> Any:
    def leaf(keys: Any, x: Any) -> Array:
        if not (trees.is_array(x) or isinstance(x, bool | int | float | complex)):
            raise TypeError(
                f"aux: the leaf at {trees.quoted(trees.path_str(keys))} is {x!r}, which is no array or number and "
                "cannot leave a compiled step"
            )
        return jnp.asarray(x)

    return jax.tree_util.tree_map_with_path(leaf, aux)


def _same_kind(old: Any, new: Any) -> Any:
    """The new model_state, with the dtypes of the old one, which it must be like."""
    if trees.structure(old) != trees.structure(new):
        raise ValueError(
            f"loss_fn returned a model_state of the structure {trees.structure(new)}, the state holds "
            f"{trees.structure(old)}; return the whole of it, changed or not"
        )

    def leaf(keys: Any, before: Any, after: Any) -> Array:
        before, after = jnp.asarray(before), jnp.asarray(after)
        if before.shape != after.shape:
            raise ValueError(
                f"loss_fn returned a model_state whose leaf {trees.quoted(trees.path_str(keys))} has shape "
                f"{after.shape}; the state holds shape {before.shape}"
            )
        return after if after.dtype == before.dtype else after.astype(before.dtype)

    return jax.tree_util.tree_map_with_path(leaf, old, new)
