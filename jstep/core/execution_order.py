"""Execution order of a step on CPUs, so that XLA overwrites slots without copying them.

XLA's CPU backend computes each array in a separate kernel. On TPUs and GPUs one kernel computes all arrays of a leaf,
and reads each operand once; an enforced order would split it and read operands twice.
"""

import contextvars
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import jax
from jax.extend.core import Literal

from jstep.core.exceptions import setting
from jstep.core.programs import variables
from jstep.core.types import Array


def compute_first(*arrays: Any) -> tuple[Any, ...]:
    """Materialize arrays (or trees) on a CPU before their uses, so that they are not recomputed."""
    if not _is_traced(arrays):
        return arrays
    same: tuple[Any, ...] = jax.lax.platform_dependent(
        *arrays, cpu=lambda *arrays: jax.lax.optimization_barrier(arrays), default=lambda *arrays: arrays
    )
    return same


def in_order(first: Array, *later: Array) -> list[Array]:
    """Return the later arrays, on a CPU each computed by a kernel that XLA must run after that of the one before it.

    If two kernels read a slot that one of them overwrites, XLA copies the slot unless the other must run earlier, which
    only a data dependency ensures. The condition is never true; LLVM detects this and XLA does not, so the dependency
    adds no memory traffic. The barrier keeps XLA from computing `first` again in the kernel that is to wait for it.

    An order that nothing needs is not free: a kernel that other kernels wait for becomes two, and with 1000 leaves the
    two slots of Adam take half as long to compile again. Slots that are in place (`is_in_place`) need none.
    """

    def ordered(first: Array, *later: Array) -> list[Array]:
        found = []
        for x in later:
            first = jax.lax.optimization_barrier(first)
            first = jax.lax.select((first > 0) & (first < 0), first.astype(x.dtype), x)
            found.append(first)
        return found

    if not later or not _is_traced((first, later)):
        return list(later)
    same: list[Array] = jax.lax.platform_dependent(first, *later, cpu=ordered, default=lambda first, *later: [*later])
    return same


_IN_PLACE: contextvars.ContextVar[dict[int, Array] | None] = contextvars.ContextVar("_IN_PLACE", default=None)
"""The arrays of the update being traced that overwrite their old values in any order, by identity."""


def collecting_in_place() -> AbstractContextManager[dict[int, Array] | None]:
    """Context manager in which `mark_in_place` has an effect on `is_in_place`."""
    return setting(_IN_PLACE, {})


def mark_in_place(arrays: Iterable[Array]) -> None:
    """Declare that nothing but the kernel of each array reads the old value that the array replaces."""
    known = _IN_PLACE.get()
    if known is not None:
        known.update((id(x), x) for x in arrays)  # the reference keeps the identity from being used again


def is_in_place(array: Array) -> bool:
    """Whether this very array was marked by `mark_in_place`; an array that is computed from it was not."""
    return id(array) in (_IN_PLACE.get() or ())


def are_all_in_place(jaxpr: Any, replaced: Mapping[int, int]) -> bool:
    """Whether each old value that a program replaces is read only by the kernel of the value that replaces it.

    The new value of a slot may be used freely, as in Adam, whose parameter is computed from the new slots, if XLA keeps
    it: it computes again what an operation on one array returns. Lion's parameter is computed from the old slot.

    Args:
        jaxpr: The program.
        replaced: Index of an old value among the arguments → index of the new one among the results.
    """
    pairs = [(jaxpr.invars[old], jaxpr.outvars[new]) for old, new in replaced.items()]
    if any(isinstance(new, Literal) for _, new in pairs):
        return False
    return all(_reaches_only(jaxpr, old, new) and _is_kept(jaxpr, new) for old, new in pairs)


def _reaches_only(jaxpr: Any, source: Any, target: Any) -> bool:
    """Whether the only result that is computed from `source`, except by way of `target`, is `target`."""
    reached = {source} - {target}
    for eqn in jaxpr.eqns:
        if any(atom in reached for atom in variables(eqn.invars)):
            reached |= set(eqn.outvars) - {target}
    return not any(atom in reached for atom in variables(jaxpr.outvars))


def _is_kept(jaxpr: Any, value: Any) -> bool:
    """Whether XLA computes a value once, even if several kernels use it."""
    if not any(value in variables(eqn.invars) for eqn in jaxpr.eqns):
        return True
    made_by = [eqn for eqn in jaxpr.eqns if value in eqn.outvars]
    return all(sum(atom.aval.shape == value.aval.shape for atom in variables(eqn.invars)) > 1 for eqn in made_by)


def _is_traced(tree: Any) -> bool:
    """Whether a program is being traced: outside of one the order is fixed, and `platform_dependent` would compile."""
    return any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(tree))
