"""SOAP: Adam in the eigenbasis of Shampoo's preconditioner."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jstep.core import trees
from jstep.core.checks import as_int
from jstep.core.selection import VarList
from jstep.core.trees import Array, Optimizer, Params, ScalarOrSchedule, Slots, Step, Updates
from jstep.optimizers.age import age_of, bias_correction
from jstep.optimizers.directions import Result, Values, decay_mask, decays, from_update
from jstep.optimizers.eigenbases import FIRST, NEXT, SAME, EigenbasisUpdate, update_eigenbases
from jstep.optimizers.leafwise import MEAN, SQUARE, Slot
from jstep.optimizers.offloading import loads_slots, with_slots_loaded
from jstep.state.train_state import START_STEP


def soap(
    learning_rate: ScalarOrSchedule = 3e-3,
    beta1: ScalarOrSchedule = 0.95,
    beta2: ScalarOrSchedule = 0.95,
    shampoo_beta: ScalarOrSchedule = 0.95,
    epsilon: ScalarOrSchedule = 1e-8,
    weight_decay: ScalarOrSchedule = 0.01,
    weight_decay_mask: VarList = None,
    precondition_frequency: int = 10,
    max_precondition_dim: int = 10000,
) -> Optimizer:
    """SOAP: g' = Qᵀg; m averages g, v averages g'²; p −= lr·√(1−β2^k)/(1−β1^k) · Q(Qᵀm/(√v + ε)), k = t − 1.

    For each axis i of a leaf GG_i averages g·gᵀ over the other axes, and Q_i is its eigenbasis. The first update of a
    slot only initializes GG and Q (by eigh). Every precondition_frequency steps Q is refined by one power iteration,
    the QR of GG·Q. t is the age of the slots. On TPUs eigh uses Jacobi's method, and eigh and QR process all matrices
    of one size in a loop, so that compiling takes seconds whatever the sizes and the number of leaves.

    Args:
        learning_rate: The step size lr ≥ 0.
        beta1: The decay of the first moment, in [0, 1).
        beta2: The decay of the second moment, in [0, 1).
        shampoo_beta: The decay of GG, in [0, 1).
        epsilon: Added to √v, ≥ 0.
        weight_decay: Decoupled weight decay, multiplied by lr and applied after each step except the first; ≥ 0.
        weight_decay_mask: The leaves that decay, in the grammar of `var_list`; None for all.
        precondition_frequency: The number of steps between updates of Q, ≥ 1; fixed when the optimizer is created.
        max_precondition_dim: The size of the largest axis with GG and Q. Longer axes, and leaves with fewer than two
            axes, have none; a leaf without any uses Adam.

    Returns:
        An `Optimizer` with the slots `m`, `v` (initially 0) and, for each axis, `gg_0`, `q_0`, `gg_1` … (square,
        initially 0), and the scalar `start_step`.

    Raises:
        ValueError: An argument is out of its range, or the mask matches nothing.

    Example:
        >>> import jax.numpy as jnp, jstep
        >>> state = jstep.TrainState.create({"w": jnp.ones((3, 2)), "b": jnp.ones(2)}, jstep.soap())
        >>> print(jstep.get_slot_names(state), state.slots["gg_0"]["w"].shape, state.slots["gg_0"]["b"])
        ['gg_0', 'gg_1', 'm', 'q_0', 'q_1', 'v'] (3, 3) None

    Source: Vyas et al., "SOAP: Improving and Stabilizing Shampoo using Adam" (2024); the results match the
    authors' code and pytorch_optimizer, except for the signs of eigenvectors and the bases of null spaces.
    """
    frequency = as_int(precondition_frequency, "precondition_frequency", at_least=1)
    longest = as_int(max_precondition_dim, "max_precondition_dim", at_least=1)

    def square(axis: int) -> Any:
        def shape(path: str, leaf: Any) -> tuple[int, int] | None:
            sizes = np.shape(leaf)
            return (sizes[axis],) * 2 if len(sizes) > max(1, axis) and 0 < sizes[axis] <= longest else None

        return shape

    def slots(params: Params) -> dict[str, Any]:
        # At least two axes, so that the names do not depend on whether there is a matrix.
        axes = range(max([2, *(np.ndim(leaf) for leaf in jax.tree.leaves(params) if trees.is_trainable(leaf))]))
        return {"m": MEAN, "v": SQUARE} | {
            f"{name}_{axis}": Slot(shape=square(axis)) for axis in axes for name in ("gg", "q")
        }

    hyper = {
        "learning_rate": learning_rate,
        "beta1": beta1,
        "beta2": beta2,
        "epsilon": epsilon,
        "shampoo_beta": shampoo_beta,
        "weight_decay": weight_decay,
    }
    flags = decay_mask(weight_decay_mask)
    moments = from_update("soap", soap_update, slots, hyper, flags=flags, prepare=sizes_and_shares)

    @loads_slots
    def update(updates: Updates, given: Slots, params: Params, step: Step, /) -> tuple[Updates, Slots]:
        new_updates, new = moments.update(updates, given, params, step)
        k = age_of(step, given[START_STEP]) - 1
        turn = jnp.where(k == 0, FIRST, jnp.where(k % frequency == 0, NEXT, SAME))
        has_update = [not trees.is_none(u) for u in trees.flatten_like(params, new_updates, "updates")]
        treedef = trees.structure(params)

        def turned(own: Slots, _: Any) -> tuple[None, Slots]:
            of_leaves = {name: trees.flatten_like(params, tree, name) for name, tree in own.items()}
            values = with_turned_bases(of_leaves, turn, has_update)
            return None, {name: treedef.unflatten(values[name]) for name in own if not name.startswith("gg")}

        # All matrices of one size are processed by one loop, so they are on the devices at once.
        return new_updates, new | with_slots_loaded(turned, {n: new[n] for n in slots(params) if n != "m"}, None)[1]

    return moments._replace(update=update)


def with_turned_bases(slots: dict[str, list[Any]], turn: Array, has_update: list[bool]) -> dict[str, list[Any]]:
    """The leaves of each slot, with new bases for the leaves that have bases and were updated."""
    axes = [axis for axis in range(len(slots)) if f"gg_{axis}" in slots]
    leaves = {}
    for i, v in enumerate(slots["v"]):
        own = [axis for axis in axes if slots[f"gg_{axis}"][i] is not None]
        if own and has_update[i]:
            grams, bases = ({axis: slots[f"{name}_{axis}"][i] for axis in own} for name in ("gg", "q"))
            leaves[i] = EigenbasisUpdate(grams, bases, v)
    slots = {name: list(values) for name, values in slots.items()}
    for i, leaf in zip(leaves, update_eigenbases(turn, list(leaves.values())), strict=True):
        slots["v"][i] = leaf.v
        for axis, basis in leaf.bases.items():
            slots[f"q_{axis}"][i] = basis
    return slots


def sizes_and_shares(h: Values) -> dict[str, Any]:
    """The step size, and the weights of old and new values in the moments."""
    first, k = h.age == 1, jnp.maximum(h.age - 1, 1)
    size = h.learning_rate * jnp.sqrt(bias_correction(h.beta2, k)) / bias_correction(h.beta1, k)
    return {
        "first": first,
        "size": jnp.where(first, 0.0, size),
        "shrink": jnp.where(first, 0.0, h.learning_rate * h.weight_decay),
        "m_old": jnp.where(first, 1.0, h.beta1),
        "m_new": jnp.where(first, 0.0, 1 - h.beta1),
        "v_old": jnp.where(first, 1.0, h.beta2),
        "v_new": jnp.where(first, 0.0, 1 - h.beta2),
    }


def soap_update(g: Array, p: Array, s: Values, h: Values) -> Result:
    """The update, moments and averages of g·gᵀ; the bases of all leaves are updated together afterwards."""
    axes = [axis for axis in range(p.ndim) if f"gg_{axis}" in s and s[f"gg_{axis}"] is not None]
    bases = {axis: s[f"q_{axis}"] for axis in axes}
    m = h.m_old * s.m + h.m_new * g
    v = h.v_old * s.v + h.v_new * jnp.square(projected(g, bases))
    u = projected(projected(m, bases) / (jnp.sqrt(v) + h.epsilon), bases, back=True)
    # The bases are initialized from the first gradient, so the first update has no direction.
    update = jnp.where(h.first, jnp.zeros_like(u), -h.size * u)
    if decays(h):
        update = update - h.shrink * (p + update)
    grams = {axis: gram(g, axis, s[f"gg_{axis}"], h.shampoo_beta) for axis in axes}
    return update, {"m": m, "v": v} | {f"gg_{i}": grams[i] for i in axes}


def projected(x: Array, bases: dict[int, Array], back: bool = False) -> Array:
    """Project an array onto bases, axis by axis, or back."""
    for axis, q in bases.items():
        x = jnp.moveaxis(jnp.tensordot(x, q, ((axis,), (1 if back else 0,))), -1, axis)
    return x


def gram(g: Array, axis: int, old: Array, decay: Any) -> Array:
    """The new average of g·gᵀ, contracted over all axes but one."""
    others = tuple(i for i in range(g.ndim) if i != axis)
    return decay * old + (1 - decay) * jnp.tensordot(g, g, (others, others))
