"""The coordinate check of μP: whether activations change equally at all widths."""

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from jstep.core import trees
from jstep.core.checks import as_function, as_int, columns, figure, kind, shown
from jstep.core.trees import Array
from jstep.state.train_state import TrainState


@dataclasses.dataclass(frozen=True)
class CoordCheck:
    """Result of `coord_check`.

    Attributes:
        sizes: Name of an activation → width → its mean absolute value before training.
        changes: Name → width → its mean absolute change by training.
        growth: Name → the slope of log change over log width: about 0 if the rate transfers, 1 if the change grows like
            the width; NaN if an activation does not change at some width, or is not finite.
        steps: The number of steps after which changes are measured.
    """

    sizes: Mapping[str, Mapping[int, float]]
    changes: Mapping[str, Mapping[int, float]]
    growth: Mapping[str, float]
    steps: int

    def __str__(self) -> str:
        widths = [int(width) for width in next(iter(self.sizes.values()))]
        head = ["activation", "", *map(str, widths), "growth"]
        rows = []
        for name, changes in self.changes.items():
            rows.append([name, "size", *(f"{self.sizes[name][width]:.3g}" for width in widths), ""])
            rows.append(["", "change", *(f"{changes[width]:.3g}" for width in widths), self._growth_of(name)])
        title = f"mean |x| over widths, and its change after {self.steps} step{'s' if self.steps > 1 else ''}"
        return "\n".join([title, "", *columns([head, *rows], left=2)])

    def _growth_of(self, name: str) -> str:
        return f"{round(self.growth[name], 2) + 0.0:.2f}"  # not -0.00

    def plot(self, path: str) -> None:
        """Plot sizes and changes over widths, a line for each activation, on logarithmic axes.

        Args:
            path: The output file; its extension selects the format.

        Raises:
            ImportError: matplotlib is not installed.
        """
        fig = figure()
        fig.set_size_inches(7.5, 3.2)
        titles = {"before training": self.sizes, f"change after {self.steps} steps": self.changes}
        for axes, (title, values) in zip(fig.subplots(1, 2), titles.items(), strict=True):
            for name, by_width in values.items():
                label = name if values is self.sizes else f"{name}: {self._growth_of(name)}"
                axes.plot(list(by_width), list(by_width.values()), marker="o", markersize=3, linewidth=1.3, label=label)
            axes.set_xscale("log", base=2)
            axes.set_yscale("log")
            axes.set_title(title, fontsize=9, loc="left")
            axes.set_xlabel("width", fontsize=8)
            axes.set_ylabel("mean |x|", fontsize=8)
            axes.tick_params(labelsize=7.5)
            axes.grid(alpha=0.3, linewidth=0.5)
            axes.spines[["top", "right"]].set_visible(False)
            axes.legend(fontsize=6.5, frameon=False)
        fig.savefig(path, dpi=200)


def coord_check(
    make: Callable[[int], tuple[Any, TrainState, Any]],
    widths: Iterable[int],
    activations: Callable[..., Mapping[str, Array]],
    steps: int = 5,
) -> CoordCheck:
    """Measure how much activations change in a few training steps on one batch, at several widths.

    With rates and initial values that transfer (`mup`), the change of each activation is about the same at all widths:
    a growth within ±0.1 or so. Otherwise the changes of hidden layers and of the output grow with the width, or shrink.
    It is expected that the size of the output before training shrinks like 1/√width.

    Args:
        make: `make(width) -> (train_step, state, batch)`: a training step, as from `minimize`, a new state, and a
            batch: a tuple is passed as several arguments, anything else as one. Return the same batch at each width.
        widths: Two widths or more, such as (64, 128, 256, 512).
        activations: `activations(params, *batch) -> {name: array}`, of any shapes; the same names at each width.
        steps: The number of training steps, each on the same batch, ≥ 1.

    Returns:
        A `CoordCheck`: `sizes[name][width]`, `changes[name][width]`, `growth[name]`; `str()` formats a table,
        `plot(path)` draws a figure.

    Raises:
        TypeError: `make` or `activations` returns something else.
        ValueError: There are fewer than two widths, or names or shapes of activations differ.

    Example:
        >>> import jax, jax.numpy as jnp, jstep
        >>> def activations(params, x):
        ...     return {"hidden": x @ params["in"], "out": x @ params["in"] @ params["out"]}
        >>> def make(width):
        ...     params = {"in": jnp.ones((4, width)) / 2, "out": jnp.ones((width, 1)) / width}
        ...     optimizer = jstep.chain(jstep.adam(0.01), jstep.scale_updates({"out": 64 / width}))
        ...     state = jstep.TrainState.create(params, optimizer)
        ...     train_step = jstep.minimize(lambda params, x: jnp.mean(activations(params, x)["out"]), optimizer)
        ...     return train_step, state, jnp.ones((2, 4))
        >>> check = jstep.coord_check(make, (64, 128, 256), activations, steps=3)
        >>> print(check)
        mean |x| over widths, and its change after 3 steps
        <BLANKLINE>
        activation              64     128     256  growth
        hidden      size         2       2       2
                    change  0.0952  0.0952  0.0952    0.00
        out         size         2       2       2
                    change    3.75    3.75    3.75    0.00

    Source: Yang et al., "Tensor Programs V" (2022), appendix D.1, and the coordinate check of its package.
    """
    as_function(make, "make", "(width) -> (train_step, state, batch)")
    as_function(activations, "activations", "(params, *batch) -> {name: array}")
    number = as_int(steps, "steps", at_least=1)
    given = _checked_widths(widths)
    measured = {width: _of_width(make, width, activations, number) for width in given}
    names = list(measured[given[0]])
    for width, found in measured.items():
        if set(found) != set(names):
            raise ValueError(
                f"activations: must return the same names at each width, got {sorted(names)} at {given[0]} and "
                f"{sorted(found)} at {width}"
            )
    sizes = {name: {width: measured[width][name][0] for width in given} for name in names}
    changes = {name: {width: measured[width][name][1] for width in given} for name in names}
    return CoordCheck(sizes, changes, {name: _slope(changes[name]) for name in names}, number)


def _checked_widths(widths: Any) -> list[int]:
    if isinstance(widths, str | int) or not isinstance(widths, Iterable):
        raise TypeError(f"widths={shown(widths)}: must be several integers, such as (64, 128, 256), got {kind(widths)}")
    given = [as_int(width, "widths", at_least=1) for width in widths]
    if len(given) < 2 or len(set(given)) < len(given):
        raise ValueError(f"widths={given}: must be two different widths or more, to fit a slope")
    return given


def _of_width(make: Any, width: int, activations: Any, steps: int) -> dict[str, tuple[float, float]]:
    """Return the size and the change of each activation at a width."""
    made = make(width)
    if not (isinstance(made, tuple | list) and len(made) == 3 and isinstance(made[1], TrainState)):
        raise TypeError(
            f"make: must return (train_step, state, batch) for width {width}, got {kind(made)} {shown(made)}"
        )
    train_step, state, batch = made
    as_function(train_step, f"make({width})[0]", "train_step(state, *batch)")
    args = trees.arguments_of(batch)
    before = _checked(activations(state.params, *args), width)
    for _ in range(steps):
        state, _ = train_step(state, *args)
    after = _checked(activations(state.params, *args), width)
    if {name: x.shape for name, x in before.items()} != {name: x.shape for name, x in after.items()}:
        raise ValueError(
            f"activations: must have the same names and shapes before and after training, at width {width}"
        )
    return {name: (_mean(x), _mean(after[name] - x)) for name, x in before.items()}


def _checked(found: Any, width: int) -> dict[str, np.ndarray[Any, Any]]:
    """Return the activations on the host, in float32 or wider."""
    if not isinstance(found, Mapping) or not found:
        raise TypeError(f"activations: must return name -> array, at least one, got {kind(found)} at width {width}")
    arrays = {}
    for name, x in found.items():
        if not isinstance(name, str) or not trees.is_array(x) or not jnp.issubdtype(x.dtype, jnp.inexact):
            raise TypeError(
                f"activations: {shown(name)} must be the name of a floating-point array, got {kind(x)} at width {width}"
            )
        if x.size == 0:
            raise ValueError(f"activations: {name!r} must not be empty, got shape {x.shape} at width {width}")
        wide = x.dtype if jnp.issubdtype(x.dtype, jnp.complexfloating) else trees.compute_dtype(x.dtype)
        arrays[name] = np.asarray(x).astype(wide)
    return arrays


def _mean(x: np.ndarray[Any, Any]) -> float:
    return float(np.mean(np.abs(x), dtype=np.float64))


def _slope(by_width: Mapping[int, float]) -> float:
    """Fit the slope of log value over log width by least squares."""
    values = np.array(list(by_width.values()))
    if not (np.isfinite(values).all() and (values > 0).all()):
        return math.nan
    return float(np.polyfit(np.log(list(by_width)), np.log(values), 1)[0])
