"""Hyperparameters across widths: width ratios, μP, and the coordinate check."""

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import numpy as np

from jstep.core import trees
from jstep.core.checks import as_choice, as_function, as_int, describe_type, format_value
from jstep.core.tables import columns
from jstep.core.tracebacks import shortens_tracebacks
from jstep.core.trees import Array, Params, Tree
from jstep.optimizers.leaf_values import pair_of_axes
from jstep.state.train_state import TrainState

# Width ratios of the leaves of two models: fan-in and fan-out of the wide model over the small one.

WidthAxes: TypeAlias = Callable[[str, Any], Any]
"""`axes(path, leaf) -> (in, out)`: each an axis, several axes, or None."""


@dataclasses.dataclass(frozen=True)
class Widths:
    """Width ratios of a leaf.

    Attributes:
        base: Its shape in the small model.
        target: Its shape in the wide model.
        r_in: The ratio of its fan-in, target over base.
        r_out: The same of its fan-out.
        base_fan_in: Its fan-in in the small model; 1 without such an axis.
        base_fan_out: The same of its fan-out.
    """

    base: tuple[int, ...]
    target: tuple[int, ...]
    r_in: float
    r_out: float
    base_fan_in: int
    base_fan_out: int

    @property
    def kind(self) -> str:
        """The wider axes: "hidden" (both), "input" (outputs), "output" (inputs) or "none"."""
        has_wider_in = self.r_in != 1
        has_wider_out = self.r_out != 1
        if has_wider_in and has_wider_out:
            return "hidden"
        if has_wider_out:
            return "input"
        if has_wider_in:
            return "output"
        return "none"

    @property
    def growth(self) -> float:
        """The ratio of the larger fan, target over base."""
        larger = max(self.base_fan_in * self.r_in, self.base_fan_out * self.r_out)
        return larger / max(self.base_fan_in, self.base_fan_out)


def find_widths(
    base: object, target: Tree, delta: object, axes: WidthAxes | None
) -> dict[str, Widths]:
    """Return path → width ratios of each trainable leaf of `target`."""
    target_leaves = trees.leaves_with_paths(target)
    base_leaves = _matching_leaves(target, base, "base")
    if delta is None:
        # An axis is a width if it differs between base and target.
        delta_leaves = [leaf for _, leaf in target_leaves]
    else:
        delta_leaves = _matching_leaves(target, delta, "delta")
    widths: dict[str, Widths] = {}
    leaves = zip(target_leaves, base_leaves, delta_leaves, strict=True)
    for (path, leaf), base_leaf, delta_leaf in leaves:
        if trees.is_trainable(leaf):
            widths[path] = _leaf_widths(path, leaf, np.shape(base_leaf), np.shape(delta_leaf), axes)
    return widths


def _matching_leaves(target: Tree, tree: Tree, what: str) -> list[Any]:
    """Return the leaves of a tree, which must have the leaves of the target."""
    # Compare keys, not structures: modules of Equinox and others store their width in the
    # structure.
    expected = [keys for keys, _ in jax.tree_util.tree_leaves_with_path(target)]
    found = [keys for keys, _ in jax.tree_util.tree_leaves_with_path(tree)]
    if expected != found:
        lacking = sorted(map(trees.path_str, {*expected} - {*found}))[:5]
        extra = sorted(map(trees.path_str, {*found} - {*expected}))[:5]
        raise ValueError(
            f"{what}: must have the leaves of target, but lacks {lacking} and has {extra} in "
            "addition"
        )
    return jax.tree.leaves(tree)


def _leaf_widths(
    path: str, leaf: Any, base: tuple[int, ...], delta: tuple[int, ...], axes: WidthAxes | None
) -> Widths:
    target = np.shape(leaf)
    where = f"the leaf at {trees.quote_path(path)}"
    for what, shape in (("base", base), ("delta", delta)):
        if len(shape) != len(target):
            raise ValueError(
                f"{what}: {where} has shape {shape}, in target {target}; must have as many axes"
            )
    for axis, (small, wide, other) in enumerate(zip(base, target, delta, strict=True)):
        if wide < small:
            raise ValueError(
                f"target: {where} has shape {target}, in base {base}: axis {axis} must not shrink"
            )
        if small == other != wide:
            raise ValueError(
                f"delta: axis {axis} of {where} is {small} in base and delta, so not a width, but "
                f"{wide} in target; make target equal to base there, or delta different"
            )
    in_axes, out_axes = _fan_axes(path, leaf, axes)
    for axis, (small, other) in enumerate(zip(base, delta, strict=True)):
        if small != other and axis not in in_axes + out_axes:
            raise ValueError(
                f"axes: axis {axis} of {where} grows from {small} to {target[axis]}, but is "
                f"neither an input nor an output axis, which are {in_axes} and {out_axes}; give "
                "axes=lambda path, leaf: (in, out)"
            )
    base_fan_in = math.prod(base[axis] for axis in in_axes)
    base_fan_out = math.prod(base[axis] for axis in out_axes)
    fan_in = math.prod(target[axis] for axis in in_axes)
    fan_out = math.prod(target[axis] for axis in out_axes)
    return Widths(
        base=base,
        target=target,
        r_in=fan_in / base_fan_in if base_fan_in else 1.0,
        r_out=fan_out / base_fan_out if base_fan_out else 1.0,
        base_fan_in=base_fan_in,
        base_fan_out=base_fan_out,
    )


def _fan_axes(
    path: str, leaf: object, axes: WidthAxes | None
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the axes of the fan-in and of the fan-out of a leaf."""
    ndim = len(getattr(leaf, "shape", ()))
    if axes is not None:
        return pair_of_axes(axes(path, leaf), path, ndim)
    in_axes = (ndim - 2,) if ndim >= 2 else ()
    out_axes = (ndim - 1,) if ndim >= 1 else ()
    return in_axes, out_axes


# Maximal update parametrization (μP): hyperparameter transfer from a small model to a wide one.

INITS = ("fan_in", "constant")
OPTIMIZERS = ("adam", "sgd", "muon", "muon_original", "hyperball")


@dataclasses.dataclass(frozen=True, kw_only=True)
class MupFactors:
    """Factors on the hyperparameters of the small model, by the path of each trainable leaf.

    Attributes:
        rates: Factors on the learning rate, for `scale_updates`.
        decays: Factors on a weight decay that is multiplied by the rate, for `add_weight_decay`:
            the inverse of `rates`.
        initials: Factors on the initial values, for `initial`.
        widths: The width ratios of each leaf: `kind`, `r_in`, `r_out`, and its shapes.
    """

    rates: Mapping[str, float]
    decays: Mapping[str, float]
    initials: Mapping[str, float]
    widths: Mapping[str, Widths] = dataclasses.field(repr=False)

    def initial(self, params: Params) -> Params:
        """Scale the output of the wide model's initializers to its initial parameters.

        Args:
            params: The wide model's parameters: arrays of the target's shapes, traced or not.

        Returns:
            The same tree and dtypes, with each trainable leaf multiplied by its factor.

        Raises:
            ValueError: A leaf is not in the target, or has another shape there; names the path.
        """
        leaves = trees.leaves_with_paths(params)
        trainable = {path for path, leaf in leaves if trees.is_trainable(leaf)}
        if trainable != self.widths.keys():
            differing = sorted(trainable ^ self.widths.keys())[:10]
            raise ValueError(
                f"params: must have the leaves of target, but {differing} are in one of them only"
            )
        scaled = [self._scale(path, leaf) if path in trainable else leaf for path, leaf in leaves]
        return jax.tree.unflatten(jax.tree.structure(params), scaled)

    def _scale(self, path: str, leaf: Any) -> Any:
        expected = self.widths[path].target
        if np.shape(leaf) != expected:
            raise ValueError(
                f"params: {trees.quote_path(path)} has shape {np.shape(leaf)}, in target {expected}"
            )
        factor = self.initials[path]
        return leaf if factor == 1 else (leaf * factor).astype(leaf.dtype)

    def __str__(self) -> str:
        head = ("path", "base", "target", "kind", "r_in", "r_out", "initial", "rate", "decay")
        rows: list[tuple[str, ...]] = []
        for path, widths in self.widths.items():
            name = path or "(the tree itself)"
            figures = (
                widths.r_in,
                widths.r_out,
                self.initials[path],
                self.rates[path],
                self.decays[path],
            )
            texts = [f"{figure:.4g}" for figure in figures]
            rows.append(
                (name, _shape_text(widths.base), _shape_text(widths.target), widths.kind, *texts)
            )
        return "\n".join(columns([head, *rows], left=4))


def _shape_text(shape: Sequence[int]) -> str:
    return "×".join(map(str, shape)) or "()"


@shortens_tracebacks
def mup(
    base: object,
    target: Tree,
    *,
    delta: object = None,
    axes: WidthAxes | None = None,
    init: str = "fan_in",
    optimizer: str = "adam",
) -> MupFactors:
    """Compute μP factors to transfer hyperparameters from a small to a wide, unchanged model.

    r_in and r_out are the ratios of a leaf's fan-in and fan-out, target over base (table 3 of
    Tensor Programs V):

    | factor on | input, vectors (only r_out ≠ 1) | hidden (both) | output (only r_in) |
    |---|---|---|---|
    | initial values, drawn with variance 1/fan_in | 1 | 1 | 1/√r_in |
    | initial values, drawn with a constant variance | 1 | 1/√r_in | 1/r_in |
    | rate, `"adam"` (and AdamW, Lion, RMSProp) | 1 | 1/r_in | 1/r_in |
    | rate, `"sgd"` | r_out | r_out/r_in | 1/r_in |
    | rate, `"muon"` (scale "rms") | 1 | √(r_out/r_in)/√(growth of the larger fan) | 1/r_in |
    | rate, `"muon_original"` (scale "original") | 1 | 1 | 1/r_in |
    | rate, `"hyperball"` | 1 | 1 | 1 |

    The last three rows are for optimizers that use Adam for other leaves.

    The best learning rate of the small model then transfers approximately to the wide one, of the
    same depth, batch size and length of the run. Shapes do not show three adjustments: multiply the
    logits of a tied output layer by 1/r, scale attention with wider heads by 1/d in place of 1/√d,
    and set Adam's ε to about 1e-12.

    Args:
        base: The shapes of the small model's parameters, from `jax.eval_shape`, or its parameters.
        target: The same for the wide model, with the same tree and depth and no smaller axis.
        delta: The same for a third model: an axis is a width if it differs between base and delta,
            not base and target.
        axes: `axes(path, leaf) -> (in, out)`: the fan-in and fan-out axes of each leaf, each a
            number, several or None. By default the last two, (in, out) as in Flax; for a vector the
            last, an output. Kernels [out, in] need `(1, 0)`, stacked vectors [layers, d] and biases
            [heads, head_dim] need `(None, out)`.
        init: The variance of the model's initializers: `"fan_in"` for 1/fan_in, or `"constant"`.
        optimizer: The row of the table: `"adam"`, `"sgd"`, `"muon"`, `"muon_original"` or
            `"hyperball"`.

    Returns:
        A `MupFactors` of all trainable leaves; `str()` formats a table. Factors of leaves that do
        not grow are exactly 1.

    Raises:
        TypeError: `axes` does not return a pair of axes.
        ValueError: The trees do not match, a dimension shrinks, a dimension grows that is neither
            in nor out (names the path), or `init` or `optimizer` is not one of the values above.

    Example:
        >>> import jax, jax.numpy as jnp, jstep
        >>> def init(key, width):
        ...     keys = jax.random.split(key)
        ...     layer = jax.random.normal(keys[0], (8, width))
        ...     return {"in": layer, "out": jax.random.normal(keys[1], (width, 2))}
        >>> key = jax.random.key(0)
        >>> shapes = [jax.eval_shape(lambda key: init(key, n), key) for n in (64, 256)]
        >>> factors = jstep.mup(*shapes)
        >>> print(factors)
        path  base  target  kind    r_in  r_out  initial  rate  decay
        in    8×64  8×256   input      1      4        1     1      1
        out   64×2  256×2   output     4      1      0.5  0.25      4
        >>> optimizer = jstep.chain(
        ...     jstep.scale_by_adam(),
        ...     jstep.add_weight_decay(0.1, factors.decays),
        ...     jstep.scale_by_learning_rate(1e-3),
        ...     jstep.scale_updates(factors.rates),
        ... )
        >>> state = jstep.TrainState.create(factors.initial(init(key, 256)), optimizer)

    Source: Yang et al., "Tensor Programs V: Tuning Large Neural Networks via Zero-Shot
    Hyperparameter Transfer" (2022), table 3.
    """
    as_choice(init, "init", INITS)
    as_choice(optimizer, "optimizer", OPTIMIZERS)
    as_function(axes, "axes", "(path, leaf) -> (in, out)", optional=True)
    widths = find_widths(base, target, delta, axes)
    if not widths:
        raise ValueError(
            "target: has no floating-point leaf; give the shapes of the trained parameters"
        )
    rates = {path: _rate(ratios, optimizer) for path, ratios in widths.items()}
    return MupFactors(
        rates=rates,
        decays={path: 1 / rate for path, rate in rates.items()},
        initials={path: _initial(ratios, init) for path, ratios in widths.items()},
        widths=widths,
    )


def _initial(widths: Widths, init: str) -> float:
    powers = {"output": -0.5} if init == "fan_in" else {"hidden": -0.5, "output": -1.0}
    return float(widths.r_in ** powers.get(widths.kind, 0.0))


def _rate(widths: Widths, optimizer: str) -> float:
    if optimizer == "sgd":
        return widths.r_out / widths.r_in
    if widths.kind in {"input", "none"} or optimizer == "hyperball":
        return 1.0
    if widths.kind == "hidden" and optimizer == "muon_original":
        return 1.0
    if widths.kind == "hidden" and optimizer == "muon":
        return math.sqrt(widths.r_out / widths.r_in) / math.sqrt(widths.growth)
    return 1 / widths.r_in


# The coordinate check of μP: whether activations change equally at all widths.


@dataclasses.dataclass(frozen=True, kw_only=True)
class CoordCheck:
    """Result of `coord_check`.

    Attributes:
        sizes: Name of an activation → width → its mean absolute value before training.
        changes: Name → width → its mean absolute change by training.
        growth: Name → the slope of log change over log width: about 0 if the rate transfers, 1 if
            the change grows like the width; NaN if an activation does not change, or is not finite.
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
            rows.append(
                [
                    "",
                    "change",
                    *(f"{changes[width]:.3g}" for width in widths),
                    self._growth_text(name),
                ]
            )
        title = (
            f"mean |x| over widths, and its change after {self.steps} "
            f"step{'s' if self.steps > 1 else ''}"
        )
        return "\n".join([title, "", *columns([head, *rows], left=2)])

    def _growth_text(self, name: str) -> str:
        # With 0.0 added, it is not -0.00.
        return f"{round(self.growth[name], 2) + 0.0:.2f}"

    def plot(self, path: str) -> None:
        """Plot sizes and changes over widths, a line for each activation, on logarithmic axes.

        Args:
            path: The output file; its extension selects the format.

        Raises:
            ImportError: matplotlib is not installed.
        """
        # Not pyplot, which has global state, and may need a display.
        from matplotlib.figure import Figure

        fig = Figure(figsize=(7.5, 3.2), layout="constrained")
        titles = {"before training": self.sizes, f"change after {self.steps} steps": self.changes}
        for axes, (title, values) in zip(fig.subplots(1, 2), titles.items(), strict=True):
            for name, means in values.items():
                label = name if values is self.sizes else f"{name}: {self._growth_text(name)}"
                axes.plot(
                    list(means),
                    list(means.values()),
                    marker="o",
                    markersize=3,
                    linewidth=1.3,
                    label=label,
                )
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


@shortens_tracebacks
def coord_check(
    make: Callable[[int], tuple[Any, TrainState, Any]],
    widths: Iterable[int],
    activations: Callable[..., Mapping[str, Array]],
    steps: int = 5,
) -> CoordCheck:
    """Measure how much activations change in a few train steps on one batch, at several widths.

    With rates and initial values that transfer (`mup`), the change of each activation is about the
    same at all widths: a growth within ±0.1 or so.

    Args:
        make: `make(width) -> (train_step, state, batch)`: a train step, a new state, and the same
            batch at each width: a tuple is passed as several arguments.
        widths: Two widths or more, such as (64, 128, 256, 512).
        activations: `activations(params, *batch) -> {name: array}`, of any shapes; the same names
            at each width.
        steps: The number of training steps, each on the same batch, ≥ 1.

    Returns:
        A `CoordCheck`, whose `str()` is a table; `plot(path)` draws a figure.

    Raises:
        TypeError: `make` or `activations` returns something else.
        ValueError: There are fewer than two widths, or names or shapes of activations differ.

    Example:
        >>> import jax, jax.numpy as jnp, jstep
        >>> def activations(params, x):
        ...     return {"hidden": x @ params["in"], "out": x @ params["in"] @ params["out"]}
        >>> def loss_fn(params, x):
        ...     return jnp.mean(activations(params, x)["out"])
        >>> def make(width):
        ...     params = {"in": jnp.ones((4, width)) / 2, "out": jnp.ones((width, 1)) / width}
        ...     optimizer = jstep.chain(jstep.adam(0.01), jstep.scale_updates({"out": 64 / width}))
        ...     state = jstep.TrainState.create(params, optimizer)
        ...     train_step = jstep.minimize(loss_fn, optimizer)
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

    Source: Yang et al., "Tensor Programs V" (2022), appendix D.1, and the coordinate check of its
    package.
    """
    as_function(make, "make", "(width) -> (train_step, state, batch)")
    as_function(activations, "activations", "(params, *batch) -> {name: array}")
    steps = as_int(steps, "steps", at_least=1)
    if not isinstance(widths, Iterable):
        raise TypeError(
            f"widths={format_value(widths)}: must be several integers, got {describe_type(widths)}"
        )
    checked_widths = [as_int(width, "widths", at_least=1) for width in widths]
    if len(checked_widths) < 2 or len(set(checked_widths)) < len(checked_widths):
        raise ValueError(
            f"widths={checked_widths}: must be two different widths or more, to fit a slope"
        )
    measured = {width: _measure(make, width, activations, steps) for width in checked_widths}
    first_width = checked_widths[0]
    names = list(measured[first_width])
    for width, means in measured.items():
        if means.keys() != set(names):
            raise ValueError(
                f"activations: must return the same names at each width, got {sorted(names)} at "
                f"{first_width} and {sorted(means)} at {width}"
            )
    sizes: dict[str, dict[int, float]] = {}
    changes: dict[str, dict[int, float]] = {}
    growth: dict[str, float] = {}
    for name in names:
        sizes[name] = {width: means[name].size for width, means in measured.items()}
        changes[name] = {width: means[name].change for width, means in measured.items()}
        growth[name] = _slope(changes[name])
    return CoordCheck(sizes=sizes, changes=changes, growth=growth, steps=steps)


def _slope(changes: Mapping[int, float]) -> float:
    """The least-squares slope of log change over log width; NaN if a change is 0 or not finite."""
    values = np.array(list(changes.values()))
    if not (np.isfinite(values).all() and (values > 0).all()):
        return math.nan
    return float(np.polyfit(np.log(list(changes)), np.log(values), 1)[0])


class _Means(NamedTuple):
    """The mean absolute values of an activation before training, and of its change."""

    size: float
    change: float


def _measure(make: Any, width: int, activations: Any, steps: int) -> dict[str, _Means]:
    """Name of an activation → its means at a width."""
    result = make(width)
    if not (
        isinstance(result, tuple | list) and len(result) == 3 and isinstance(result[1], TrainState)
    ):
        raise TypeError(
            f"make({width}): must return (train_step, state, batch), got {describe_type(result)}"
        )
    train_step, state, batch = result
    as_function(train_step, f"make({width})[0]", "train_step(state, *batch)")
    args = trees.batch_to_args(batch)
    initial = _as_host_arrays(activations(state.params, *args), width)
    for _ in range(steps):
        state, _ = train_step(state, *args)
    trained = _as_host_arrays(activations(state.params, *args), width)
    return {name: _Means(_mean(x), _mean(trained[name] - x)) for name, x in initial.items()}


def _as_host_arrays(activations: object, width: int) -> dict[str, np.ndarray[Any, Any]]:
    if not isinstance(activations, Mapping) or not activations:
        raise TypeError(
            f"activations: must return name -> array at width {width}, got "
            f"{describe_type(activations)}"
        )
    arrays = {}
    for name, x in activations.items():
        if not trees.is_array(x) or not trees.is_floating(x.dtype) or not x.size:
            raise TypeError(
                f"activations: {name!r} must be a floating-point array with numbers, got "
                f"{describe_type(x)} at width {width}"
            )
        arrays[name] = np.asarray(x).astype(trees.compute_dtype(x.dtype))
    return arrays


def _mean(x: np.ndarray[Any, Any]) -> float:
    return float(np.mean(np.abs(x), dtype=np.float64))
