"""Float32 master weights for low-precision parameters."""

from typing import Any

import jax
import jax.numpy as jnp

from jstep.core import trees
from jstep.core.checks import kind, shown
from jstep.core.types import Context, Optimizer, Params, Slots, Step, Updates, require_optimizer
from jstep.optimizers.apply_updates import apply_updates
from jstep.optimizers.call_update import call_update, inner_context
from jstep.optimizers.hyper import Hyper
from jstep.optimizers.masks import partial_params
from jstep.optimizers.projected import is_update
from jstep.optimizers.wrap_optimizer import wrap_optimizer

MASTER = "master"


def master_weights(optimizer: Optimizer, dtype: Any = jnp.float32) -> Optimizer:
    """Master weights: master += u; p = master, rounded to the parameter's dtype.

    An update of 0.001 to a bfloat16 weight of 1 is lost to rounding, but not in its master. The parameters are
    bitwise equal to the rounded parameters of a float32 run on the same gradients.

    Args:
        optimizer: The inner optimizer, which sees the master weights as its parameters and computes the updates u. Its
            labels, masks and other predicates see the parameters themselves, with their dtypes.
        dtype: The dtype of the master weights; wider parameters keep theirs.

    Returns:
        An `Optimizer` with one more slot, `master`, initially a copy of the parameters. It is the source of truth: if
        you change parameters but not the slot, the next update reverts the change.

    Raises:
        TypeError: `dtype` is not a floating dtype of at least 32 bits.
        ValueError: The optimizer already has a slot `master`.

    Example:
        >>> import jax.numpy as jnp, jstep
        >>> optimizer = jstep.master_weights(jstep.gradient_descent(0.001))
        >>> state = jstep.TrainState.create({"w": jnp.bfloat16(1.0)}, optimizer)
        >>> for _ in range(8):
        ...     state = jstep.apply_gradients(state, {"w": jnp.bfloat16(1.0)}, optimizer)
        >>> print(state.params["w"], jnp.round(state.slots["master"]["w"], 4))
        0.992188 0.992

    Source: Micikevicius et al., "Mixed Precision Training" (2017), section 3.1.
    """
    require_optimizer("optimizer", optimizer)
    wide = _floating_dtype(dtype)

    def widened(leaf: Any) -> Any:
        if not trees.is_trainable(leaf):
            return leaf
        return jnp.array(leaf, leaf.dtype if leaf.dtype.itemsize > wide.itemsize else wide, copy=True)

    def fresh(params: Params, global_step: Step) -> Any:
        return jax.tree.map(lambda leaf: widened(leaf) if trees.is_trainable(leaf) else None, params)

    def update(
        updates: Updates, inner: Slots, own: Slots, params: Params, step: Step, h: Hyper, context: Context
    ) -> tuple[Updates, Slots, Slots]:
        leaves, treedef = trees.flatten(params)
        kept = trees.flatten_like(params, own[MASTER], f"slot {MASTER!r}")
        whole = treedef.unflatten([p if m is None else m for m, p in zip(kept, leaves, strict=True)])
        at_rounding = inner_context(context, lambda masters: jax.tree.map(_rounded, params, masters))
        with partial_params(params):
            updates, inner = call_update(optimizer, updates, inner, whole, step, at_rounding, exact=True)
        found = trees.flatten_like(params, updates, "updates", is_leaf=is_update)
        moved = trees.flatten(apply_updates(whole, updates))[0]
        rounded: list[Any] = [
            None if u is None else _to_rounding(p, m) for u, m, p in zip(found, moved, leaves, strict=True)
        ]
        new = treedef.unflatten([None if m is None else n for m, n in zip(kept, moved, strict=True)])
        return treedef.unflatten(rounded), inner, {MASTER: new}

    return wrap_optimizer(
        optimizer, "master_weights", update, added={MASTER: fresh}, init_on=lambda params: jax.tree.map(widened, params)
    )


def _rounded(p: Any, master: Any) -> Any:
    return master.astype(p.dtype) if trees.is_trainable(p) else master


def _to_rounding(p: Any, master: Any) -> Any:
    """The update from p to the rounding of its master.

    The difference of two low-precision numbers is exact in the wider dtype unless they differ by a factor of about
    2^13.
    """
    return _rounded(p, master).astype(master.dtype) - p.astype(master.dtype)


def _floating_dtype(dtype: Any) -> Any:
    try:
        found = jnp.dtype("none" if dtype is None else dtype)  # None would be float64
    except TypeError:
        raise TypeError(f"dtype={shown(dtype)}: must be a floating dtype such as float32, got {kind(dtype)}") from None
    if not trees.is_floating(found) or found.itemsize < 4:
        raise TypeError(f"dtype={found}: must be a floating dtype of at least 32 bits, such as float32")
    return jax.dtypes.canonicalize_dtype(found)
