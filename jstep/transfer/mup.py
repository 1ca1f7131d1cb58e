"""Maximal update parametrization (μP): hyperparameter transfer from a small model to a wide one."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax

from jstep.core import trees
from jstep.core.checks import as_function, columns, kind, one_of
from jstep.core.trees import Params
from jstep.transfer.widths import WidthAxes, Widths, widths_of

INITS = ("fan_in", "constant")
OPTIMIZERS = ("adam", "sgd", "muon", "muon_original", "hyperball")


@dataclasses.dataclass(frozen=True)
class MupFactors:
    """Factors on the hyperparameters of the small model, by the path of each trainable leaf.

    Attributes:
        rates: Factors on the learning rate, for `scale_updates`.
        decays: Factors on a weight decay that is multiplied by the rate, for `add_weight_decay`: the inverse of
            `rates`.
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
        leaves = [(path, leaf) for path, leaf in trees.leaves_with_paths(params) if trees.is_trainable(leaf)]
        missing = sorted(self.widths.keys() - {path for path, _ in leaves})
        if missing:
            raise ValueError(f"params: must be like target, but lacks {missing[:10]}")
        for path, leaf in leaves:
            if path not in self.widths:
                raise ValueError(
                    f"params: target has no leaf {path!r}{trees.nearest(path, self.widths)}; give the parameters of "
                    "the wide model"
                )
            shape = tuple(getattr(leaf, "shape", ()))
            if shape != self.widths[path].target:
                raise ValueError(
                    f"params: the leaf at {trees.quoted(path)} has shape {shape}, in target "
                    f"{self.widths[path].target}; give the parameters of the wide model"
                )

        def scaled(keys: Any, leaf: Any) -> Any:
            factor = self.initials.get(trees.path_str(keys), 1.0) if trees.is_trainable(leaf) else 1.0
            return leaf if factor == 1 else (leaf * factor).astype(leaf.dtype)

        return jax.tree_util.tree_map_with_path(scaled, params)

    def __str__(self) -> str:
        head = ("path", "base", "target", "kind", "r_in", "r_out", "initial", "rate", "decay")
        rows = [
            (
                path or "(the tree itself)",
                _times(one.base),
                _times(one.target),
                one.kind,
                *(f"{x:.4g}" for x in (one.r_in, one.r_out, self.initials[path], self.rates[path], self.decays[path])),
            )
            for path, one in self.widths.items()
        ]
        return "\n".join(columns([head, *rows], left=4))


def mup(
    base: Any,
    target: Any,
    *,
    delta: Any = None,
    axes: WidthAxes | None = None,
    init: str = "fan_in",
    optimizer: str = "adam",
) -> MupFactors:
    """Compute μP factors that transfer hyperparameters from a small model to a wide one, without model changes.

    r_in and r_out are the ratios of a leaf's fan-in and fan-out, target over base (table 3 of Tensor Programs V):

    | factor on | input, vectors (only r_out ≠ 1) | hidden (both) | output (only r_in) |
    |---|---|---|---|
    | initial values, drawn with variance 1/fan_in | 1 | 1 | 1/√r_in |
    | initial values, drawn with a constant variance | 1 | 1/√r_in | 1/r_in |
    | rate, `"adam"` (and AdamW, Lion, RMSProp) | 1 | 1/r_in | 1/r_in |
    | rate, `"sgd"` | r_out | r_out/r_in | 1/r_in |
    | rate, `"muon"` (scale "rms"; Adam for other leaves) | 1 | √(r_out/r_in)/√(growth of the larger fan) | 1/r_in |
    | rate, `"muon_original"` (scale "original"; Adam for other leaves) | 1 | 1 | 1/r_in |
    | rate, `"hyperball"` (Adam for other leaves) | 1 | 1 | 1 |

    The best learning rate of the small model then transfers approximately to the wide one. This holds for width, not
    for depth, batch size or the length of the run. Three adjustments cannot be inferred from shapes: a tied embedding
    and output layer has no factor in table 3, so multiply its logits by 1/r in the model, and it counts as input;
    attention with wider heads needs 1/d in place of 1/√d; and Adam's ε is relative to gradients that shrink with the
    width: set it to about 1e-12.

    Args:
        base: The shapes of the small model's parameters, from `jax.eval_shape`, or its parameters.
        target: The same of the wide model, with the same tree and depth and no smaller axis.
        delta: The same of a third model, for axes that are equal in base and target or differ only by accident: an axis
            is a width if it differs between base and delta; the ratio is still target over base.
        axes: `axes(path, leaf) -> (in, out)`: the fan-in and fan-out axes of each leaf, each a number, several or None.
            By default the last two, (in, out) as in Flax; for a vector the last, an output. Needed for kernels [out,
            in] (`(1, 0)`), for stacked vectors [layers, d] and biases [heads, head_dim] (`(None, out)`).
        init: The variance of the model's initializers: `"fan_in"` for 1/fan_in, or `"constant"`.
        optimizer: The row of the table: `"adam"`, `"sgd"`, `"muon"`, `"muon_original"` or `"hyperball"`.

    Returns:
        A `MupFactors`: `rates` for `scale_updates`, `decays` for `add_weight_decay`, `initial(params)`; `str()` formats
        a table. It covers all trainable leaves; factors of leaves that do not grow are exactly 1.

    Raises:
        TypeError: A leaf has no shape, or `axes` does not return a pair of axes.
        ValueError: The trees do not match, a dimension shrinks, a dimension grows that is neither in nor out (names the
            path), or `init` or `optimizer` is not one of the values above.

    Example:
        >>> import jax, jax.numpy as jnp, jstep
        >>> def init(key, width):
        ...     keys = jax.random.split(key)
        ...     return {"in": jax.random.normal(keys[0], (8, width)), "out": jax.random.normal(keys[1], (width, 2))}
        >>> shapes = [jax.eval_shape(lambda key: init(key, width), jax.random.key(0)) for width in (64, 256)]
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
        >>> state = jstep.TrainState.create(factors.initial(init(jax.random.key(0), 256)), optimizer)

    Source: Yang et al., "Tensor Programs V: Tuning Large Neural Networks via Zero-Shot Hyperparameter Transfer"
    (2022), table 3.
    """
    one_of(init, "init", INITS)
    one_of(optimizer, "optimizer", OPTIMIZERS)
    as_function(axes, "axes", "(path, leaf) -> (in, out)", optional=True)
    for name, tree in {"base": base, "target": target}.items():
        if tree is None:
            raise TypeError(f"{name}={tree}: must be a tree of shapes or arrays, got {kind(tree)}")
    widths = widths_of(base, target, delta, axes)
    if not widths:
        raise ValueError("target: has no floating-point leaf; give the shapes of the trained parameters")
    rates = {path: _rate(one, optimizer) for path, one in widths.items()}
    return MupFactors(
        rates=rates,
        decays={path: 1 / rate for path, rate in rates.items()},
        initials={path: _initial(one, init) for path, one in widths.items()},
        widths=widths,
    )


def _initial(one: Widths, init: str) -> float:
    power = (
        {"hidden": 0.0, "output": -0.5}.get(one.kind)
        if init == "fan_in"
        else {"hidden": -0.5, "output": -1.0}.get(one.kind)
    )
    return 1.0 if not power else one.r_in**power


def _rate(one: Widths, optimizer: str) -> float:
    if optimizer == "sgd":
        return one.r_out / one.r_in
    if one.kind in {"input", "none"} or optimizer == "hyperball":
        return 1.0
    if one.kind == "hidden" and optimizer == "muon_original":
        return 1.0
    if one.kind == "hidden" and optimizer == "muon":
        return math.sqrt(one.r_out / one.r_in) / math.sqrt(one.larger)
    return 1 / one.r_in


def _times(shape: tuple[int, ...]) -> str:
    return "×".join(map(str, shape)) or "()"
