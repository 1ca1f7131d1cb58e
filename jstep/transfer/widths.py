"""Width ratios of the leaves of two models: fan-in and fan-out of the wide model over the small one."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, TypeAlias

import jax

from jstep.core import trees
from jstep.core.checks import kind, shown

WidthAxes: TypeAlias = Callable[[str, Any], Any]
"""`axes(path, leaf) -> (in, out)`: each an axis, several axes, or None."""


@dataclasses.dataclass(frozen=True)
class Widths:
    """Width ratios of a leaf.

    Attributes:
        base: Its shape in the small model.
        target: Its shape in the wide model.
        r_in: The ratio of its fan-in, target over base.
        r_out: The ratio of its fan-out, target over base.
        in_base: Its fan-in in the small model; 1 without an input axis.
        out_base: Its fan-out in the small model; 1 without an output axis.
    """

    base: tuple[int, ...]
    target: tuple[int, ...]
    r_in: float
    r_out: float
    in_base: int
    out_base: int

    @property
    def kind(self) -> str:
        """Which axes are wider: "hidden" (inputs and outputs), "input" (outputs), "output" (inputs) or "none"."""
        return {(1, 1): "hidden", (0, 1): "input", (1, 0): "output", (0, 0): "none"}[self.r_in != 1, self.r_out != 1]

    @property
    def larger(self) -> float:
        """The ratio of the larger of fan-in and fan-out, target over base."""
        wide = max(self.in_base * self.r_in, self.out_base * self.r_out)
        return wide / max(self.in_base, self.out_base)


def widths_of(base: Any, target: Any, delta: Any, axes: WidthAxes | None) -> dict[str, Widths]:
    """Return the widths of all trainable leaves by path.

    Args:
        base: The shapes of the small model.
        target: The shapes of the wide model.
        delta: The shapes of a third model, or None: an axis is a width if it differs between base and delta.
        axes: The input and output axes of each leaf, see `mup`.

    Raises:
        TypeError: A leaf has no shape, or `axes` does not return a pair of axes.
        ValueError: The trees do not match, an axis shrinks, or a wider axis is neither an input nor an output; names
            the path.
    """
    leaves = trees.leaves_with_paths(target)
    if not leaves:
        raise ValueError("target: has no leaves; give the shapes of the parameters, as jax.eval_shape returns them")
    bases = _like(target, base, "base")
    deltas = bases if delta is None else _like(target, delta, "delta")
    found: dict[str, Widths] = {}
    for (path, leaf), small, other in zip(leaves, bases, deltas, strict=True):
        if path in found:
            raise ValueError(f"target: several leaves share the path {path!r}; rename a key that holds a slash")
        shapes = [_shape(one, path, what) for one, what in ((small, "base"), (leaf, "target"), (other, "delta"))]
        if not trees.is_trainable(leaf):
            continue
        wide = _wide_axes(path, *shapes, has_delta=delta is not None)
        found[path] = _widths(path, leaf, shapes[0], shapes[1], wide, axes)
    return found


def _like(target: Any, tree: Any, what: str) -> list[Any]:
    # Compare keys, not structures: modules of Equinox and others store their width in the structure.
    keys, own = ([keys for keys, _ in jax.tree_util.tree_leaves_with_path(one)] for one in (target, tree))
    if keys == own:
        return jax.tree.leaves(tree)
    paths = [set(trees.paths_of(one)) for one in (target, tree)]
    missing, extra = sorted(paths[0] - paths[1])[:10], sorted(paths[1] - paths[0])[:10]
    if missing or extra:
        difference = f"it lacks {missing} and has {extra} in addition"
    else:
        difference = f"has {trees.structure(tree)} instead of {trees.structure(target)}"
    raise ValueError(
        f"{what}: must have the structure of target, but {difference}; both must be the same model at two widths, of "
        "the same depth"
    )


def _shape(leaf: Any, path: str, what: str) -> tuple[int, ...]:
    if isinstance(leaf, bool | int | float):
        return ()
    if not (hasattr(leaf, "shape") and hasattr(leaf, "dtype")):
        raise TypeError(
            f"{what}: the leaf at {trees.quoted(path)} is {kind(leaf)}, which has no shape and dtype; give trees of "
            "arrays, or of shapes as jax.eval_shape returns them"
        )
    return tuple(leaf.shape)


def _wide_axes(
    path: str, base: tuple[int, ...], target: tuple[int, ...], delta: tuple[int, ...], *, has_delta: bool
) -> list[int]:
    """Return the axes that are widths.

    Raises:
        ValueError: The numbers of axes differ, an axis shrinks, or an axis differs although it is equal in base and
            delta.
    """
    for what, shape in (("base", base), ("delta", delta)):
        if len(shape) != len(target):
            raise ValueError(
                f"{what}: the leaf at {trees.quoted(path)} has shape {shape} there and {target} in target; they must "
                "have the same number of axes"
            )
    for axis, (small, wide) in enumerate(zip(base, target, strict=True)):
        if wide < small:
            raise ValueError(
                f"target: the leaf at {trees.quoted(path)} has shape {target}, in base {base}: axis {axis} must not "
                "shrink; base is the small model, whose hyperparameters are known"
            )
        if small == 0 and wide:
            raise ValueError(f"base: the leaf at {trees.quoted(path)} has shape {base}; its axes must not be empty")
    wide_axes = [
        axis for axis, sizes in enumerate(zip(base, delta if has_delta else target, strict=True)) if len(set(sizes)) > 1
    ]
    for axis in range(len(target)):
        if base[axis] != target[axis] and axis not in wide_axes:
            raise ValueError(
                f"delta: axis {axis} of the leaf at {trees.quoted(path)} is {base[axis]} in base and delta, so not a "
                f"width, but {target[axis]} in target; make target equal to base there, or delta different"
            )
    return wide_axes


def _widths(
    path: str,
    leaf: Any,
    base: tuple[int, ...],
    target: tuple[int, ...],
    wide: list[int],
    axes: WidthAxes | None,
) -> Widths:
    ins, outs = _pair_of_axes(path, leaf, axes)
    for axis in wide:
        if axis not in ins and axis not in outs:
            raise ValueError(
                f"axes: axis {axis} of the leaf at {trees.quoted(path)} grows from {base[axis]} to {target[axis]} "
                f"(shape {base} to {target}), but is neither an input nor an output axis, which are {ins} and {outs}; "
                "compare models of one depth, or give axes=lambda path, leaf: (in, out)"
            )

    def fan(shape: tuple[int, ...], some: tuple[int, ...]) -> int:
        return math.prod(shape[axis] for axis in some)

    in_base, out_base = fan(base, ins), fan(base, outs)
    r_in = fan(target, ins) / in_base if in_base else 1.0
    r_out = fan(target, outs) / out_base if out_base else 1.0
    return Widths(base, target, r_in, r_out, in_base, out_base)


def _pair_of_axes(path: str, leaf: Any, axes: WidthAxes | None) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the input and output axes of a leaf as nonnegative indices."""
    ndim = len(getattr(leaf, "shape", ()))
    if axes is None:
        return (() if ndim < 2 else (ndim - 2,)), (() if ndim < 1 else (ndim - 1,))
    given = axes(path, leaf)
    if not (isinstance(given, tuple | list) and len(given) == 2):
        raise TypeError(
            f"axes: must return (in, out) at {trees.quoted(path)}, each an axis, several or None, got {shown(given)}"
        )
    ins, outs = (_counted(one, ndim, path) for one in given)
    if set(ins) & set(outs) or len({*ins, *outs}) < len(ins) + len(outs):
        raise ValueError(f"axes: must name each axis at {trees.quoted(path)} once, got {shown(given)}")
    return ins, outs


def _counted(given: Any, ndim: int, path: str) -> tuple[int, ...]:
    some = () if given is None else tuple(given) if isinstance(given, tuple | list) else (given,)
    for axis in some:
        if isinstance(axis, bool) or not isinstance(axis, int):
            raise TypeError(f"axes: must return integers at {trees.quoted(path)}, got {shown(axis)}")
        if not -ndim <= axis < ndim:
            raise ValueError(f"axes: the leaf at {trees.quoted(path)} has {ndim} axes and no axis {axis}")
    return tuple(axis % ndim for axis in some)
