"""Outputs of a loss: their validation, a model_state like the old one, and summaries."""

import contextvars
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import get_opaque_trace_state
from jax.typing import DTypeLike

from jstep.core import device_values, trees
from jstep.core.checks import array_type, describe_type


def unpack_outputs(
    out: object, old: object, has_aux: bool, has_model_state: bool, named_aux: bool
) -> tuple[trees.Array, Any, Any]:
    """Return loss, new model_state and aux from the output of a loss."""
    loss, model_state, aux = _split(out, has_aux, has_model_state)
    if named_aux and isinstance(aux, Mapping):
        _check_names(aux)
    if not (trees.is_array(loss) or isinstance(loss, int | float)):
        raise TypeError(
            f"loss_fn returned a {type(loss).__name__} as loss; it must be a floating-point scalar"
        )
    loss = jnp.asarray(loss)
    if not jnp.issubdtype(loss.dtype, jnp.floating):
        raise TypeError(f"the loss has dtype {loss.dtype}; it must be floating point")
    if loss.ndim:
        raise ValueError(
            f"the loss has shape {loss.shape}; it must be a scalar: reduce it with jnp.mean, "
            "or with jnp.sum, whose gradient is that of tf.train's minimize"
        )
    model_state = _like(old, model_state)
    trees.check_arrays(aux, "aux", " and cannot leave a compiled step")
    aux = device_values.prepare_for_device(aux, "aux")
    return loss, model_state, jax.tree.map(jnp.asarray, aux)


def _check_names(aux: Mapping[Any, Any]) -> None:
    for key in aux:
        if not isinstance(key, str):
            raise TypeError(
                f"aux: the key {key!r} must be a string, got {describe_type(key)}: "
                "entries of aux are metrics by name"
            )


def _split(out: object, has_aux: bool, has_model_state: bool) -> tuple[Any, Any, Any]:
    """Return the loss, model_state and aux; None for those that the loss does not return."""
    if not (has_aux or has_model_state):
        if isinstance(out, tuple | list):
            raise TypeError(
                f"loss_fn returned a {type(out).__name__} of {len(out)}: "
                "must be a scalar loss, or set has_aux=True"
            )
        return out, None, None
    options = f"has_aux={has_aux}"
    wanted = "(loss, aux)"
    if has_model_state:
        options += ", has_model_state=True"
        wanted = "(loss, (model_state, aux))" if has_aux else "(loss, model_state)"

    def as_pair(value: object, form: str) -> Any:
        if not (isinstance(value, tuple | list) and len(value) == 2):
            raise TypeError(
                f"loss_fn returned {form.format(describe_type(value))}; "
                f"with {options} it must return {wanted}"
            )
        return value

    loss, others = as_pair(out, "{}")
    if not has_model_state:
        return loss, None, others
    if not has_aux:
        return loss, others, None
    model_state, aux = as_pair(others, "(loss, {})")
    return loss, model_state, aux


def _like(old: object, new: object) -> Any:
    """Return the new model_state in the dtypes of the old one."""
    if trees.structure(old) != trees.structure(new):
        raise TypeError(
            f"loss_fn returned another model_state: must be {_described(old)}, as in the state, "
            f"got {_described(new)}; return (loss, model_state) with all of it, "
            "or with has_aux=True (loss, (model_state, aux))"
        )

    def convert(keys: Any, old_leaf: object, new_leaf: object) -> trees.Array:
        old_array = jnp.asarray(old_leaf)
        new_array = jnp.asarray(new_leaf)
        is_same = old_array.dtype == new_array.dtype
        # A wider kind would be truncated at each update.
        fits = is_same or -1 < _kind_of(new_array.dtype) <= _kind_of(old_array.dtype)
        if old_array.shape != new_array.shape or not fits:
            path = trees.quote_path(trees.path_str(keys))
            wanted = array_type(old_array.shape, old_array.dtype)
            got = array_type(new_array.shape, new_array.dtype)
            raise TypeError(
                f"loss_fn returned a model_state whose leaf {path} must be {wanted}, "
                f"as in the state, got {got}; create it as {got}"
            )
        if is_same:
            return new_array
        return new_array.astype(old_array.dtype)

    return jax.tree_util.tree_map_with_path(convert, old, new)


def _described(tree: object) -> str:
    return f"a {type(tree).__name__} of {trees.leaf_paths(tree)[:20]}"


_KINDS = (jnp.bool_, jnp.integer, jnp.floating, jnp.complexfloating)
"""Kinds of numbers, each of which holds the values of the kinds before it."""


def _kind_of(dtype: DTypeLike) -> int:
    """The index of a dtype in `_KINDS`; -1 for a key."""
    return next((i for i, kind in enumerate(_KINDS) if jnp.issubdtype(dtype, kind)), -1)


# Summaries that a loss creates while it is traced.


class Collector:
    """The summaries that a function creates, which `jstep.summary` adds.

    Attributes:
        nested: Tags → source line of summaries created inside a transformation.
        unreturned: `unreturned(collector, result)`: the created summaries that are not in the
            result, or None.
    """

    def __init__(self, key: str) -> None:
        self.key = key
        self.trace = get_opaque_trace_state()
        self.parts: list[Any] = []
        self.nested: dict[tuple[str, ...], str] = {}
        self.unreturned: Callable[[Collector, Any], Any] | None = None


COLLECTORS: contextvars.ContextVar[tuple[Collector, ...]] = contextvars.ContextVar(
    "jstep_collect", default=()
)
"""The collectors of the active functions, innermost last."""
