"""Outputs of a loss function, the summaries created in it, and the parameters that it depends on."""

import contextvars
import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import SymbolicZero

from jstep.core import trees
from jstep.core.checks import setting
from jstep.core.trees import Array


def track_connected(leaves: list[Array], connected: set[int]) -> list[Array]:
    """Return the leaves; tracing the gradient adds the indices of those that receive a gradient to `connected`.

    An identity function has a custom backward rule, which JAX runs once while it traces the gradient. The rule gets a
    symbolic zero for a leaf that nothing depends on. It leaves no trace in the compiled program.
    """

    @jax.custom_vjp
    def identity(leaves: list[Array]) -> list[Array]:
        return leaves

    def forward(leaves: Any) -> tuple[list[Array], None]:
        return [leaf.value for leaf in leaves], None

    def backward(_: None, cotangents: list[Any]) -> tuple[list[Any]]:
        connected.update(i for i, ct in enumerate(cotangents) if not isinstance(ct, SymbolicZero))
        return ([None if isinstance(ct, SymbolicZero) else ct for ct in cotangents],)

    identity.defvjp(forward, backward, symbolic_zeros=True)
    return identity(leaves)


def split_outputs(out: Any, has_aux: bool, has_model_state: bool) -> tuple[Any, Any, Any]:
    """Return loss, model_state and aux from the output of loss_fn."""
    if not (has_aux or has_model_state):
        if isinstance(out, tuple | list):
            raise TypeError(
                f"loss_fn returned a {type(out).__name__} of {len(out)}; it must return a scalar loss. Set "
                "has_aux=True if it returns (loss, aux), has_model_state=True if (loss, model_state)."
            )
        return out, None, None
    want = "(loss, aux)" if not has_model_state else "(loss, (model_state, aux))" if has_aux else "(loss, model_state)"
    options = f"has_aux={has_aux}" + (", has_model_state=True" if has_model_state else "")
    if not (isinstance(out, tuple | list) and len(out) == 2):
        raise TypeError(f"loss_fn returned {_kind(out)}; with {options} it must return {want}")
    loss, rest = out
    if not has_model_state:
        return loss, None, rest
    if not has_aux:
        return loss, rest, None
    if not (isinstance(rest, tuple | list) and len(rest) == 2):
        raise TypeError(f"loss_fn returned (loss, {_kind(rest)}); with {options} it must return {want}")
    return loss, rest[0], rest[1]


def _kind(x: Any) -> str:
    return f"an array of shape {np.shape(x)}" if trees.is_array(x) else f"a {type(x).__name__}"


def checked_loss(loss: Any) -> Array:
    """Validate the loss, a floating-point scalar."""
    if not (trees.is_array(loss) or isinstance(loss, int | float)):
        raise TypeError(f"loss_fn returned a {type(loss).__name__} as loss; it must be a floating-point scalar")
    loss = jnp.asarray(loss)
    if not jnp.issubdtype(loss.dtype, jnp.floating):
        raise TypeError(f"the loss has dtype {loss.dtype}; it must be floating point")
    if loss.ndim:
        raise ValueError(f"the loss has shape {loss.shape}; it must be a scalar: reduce it, for instance with jnp.mean")
    return loss


def checked_aux(aux: Any) -> Any:
    """Convert the auxiliary values to arrays."""

    def leaf(keys: Any, x: Any) -> Array:
        if not trees.is_array_or_number(x):
            raise TypeError(
                f"aux: the leaf at {trees.quoted(trees.path_str(keys))} is {x!r}, which is not an array or number and "
                "cannot leave a compiled step"
            )
        return jnp.asarray(x)

    return jax.tree_util.tree_map_with_path(leaf, aux)


def same_kind(old: Any, new: Any) -> Any:
    """Return the new model_state with the dtypes of the old one, whose structure and shapes it must have."""
    if trees.structure(old) != trees.structure(new):
        raise ValueError(
            f"loss_fn returned a model_state of the structure {trees.structure(new)}, the state holds "
            f"{trees.structure(old)}; return all of it, changed or not (a loss takes and returns it with "
            "has_model_state=True)"
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


Collect = Callable[[Callable[[], Any]], Callable[[], tuple[Any, Any]]]
"""Maps a function to one that also returns the summaries created in it and not part of its result, or None."""

_collects: list[Collect] = []
_merges: list[Callable[[Any, Any], Any]] = []
_lost_summaries: contextvars.ContextVar[list[None] | None] = contextvars.ContextVar("jstep_lost", default=None)


def register_summaries(collect: Collect, merge: Callable[[Any, Any], Any]) -> None:
    """Register how to collect and merge summaries; `jstep.summary` calls this when it is loaded.

    Args:
        collect: Wraps a function to also return the summaries created in it.
        merge: Merges two values to one summary; None if they are not summaries.
    """
    _collects[:] = [collect]
    _merges[:] = [merge]


def join_returned(aux: Mapping[str, Any], made: Any) -> tuple[Mapping[str, Any], Any]:
    """Return aux, and the summaries created by the loss, merged with those that it returned as `summaries`."""
    merged = _merges[0](aux["summaries"], made) if _merges and "summaries" in aux and made is not None else None
    if merged is None:
        return aux, made
    return {name: value for name, value in aux.items() if name != "summaries"}, merged


def merge_summaries(made: Iterable[Any]) -> Any:
    """Merge the summaries of several losses; None if there are no summaries."""
    summaries = [one for one in made if one is not None]
    return functools.reduce(_merges[0], summaries) if summaries else None


def collect_summaries(fn: Callable[[], Any]) -> tuple[Any, Any]:
    """Return the result of fn, and the summaries created in it but not returned, or None."""
    if not _collects:
        lost: list[None] = []
        with setting(_lost_summaries, lost):
            result = fn()
        if not lost:  # also if another thread has loaded jstep.summary meanwhile: fn is traced once, as usual
            return result, None
        # The loss itself loaded jstep.summary: its summaries have not been collected.
    return _collects[0](fn)()


def note_lost_summary() -> None:
    """Record that a summary was created outside a collection."""
    lost = _lost_summaries.get()
    if lost is not None:
        lost.append(None)
